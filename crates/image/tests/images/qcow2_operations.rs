//! The cost of a request: operations on the storage, counted.

use std::sync::Arc;

use limosa_image::qcow2::{Counts, CreateOptions, OperationCount, Qcow2, Qcow2Options};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::{Buffer, block_on};
use limosa_testkit::image::{self, TestImage};

const SIZE: u64 = 4 << 20;

fn opened(backing: Option<Arc<dyn Disk>>) -> Arc<Qcow2> {
    let image = TestImage::new(&CreateOptions::default().size(SIZE));
    image.open_over(backing, Qcow2Options::default())
}

fn write(disk: &Qcow2, at: u64, length: usize) {
    image::write(disk, at, &vec![7; length]);
}

fn full() -> Arc<dyn Disk> {
    let disk = opened(None);
    write(&disk, 0, usize::try_from(SIZE / 2).unwrap());
    disk
}

fn contents(counts: Counts) -> [u64; 4] {
    [counts.data_reads, counts.data_writes, counts.cow_reads, counts.cow_writes]
        .map(|counter: OperationCount| counter.operations)
}

#[test]
fn a_first_write_is_one_operation_where_zeros_are_proven_and_a_rewrite_always() {
    let disk = opened(None);
    write(&disk, 100 << 10, 4096);
    assert_eq!(contents(disk.counts()), [0, 1, 0, 0]);
    assert_eq!(disk.counts().data_writes.bytes, 4096);
    write(&disk, 101 << 10, 4096);
    assert_eq!(contents(disk.counts()), [0, 2, 0, 0]);
}

#[test]
fn a_write_over_a_backing_image_is_one_read_and_one_write() {
    let disk = opened(Some(full()));
    write(&disk, 100 << 10, 4096);
    assert_eq!(contents(disk.counts()), [0, 0, 1, 1]);
    assert_eq!(disk.counts().cow_writes.bytes, 64 << 10);
    // A longer middle is not read in vain: two reads.
    write(&disk, (128 << 10) + 4096, 32 << 10);
    assert_eq!(contents(disk.counts()), [0, 0, 3, 2]);
    // Where the backing image has nothing, nothing is read, and only the data is written.
    write(&disk, 3 << 20, 4096);
    assert_eq!(contents(disk.counts()), [0, 1, 3, 2]);
}

#[test]
fn a_run_of_new_clusters_is_one_write_and_a_flush_with_nothing_to_note_is_one_flush() {
    let disk = opened(None);
    write(&disk, 0, 1 << 20);
    assert_eq!(contents(disk.counts()), [0, 1, 0, 0]);
    block_on(disk.flush()).unwrap();
    let flushes = disk.counts().flushes;
    block_on(disk.flush()).unwrap();
    assert_eq!(disk.counts().flushes, flushes + 1);
    assert_eq!(disk.counts().l2_writes.operations, 1);
    block_on(disk.close()).unwrap();
}

#[test]
fn a_read_of_no_bytes_succeeds() {
    let disk = opened(None);
    for at in [0, 100 << 10, disk.len()] {
        block_on(disk.read(GuestOffset(at), Buffer::zeroed(0).into())).unwrap();
    }
}
