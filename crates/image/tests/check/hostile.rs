//! Images that are made to cost their reader time and memory: what going through them takes is bounded by the file.

use std::sync::Arc;

use limosa_image::qcow2::{CheckOptions, CheckReport, CreateOptions, Repair, check, repair};
use limosa_storage::testing::RequestRecorder;
use limosa_storage::{MemoryStorage, Operation, Storage, block_on};
use limosa_testkit::image::{TestImage, contents, number, put};

use crate::cuts::views;
use crate::verdict::{figures, stock};
use crate::zoo;

/// An empty image in memory.
fn empty(options: &CreateOptions) -> Arc<dyn Storage> {
    TestImage::new(options).file
}

/// A check, and the bytes that it read.
fn checked(file: &Arc<dyn Storage>) -> (CheckReport, u64) {
    let counting = RequestRecorder::new();
    let report = block_on(check(&*counting.wrap(Arc::clone(file)), CheckOptions::default())).unwrap();
    let reads = counting.take().into_iter().filter(|seen| seen.operation == Operation::Read);
    (report, reads.map(|seen| seen.range.end - seen.range.start).sum())
}

#[test]
fn l1_tables_that_thousands_of_snapshots_share_are_read_once() {
    const SNAPSHOTS: u32 = 20_000;
    const CLUSTER: u64 = 64 << 10;
    const L1: u64 = 64 * CLUSTER;
    let file = empty(&CreateOptions::default().size(1 << 30));
    let end = file.length().unwrap();
    // Tables of 1 to 2 MiB that all lie over each other, and are not alike: 30 GiB if each is read.
    let mut table = Vec::new();
    for snapshot in 0..SNAPSHOTS {
        let (at, entries) = (end + u64::from(snapshot % 16) * CLUSTER, (128 << 10) + snapshot % 4096);
        table.extend([at.to_be_bytes(), (u64::from(entries) << 32).to_be_bytes()].concat());
        table.extend([0; 20]);
        table.extend(16_u32.to_be_bytes());
        table.extend([0_u64.to_be_bytes(), (1_u64 << 30).to_be_bytes()].concat());
    }
    put(&*file, end + L1, &table);
    put(&*file, 60, &SNAPSHOTS.to_be_bytes());
    put(&*file, 64, &(end + L1).to_be_bytes());
    // An L2 table that is referred to from the middle of most of them.
    put(&*file, end + 32 * CLUSTER, &(end + 60 * CLUSTER).to_be_bytes());
    let (report, read) = checked(&file);
    assert!(read < 4 * file.length().unwrap(), "{read} bytes read");
    // Snapshot tables and L1 tables have the references of all, and refcounts of 16 bits go to 65535.
    assert!(report.corruptions > 0 && report.check_errors == 0, "{report:?}");
    let repaired = block_on(repair(&*file, Repair::All, CheckOptions::default())).unwrap();
    assert!(repaired.is_clean(), "{repaired:?}");
}

#[test]
fn refcounts_far_apart_are_looked_up_without_reading_their_blocks_again_and_again() {
    const CLUSTER: u64 = 2 << 20;
    const ENTRIES: u64 = 4096;
    let file = empty(&CreateOptions::default().size(1 << 40).cluster_size(CLUSTER));
    let end = file.length().unwrap().next_multiple_of(CLUSTER);
    let (l1, refcount_table) = (number(&*file, 40), number(&*file, 48));
    // Entries that lead to where two other refcount blocks tell of, by turns: 8 GiB if a block is read for each.
    put(&*file, refcount_table + 8, &(end + CLUSTER).to_be_bytes());
    put(&*file, refcount_table + 16, &(end + 2 * CLUSTER).to_be_bytes());
    put(&*file, l1, &(end | 1 << 63).to_be_bytes());
    let table: Vec<u8> =
        (0..ENTRIES).flat_map(|entry| ((1 + entry % 2) << 41 | (entry * CLUSTER) | 1 << 63).to_be_bytes()).collect();
    put(&*file, end, &table);
    put(&*file, end + 3 * CLUSTER - 1, &[0]);
    let (report, read) = checked(&file);
    assert!(read < 128 << 20, "{read} bytes read");
    assert!(report.corruptions >= ENTRIES, "{report:?}");
}

#[test]
fn a_directory_of_bitmaps_is_read_no_further_than_the_header_says() {
    let file = empty(&CreateOptions::default().size(1 << 20));
    let end = file.length().unwrap();
    let entry = |granularity: u8, entries: u32| {
        let mut bytes = (end + (1 << 20)).to_be_bytes().to_vec();
        // In use: its size is not compared with the disk's.
        bytes.extend([entries.to_be_bytes(), 1_u32.to_be_bytes()].concat());
        bytes.extend([1, granularity, 0, 1, 0, 0, 0, 0]);
        bytes.extend([b'a', 0, 0, 0, 0, 0, 0, 0]);
        bytes
    };
    let bitmaps = |count: u32, directory: &[u8]| {
        let storage = MemoryStorage::with_contents(contents(&*file), 1 << 30);
        // The names of features are the only extension: its place is the bitmaps'.
        let mut extension = 0x2385_2875_u32.to_be_bytes().to_vec();
        extension.extend([24_u32.to_be_bytes(), count.to_be_bytes(), [0; 4]].concat());
        extension.extend([(directory.len() as u64).to_be_bytes(), end.to_be_bytes(), [0; 8]].concat());
        put(&storage, 112, &extension);
        put(&storage, 95, &[1]);
        put(&storage, end, directory);
        let report = block_on(check(&storage, CheckOptions::default())).unwrap();
        report.findings.first().map(ToString::to_string).unwrap_or_default()
    };
    let most = "corruption: bitmap directory at 0x40000: more bitmaps than the 1 that the header says there are";
    assert_eq!(bitmaps(1, &entry(16, 1).repeat(2000)), most);
    let long = "corruption: bitmap directory at 0x40000: bitmap 0: a table of 4294967295 clusters; 536870912 bytes are the most";
    assert_eq!(bitmaps(1, &entry(16, u32::MAX)), long);
}

#[test]
fn what_an_l1_table_refers_to_that_is_lost_is_not_given_back() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let path = zoo::plain(folder.path(), "cluster_size=64k").path;
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40..48].copy_from_slice(&(1_u64 << 40).to_be_bytes());
    std::fs::write(&path, &bytes).unwrap();
    let storage = MemoryStorage::with_contents(bytes.clone(), 1 << 30);
    let found = block_on(check(&storage, CheckOptions::default())).unwrap();
    assert_eq!(Some(figures(&found)), stock(&path).0);
    let said = "corruption: L1 table at 0x10000000000: the 8 bytes at 0x10000000000 are behind the end of the file";
    assert_eq!(found.findings[0].to_string(), said);
    assert!(found.leaks > 0);
    let report = block_on(repair(&storage, Repair::All, CheckOptions::default())).unwrap();
    assert_eq!((report.corruptions, report.leaks), (1, found.leaks));
    assert!(storage.contents() == bytes, "if the table is found by hand, all that it refers to still exists");
}

#[test]
fn what_the_guest_wrote_is_not_repaired_as_a_table() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    for name in ["usual", "subclusters", "tiny"] {
        let path = zoo::one(folder.path(), name).path;
        let mut bytes = std::fs::read(&path).unwrap();
        let before = views(&bytes, None).unwrap();
        let storage = MemoryStorage::with_contents(bytes.clone(), 1 << 30);
        // The cluster in which the guest's 5 MiB lie becomes a table of the first snapshot, which has nothing there.
        let map = limosa_testkit::qemu_img(["map", "--output", "json", path.to_str().unwrap()]).unwrap();
        let map: serde_json::Value = serde_json::from_str(&map).unwrap();
        let guest = map.as_array().unwrap().iter().find(|part| part["start"] == 5 << 20).unwrap();
        let place = guest["offset"].as_u64().unwrap();
        let snapshots = number(&storage, 64);
        let (l1, entries) = (number(&storage, snapshots), number(&storage, snapshots + 8) >> 32);
        let at = usize::try_from(l1 + entries * 8 - 8).unwrap();
        bytes[at..at + 8].copy_from_slice(&(place | 1 << 63).to_be_bytes());
        let storage = MemoryStorage::with_contents(bytes, 1 << 30);
        assert!(block_on(check(&storage, CheckOptions::default())).unwrap().corruptions > 0);
        assert!(block_on(repair(&storage, Repair::All, CheckOptions::default())).unwrap().is_clean(), "{name}");
        let after = views(&storage.contents(), None).unwrap();
        assert!(
            after[0] == before[0] && after[2] == before[2],
            "{name}: the disk and the other snapshot are as they were"
        );
    }
}

#[test]
fn what_is_said_after_a_repair_is_true_also_of_a_table_that_lies_over_the_header() {
    let file = empty(&CreateOptions::default().size(1 << 20).cluster_size(512));
    // The whole cluster of the header is an L1 table, and a bit that limosa does not know one of its entries.
    put(&*file, 36, &64_u32.to_be_bytes());
    put(&*file, 40, &0_u64.to_be_bytes());
    put(&*file, 88, &(1_u64 << 37).to_be_bytes());
    let (found, _) = checked(&file);
    let report = block_on(repair(&*file, Repair::All, CheckOptions::default())).unwrap();
    assert_ne!(report.corruptions, found.corruptions, "the bit was cleared");
    let (again, _) = checked(&file);
    assert_eq!((again.corruptions, again.leaks), (report.corruptions, report.leaks));
}
