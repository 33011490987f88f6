//! Snapshots of a directory: listed, removed, rebased, merged, pruned; what stays comes back.

use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::SystemTime;

use limosa_migrate::Handle;
use limosa_pack::{Access, PackError, PackOptions, PrunePlan, Retention, SnapshotDirectory, open_snapshot, plan_prune};
use limosa_page::error_with_causes;
use limosa_snapshot::{Snapshot, SnapshotError};

use crate::{access, assert_same, encrypted, options, pack_file, passphrase, snapshot};

pub(crate) fn text(error: &PackError) -> String {
    error_with_causes(error)
}

pub(crate) fn name(name: &str) -> &OsStr {
    OsStr::new(name)
}

/// Snapshots `a` to `d`, and packed in a chain `1` to `4`; the plain ones are in a directory of their own.
pub(crate) fn chain(directory: &Path, how: &PackOptions) -> SnapshotDirectory {
    std::fs::create_dir(directory.join("plain")).unwrap();
    let mut base = None;
    for number in 1..=4_u64 {
        let source = directory.join(format!("plain/{number}"));
        snapshot(&source, 600, &[(1, 1), (40 * number, number + 1), (300, number)]);
        let target = directory.join(format!("{number}"));
        pack_file(&source, &target, base.as_deref(), how);
        base = Some(target);
    }
    SnapshotDirectory::new(directory, Some(passphrase()))
}

#[track_caller]
pub(crate) fn assert_readable(directory: &Path, names: &[&str]) {
    for name in names {
        let packed = open_snapshot(&directory.join(name), &access(Some(&passphrase()))).unwrap();
        assert_same(&Snapshot::open(&directory.join("plain").join(name)).unwrap(), &packed);
    }
}

pub(crate) fn bases(directory: &SnapshotDirectory) -> Vec<(OsString, Option<OsString>)> {
    let mut bases: Vec<_> = directory.list().unwrap().into_iter().map(|entry| (entry.name, entry.base)).collect();
    bases.sort();
    bases
}

#[test]
fn a_directory_lists_what_stands_on_what_and_what_is_broken() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &encrypted());
    std::fs::write(folder.path().join("notes"), "text").unwrap();
    limosa_testkit::qemu_img(["create", "-q", "-f", "qcow2", folder.path().join("disk").to_str().unwrap(), "1M"])
        .unwrap();
    snapshot(&folder.path().join("plain-one"), 600, &[(7, 7)]);
    let listed = directory.list().unwrap();
    assert_eq!(listed.len(), 5, "{listed:?}");
    let two = listed.iter().find(|entry| entry.name == "2").unwrap();
    assert!(two.is_packed && two.is_encrypted && two.base.as_deref() == Some(name("1")) && two.fault.is_none());
    assert!(two.page_bytes > 0 && two.allocated > 0 && two.saved > 1_600_000_000);
    let without_key = SnapshotDirectory::new(folder.path(), None).list().unwrap();
    assert_eq!(without_key.iter().filter(|entry| entry.fault.is_some() && entry.is_encrypted).count(), 4);
    std::fs::remove_file(folder.path().join("1")).unwrap();
    let broken = directory.list().unwrap();
    assert_eq!(broken.iter().filter(|entry| entry.fault.is_some()).count(), 3, "{broken:?}");
}

#[test]
fn one_that_others_stand_on_is_not_removed_and_neither_is_one_that_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    assert!(text(&directory.remove(name("2")).unwrap_err()).contains("3 stands on it"));
    let served = open_snapshot(&folder.path().join("4"), &Access::default()).unwrap();
    served.lock_serving().unwrap();
    let error = directory.remove(name("4")).unwrap_err();
    assert!(matches!(error, PackError::Snapshot(SnapshotError::Locked { .. })), "{error}");
    // What stands on it is served, and its record would have to change.
    let error = directory.rebase(name("3"), None, &options(), &Handle::new()).unwrap_err();
    assert!(matches!(error, PackError::Snapshot(SnapshotError::Locked { .. })), "{error}");
    drop(served);
    directory.remove(name("4")).unwrap();
    directory.remove(name("3")).unwrap();
    assert_readable(folder.path(), &["1", "2"]);
    // An encrypted one may stand on anything.
    pack_file(&folder.path().join("plain/1"), &folder.path().join("secret"), None, &encrypted());
    let without_key = SnapshotDirectory::new(folder.path(), None);
    assert!(text(&without_key.remove(name("2")).unwrap_err()).contains("passphrase"));
}

#[test]
fn one_is_rebased_onto_another_or_none_and_what_stands_on_it_stays() {
    for how in [options(), encrypted()] {
        let folder = tempfile::tempdir().unwrap();
        let directory = chain(folder.path(), &how);
        let handle = Handle::new();
        let packed = directory.rebase(name("3"), Some(name("1")), &options(), &handle).unwrap();
        assert!(packed.base_bytes > 0);
        assert_readable(folder.path(), &["1", "2", "3", "4"]);
        directory.remove(name("2")).unwrap();
        directory.rebase(name("3"), None, &options(), &handle).unwrap();
        directory.remove(name("1")).unwrap();
        assert_readable(folder.path(), &["3", "4"]);
        assert_eq!(directory.list().unwrap().iter().all(|entry| entry.is_encrypted), how.encryption.is_some());
        let error = directory.rebase(name("3"), Some(name("4")), &options(), &handle).unwrap_err();
        assert!(text(&error).contains("stands on it already"), "{error}");
        let error = directory.rebase(name("3"), Some(name("3")), &options(), &handle).unwrap_err();
        assert!(text(&error).contains("3"), "{error}");
        assert_readable(folder.path(), &["3", "4"]);
    }
}

#[test]
fn one_that_is_merged_is_gone_and_the_others_are_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    // Two stand on it.
    let source = folder.path().join("plain/5");
    snapshot(&source, 600, &[(1, 1), (300, 9)]);
    pack_file(&source, &folder.path().join("5"), Some(&folder.path().join("2")), &options());
    let mut rebased = 0;
    directory.merge(name("2"), &options(), &Handle::new(), |_| rebased += 1).unwrap();
    assert_eq!(rebased, 2);
    assert_readable(folder.path(), &["1", "3", "4", "5"]);
    let one = Some(OsString::from("1"));
    let expected = [("1", None), ("3", one.clone()), ("4", Some("3".into())), ("5", one)];
    assert_eq!(bases(&directory), expected.map(|(name, base)| (OsString::from(name), base)));
    let error = directory.merge(name("4"), &options(), &Handle::new(), |_| ()).unwrap_err();
    assert!(text(&error).contains("no snapshot stands on it"), "{error}");
}

#[test]
fn a_base_is_known_under_every_form_that_it_had_and_under_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let path = folder.path().join("3");
    let old = std::fs::read(&path).unwrap();
    directory.rebase(name("3"), None, &options(), &Handle::new()).unwrap();
    let new = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    pack_file(&folder.path().join("plain/3"), &path, None, &options());
    let error = open_snapshot(&folder.path().join("4"), &Access::default()).unwrap_err();
    assert!(text(&error).contains("was changed"), "{error}");
    // Both hold the same: one from a backup, too.
    for known in [old, new] {
        std::fs::write(&path, known).unwrap();
        assert_readable(folder.path(), &["3", "4"]);
    }
}

/// The plan of a prune to the newest snapshots.
pub(crate) fn plan(directory: &SnapshotDirectory, last: usize) -> PrunePlan {
    let mut retention = Retention::new();
    retention.last = NonZeroUsize::new(last);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    plan_prune(&directory.list().unwrap(), &retention, now)
}

pub(crate) fn carry_out(directory: &SnapshotDirectory, plan: &PrunePlan) {
    for step in &plan.steps {
        directory.carry_out(step, &options(), &Handle::new()).unwrap();
    }
}

#[test]
fn a_directory_is_pruned_to_its_newest_ones() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &encrypted());
    // They are of the same second; then the time of the file decides.
    carry_out(&directory, &plan(&directory, 2));
    let expected = [("3", None), ("4", Some(OsString::from("3")))];
    assert_eq!(bases(&directory), expected.map(|(name, base)| (OsString::from(name), base)));
    assert_readable(folder.path(), &["3", "4"]);
}
