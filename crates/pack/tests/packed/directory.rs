//! Snapshots of a directory: listed, removed, rebased, merged, pruned; what stays comes back.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;
use std::path::Path;

use limosa_migrate::Handle;
use limosa_pack::{
    Base, PackError, PackOptions, PruneStep, Retention, SnapshotDirectory, open_snapshot, pack, plan_prune,
};
use limosa_page::error_with_causes;
use limosa_snapshot::{Snapshot, SnapshotError, UnnamedFile};
use proptest::prelude::*;

use crate::{assert_same, encrypted, options, pack_file, passphrase, snapshot};

fn text(error: &PackError) -> String {
    error_with_causes(error)
}

fn name(name: &str) -> &OsStr {
    OsStr::new(name)
}

/// Snapshots `a` to `d`, and packed in a chain `1` to `4`; the plain ones are in a directory of their own.
fn chain(directory: &Path, how: &PackOptions) -> SnapshotDirectory {
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
fn assert_readable(directory: &Path, names: &[&str]) {
    for name in names {
        let packed = open_snapshot(&directory.join(name), Some(&passphrase())).unwrap();
        assert_same(&Snapshot::open(&directory.join("plain").join(name)).unwrap(), &packed);
    }
}

fn bases(directory: &SnapshotDirectory) -> Vec<(OsString, Option<OsString>)> {
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
    let served = open_snapshot(&folder.path().join("4"), None).unwrap();
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
    directory.merge(name("2"), &options(), &Handle::new()).unwrap();
    assert_readable(folder.path(), &["1", "3", "4", "5"]);
    let one = Some(OsString::from("1"));
    let expected = [("1", None), ("3", one.clone()), ("4", Some("3".into())), ("5", one)];
    assert_eq!(bases(&directory), expected.map(|(name, base)| (OsString::from(name), base)));
    let error = directory.merge(name("4"), &options(), &Handle::new()).unwrap_err();
    assert!(text(&error).contains("no snapshot stands on it"), "{error}");
}

#[test]
fn another_file_in_the_place_of_the_base_is_still_found_after_a_rebase() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let old = std::fs::read(folder.path().join("3")).unwrap();
    directory.rebase(name("3"), None, &options(), &Handle::new()).unwrap();
    std::fs::write(folder.path().join("3"), old).unwrap();
    let error = open_snapshot(&folder.path().join("4"), None).unwrap_err();
    assert!(text(&error).contains("was changed"), "{error}");
}

fn carry_out(directory: &SnapshotDirectory, steps: Vec<PruneStep>, how: &PackOptions) {
    for step in steps {
        match step {
            PruneStep::Rebase { name, base } => {
                directory.rebase(&name, base.as_deref(), how, &Handle::new()).unwrap();
            }
            PruneStep::Remove { name } => directory.remove(&name).unwrap(),
        }
    }
}

#[test]
fn a_directory_is_pruned_to_its_newest_ones() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &encrypted());
    let mut retention = Retention::new();
    retention.last = NonZeroUsize::new(2);
    // They are of the same second; then the name decides.
    carry_out(&directory, plan_prune(&directory.list().unwrap(), &retention), &encrypted());
    let expected = [("3", None), ("4", Some(OsString::from("3")))];
    assert_eq!(bases(&directory), expected.map(|(name, base)| (OsString::from(name), base)));
    assert_readable(folder.path(), &["3", "4"]);
}

/// Something that is done to a directory.
#[derive(Debug, Clone)]
enum Action {
    /// Save with these pages, on a base that is there.
    Save(BTreeMap<u64, u64>, prop::sample::Index, bool),
    Rebase(prop::sample::Index, Option<prop::sample::Index>),
    Merge(prop::sample::Index),
    Prune(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let pages = || prop::collection::btree_map(0_u64..600, 0_u64..3, 0..40);
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (pages(), index(), any::<bool>()).prop_map(|(pages, base, whole)| Action::Save(pages, base, whole)),
        2 => (index(), prop::option::of(index())).prop_map(|(name, base)| Action::Rebase(name, base)),
        1 => index().prop_map(Action::Merge),
        1 => (2_usize..6).prop_map(Action::Prune),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn whatever_is_done_to_a_directory_what_is_left_comes_back(
        actions in prop::collection::vec(action(), 1..12),
        secret: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("plain")).unwrap();
        let directory = SnapshotDirectory::new(folder.path(), Some(passphrase()));
        let how = if secret { encrypted() } else { options() };
        let handle = Handle::new();
        let mut saved = 0;
        for action in actions {
            let there: Vec<OsString> = directory.list().unwrap().into_iter().map(|entry| entry.name).collect();
            match action {
                Action::Save(pages, base, whole) => {
                    let new = format!("{saved:03}");
                    saved += 1;
                    let source = folder.path().join("plain").join(&new);
                    snapshot(&source, 600, &pages.into_iter().collect::<Vec<_>>());
                    let base = (!whole && !there.is_empty()).then(|| folder.path().join(base.get(&there)));
                    let Ok(base) = base.map(|base| Base::open(&base, Some(&passphrase()))).transpose() else { continue };
                    let pending = UnnamedFile::create(&folder.path().join(&new), false).unwrap();
                    pack(&Snapshot::open(&source).unwrap(), pending, base.as_ref(), &how, &handle).unwrap();
                }
                Action::Rebase(one, base) if !there.is_empty() => {
                    let base = base.map(|base| base.get(&there).as_os_str());
                    // A loop, or a chain that is too long, is refused.
                    let _ = directory.rebase(there[one.index(there.len())].as_os_str(), base, &how, &handle);
                }
                Action::Merge(one) if !there.is_empty() => {
                    let _ = directory.merge(there[one.index(there.len())].as_os_str(), &how, &handle);
                }
                Action::Prune(last) => {
                    let mut retention = Retention::new();
                    retention.last = NonZeroUsize::new(last);
                    carry_out(&directory, plan_prune(&directory.list().unwrap(), &retention), &how);
                    prop_assert!(directory.list().unwrap().len() <= last);
                }
                Action::Rebase(..) | Action::Merge(_) => {}
            }
            for entry in directory.list().unwrap() {
                prop_assert!(entry.fault.is_none(), "{entry:?}");
                let packed = open_snapshot(&directory.path_of(&entry.name), Some(&passphrase())).unwrap();
                assert_same(&Snapshot::open(&folder.path().join("plain").join(&entry.name)).unwrap(), &packed);
            }
        }
    }
}
