//! Requests that overlap, in orders that only slow storages bring about.

use std::task::Poll;

use limosa_image::qcow2::CreateOptions;
use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::RequestHolder;
use limosa_storage::{Buffer, Operation, block_on};
use limosa_testkit::image::{TestImage, poll_once};

#[test]
fn a_write_to_a_zeroed_cluster_is_not_seen_by_an_older_read_before_it_is_seen_by_all() {
    let held = RequestHolder::only(&[Operation::Read, Operation::Write]);
    held.release_all();
    let image = TestImage::new(&CreateOptions::default().size(1 << 20));
    let disk = image.over(|storage| held.wrap(storage)).open();
    block_on(disk.write(GuestOffset(0), Buffer::from_slice(&[1; 64 << 10]).into())).unwrap();
    held.hold_again();
    let (older, later) = (Buffer::zeroed(512), Buffer::from_slice(&[9; 512]));
    let mut reads = disk.read(GuestOffset(0), older.clone().into());
    assert!(poll_once(&mut reads).is_pending());
    block_on(disk.write_zeroes(GuestOffset(0), 64 << 10, false)).unwrap();
    let mut writes = disk.write(GuestOffset(0), Buffer::from_slice(&[2; 512]).into());
    assert!(poll_once(&mut writes).is_pending());
    // The bytes are there, and the table does not say so yet.
    let [read, write] = &held.waiting()[..] else { panic!("a read and a write of one cluster") };
    assert!(held.release(write.number) && held.release(read.number));
    assert!(poll_once(&mut reads) == Poll::Ready(true));
    block_on(disk.read(GuestOffset(0), later.clone().into())).unwrap();
    assert!(later.is_zero() && older.to_vec() != [2; 512], "who read later saw what was there before");
    assert!(poll_once(&mut writes) == Poll::Ready(true));
    held.release_all();
    block_on(disk.read(GuestOffset(0), later.clone().into())).unwrap();
    assert_eq!(later.to_vec(), [2; 512]);
}
