//! Clusters that are taken ahead: given back when the image is closed, lost at most when it is not.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::qcow2::{CreateOptions, Qcow2, Qcow2Options};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::{Create, FileOptions, FileStorage, Storage, block_on};
use limosa_testkit::image::{self, TestImage, leaks};
use limosa_testkit::{qemu_img, qemu_img_output, scratch};

const CLUSTER: u64 = 64 << 10;
/// The same, as an index.
const BYTES: usize = 64 << 10;
const AHEAD: u64 = 4 << 20;

fn open(file: Arc<dyn Storage>, allocate_ahead: u64) -> Arc<Qcow2> {
    TestImage::existing(file).open_with(Qcow2Options::default().allocate_ahead(allocate_ahead))
}

fn options(extended_l2: bool) -> CreateOptions {
    CreateOptions::default().size(64 << 20).extended_l2(extended_l2)
}

/// Writes to clusters of these numbers, one after the other.
fn write(disk: &dyn Disk, clusters: Range<u64>) {
    for cluster in clusters {
        image::write(disk, cluster * CLUSTER, &[u8::try_from(cluster % 255 + 1).unwrap(); BYTES]);
    }
}

fn is_there(disk: &dyn Disk, clusters: Range<u64>) -> bool {
    clusters.into_iter().all(|cluster| {
        image::read(disk, cluster * CLUSTER, CLUSTER) == [u8::try_from(cluster % 255 + 1).unwrap(); BYTES]
    })
}

/// A file of the folder with an image that was written to and, unless it is told otherwise, closed.
fn written(folder: &Path, extended_l2: bool, closed: bool) -> PathBuf {
    let path = folder.join("image");
    let _ = std::fs::remove_file(&path);
    let file = FileStorage::open(&path, &FileOptions { create: Create::New, ..FileOptions::default() }).unwrap();
    let disk = open(TestImage::create_in(file, &options(extended_l2)).file, AHEAD);
    write(&*disk, 0..5);
    block_on(disk.flush()).unwrap();
    if closed {
        block_on(disk.close()).unwrap();
    }
    path
}

#[test]
fn a_closed_image_has_no_leak_and_its_file_ends_with_what_is_used() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    for extended_l2 in [false, true] {
        let path = written(folder.path(), extended_l2, true);
        // Header, refcount table and block, L1 table, L2 table, contents.
        assert!(path.metadata().unwrap().len() <= 10 * CLUSTER, "extended_l2: {extended_l2}");
        qemu_img(["check", "-q", path.to_str().unwrap()]).unwrap();
        let file = FileStorage::open(&path, &FileOptions::default()).unwrap();
        let disk = open(file, AHEAD);
        assert!(is_there(&*disk, 0..5));
    }
}

#[test]
fn an_image_that_was_not_closed_has_leaks_of_what_was_taken_ahead_and_nothing_worse() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    for extended_l2 in [false, true] {
        let path = written(folder.path(), extended_l2, false);
        let code = || qemu_img_output(["check", path.to_str().unwrap()]).unwrap().status.code();
        assert_eq!(code(), Some(3));
        let options = FileOptions { read_only: false, ..FileOptions::default() };
        let disk = open(FileStorage::open(&path, &options).unwrap(), AHEAD);
        assert!(is_there(&*disk, 0..5));
        // What is taken next lies behind them.
        write(&*disk, 5..7);
        block_on(disk.close()).unwrap();
        drop(disk);
        assert_eq!(code(), Some(3));
        let file = FileStorage::open(&path, &options).unwrap();
        // Of the 64 the L2 table and the contents are in use.
        assert_eq!(leaks(&*file), AHEAD / CLUSTER - 6);
        assert!(is_there(&*open(file, AHEAD), 0..7));
    }
}

#[test]
fn nothing_is_cut_off_that_the_file_had_before_or_that_lies_behind_what_is_given_back() {
    let TestImage { file, .. } = TestImage::new(&options(true));
    // Another process made the file longer.
    block_on(file.set_len(8 << 20)).unwrap();
    let disk = open(Arc::clone(&file), AHEAD);
    write(&*disk, 0..3);
    block_on(disk.close()).unwrap();
    assert_eq!(file.length().unwrap(), 8 << 20);
    // What is used may lie behind what was taken ahead: a write of more than what is left takes it from behind.
    let disk = open(Arc::clone(&file), 16 << 20);
    write(&*disk, 3..4);
    let all = vec![9; 20 << 20];
    image::write(&*disk, 32 << 20, &all);
    block_on(disk.close()).unwrap();
    assert_eq!(leaks(&*file), 0);
    let disk = open(file, AHEAD);
    assert!(is_there(&*disk, 0..4));
    assert!(image::read(&*disk, 32 << 20, 20 << 20) == all);
}

#[test]
fn how_much_is_taken_ahead_decides_how_many_clusters_are_counted_before_they_are_used() {
    let leaks = |allocate_ahead| {
        let TestImage { file, .. } = TestImage::new(&options(false));
        let disk = open(Arc::clone(&file), allocate_ahead);
        write(&*disk, 0..3);
        block_on(disk.flush()).unwrap();
        drop(disk);
        // Only what has something behind it is seen to be lost.
        let disk = open(Arc::clone(&file), 0);
        write(&*disk, 3..4);
        block_on(disk.close()).unwrap();
        leaks(&*file)
    };
    // The L2 table is the first of them.
    assert_eq!([0, CLUSTER, 1 << 20, 4 << 20].map(leaks), [0, 0, 12, 60]);
}

#[test]
fn free_clusters_across_the_end_of_a_slice_of_refcounts_are_used_anew() {
    let options = CreateOptions::default().size(1 << 20).cluster_size(512);
    let disk = open(TestImage::new(&options).file, 0);
    let length = 512 << 10;
    image::write(&*disk, 0, &vec![1; length]);
    block_on(disk.discard(GuestOffset(0), length as u64)).unwrap();
    block_on(disk.flush()).unwrap();
    // 256 refcounts are in a slice: some requests want clusters of both sides.
    image::write(&*disk, 0, &vec![2; length]);
    assert!(image::read(&*disk, 0, length as u64).iter().all(|byte| *byte == 2));
    block_on(disk.close()).unwrap();
}
