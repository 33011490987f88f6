//! What the end of an image says, and to whom.

use std::sync::Arc;
use std::task::{Context, Waker};

use limosa_image::qcow2::{CheckOptions, CreateOptions, Parts, Qcow2, Qcow2Options, check, create};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, GuestOffset, Pending};
use limosa_storage::testing::{Failing, Fault, Held, SparseMemory};
use limosa_storage::{Buffer, Operation, Storage, block_on};

/// An image with a write that was not flushed.
fn written(over: impl Fn(Arc<dyn Storage>) -> Arc<dyn Storage>) -> (Arc<dyn Storage>, Arc<Qcow2>) {
    let file: Arc<dyn Storage> = Arc::new(SparseMemory::file("image", 256 << 20));
    let options = CreateOptions { size: 64 << 20, ..CreateOptions::default() };
    let header = block_on(create(&*file, None, &options)).unwrap();
    let parts = Parts { file: over(Arc::clone(&file)), data_file: None, backing: None, header };
    let disk = block_on(Qcow2::open(parts, Qcow2Options::default())).unwrap();
    block_on(disk.write(GuestOffset(0), Buffer::copied(&[1; 512]).into())).unwrap();
    (file, disk)
}

#[test]
fn a_close_that_failed_is_not_said_to_be_fine_later() {
    let failing = Failing::only(&[Operation::Flush]);
    let (_, disk) = written(|storage| failing.over(storage));
    failing.fail(0, u64::MAX, Fault::Broken);
    let first = block_on(disk.close()).unwrap_err().to_string();
    assert_eq!(block_on(disk.close()).unwrap_err().to_string(), first);
}

#[test]
fn a_close_that_nobody_waited_for_is_brought_to_its_end_by_the_next_one() {
    let held = Held::only(&[Operation::Flush]);
    let (file, disk) = written(|storage| held.over(storage));
    let mut close = disk.close();
    assert!(close.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(block_on(disk.flush()).is_err(), "nothing is begun after a close was");
    drop(close);
    held.open();
    block_on(disk.close()).unwrap();
    assert!(block_on(check(&*file, CheckOptions::default())).unwrap().is_clean());
    // A data cluster and its L2 table behind header, refcount table and block, and L1 table.
    assert_eq!(file.length().unwrap(), 6 * (64 << 10));
    block_on(disk.close()).unwrap();
}

/// Whether it is done, asked once.
fn is_done(request: &mut Pending<'_>) -> bool {
    request.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn a_close_waits_for_requests_that_had_begun_and_refuses_those_that_had_not() {
    for raw in [false, true] {
        for operation in [Operation::Read, Operation::Write] {
            let held = Held::only(&[operation]);
            let contents: Arc<dyn Storage> = Arc::new(SparseMemory::file("contents", 256 << 20));
            let disk: Arc<dyn Disk> = if raw {
                block_on(contents.set_len(64 << 20)).unwrap();
                Raw::open(held.over(Arc::clone(&contents)), &RawOptions::default()).unwrap()
            } else {
                // With a file for contents alone, what the close itself writes is not held.
                let file: Arc<dyn Storage> = Arc::new(SparseMemory::file("image", 256 << 20));
                let options =
                    CreateOptions { size: 64 << 20, data_file: Some("contents".into()), ..CreateOptions::default() };
                let header = block_on(create(&*file, Some(&*contents), &options)).unwrap();
                let once = Parts {
                    file: Arc::clone(&file),
                    data_file: Some(Arc::clone(&contents)),
                    backing: None,
                    header: header.clone(),
                };
                let first = block_on(Qcow2::open(once, Qcow2Options::default())).unwrap();
                block_on(first.write(GuestOffset(0), Buffer::copied(&[1; 512]).into())).unwrap();
                block_on(first.close()).unwrap();
                let data_file = Some(held.over(Arc::clone(&contents)));
                let parts = Parts { file, data_file, backing: None, header };
                block_on(Qcow2::open(parts, Qcow2Options::default())).unwrap()
            };
            let begin = |disk: &Arc<dyn Disk>| match operation {
                Operation::Read => {
                    let disk = Arc::clone(disk);
                    Box::pin(async move { disk.read(GuestOffset(0), Buffer::zeroed(512).into()).await })
                        as Pending<'static>
                }
                _ => {
                    let disk = Arc::clone(disk);
                    Box::pin(async move { disk.write(GuestOffset(0), Buffer::copied(&[2; 512]).into()).await })
                }
            };
            let (mut begun, mut dropped) = (begin(&disk), begin(&disk));
            assert!(!is_done(&mut begun) && !is_done(&mut dropped));
            let mut close = disk.close();
            assert!(!is_done(&mut close), "raw: {raw}, {operation}: it ended before a request");
            assert!(block_on(begin(&disk)).unwrap_err().to_string().contains("it has been closed"));
            drop(dropped);
            held.open();
            assert!(!is_done(&mut close), "raw: {raw}, {operation}: it ended before a request");
            block_on(begun).unwrap();
            block_on(close).unwrap();
        }
    }
}
