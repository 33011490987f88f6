//! Working sets beside a snapshot: read back by it alone, replaced whole, and gone with it.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use limosa_migrate::stored::BlockRange;
use limosa_snapshot::{
    Durability, InvalidWorkingSet, RecordedMode, Snapshot, SnapshotError, UnnamedFile, WorkingSet, WorkingSetFile,
    WorkingSetRecorder,
};

use crate::fixture::{QUICK, names, range, small};

/// Records these pages of the first block.
fn record(snapshot: &Snapshot, touched: &[(u64, u64)]) -> WorkingSet {
    let mut recorder = WorkingSetRecorder::new(snapshot, RecordedMode::Lazy);
    for (start, end) in touched {
        recorder.note(BlockRange { block: 0, pages: range(*start, *end) });
    }
    recorder.finish()
}

fn pages(set: &WorkingSet) -> Vec<(usize, u64, u64)> {
    set.ranges.iter().map(|range| (range.block, range.pages.start.0, range.pages.end.0)).collect()
}

fn publish(snapshot: &Snapshot, touched: &[(u64, u64)]) -> WorkingSet {
    let set = record(snapshot, touched);
    WorkingSetFile::create(snapshot).unwrap().publish(&set).unwrap();
    set
}

#[test]
fn each_stored_page_is_recorded_once_in_the_order_of_first_touches() {
    let directory = tempfile::tempdir().unwrap();
    // 300..310 are stored.
    let snapshot = Snapshot::open(&small(directory.path(), "vm", QUICK)).unwrap();
    let set = record(&snapshot, &[(305, 307), (0, 302), (302, 304), (300, 600), (305, 9000)]);
    assert_eq!(pages(&set), [(0, 305, 307), (0, 300, 305), (0, 307, 310)]);
    let mut recorder = WorkingSetRecorder::new(&snapshot, RecordedMode::Mapped);
    recorder.note(BlockRange { block: 9, pages: range(0, 1) });
    assert_eq!(recorder.finish().pages(), 0);
}

#[test]
fn a_working_set_is_read_back_replaced_whole_and_the_owners_alone() {
    let directory = tempfile::tempdir().unwrap();
    let snapshot = Snapshot::open(&small(directory.path(), "vm", QUICK)).unwrap();
    assert_eq!(WorkingSet::of(&snapshot).unwrap(), None);
    let unused = WorkingSetFile::create(&snapshot).unwrap();
    drop(unused);
    assert_eq!(names(directory.path()), ["vm"]);
    for touched in [&[(300, 301)][..], &[(308, 310), (300, 302)]] {
        let set = publish(&snapshot, touched);
        let found = WorkingSet::of(&snapshot).unwrap().unwrap();
        assert_eq!((pages(&found), found.mode, found.snapshot), (pages(&set), RecordedMode::Lazy, snapshot.id()));
        assert_eq!(names(directory.path()), ["vm", "vm.working-set"]);
    }
    let mode = std::fs::metadata(directory.path().join("vm.working-set")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let recording = WorkingSetFile::create(&snapshot).unwrap();
    let refused = WorkingSetFile::create(&snapshot).unwrap_err().to_string();
    assert!(refused.contains("another recording"), "{refused}");
    drop(recording);
    // A link to the snapshot has the same.
    symlink(directory.path().join("vm"), directory.path().join("link")).unwrap();
    let linked = Snapshot::open(&directory.path().join("link")).unwrap();
    assert_eq!(WorkingSet::of(&linked).unwrap().unwrap().pages(), 4);
}

#[test]
fn what_is_not_the_snapshots_working_set_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let snapshot = Snapshot::open(&small(directory.path(), "vm", QUICK)).unwrap();
    let other = Snapshot::open(&small(directory.path(), "other", QUICK)).unwrap();
    publish(&other, &[(300, 301)]);
    let place = directory.path().join("vm.working-set");
    let refused = || match WorkingSet::of(&snapshot).unwrap_err() {
        SnapshotError::WorkingSet { path, why } => {
            assert_eq!(path, place);
            why
        }
        error => panic!("{error}"),
    };
    std::fs::rename(directory.path().join("other.working-set"), &place).unwrap();
    assert_eq!(refused(), InvalidWorkingSet::OfAnother(other.id()));
    std::fs::write(&place, "Dear Sir or Madam").unwrap();
    assert_eq!(refused(), InvalidWorkingSet::Foreign);
    let foreign = WorkingSetFile::create(&snapshot).unwrap_err();
    assert!(matches!(foreign, SnapshotError::WorkingSet { why: InvalidWorkingSet::Foreign, .. }), "{foreign}");
    assert_eq!(std::fs::read(&place).unwrap(), b"Dear Sir or Madam");
    std::fs::File::create(&place).unwrap().set_len(1 << 40).unwrap();
    assert!(matches!(refused(), InvalidWorkingSet::Damaged(_)));
    std::fs::remove_file(&place).unwrap();
    std::fs::create_dir(&place).unwrap();
    assert!(matches!(WorkingSet::of(&snapshot), Err(SnapshotError::Io { .. })));
    assert!(matches!(WorkingSetFile::create(&snapshot), Err(SnapshotError::Io { .. })));
}

#[test]
fn a_new_snapshot_of_a_name_removes_the_old_ones_working_set_and_no_other_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = small(directory.path(), "vm", QUICK);
    publish(&Snapshot::open(&path).unwrap(), &[(300, 301)]);
    replace(&path, true);
    assert_eq!(names(directory.path()), ["vm"]);
    publish_again(&path);
    std::fs::remove_file(&path).unwrap();
    replace(&path, false);
    assert_eq!(names(directory.path()), ["vm"]);
    std::fs::write(directory.path().join("vm.working-set"), "somebody's notes").unwrap();
    replace(&path, true);
    assert_eq!(names(directory.path()), ["vm", "vm.working-set"]);
}

#[test]
fn a_recording_of_a_snapshot_that_is_replaced_or_removed_meanwhile_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    for (name, is_replaced) in [("replaced", true), ("removed", false)] {
        let path = small(directory.path(), name, QUICK);
        let snapshot = Snapshot::open(&path).unwrap();
        let file = WorkingSetFile::create(&snapshot).unwrap();
        if is_replaced {
            replace(&path, true);
        } else {
            std::fs::remove_file(&path).unwrap();
        }
        let refused = file.publish(&record(&snapshot, &[(300, 301)])).unwrap_err();
        let SnapshotError::WorkingSet { why, .. } = &refused else { panic!("{refused}") };
        assert_eq!(*why, InvalidWorkingSet::SnapshotGone);
    }
    assert_eq!(names(directory.path()), ["replaced"]);
}

fn replace(path: &Path, replace: bool) {
    UnnamedFile::create(path, replace).unwrap().publish(Durability::Unsynced).unwrap();
}

fn publish_again(path: &Path) {
    let directory = tempfile::tempdir().unwrap();
    let snapshot = Snapshot::open(&small(directory.path(), "vm", QUICK)).unwrap();
    publish(&snapshot, &[(300, 301)]);
    std::fs::rename(directory.path().join("vm.working-set"), path.with_file_name("vm.working-set")).unwrap();
    assert!(WorkingSet::of(&snapshot).unwrap().is_none());
}
