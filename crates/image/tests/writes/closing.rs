//! The errors of a close, and their receivers.

use std::sync::Arc;

use limosa_image::qcow2::{CreateOptions, Qcow2};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, GuestOffset, Pending};
use limosa_storage::testing::{Failing, Fault, RequestHolder};
use limosa_storage::{Buffer, Operation, Storage, block_on};
use limosa_testkit::image::{TestImage, contents, leaks, memory_file, poll_once, write};

/// An image with a write that was not flushed.
fn written(over: impl Fn(Arc<dyn Storage>) -> Arc<dyn Storage>) -> (Arc<dyn Storage>, Arc<Qcow2>) {
    let image = TestImage::new(&CreateOptions::default().size(64 << 20));
    let disk = image.over(over).open();
    write(&*disk, 0, &[1; 512]);
    (image.file, disk)
}

#[test]
fn a_close_that_failed_is_not_said_to_be_fine_later() {
    let failing = Failing::only(&[Operation::Flush]);
    let (_, disk) = written(|storage| failing.wrap(storage));
    failing.fail(0, u64::MAX, Fault::Broken);
    let first = block_on(disk.close()).unwrap_err().to_string();
    assert_eq!(block_on(disk.close()).unwrap_err().to_string(), first);
}

#[test]
fn a_close_that_was_dropped_is_completed_by_the_next_one() {
    let held = RequestHolder::only(&[Operation::Flush]);
    let (file, disk) = written(|storage| held.wrap(storage));
    let mut close = disk.close();
    assert!(poll_once(&mut close).is_pending());
    assert!(block_on(disk.flush()).is_err(), "nothing is begun after a close was");
    drop(close);
    held.release_all();
    block_on(disk.close()).unwrap();
    assert_eq!(leaks(&*file), 0);
    // A data cluster and its L2 table behind header, refcount table and block, and L1 table.
    assert_eq!(file.length().unwrap(), 6 * (64 << 10));
    block_on(disk.close()).unwrap();
}

#[test]
fn a_close_ends_a_growth_that_was_dropped_and_nothing_changes_the_file_after_it() {
    let held = RequestHolder::only(&[Operation::Flush, Operation::Read]);
    held.release_all();
    let (file, disk) = written(|storage| held.wrap(storage));
    held.hold_again();
    let mut growth = disk.grow(128 << 20);
    assert!(poll_once(&mut growth).is_pending());
    drop(growth);
    held.release_all();
    block_on(disk.close()).unwrap();
    let closed = contents(&*file);
    for late in [
        disk.grow(256 << 20),
        disk.write(GuestOffset(0), Buffer::from_slice(&[2; 512]).into()),
        disk.discard(GuestOffset(0), 1 << 20),
    ] {
        assert!(block_on(late).is_err());
    }
    assert!(contents(&*file) == closed, "the file changed after it was closed");
    assert_eq!(leaks(&*file), 0);
    let header = TestImage::existing(Arc::clone(&file)).header();
    assert!(!header.features.corrupt());
    assert_eq!(header.size, 128 << 20);
}

#[test]
fn a_close_waits_for_requests_that_had_begun_and_refuses_those_that_had_not() {
    for raw in [false, true] {
        for operation in [Operation::Read, Operation::Write] {
            let held = RequestHolder::only(&[operation]);
            let disk: Arc<dyn Disk> = if raw {
                let contents = memory_file("contents");
                block_on(contents.set_len(64 << 20)).unwrap();
                Raw::open(held.wrap(contents), &RawOptions::default()).unwrap()
            } else {
                // With a file for contents alone, what the close itself writes is not held.
                let options = CreateOptions::default().size(64 << 20).data_file(Some("data".into()));
                let image = TestImage::new(&options);
                let first = image.open();
                write(&*first, 0, &[1; 512]);
                block_on(first.close()).unwrap();
                TestImage { data_file: image.data_file.map(|contents| held.wrap(contents)), ..image }.open()
            };
            let begin = |disk: &Arc<dyn Disk>| match operation {
                Operation::Read => {
                    let disk = Arc::clone(disk);
                    Box::pin(async move { disk.read(GuestOffset(0), Buffer::zeroed(512).into()).await })
                        as Pending<'static>
                }
                _ => {
                    let disk = Arc::clone(disk);
                    Box::pin(async move { disk.write(GuestOffset(0), Buffer::from_slice(&[2; 512]).into()).await })
                }
            };
            let (mut begun, mut dropped) = (begin(&disk), begin(&disk));
            assert!(poll_once(&mut begun).is_pending() && poll_once(&mut dropped).is_pending());
            let mut close = disk.close();
            assert!(poll_once(&mut close).is_pending(), "raw: {raw}, {operation}: it ended before a request");
            assert!(block_on(begin(&disk)).unwrap_err().to_string().contains("it has been closed"));
            drop(dropped);
            held.release_all();
            assert!(poll_once(&mut close).is_pending(), "raw: {raw}, {operation}: it ended before a request");
            block_on(begun).unwrap();
            block_on(close).unwrap();
        }
    }
}
