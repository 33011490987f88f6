use limosa_storage::block_on;
use proptest::prelude::*;

use super::*;
use crate::test_disk::{Asked, Part, TestDisk};

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn run(one: &TestDisk, other: &TestDisk, strict: bool) -> Comparison {
    let options = CompareOptions { max_in_flight: 4, chunk_size: 4096, strict };
    block_on(compare(one, other, &options, &go_on)).unwrap()
}

const PARTS: &[Part] =
    &[(8192, BlockStatus::Data, 0, 1), (4096, BlockStatus::Zero, 0, 0), (4096, BlockStatus::Unallocated, 0, 0)];

#[test]
fn what_is_known_to_be_zero_is_not_read() {
    let (one, other) = (TestDisk::new(PARTS), TestDisk::new(&[PARTS[0], (8192, BlockStatus::Data, 0, 0)]));
    assert_eq!(run(&one, &other, false).verdict, Verdict::Same);
    assert_eq!(one.asked(), [Asked::Read(0..4096), Asked::Read(4096..8192)]);
    assert_eq!(other.asked().len(), 4);
    let zeros = TestDisk::zero(1 << 20);
    assert_eq!(run(&zeros, &TestDisk::zero(1 << 20), true).bytes_read, 0);
}

#[test]
fn the_difference_named_is_the_first_one_in_its_sector() {
    for at in [0, 511, 512, 5000, 8191, 8192, 12288, 16383_u64] {
        let (one, other) =
            (TestDisk::new(&[(16384, BlockStatus::Data, 0, 0)]), TestDisk::new(&[(16384, BlockStatus::Data, 0, 0)]));
        one.set(at, b"x");
        one.set(16383, b"y");
        let at = Verdict::ContentsDiffer(GuestOffset(at / 512 * 512));
        assert_eq!(run(&one, &other, false).verdict, at);
        assert_eq!(run(&other, &one, false).verdict, at);
        assert_eq!(run(&one, &TestDisk::zero(16384), false).verdict, at);
        assert_eq!(run(&TestDisk::zero(16384), &one, false).verdict, at);
    }
}

#[test]
fn a_longer_disk_is_the_same_if_it_goes_on_with_zeros() {
    let one = TestDisk::new(PARTS);
    let longer = TestDisk::new(&[PARTS, &[(4096, BlockStatus::Data, 0, 0)]].concat());
    let found = run(&one, &longer, false);
    assert_eq!((found.verdict, found.same_length), (Verdict::Same, false));
    assert_eq!(run(&longer, &one, true).verdict, Verdict::LengthDiffers);
    longer.set(20000, b"x");
    assert_eq!(run(&one, &longer, false).verdict, Verdict::ContentsDiffer(GuestOffset(19968)));
    assert_eq!(run(&longer, &one, false).verdict, Verdict::ContentsDiffer(GuestOffset(19968)));
}

#[test]
fn a_length_within_a_sector_is_that_of_the_sector() {
    let (one, other) =
        (TestDisk::new(&[(1000, BlockStatus::Data, 0, 1)]), TestDisk::new(&[(1024, BlockStatus::Data, 0, 1)]));
    other.set(1000, &[0; 24]);
    let found = run(&one, &other, false);
    assert_eq!((found.verdict, found.same_length), (Verdict::Same, true));
}

#[test]
fn asked_for_strictly_allocation_counts() {
    let one = TestDisk::new(PARTS);
    assert_eq!(run(&one, &TestDisk::new(PARTS), true).verdict, Verdict::Same);
    let other = TestDisk::new(&[PARTS[0], (8192, BlockStatus::Zero, 0, 0)]);
    assert_eq!(run(&one, &other, false).verdict, Verdict::Same);
    assert_eq!(run(&one, &other, true).verdict, Verdict::AllocationDiffers(GuestOffset(12288)));
    let other = TestDisk::new(&[(8192, BlockStatus::Compressed, 0, 1), PARTS[1], PARTS[2]]);
    assert_eq!(run(&one, &other, true).verdict, Verdict::AllocationDiffers(GuestOffset(0)));
}

#[test]
fn a_failure_names_the_disk() {
    let error = block_on(compare(
        &TestDisk::dirty(4096),
        &TestDisk::dirty(4096).breaking(512..1024),
        &CompareOptions::default(),
        &go_on,
    ))
    .unwrap_err();
    assert_eq!(
        [error.to_string(), error.source.to_string()],
        ["disk: cannot be compared", "error while reading at byte 0"]
    );
    let stop = |_| ControlFlow::Break(());
    let stopped = block_on(compare(&TestDisk::zero(9), &TestDisk::zero(9), &CompareOptions::default(), &stop));
    assert!(matches!(stopped.unwrap_err().source, OperationError::Stopped));
}

proptest! {
    #[test]
    fn the_first_difference_is_found_whatever_is_known(
        parts in prop::collection::vec((1_u64..20, any::<bool>(), any::<bool>(), 0_u8..2), 1..30),
        max_in_flight in 1_usize..6,
    ) {
        let disk = |which: bool| {
            let parts: Vec<Part> = parts.iter().map(|&(sectors, one, other, byte)| {
                let known = if which { one } else { other };
                let byte = if known { 0 } else { byte };
                (sectors * 512, if known { BlockStatus::Zero } else { BlockStatus::Data }, 0, byte)
            }).collect();
            TestDisk::new(&parts)
        };
        let (one, other) = (disk(true), disk(false));
        let wanted = one.bytes().iter().zip(&other.bytes()).position(|(one, other)| one != other);
        let wanted = wanted.map_or(Verdict::Same, |at| Verdict::ContentsDiffer(GuestOffset(at as u64 / 512 * 512)));
        let options = CompareOptions { max_in_flight, chunk_size: 2048, strict: false };
        prop_assert_eq!(block_on(compare(&one, &other, &options, &go_on)).unwrap().verdict, wanted);
    }
}
