//! Requests that overlap, in orders that only slow storages bring about.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use limosa_image::qcow2::{CreateOptions, Parts, Qcow2, Qcow2Options, create};
use limosa_image::{Disk, GuestOffset, Pending};
use limosa_storage::testing::{Held, SparseMemory};
use limosa_storage::{Buffer, Operation, block_on};

fn goes_on(request: &mut Pending<'_>) -> Poll<()> {
    request.as_mut().poll(&mut Context::from_waker(Waker::noop())).map(Result::unwrap)
}

#[test]
fn a_write_to_a_zeroed_cluster_is_not_seen_by_an_older_read_before_it_is_seen_by_all() {
    let held = Held::only(&[Operation::Read, Operation::Write]);
    held.open();
    let file = held.over(Arc::new(SparseMemory::file("image", 64 << 20)));
    let header = block_on(create(&*file, None, &CreateOptions { size: 1 << 20, ..CreateOptions::default() })).unwrap();
    let parts = Parts { file, data_file: None, backing: None, header };
    let disk = block_on(Qcow2::open(parts, Qcow2Options::default())).unwrap();
    block_on(disk.write(GuestOffset(0), Buffer::copied(&[1; 64 << 10]).into())).unwrap();
    held.close();
    let (older, later) = (Buffer::zeroed(512), Buffer::copied(&[9; 512]));
    let mut reads = disk.read(GuestOffset(0), older.clone().into());
    assert!(goes_on(&mut reads).is_pending());
    block_on(disk.write_zeroes(GuestOffset(0), 64 << 10, false)).unwrap();
    let mut writes = disk.write(GuestOffset(0), Buffer::copied(&[2; 512]).into());
    assert!(goes_on(&mut writes).is_pending());
    // The bytes are there, and the table does not say so yet.
    let [read, write] = &held.waiting()[..] else { panic!("a read and a write of one cluster") };
    assert!(held.let_go(write.number) && held.let_go(read.number));
    assert!(goes_on(&mut reads).is_ready());
    block_on(disk.read(GuestOffset(0), later.clone().into())).unwrap();
    assert!(later.is_zero() && older.to_vec() != [2; 512], "who read later saw what was there before");
    assert!(goes_on(&mut writes).is_ready());
    held.open();
    block_on(disk.read(GuestOffset(0), later.clone().into())).unwrap();
    assert_eq!(later.to_vec(), [2; 512]);
}
