//! Disks that grow beside other requests, which do not wait: acknowledged writes stay.

use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use limosa_image::qcow2::{CheckOptions, CreateOptions, Qcow2, Qcow2Options, check};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::{Failing, Fault, RequestHolder};
use limosa_storage::{Operation, Storage, block_on};
use limosa_testkit::image::{self, TestImage, filled, poll_once, raw_filled};

const CLUSTER: u64 = 64 << 10;
/// The old end lies within a cluster, and within a subcluster.
const OLD: u64 = 3 * CLUSTER + 512;
const NEW: u64 = 8 * CLUSTER;

/// Images of all sorts that zero in ways of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    Usual,
    Subclusters,
    Backed,
    BackedVersion2,
    DataFile,
}

impl Sort {
    const ALL: [Self; 5] = [Self::Usual, Self::Subclusters, Self::Backed, Self::BackedVersion2, Self::DataFile];
}

struct Bed {
    image: TestImage,
    sort: Sort,
}

impl Bed {
    /// An image that is full of ones.
    fn new(sort: Sort) -> Self {
        let backed = matches!(sort, Sort::Backed | Sort::BackedVersion2);
        let options = CreateOptions::default()
            .size(OLD)
            .version(if sort == Sort::BackedVersion2 { 2 } else { 3 })
            .extended_l2(sort == Sort::Subclusters)
            .backing_file(backed.then(|| "below".into()))
            .data_file((sort == Sort::DataFile).then(|| "data".into()));
        let bed = Self { image: TestImage::new(&options), sort };
        let disk = bed.open();
        write(&*disk, 0, 1, OLD);
        block_on(disk.close()).unwrap();
        bed
    }

    /// The image in use: requests are held from now on.
    fn held(&self, held: &RequestHolder) -> Arc<Qcow2> {
        held.release_all();
        let disk = self.open_over(|storage| held.wrap(storage));
        held.hold_again();
        disk
    }

    fn open(&self) -> Arc<Qcow2> {
        self.open_over(|storage| storage)
    }

    fn open_over(&self, over: impl Fn(Arc<dyn Storage>) -> Arc<dyn Storage>) -> Arc<Qcow2> {
        let backing = matches!(self.sort, Sort::Backed | Sort::BackedVersion2).then(|| raw_filled(7, 1 << 19));
        self.image.over(over).open_over(backing, Qcow2Options::default())
    }
}

fn write(disk: &dyn Disk, at: u64, byte: u8, length: u64) {
    image::write(disk, at, &filled(byte, length).to_vec());
}

fn read(disk: &dyn Disk, range: Range<u64>) -> Vec<u8> {
    image::read(disk, range.start, range.end - range.start)
}

fn corruptions(file: &dyn Storage) -> u64 {
    block_on(check(file, CheckOptions::default())).unwrap().corruptions
}

#[test]
fn zeroing_up_to_the_old_end_leaves_what_was_written_behind_it_meanwhile() {
    for sort in Sort::ALL {
        for how in ["discard", "unmap", "keep"] {
            let bed = Bed::new(sort);
            let held = RequestHolder::only(&[Operation::Read]);
            let disk = bed.held(&held);
            let mut zeroing = match how {
                "discard" => disk.discard(GuestOffset(512), OLD - 512),
                how => disk.write_zeroes(GuestOffset(512), OLD - 512, how == "unmap"),
            };
            // It has begun, and waits for a table.
            assert!(poll_once(&mut zeroing).is_pending());
            held.release_all();
            block_on(disk.grow(NEW)).unwrap();
            write(&*disk, OLD, 3, CLUSTER);
            block_on(zeroing).unwrap();
            let what = format!("{sort:?}, {how}");
            let sound = |disk: &dyn Disk| {
                assert!(read(disk, OLD..OLD + CLUSTER) == vec![3; 64 << 10], "{what}");
                assert!(read(disk, CLUSTER..3 * CLUSTER) == vec![0; 128 << 10], "{what}");
                if how != "discard" {
                    assert!(read(disk, 512..OLD).iter().all(|byte| *byte == 0), "{what}");
                }
                assert!(read(disk, OLD + CLUSTER..NEW).iter().all(|byte| *byte == 0), "{what}");
            };
            sound(&*disk);
            block_on(disk.close()).unwrap();
            sound(&*bed.open());
            assert_eq!(corruptions(&*bed.image.file), 0, "{what}");
        }
    }
}

#[test]
fn a_disk_that_is_made_longer_twice_at_once_keeps_what_was_written_in_between() {
    for sort in Sort::ALL {
        let bed = Bed::new(sort);
        let held = RequestHolder::only(&[Operation::Flush, Operation::Read]);
        let disk = bed.held(&held);
        let mut slow = disk.grow(NEW);
        assert!(poll_once(&mut slow).is_pending());
        held.release_all();
        let mut quick = disk.grow(NEW);
        let mut is_slow_over = false;
        let grown = loop {
            match poll_once(&mut quick) {
                Poll::Ready(grown) => break grown,
                Poll::Pending => is_slow_over = is_slow_over || poll_once(&mut slow).is_ready(),
            }
        };
        assert!(grown, "{sort:?}");
        write(&*disk, OLD, 3, NEW - OLD);
        if !is_slow_over {
            let _ = block_on(slow);
        }
        assert!(read(&*disk, OLD..NEW).iter().all(|byte| *byte == 3), "{sort:?}");
        block_on(disk.close()).unwrap();
        assert!(read(&*bed.open(), OLD..NEW).iter().all(|byte| *byte == 3), "{sort:?}");
    }
}

#[test]
fn a_dropped_growth_is_ended_by_the_next_request() {
    let bed = Bed::new(Sort::Usual);
    let held = RequestHolder::only(&[Operation::Flush, Operation::Read]);
    let disk = bed.held(&held);
    let mut dropped = disk.grow(NEW);
    assert!(poll_once(&mut dropped).is_pending());
    drop(dropped);
    assert_eq!(disk.len(), OLD);
    held.release_all();
    read(&*disk, 0..512);
    assert_eq!(disk.len(), NEW);
    assert!(read(&*disk, OLD..NEW).iter().all(|byte| *byte == 0));
    block_on(disk.close()).unwrap();
    assert_eq!(corruptions(&*bed.image.file), 0);
}

#[test]
fn a_growth_that_is_dropped_keeps_no_other_from_its_end() {
    let bed = Bed::new(Sort::Usual);
    let held = RequestHolder::only(&[Operation::Flush, Operation::Read]);
    let disk = bed.held(&held);
    let mut left = disk.grow(NEW);
    let mut dropped = disk.grow(NEW);
    assert!(poll_once(&mut left).is_pending() && poll_once(&mut dropped).is_pending());
    drop(dropped);
    held.release_all();
    block_on(disk.grow(2 * NEW)).unwrap();
    assert_eq!(disk.len(), 2 * NEW);
    drop(left);
    block_on(disk.close()).unwrap();
    assert_eq!(corruptions(&*bed.image.file), 0);
}

#[test]
fn a_growth_that_fails_wherever_it_does_leaves_the_file_whole_at_once() {
    let kinds = [(16, 512), (64, 512), (64, 4096)].map(|(refcount_bits, cluster_size)| {
        CreateOptions::default().size(64 << 10).refcount_bits(refcount_bits).cluster_size(cluster_size)
    });
    for options in kinds {
        for fault in Fault::ALL {
            for nth in 0.. {
                let TestImage { file, .. } = TestImage::new(&options);
                let failing = Failing::only(&[Operation::Write, Operation::Flush]);
                let usual = Qcow2Options::default().allocate_ahead(0);
                let disk = TestImage::existing(failing.wrap(Arc::clone(&file))).open_with(usual);
                write(&*disk, 0, 1, 64 << 10);
                block_on(disk.flush()).unwrap();
                failing.fail(nth, 1, fault);
                let grown = block_on(disk.grow(64 << 20)).is_ok();
                failing.mend();
                assert_eq!(corruptions(&*file), 0, "{options:?}, {fault:?} after {nth}");
                write(&*disk, 0, 2, 32 << 10);
                block_on(disk.close()).unwrap();
                assert_eq!(corruptions(&*file), 0, "{options:?}, {fault:?} after {nth}, closed");
                if grown {
                    break;
                }
            }
        }
    }
}
