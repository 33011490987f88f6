use limosa_storage::{MemoryStorage, Storage, block_on};
use proptest::prelude::*;

use super::*;
use crate::disk::BlockStatus;
use crate::raw::{Raw, RawOptions};
use crate::test_disk::{Asked, Part, TestDisk};

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// An error and its cause.
fn said(error: &OperationError) -> String {
    let cause = std::error::Error::source(error).map(ToString::to_string);
    format!("{error}: {}", cause.unwrap_or_default())
}

fn sources(parts: &[&[Part]]) -> Vec<Arc<dyn Disk>> {
    parts.iter().map(|parts| Arc::new(TestDisk::new(parts)) as Arc<dyn Disk>).collect()
}

/// The future may move to another thread.
fn on_any_thread<T: Send>(future: T) -> T {
    future
}

fn run(sources: &[Arc<dyn Disk>], target: &TestDisk, options: &ConvertOptions) -> ConvertCounters {
    block_on(on_any_thread(convert(sources, target, options, &go_on))).unwrap()
}

/// Small enough for small disks.
fn small() -> ConvertOptions {
    ConvertOptions { max_in_flight: 3, chunk_size: 4096, sparse: 1024, ..ConvertOptions::default() }
}

const HOLES: &[Part] = &[
    (4096, BlockStatus::Data, 0, 1),
    (9000 / 512 * 512, BlockStatus::Zero, 0, 0),
    (1024, BlockStatus::Compressed, 0, 2),
    (40960, BlockStatus::Unallocated, 0, 0),
    (512, BlockStatus::Data, 1, 3),
];

#[test]
fn holes_are_neither_read_nor_written() {
    let source = Arc::new(TestDisk::new(HOLES));
    let target = TestDisk::zero(source.len());
    let options = ConvertOptions { target_is_zero: true, ..small() };
    let counters = run(&[Arc::clone(&source) as Arc<dyn Disk>], &target, &options);
    assert_eq!(target.bytes(), source.bytes());
    assert_eq!(source.asked(), [Asked::Read(0..4096), Asked::Read(12800..13824), Asked::Read(54784..55296)]);
    assert_eq!(target.asked(), [Asked::Write(0..4096), Asked::Write(12800..13824), Asked::Write(54784..55296)]);
    assert_eq!((counters.reads, counters.writes, counters.zeroes), (3, 3, 0));
    assert_eq!((counters.bytes_read, counters.bytes_written), (5632, 5632));
    assert_eq!(counters.bytes_already_zero, source.len() - 5632);
}

#[test]
fn zeros_are_written_only_where_the_target_has_something_else() {
    let parts: &[Part] = &[(16384, BlockStatus::Unallocated, 0, 0)];
    let target = TestDisk::new(&[
        (4096, BlockStatus::Data, 0, 0xdd),
        (4096, BlockStatus::Zero, 0, 0),
        (4096, BlockStatus::Data, 0, 0xdd),
        (4096, BlockStatus::Unallocated, 0, 0),
    ]);
    let counters = run(&sources(&[parts]), &target, &small());
    assert_eq!(target.asked(), [Asked::Zero(0..4096), Asked::Zero(8192..12288)]);
    assert_eq!((counters.bytes_zeroed, counters.bytes_already_zero), (8192, 8192));
    assert!(target.bytes().iter().all(|&byte| byte == 0));
}

#[test]
fn contents_that_are_zeros_leave_room() {
    let disk = TestDisk::new(&[(8192, BlockStatus::Data, 0, 0)]);
    disk.set(3000, b"x");
    let target = TestDisk::zero(8192);
    run(&[Arc::new(disk)], &target, &ConvertOptions { target_is_zero: true, ..small() });
    assert_eq!(target.asked(), [Asked::Write(2048..3072)]);
    let coarse = TestDisk::zero(8192).with_granularity(4096);
    let disk = TestDisk::new(&[(8192, BlockStatus::Data, 0, 0)]);
    disk.set(3000, b"x");
    run(&[Arc::new(disk)], &coarse, &ConvertOptions { target_is_zero: true, ..small() });
    assert_eq!(coarse.asked(), [Asked::Write(0..4096)], "a cluster is written as a whole");
}

#[test]
fn without_a_sparse_size_everything_is_written() {
    let target = TestDisk::zero(55296);
    let options = ConvertOptions { target_is_zero: true, sparse: 0, ..small() };
    let counters = run(&sources(&[HOLES]), &target, &options);
    assert_eq!((counters.bytes_read, counters.bytes_written, counters.bytes_already_zero), (5632, 55296, 0));
    assert_eq!(target.bytes(), TestDisk::new(HOLES).bytes());
}

#[test]
fn what_lies_below_the_target_already_is_left_to_it() {
    let parts: &[Part] = &[
        (4096, BlockStatus::Data, 0, 1),
        (4096, BlockStatus::Data, 1, 2),
        (4096, BlockStatus::Zero, 0, 0),
        (4096, BlockStatus::Unallocated, 2, 0),
        (4096, BlockStatus::Zero, 0, 0),
    ];
    let target = TestDisk::dirty(20480);
    let counters = run(&sources(&[parts]), &target, &ConvertOptions { backing_length: Some(16384), ..small() });
    assert_eq!(target.asked(), [Asked::Write(0..4096), Asked::Zero(8192..12288)]);
    assert_eq!(counters.bytes_in_backing, 12288);
}

#[test]
fn what_hides_the_target_s_backing_image_is_replaced() {
    let parts: &[Part] = &[
        (4096, BlockStatus::Data, 0, 1),
        (8192, BlockStatus::Data, 1, 2),
        (4096, BlockStatus::Zero, 1, 0),
        (4096, BlockStatus::Unallocated, 2, 0),
    ];
    let target = TestDisk::new(&[
        (8192, BlockStatus::Data, 1, 2),
        (8192, BlockStatus::Data, 0, 0xdd),
        (2048, BlockStatus::Data, 0, 0xdd),
        (2048, BlockStatus::Unallocated, 0, 0),
    ]);
    let options = ConvertOptions { backing_length: Some(18432), target_has_contents: true, ..small() };
    let counters = run(&sources(&[parts]), &target, &options);
    assert_eq!(
        target.asked(),
        [Asked::Write(0..4096), Asked::Write(8192..12288), Asked::Zero(12288..16384), Asked::Zero(16384..18432)]
    );
    assert_eq!(counters.bytes_in_backing, 4096 + 2048);
    assert_eq!(target.bytes(), TestDisk::new(parts).bytes());
}

#[test]
fn disks_are_put_one_after_the_other_in_whole_sectors() {
    let first: &[Part] = &[(1000, BlockStatus::Data, 0, 7)];
    let second: &[Part] = &[(3000, BlockStatus::Data, 0, 8)];
    let both = sources(&[first, second]);
    let bytes = length(&both).unwrap();
    assert_eq!(bytes, 1024 + 3072);
    let target = TestDisk::dirty(bytes + 512);
    run(&both, &target, &small());
    let wanted = [vec![7; 1000], vec![0; 24], vec![8; 3000], vec![0; 72], vec![0xdd; 512]].concat();
    assert!(target.bytes() == wanted);
}

#[test]
fn in_order_no_write_begins_before_the_one_in_front_of_it_has_ended() {
    let parts: &[Part] = &[(1 << 20, BlockStatus::Data, 0, 5)];
    for out_of_order in [false, true] {
        let target = TestDisk::zero(1 << 20);
        run(&sources(&[parts]), &target, &ConvertOptions { out_of_order, ..small() });
        let writes = target.asked();
        assert_eq!(writes.len(), 256);
        let in_order = (0_u64..256).map(|number| Asked::Write(number * 4096..(number + 1) * 4096));
        assert_eq!(writes.into_iter().eq(in_order), !out_of_order);
        assert_eq!(target.most_under_way(), if out_of_order { 3 } else { 1 });
    }
}

#[test]
fn a_thread_for_each_request_does_the_same() {
    for out_of_order in [false, true] {
        let source = Arc::new(TestDisk::new(HOLES));
        let target = TestDisk::dirty(source.len());
        let options = ConvertOptions { out_of_order, ..small() };
        let sources: [Arc<dyn Disk>; 1] = [Arc::clone(&source) as _];
        let counters = convert_on_threads(&sources, &target, &options, &go_on).unwrap();
        assert!(target.bytes() == source.bytes());
        assert_eq!((counters.reads, counters.bytes_read), (3, 5632));
    }
}

#[test]
fn threads_that_wait_for_one_that_fails_end_too() {
    let parts: &[Part] = &[(1 << 20, BlockStatus::Data, 0, 5)];
    for _ in 0..20 {
        let target = TestDisk::zero(1 << 20).breaking(40960..40961);
        let options = ConvertOptions { max_in_flight: 8, ..small() };
        let error = convert_on_threads(&sources(&[parts]), &target, &options, &go_on).unwrap_err();
        assert!(error.to_string().starts_with("error while writing at byte 40960"), "{error}");
        assert!(target.asked().iter().all(|asked| *asked != Asked::Write(45056..49152)));
    }
}

#[test]
fn a_target_without_room_is_refused_untouched() {
    let target = TestDisk::zero(55295);
    let error = block_on(convert(&sources(&[HOLES]), &target, &small(), &go_on)).unwrap_err();
    assert!(matches!(error, OperationError::TargetTooSmall { has: 55295, needs: 55296, .. }), "{error}");
    assert_eq!(target.asked(), []);
}

#[test]
fn a_failure_says_what_was_done_and_where() {
    let source: Vec<Arc<dyn Disk>> = vec![Arc::new(TestDisk::dirty(65536).breaking(20480..20992))];
    let error = block_on(convert(&source, &TestDisk::zero(65536), &small(), &go_on)).unwrap_err();
    assert!(said(&error).starts_with("error while reading at byte 20480: cannot read disk"), "{error:?}");
    let target = TestDisk::zero(65536).breaking(8192..8704);
    let error =
        block_on(convert(&sources(&[&[(65536, BlockStatus::Data, 0, 1)]]), &target, &small(), &go_on)).unwrap_err();
    assert_eq!(error.to_string(), "error while writing at byte 8192");
}

#[test]
fn what_can_be_read_is_saved_and_the_rest_named() {
    let source: Vec<Arc<dyn Disk>> = vec![Arc::new(TestDisk::dirty(65536).breaking(20480..21504).breaking(0..1))];
    let target = TestDisk::zero(65536);
    let counters = run(&source, &target, &ConvertOptions { salvage: true, ..small() });
    let mut lost = counters.unreadable_ranges;
    lost.sort_by_key(|place| place.start);
    assert_eq!(lost, [0..512, 20480..21504]);
    assert_eq!(counters.bytes_unreadable, 1536);
    let mut wanted = vec![0xdd; 65536];
    wanted[..512].fill(0);
    wanted[20480..21504].fill(0);
    assert!(target.bytes() == wanted);
}

#[test]
fn a_source_that_is_lost_is_not_saved_as_zeros() {
    for (bad, lost) in [(20480..21504, 40960..41472), (20480..21504, 20992..21504), (60000..60001, 0..512)] {
        let source = TestDisk::dirty(65536).breaking(bad).losing(lost);
        let sources: Vec<Arc<dyn Disk>> = vec![Arc::new(source)];
        let options = ConvertOptions { salvage: true, ..small() };
        let error = block_on(convert(&sources, &TestDisk::zero(65536), &options, &go_on)).unwrap_err();
        assert!(format!("{error:?}").contains("the connection is lost"), "{error:?}");
    }
}

#[test]
fn one_bad_sector_costs_few_reads() {
    let source = Arc::new(TestDisk::dirty(1 << 20).breaking(500_000..500_001));
    let options = ConvertOptions { salvage: true, chunk_size: 1 << 20, ..small() };
    let disks: Vec<Arc<dyn Disk>> = vec![Arc::clone(&source) as Arc<dyn Disk>];
    let counters = run(&disks, &TestDisk::zero(1 << 20), &options);
    assert_eq!(
        counters.unreadable_ranges.iter().map(|lost| (lost.start, lost.end)).collect::<Vec<_>>(),
        [(499_712, 500_224)]
    );
    // The whole, and two halves of what has it, eleven times: 2048 sectors are 2^11.
    assert_eq!(source.asked().len(), 1 + 2 * 11);
}

#[test]
fn it_stops_when_asked_and_reports_its_progress() {
    let seen = std::sync::Mutex::new(Vec::new());
    let watch = |progress: Progress| {
        let mut seen = seen.lock().unwrap();
        seen.push(progress.done);
        assert_eq!(progress.total, 55296);
        if seen.len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let stopped = block_on(convert(&sources(&[HOLES]), &TestDisk::dirty(55296), &small(), &watch));
    assert!(matches!(stopped, Err(OperationError::Stopped)));
    assert_eq!(seen.lock().unwrap().len(), 3);
    let all = AtomicU64::new(0);
    let watch = |progress: Progress| {
        all.store(progress.done, Ordering::Relaxed);
        ControlFlow::Continue(())
    };
    block_on(convert(&sources(&[HOLES]), &TestDisk::dirty(55296), &small(), &watch)).unwrap();
    assert_eq!(all.into_inner(), 55296);
}

fn kind() -> impl Strategy<Value = BlockStatus> {
    prop_oneof![
        Just(BlockStatus::Data),
        Just(BlockStatus::Compressed),
        Just(BlockStatus::Zero),
        Just(BlockStatus::Unallocated),
    ]
}

fn part() -> impl Strategy<Value = Part> {
    (1_u64..30, kind(), any::<bool>()).prop_map(|(sectors, kind, zeros)| {
        let byte = u8::from(!zeros && matches!(kind, BlockStatus::Data | BlockStatus::Compressed));
        (sectors * 512, kind, 0, byte)
    })
}

proptest! {
    #[test]
    fn the_target_has_what_the_sources_have(
        disks in prop::collection::vec(prop::collection::vec(part(), 1..12), 1..4),
        max_in_flight in 1_usize..6,
        sparse in prop::sample::select(vec![0_u64, 512, 1536, 4096]),
        bits in 9_u32..14,
        out_of_order: bool,
        is_zero: bool,
    ) {
        let disks: Vec<Arc<dyn Disk>> = disks.iter().map(|parts| Arc::new(TestDisk::new(parts)) as _).collect();
        let len = length(&disks).unwrap();
        let target = if is_zero { TestDisk::zero(len) } else { TestDisk::dirty(len) }.with_granularity(1 << bits);
        let options = ConvertOptions { max_in_flight, sparse, out_of_order, target_is_zero: is_zero, chunk_size: 4096, ..ConvertOptions::default() };
        let counters = block_on(convert(&disks, &target, &options, &go_on)).unwrap();
        let wanted: Vec<u8> = disks.iter().flat_map(|disk| {
            let buffer = Buffer::zeroed(index(disk.len()));
            block_on(disk.read(GuestOffset(0), buffer.clone().into())).unwrap();
            buffer.to_vec()
        }).collect();
        prop_assert!(target.bytes() == wanted);
        prop_assert_eq!(counters.bytes_written + counters.bytes_zeroed + counters.bytes_already_zero, len);
    }
}

#[test]
fn what_the_kernel_copies_is_not_read_and_what_it_does_not_copy_is() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8], len: u64| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
        let storage = limosa_storage::FileStorage::open(&path, &limosa_storage::FileOptions::default()).unwrap();
        Raw::open(storage, &RawOptions::default()).unwrap()
    };
    let bytes: Vec<u8> = (1..=200).cycle().take(100 << 10).collect();
    let sources: Vec<Arc<dyn Disk>> = vec![file("source", &bytes, 1 << 20), Arc::new(TestDisk::dirty(4096))];
    let options = ConvertOptions { copy_range: true, chunk_size: 64 << 10, ..small() };
    let target = file("target", &[7; 2 << 20], 2 << 20);
    let counters = block_on(convert(&sources, &*target, &options, &go_on)).unwrap();
    block_on(target.close()).unwrap();
    // A disk that does not lie in a file is copied plainly.
    assert_eq!((counters.bytes_copied, counters.bytes_read), (100 << 10, 4096));
    let got = std::fs::read(folder.path().join("target")).unwrap();
    assert!(got[..100 << 10] == bytes && got[100 << 10..1 << 20].iter().all(|byte| *byte == 0));
    assert!(got[1 << 20..][..4096].iter().all(|byte| *byte == 0xdd) && got[(1 << 20) + 4096] == 7);
    // Nor is anything copied into one that does not.
    let target = TestDisk::dirty(2 << 20);
    let counters = block_on(convert(&sources, &target, &options, &go_on)).unwrap();
    assert_eq!((counters.copies, counters.bytes_read), (0, (100 << 10) + 4096));
    assert!(target.bytes()[..100 << 10] == bytes);
}

fn raw(bytes: Vec<u8>) -> (MemoryStorage, Arc<dyn Disk>) {
    let storage = MemoryStorage::with_contents(bytes, 1 << 20);
    let options = RawOptions { read_only: true, ..RawOptions::default() };
    let disk: Arc<dyn Disk> = Raw::open(Arc::new(storage.clone()), &options).unwrap();
    (storage, disk)
}

#[test]
fn what_a_copy_left_that_came_to_nothing_is_not_taken_for_zeros() {
    let bytes = [vec![0; 8192], vec![7; 1024], vec![0; 3072]].concat();
    let target = TestDisk::zero(bytes.len() as u64).copying_half();
    let options = ConvertOptions { target_is_zero: true, copy_range: true, chunk_size: 12288, ..small() };
    run(&[raw(bytes.clone()).1], &target, &options);
    assert!(target.bytes() == bytes);
}

#[test]
fn a_source_that_is_cut_off_is_not_converted_to_zeros() {
    for copy_range in [false, true] {
        let (storage, source) = raw(vec![7; 65536]);
        block_on(storage.set_len(20480)).unwrap();
        let target = TestDisk::zero(65536);
        let options = ConvertOptions { target_is_zero: true, copy_range, ..small() };
        let error = block_on(convert(&[source], &target, &options, &go_on)).unwrap_err();
        let wanted = "error while reading at byte 20480: memory: contents at 0x5000 of guest offset 0x5000: the file ends at 0x5000";
        assert!(said(&error).starts_with(wanted), "{error:?}");
    }
}
