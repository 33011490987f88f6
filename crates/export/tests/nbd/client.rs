//! limosa's own client against limosa's server: a storage that behaves as a file does.

use std::ops::Range;
use std::sync::Arc;

use limosa_channel::Uri;
use limosa_export::nbd::ServerOptions;
use limosa_export::{Export, Exports};
use limosa_image::Format;
use limosa_image::qcow2::CreateOptions;
use limosa_nbd::{ConnectOptions, NbdAddress, NbdStorage};
use limosa_storage::testing::SeededRandom;
use limosa_storage::{Buffer, Storage, ZeroOptions, block_on};
use limosa_testkit::scratch;

use crate::bed::{Bed, assert_clean, make_qcow2, open_image, raw};

const SIZE: u64 = 8 << 20;

fn connect(bed: &Bed, export: &str, options: &ConnectOptions) -> Arc<NbdStorage> {
    NbdStorage::connect(&NbdAddress::new(Uri::Unix(bed.socket()), export), options).unwrap()
}

fn read(disk: &dyn Storage, range: Range<u64>) -> Vec<u8> {
    let found = Buffer::from_slice(&vec![0xee; usize::try_from(range.end - range.start).unwrap()]);
    block_on(disk.read(range.start, found.clone().into())).unwrap();
    found.to_vec()
}

#[test]
fn any_sequence_of_requests_is_that_of_a_model() {
    for seed in 0..6 {
        let folder = scratch().unwrap();
        let path = folder.path().join("disk");
        make_qcow2(&path, &CreateOptions::default().size(SIZE));
        let exports = Exports::new();
        exports.add(Export::new("d", open_image(&path, Format::Qcow2, false)).unwrap()).unwrap();
        let bed = Bed::with(exports, ServerOptions::default());
        let disk = connect(&bed, "d", &ConnectOptions::default());
        let (mut chance, mut model) = (SeededRandom::new(seed), vec![0_u8; usize::try_from(SIZE).unwrap()]);
        for step in 0..300 {
            let start = chance.below(SIZE);
            let end = (start + 1 + chance.below(if step % 50 == 0 { SIZE } else { 200_000 })).min(SIZE);
            let place = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
            match chance.below(6) {
                0 | 1 => {
                    let byte = u8::try_from(1 + chance.below(255)).unwrap();
                    model[place.clone()].fill(byte);
                    block_on(disk.write(start, Buffer::from_slice(&model[place]).into())).unwrap();
                }
                2 => {
                    model[place].fill(0);
                    let how = ZeroOptions { unmap: chance.below(2) == 0, only_fast: false };
                    block_on(disk.write_zeroes(start..end, how)).unwrap();
                }
                3 => {
                    block_on(disk.discard(start..end)).unwrap();
                    // Whole clusters become zeros, and the rest stays.
                    model[place.clone()].copy_from_slice(&read(&*disk, start..end));
                }
                4 => {
                    let extents = disk.extents(start..end + 512).unwrap();
                    let mut at = start;
                    for extent in extents {
                        assert_eq!(extent.range.start, at, "seed {seed}");
                        at = extent.range.end;
                        let part = usize::try_from(extent.range.start.min(SIZE)).unwrap()
                            ..usize::try_from(extent.range.end.min(SIZE)).unwrap();
                        assert!(!extent.kind.is_zero() || model[part].iter().all(|byte| *byte == 0), "seed {seed}");
                    }
                    assert_eq!(at, end + 512, "seed {seed}");
                }
                _ => block_on(disk.flush()).unwrap(),
            }
            let past = start.max(SIZE - 100)..SIZE + 100;
            let expected = [&model[usize::try_from(past.start).unwrap()..], &[0; 100]].concat();
            assert_eq!(read(&*disk, past), expected, "seed {seed}, step {step}");
        }
        assert_eq!(read(&*disk, 0..SIZE), model, "seed {seed}");
        drop(disk);
        bed.stop();
        assert_clean(&path);
    }
}

#[test]
fn requests_wait_for_each_other_nowhere() {
    let bed = Bed::new(raw(vec![5; 1 << 20]));
    let disk = connect(&bed, "", &ConnectOptions::default());
    // All are in flight before the first is waited for.
    let buffers: Vec<_> = (0..256_u64).map(|_| Buffer::zeroed(4096)).collect();
    let reads = buffers.iter().zip(0..).map(|(buffer, at)| disk.read(at * 4096, buffer.clone().into()));
    block_on(futures_util::future::try_join_all(reads)).unwrap();
    assert!(buffers.iter().all(|buffer| buffer.to_vec() == [5; 4096]));
    let dropped = disk.write(0, Buffer::from_slice(&[6; 4096]).into());
    drop(dropped);
    drop(disk);
    bed.stop();
}

#[test]
fn what_cannot_be_written_is_refused() {
    let folder = scratch().unwrap();
    let path = folder.path().join("disk");
    make_qcow2(&path, &CreateOptions::default().size(SIZE));
    let bed = Bed::new(open_image(&path, Format::Qcow2, true));
    let address = NbdAddress::new(Uri::Unix(bed.socket()), "");
    let refused = NbdStorage::connect(&address, &ConnectOptions::default()).unwrap_err();
    assert!(refused.source.to_string().contains("read-only"), "{}", refused.source);
    let disk = connect(&bed, "", &ConnectOptions::default().read_only(true));
    assert!(disk.is_read_only() && block_on(disk.write(0, Buffer::zeroed(512).into())).is_err());
    assert!(block_on(disk.set_len(SIZE)).is_ok() && block_on(disk.set_len(SIZE + 512)).is_err());
    let none = NbdStorage::connect(&NbdAddress::new(Uri::Unix(bed.socket()), "none"), &ConnectOptions::default());
    assert!(none.unwrap_err().source.to_string().contains("has no export \"none\""));
    let other = ConnectOptions::default().read_only(true).context("qemu:dirty-bitmap:b");
    let none = NbdStorage::connect(&address, &other).unwrap_err();
    assert!(none.source.to_string().contains("no metadata context"), "{}", none.source);
}
