//! Increments on bases.

use std::path::{Path, PathBuf};

use limosa_migrate::Handle;
use limosa_pack::{Access, Base, DEPTH_LIMIT, PackError, open_snapshot, pack};
use limosa_snapshot::{Snapshot, SnapshotError, UnnamedFile};
use proptest::prelude::*;

use crate::fixture::{QUICK, small};
use crate::{access, assert_same, encrypted, options, pack_file, passphrase, snapshot, unpack_file};

fn open(path: &Path) -> Result<Snapshot, PackError> {
    open_snapshot(path, &access(Some(&passphrase())))
}

#[test]
fn an_increment_stores_what_differs_and_reads_as_the_whole() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let many: Vec<_> = (0..2000).map(|page| (page, page + 1)).collect();
    let first = snapshot(&at("first"), 2100, &many);
    let mut changed = many;
    changed[700].1 = 77;
    changed.remove(1500);
    let second = snapshot(&at("second"), 2100, &changed);
    for (how, kind) in [(options(), ""), (encrypted(), "-secret")] {
        let (base, increment) = (at(&format!("1{kind}.qcow2")), at(&format!("2{kind}.qcow2")));
        let whole = pack_file(&first, &base, None, &how);
        let packed = pack_file(&second, &increment, Some(&base), &how);
        assert!(packed.own_bytes < 10 * (64 << 10), "{packed:?}");
        assert!(packed.base_bytes > whole.own_bytes / 2 && packed.whole_because.is_none(), "{packed:?}");
        let opened = open(&increment).unwrap();
        assert_same(&Snapshot::open(&second).unwrap(), &opened);
        assert_eq!(opened.summary().packed.unwrap().bases.len(), 1);
        let images = opened.images().unwrap();
        assert_eq!(images.iter().map(|image| Path::new(&image.name)).collect::<Vec<_>>(), [&increment, &base]);
        // Two pages differ, and the bitmap of one; nearly all of the others are the base's.
        assert!((8192..10 * (64 << 10)).contains(&images[0].contents), "{images:?}");
        assert!(images[1].contents > 7 << 20 && images[1].length > images[0].length, "{images:?}");
        let back = at(&format!("back{kind}"));
        unpack_file(&increment, &back, Some(&passphrase()));
        assert!(std::fs::read(&second).unwrap() == std::fs::read(&back).unwrap());
    }
}

#[test]
fn another_layout_is_stored_whole_and_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    pack_file(&snapshot(&at("a"), 600, &[(1, 1)]), &at("a.qcow2"), None, &options());
    let packed = pack_file(&snapshot(&at("b"), 700, &[(1, 1)]), &at("b.qcow2"), Some(&at("a.qcow2")), &options());
    assert!(packed.whole_because.unwrap().contains("pc.ram"));
    std::fs::remove_file(at("a.qcow2")).unwrap();
    assert_same(&Snapshot::open(&at("b")).unwrap(), &open(&at("b.qcow2")).unwrap());
}

/// A base and an increment of it.
fn pair(directory: &Path) -> (PathBuf, PathBuf) {
    let at = |name: &str| directory.join(name);
    pack_file(&snapshot(&at("a"), 600, &[(1, 1), (300, 2)]), &at("a.qcow2"), None, &options());
    pack_file(&snapshot(&at("b"), 600, &[(1, 9), (300, 2)]), &at("b.qcow2"), Some(&at("a.qcow2")), &options());
    (at("a.qcow2"), at("b.qcow2"))
}

fn refusal(path: &Path) -> String {
    let line = limosa_page::error_with_causes(&open(path).unwrap_err());
    assert!(!line.contains('\n') && line.contains("b.qcow2"), "{line}");
    line
}

#[test]
fn a_base_that_is_missing_swapped_or_changed_is_found_before_anything_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let (base, increment) = pair(directory.path());
    let kept = std::fs::read(&base).unwrap();
    std::fs::remove_file(&base).unwrap();
    assert!(refusal(&increment).contains("No such file"));

    std::fs::write(&base, "text").unwrap();
    assert!(refusal(&increment).contains("not a packed snapshot"));

    std::fs::remove_file(&base).unwrap();
    pack_file(&small(directory.path(), "c", QUICK), &base, None, &options());
    assert!(refusal(&increment).contains("holds the snapshot"));

    // The same snapshot, packed in another way.
    std::fs::remove_file(&base).unwrap();
    let mut other = options();
    other.cluster_size = Some(1 << 16);
    pack_file(&directory.path().join("a"), &base, None, &other);
    assert!(refusal(&increment).contains("was changed"));

    std::fs::write(&base, &kept).unwrap();
    limosa_testkit::qemu_io(["-f", "qcow2", "-c", "write -P 7 3M 64k", base.to_str().unwrap()]).unwrap();
    assert!(refusal(&increment).contains("was changed"));

    std::fs::write(&base, &kept).unwrap();
    open(&increment).unwrap();
}

#[test]
fn a_base_is_only_looked_for_beside_its_increment() {
    let directory = tempfile::tempdir().unwrap();
    let (base, increment) = pair(directory.path());
    let elsewhere = directory.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    std::fs::rename(&base, elsewhere.join("a.qcow2")).unwrap();
    let rebase = |name: &str| {
        let path = increment.to_str().unwrap();
        limosa_testkit::qemu_img(["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", name, path]).unwrap();
    };
    rebase("elsewhere/a.qcow2");
    assert!(refusal(&increment).contains("in the directory of its image"));
    rebase("/etc/passwd");
    assert!(refusal(&increment).contains("in the directory of its image"));
    rebase("b.qcow2");
    assert!(refusal(&increment).contains("already part of the chain"));
    std::os::unix::fs::symlink("elsewhere/a.qcow2", &base).unwrap();
    rebase("a.qcow2");
    assert!(refusal(&increment).contains("cannot be opened"));
    // A chain that is moved as a whole stays one.
    std::fs::remove_file(&base).unwrap();
    std::fs::rename(&increment, elsewhere.join("b.qcow2")).unwrap();
    open(&elsewhere.join("b.qcow2")).unwrap();
}

#[test]
fn a_chain_has_a_limit() {
    let directory = tempfile::tempdir().unwrap();
    let at = |number: usize| directory.path().join(format!("{number}.qcow2"));
    let mut base = None;
    for number in 0..DEPTH_LIMIT {
        let source = directory.path().join(format!("{number}"));
        snapshot(&source, 600, &[(1, 1), (20 + number as u64, 7)]);
        pack_file(&source, &at(number), base.as_deref(), &options());
        assert_same(&Snapshot::open(&source).unwrap(), &open(&at(number)).unwrap());
        base = Some(at(number));
    }
    let error = Base::open(&base.unwrap(), &Access::default()).unwrap_err().to_string();
    assert!(error.contains("16 images"), "{error}");
    let elsewhere = Base::open(&at(0), &Access::default()).unwrap();
    let other = tempfile::tempdir().unwrap();
    assert!(
        elsewhere.check_beside(&other.path().join("x.qcow2")).unwrap_err().to_string().contains("another directory")
    );
    assert!(elsewhere.check_beside(&at(0)).unwrap_err().to_string().contains("replaced"));
}

#[test]
fn a_target_that_its_own_base_stands_on_is_refused_and_the_chain_stays() {
    let directory = tempfile::tempdir().unwrap();
    let (base, increment) = pair(directory.path());
    let opened = Base::open(&increment, &Access::default()).unwrap();
    for target in [&base, &increment] {
        let error = opened.check_beside(target).unwrap_err();
        assert!(error.to_string().contains("would be replaced"), "{error}");
        // And the locks say so, too.
        assert!(matches!(UnnamedFile::create(target, true), Err(SnapshotError::Locked { .. })));
    }
    drop(opened);
    open(&increment).unwrap();
}

#[test]
fn all_files_that_a_served_snapshot_stands_on_are_locked() {
    let directory = tempfile::tempdir().unwrap();
    let (base, increment) = pair(directory.path());
    let served = open(&increment).unwrap();
    UnnamedFile::create(&base, true).unwrap();
    served.lock_serving().unwrap();
    assert!(matches!(UnnamedFile::create(&base, true), Err(SnapshotError::Locked { .. })));
    drop(served);
    let served = open(&increment).unwrap();
    let kept = std::fs::read(&base).unwrap();
    std::fs::remove_file(&base).unwrap();
    std::fs::write(&base, kept).unwrap();
    let error = served.lock_serving().unwrap_err();
    assert!(error.to_string().contains("another file has its name now"), "{error}");
    UnnamedFile::create(&increment, true).unwrap();
}

#[test]
fn a_base_that_goes_while_it_is_compared_with_fails_the_pack() {
    let directory = tempfile::tempdir().unwrap();
    let (base, increment) = pair(directory.path());
    let opened = Base::open(&increment, &Access::default()).unwrap();
    std::fs::rename(&base, directory.path().join("elsewhere")).unwrap();
    let target = directory.path().join("c.qcow2");
    let pending = UnnamedFile::create(&target, false).unwrap();
    let plain = Snapshot::open(&directory.path().join("b")).unwrap();
    let error = pack(&plain, pending, Some(&opened), &options(), &Handle::new()).unwrap_err();
    assert!(limosa_page::error_with_causes(&error).contains("a.qcow2"), "{error}");
    assert!(!target.exists());
}

#[test]
fn an_increment_whose_base_was_taken_away_is_not_read_as_zeros() {
    let directory = tempfile::tempdir().unwrap();
    let (_, increment) = pair(directory.path());
    let path = increment.to_str().unwrap();
    limosa_testkit::qemu_img(["rebase", "-u", "-f", "qcow2", "-b", "", path]).unwrap();
    assert!(refusal(&increment).contains("was taken away"));
}

#[test]
fn encrypted_memory_does_not_get_into_the_clear_by_an_increment() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let plain = snapshot(&at("a"), 600, &[(1, 1)]);
    pack_file(&plain, &at("secret"), None, &encrypted());
    pack_file(&plain, &at("clear"), None, &options());
    let base = Base::open(&at("secret"), &access(Some(&passphrase()))).unwrap();
    let pending = UnnamedFile::create(&at("b"), false).unwrap();
    let error = pack(&Snapshot::open(&plain).unwrap(), pending, Some(&base), &options(), &Handle::new()).unwrap_err();
    assert!(matches!(error, PackError::Unencrypted { .. }), "{error}");
    let how = encrypted();
    let pending = UnnamedFile::create(&at("half"), false).unwrap();
    let base = Base::open(&at("clear"), &Access::default()).unwrap();
    pack(&Snapshot::open(&plain).unwrap(), pending, Some(&base), &how, &Handle::new()).unwrap();
    assert!(!open(&at("half")).unwrap().packed_summary().unwrap().encrypted, "a part of it is in the clear");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn chains_of_any_patterns_read_as_what_was_saved(
        layers in prop::collection::vec(prop::collection::btree_map(0_u64..600, 0_u64..3, 0..60), 2..6),
        bits in prop::collection::vec(12_u32..=18, 6),
        secret_from in 0_usize..6,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let mut base: Option<PathBuf> = None;
        for (number, layer) in layers.iter().enumerate() {
            let source = directory.path().join(format!("{number}"));
            snapshot(&source, 600, &layer.iter().map(|(page, seed)| (*page, *seed)).collect::<Vec<_>>());
            let target = directory.path().join(format!("{number}.qcow2"));
            let mut how = if number >= secret_from { encrypted() } else { options() };
            how.cluster_size = Some(1 << bits[number]);
            let key = passphrase();
            let opened = base.as_ref().map(|base| Base::open(base, &access(Some(&key))).unwrap());
            let pending = UnnamedFile::create(&target, false).unwrap();
            let plain = Snapshot::open(&source).unwrap();
            pack(&plain, pending, opened.as_ref(), &how, &Handle::new()).unwrap();
            assert_same(&plain, &open(&target).unwrap());
            base = Some(target);
        }
    }
}
