//! Snapshots that are packed come back.

use limosa_migrate::Handle;
use limosa_migrate::stored::PageSource as _;
use limosa_pack::{Access, is_packed, open_snapshot, pack};
use limosa_page::PageNumber;
use limosa_snapshot::{Snapshot, SnapshotError, UnnamedFile, seal_snapshot};
use proptest::prelude::*;

use crate::fixture::{self, CHECKED, QUICK, small};
use crate::{access, assert_same, encrypted, options, pack_file, passphrase, snapshot, unpack_file};

#[test]
fn a_packed_snapshot_reads_as_the_file_and_unpacks_to_its_very_bytes() {
    let directory = tempfile::tempdir().unwrap();
    for (name, write) in [("plain", QUICK), ("checked", CHECKED)] {
        let source = small(directory.path(), name, write);
        for (kind, how) in [("", options()), ("-secret", encrypted())] {
            let target = directory.path().join(format!("{name}{kind}.qcow2"));
            let packed = pack_file(&source, &target, None, &how);
            assert!(packed.length < 4 << 20 && packed.page_bytes == 18 * 4096, "{packed:?}");
            assert!(is_packed(&target) && !is_packed(&source));
            let snapshot = open_snapshot(&target, &access(Some(&passphrase()))).unwrap();
            assert!(snapshot.is_packed() && !snapshot.is_mappable());
            assert_same(&Snapshot::open(&source).unwrap(), &snapshot);
            assert_eq!(snapshot.has_checksums(), name == "checked");
            assert_eq!(snapshot.summary().packed.unwrap().encrypted, !kind.is_empty());
            let back = directory.path().join(format!("{name}{kind}.back"));
            unpack_file(&target, &back, Some(&passphrase()));
            assert!(std::fs::read(&source).unwrap() == std::fs::read(&back).unwrap());
            assert!(Snapshot::open(&back).unwrap().is_mappable());
        }
    }
}

#[test]
fn nothing_of_a_packed_snapshot_is_passed_on_from_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let source = small(directory.path(), "vm", QUICK);
    let target = directory.path().join("vm.qcow2");
    pack_file(&source, &target, None, &options());
    let snapshot = open_snapshot(&target, &Access::default()).unwrap();
    assert!(snapshot.locate(0, PageNumber(300)).is_none() && snapshot.file_location(0, PageNumber(300)).is_none());
    assert!(seal_snapshot(&target).is_err());
    // A save that would replace it is refused while it is served.
    snapshot.lock_serving().unwrap();
    assert!(matches!(UnnamedFile::create(&target, true), Err(SnapshotError::Locked { .. })));
}

#[test]
fn stale_bytes_in_a_file_of_qemus_are_left_out() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("vm");
    let stored = [5, 6, 900];
    let pending = fixture::as_qemu(&source, &stored);
    fixture::leave_stale(&pending, fixture::LARGE, 0, &stored);
    pending.publish(limosa_snapshot::Durability::Unsynced).unwrap();
    let (target, back) = (directory.path().join("vm.qcow2"), directory.path().join("back"));
    let packed = pack_file(&source, &target, None, &options());
    assert!(packed.length < 1 << 20, "{packed:?}");
    unpack_file(&target, &back, None);
    let (one, other) = (Snapshot::open(&source).unwrap(), Snapshot::open(&back).unwrap());
    assert_same(&one, &open_snapshot(&target, &Access::default()).unwrap());
    assert_eq!(one.length(), other.length());
    let place = one.layout().blocks[0].file_offset(4096).unwrap();
    let mut bytes = [1; 4096];
    other.read_bytes(place, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4096]);
}

#[test]
fn a_cancelled_pack_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let source = small(directory.path(), "vm", QUICK);
    let snapshot = open_snapshot(&source, &Access::default()).unwrap();
    let pending = UnnamedFile::create(&directory.path().join("vm.qcow2"), false).unwrap();
    let handle = Handle::new();
    handle.control.stop(limosa_migrate::control::Stop::Cancel);
    pack(&snapshot, pending, None, &options(), &handle).unwrap_err();
    assert_eq!(fixture::names(directory.path()), ["vm"]);
}

#[test]
fn a_long_reader_and_many_faults_see_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    // More than the cache has room for.
    let pages = 12 << 10;
    let contents: Vec<_> = (0..pages).filter(|page| page % 7 != 3).map(|page| (page, page)).collect();
    let source = snapshot(&directory.path().join("vm"), pages, &contents);
    let target = directory.path().join("vm.qcow2");
    pack_file(&source, &target, None, &options());
    let (plain, packed) = (Snapshot::open(&source).unwrap(), open_snapshot(&target, &Access::default()).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| assert_same(&plain, &packed));
        for seed in 1..4_u64 {
            let packed = &packed;
            scope.spawn(move || {
                let mut page = [0; 4096];
                for turn in 0..2000 {
                    let number = turn * 7919 * seed % pages;
                    packed.read_pages(0, fixture::range(number, number + 1), &mut page).unwrap();
                    let expected = if number % 7 == 3 { [0; 4096] } else { fixture::page(number) };
                    assert!(page == expected, "page {number}");
                }
            });
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_pages_in_clusters_of_any_size_come_back(
        contents in prop::collection::btree_map(0_u64..600, 0_u64..4, 0..80),
        bits in 12_u32..=21,
        level in 1_u8..=12,
        secret: bool,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let contents: Vec<_> = contents.into_iter().collect();
        let source = snapshot(&directory.path().join("vm"), 600, &contents);
        let target = directory.path().join("vm.qcow2");
        let mut how = if secret { encrypted() } else { options() };
        how.level = Some(level);
        how.cluster_size = Some(1 << bits);
        pack_file(&source, &target, None, &how);
        assert_same(&Snapshot::open(&source).unwrap(), &open_snapshot(&target, &access(Some(&passphrase()))).unwrap());
        let back = directory.path().join("back");
        unpack_file(&target, &back, Some(&passphrase()));
        prop_assert!(std::fs::read(&source).unwrap() == std::fs::read(&back).unwrap());
    }
}
