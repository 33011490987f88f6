//! Dangers to the snapshots of a directory: each of these has lost one, or could have.

use std::ffi::OsString;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use limosa_image::luks;
use limosa_migrate::Handle;
use limosa_migrate::control::Stop;
use limosa_pack::{Access, Base, DEPTH_LIMIT, PackError, PackOptions, SnapshotDirectory, open_snapshot};
use limosa_snapshot::{Snapshot, SnapshotError};
use limosa_storage::{Buffer, Create, FileOptions, FileStorage, Storage as _, block_on};
use limosa_testkit::{qemu_img, qemu_io};

use crate::directory::{assert_readable, chain, name, plan, text};
use crate::{encrypted, options, pack_file, passphrase, snapshot};

fn rebase(directory: &SnapshotDirectory, one: &str, base: Option<&str>) -> Result<(), PackError> {
    directory.rebase(name(one), base.map(name), &options(), &Handle::new()).map(|_| ())
}

/// Gives an image another name of its backing file, without changing anything else.
fn set_backing(image: &Path, backing: &str) {
    qemu_img(["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", backing, image.to_str().unwrap()]).unwrap();
}

/// A snapshot whose packing takes a while.
fn large(path: &Path, pages: u64) {
    snapshot(path, pages, &(0..pages).map(|page| (page, page * 7 + 1)).collect::<Vec<_>>());
}

/// Waits until pages of a job have moved.
fn wait_until_packing(handle: &Handle) {
    while handle.progress.read().normal_pages == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rebase_writes_to_nothing_that_stands_on_the_snapshot_however_often_it_is_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let file = |name: &str| {
        let path = folder.path().join(name);
        let metadata = std::fs::metadata(&path).unwrap();
        (std::fs::read(&path).unwrap(), metadata.ino(), metadata.modified().unwrap())
    };
    let before = file("4");
    for base in [None, Some("1"), Some("2"), None, Some("2")] {
        rebase(&directory, "3", base).unwrap();
        rebase(&directory, "2", base.filter(|base| *base == "1")).unwrap();
        assert_readable(folder.path(), &["1", "2", "3", "4"]);
        assert!(file("4") == before);
    }
    // A job that is cancelled half way leaves no file.
    let cancelled = Handle::new();
    cancelled.control.stop(Stop::Cancel);
    let three = file("3");
    directory.rebase(name("3"), None, &options(), &cancelled).unwrap_err();
    assert!(file("3") == three && std::fs::read_dir(folder.path()).unwrap().count() == 5);
    assert_readable(folder.path(), &["1", "2", "3", "4"]);
}

#[test]
fn more_rebases_than_a_header_has_room_for_lose_nothing_that_stands_on_the_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    for turn in 0..40 {
        rebase(&directory, "3", (turn % 2 == 0).then_some("1")).unwrap();
    }
    assert_readable(folder.path(), &["3", "4"]);
}

#[test]
fn a_base_that_was_written_to_is_not_packed_again_and_its_dependents_are_not_made_to_take_it() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let path = folder.path().join("2");
    let right = std::fs::read(&path).unwrap();
    qemu_io(["-f", "qcow2", "-c", "write -P 7 1M 64k", path.to_str().unwrap()]).unwrap();
    let refused = rebase(&directory, "2", None).unwrap_err();
    assert!(text(&refused).contains("another program has written to it"), "{refused}");
    let refused = directory.merge(name("1"), &options(), &Handle::new(), |_| ()).unwrap_err();
    assert!(text(&refused).contains("another program has written to it"), "{refused}");
    let refused = Base::open(&path, &Access::default()).unwrap_err();
    assert!(text(&refused).contains("another program has written to it"), "{refused}");
    // Another snapshot in its place.
    std::fs::remove_file(&path).unwrap();
    pack_file(&folder.path().join("plain/4"), &path, Some(&folder.path().join("1")), &options());
    rebase(&directory, "2", None).unwrap();
    let refused = open_snapshot(&folder.path().join("3"), &Access::default()).unwrap_err();
    assert!(text(&refused).contains("holds the snapshot"), "{refused}");
    // The right one comes from a backup.
    std::fs::write(&path, right).unwrap();
    assert_readable(folder.path(), &["1", "2", "3", "4"]);
}

/// A way in which a file may stand on `2` without looking like it.
type Disguise = fn(&Path);

#[test]
fn what_cannot_be_looked_into_or_spells_its_base_otherwise_keeps_it() {
    let disguises: [(&str, Disguise); 9] = [
        ("a hidden name", |folder| std::fs::rename(folder.join("3"), folder.join(".3")).unwrap()),
        ("a damaged header", |folder| overwrite(&folder.join("3"), 4, &[0, 0, 0, 99])),
        ("an unknown feature", |folder| overwrite(&folder.join("3"), 72, &[0x40])),
        ("a record of a newer limosa", |folder| {
            let bytes = std::fs::read(folder.join("3")).unwrap();
            let at = bytes.windows(4).position(|window| window == b"lims").unwrap();
            overwrite(&folder.join("3"), u64::try_from(at).unwrap() + 8, &[0, 0, 0, 2]);
        }),
        ("a path of the base", |folder| set_backing(&folder.join("3"), "./2")),
        ("an absolute path", |folder| set_backing(&folder.join("3"), folder.join("2").to_str().unwrap())),
        ("a protocol", |folder| set_backing(&folder.join("3"), "file:2")),
        ("a description", |folder| {
            set_backing(
                &folder.join("3"),
                "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"2\"}}",
            );
        }),
        ("no base any more", |folder| {
            qemu_img(["rebase", "-u", "-f", "qcow2", "-b", "", folder.join("3").to_str().unwrap()]).unwrap();
        }),
    ];
    for (disguise, apply) in disguises {
        let folder = tempfile::tempdir().unwrap();
        let directory = chain(folder.path(), &options());
        std::fs::remove_file(folder.path().join("4")).unwrap();
        apply(folder.path());
        let refused = directory.remove(name("2")).expect_err(disguise);
        assert!(matches!(refused, PackError::Needed { .. } | PackError::Unknown { .. }), "{disguise}: {refused}");
        // A prune that keeps another one alone removes neither.
        pack_file(&folder.path().join("plain/4"), &folder.path().join("newest"), None, &options());
        for step in &plan(&directory, 1).steps {
            directory.carry_out(step, &options(), &Handle::new()).expect_err(disguise);
        }
        // Who knows better says so.
        let ignoring = SnapshotDirectory::new(folder.path(), None).ignoring(["3", ".3"].map(OsString::from));
        ignoring.remove(name("2")).expect(disguise);
    }
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn a_file_that_another_program_writes_to_still_stands_on_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let writer = FileStorage::open(folder.path().join("4"), &FileOptions::default()).unwrap();
    let refused = directory.remove(name("3")).unwrap_err();
    assert!(matches!(refused, PackError::Needed { .. }), "{refused}");
    // And it is not removed itself, nor replaced.
    for refused in [directory.remove(name("4")).unwrap_err(), rebase(&directory, "4", None).unwrap_err()] {
        assert!(matches!(refused, PackError::Snapshot(SnapshotError::Locked { .. })), "{refused}");
    }
    drop(writer);
    assert_readable(folder.path(), &["3", "4"]);
}

#[test]
fn what_is_no_snapshot_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let directory = SnapshotDirectory::new(folder.path(), None);
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("notes"), "text").unwrap();
    std::fs::write(path("raw"), vec![0; 1 << 20]).unwrap();
    qemu_img(["create", "-q", "-f", "qcow2", path("disk").to_str().unwrap(), "1M"]).unwrap();
    for other in ["notes", "raw", "disk"] {
        let refused = directory.remove(name(other)).unwrap_err();
        assert!(matches!(refused, PackError::Foreign { .. }), "{refused}");
        assert!(path(other).exists());
    }
    // A plain snapshot that a VM maps, or QEMU reads.
    snapshot(&path("golden"), 600, &[(1, 1)]);
    let mapped = Snapshot::open(&path("golden")).unwrap();
    let reader = FileStorage::open(path("golden"), &FileOptions::read_only_default()).unwrap();
    let refused = directory.remove(name("golden")).unwrap_err();
    assert!(matches!(refused, PackError::Snapshot(SnapshotError::Locked { .. })), "{refused}");
    drop((mapped, reader));
    directory.remove(name("golden")).unwrap();
}

#[test]
fn a_plan_is_not_carried_out_on_other_snapshots_than_it_was_made_for() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let plan = plan(&directory, 1);
    assert_eq!(plan.steps.len(), 4, "{:?}", plan.steps);
    // Meanwhile the name is given to a new snapshot.
    rebase(&directory, "2", None).unwrap();
    snapshot(&folder.path().join("plain/5"), 600, &[(9, 9)]);
    std::fs::remove_file(folder.path().join("1")).unwrap();
    std::fs::rename(folder.path().join("plain/5"), folder.path().join("plain/1")).unwrap();
    pack_file(&folder.path().join("plain/1"), &folder.path().join("1"), None, &options());
    let carry = |step| directory.carry_out(step, &options(), &Handle::new());
    assert!(carry(&plan.steps[0]).is_ok(), "4 is whole now");
    carry(&plan.steps[1]).unwrap();
    // 2 is another file, and 1 another snapshot.
    for step in &plan.steps[2..] {
        let refused = carry(step).unwrap_err();
        assert!(text(&refused).contains("than when this was planned"), "{refused}");
    }
    assert_readable(folder.path(), &["1", "2", "4"]);
}

#[test]
fn a_file_that_gets_the_name_while_the_snapshot_is_packed_stays_and_readers_are_not_kept_out() {
    // On a machine that packs faster than this thread gets on, there is more to pack.
    assert!([8_000, 32_000, 128_000].into_iter().any(is_interrupted_while_packing), "always packed too early");
}

/// Looks at a snapshot of that many pages, and gives its name to another file, while it is packed again. False: it was
/// packed before all of that was done.
fn is_interrupted_while_packing(pages: u64) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    large(&path("plain"), pages);
    pack_file(&path("plain"), &path("a"), None, &options());
    snapshot(&path("plain-b"), pages, &[(1, 1)]);
    pack_file(&path("plain-b"), &path("b"), Some(&path("a")), &options());
    std::fs::rename(path("plain"), path("another")).unwrap();
    let directory = SnapshotDirectory::new(folder.path(), None);
    let handle = Handle::new();
    std::thread::scope(|scope| {
        let rebasing = scope.spawn(|| {
            let mut how = options();
            how.level = Some(12);
            directory.rebase(name("a"), None, &how, &handle)
        });
        wait_until_packing(&handle);
        // Both are restored meanwhile, and neither is removed.
        let opened = ["a", "b"].map(|served| open_snapshot(&path(served), &Access::default()).unwrap().lock_serving());
        let removed = SnapshotDirectory::new(folder.path(), None).remove(name("a")).unwrap_err();
        std::fs::rename(path("another"), path("a")).unwrap();
        let Err(refused) = rebasing.join().unwrap() else { return false };
        assert!(opened.iter().all(Result::is_ok), "{opened:?}");
        assert!(matches!(removed, PackError::Snapshot(SnapshotError::Locked { .. })), "{removed}");
        assert!(matches!(refused, PackError::Snapshot(SnapshotError::Changed { .. })), "{refused}");
        assert!(!limosa_pack::is_packed(&path("a")), "what was put there stays");
        true
    })
}

/// Puts the image in a file into a LUKS volume of the same name.
fn encrypt(path: &Path, iter_time: Duration) {
    let image = std::fs::read(path).unwrap();
    std::fs::remove_file(path).unwrap();
    let options = FileOptions { create: Create::New, ..FileOptions::default() };
    let file = FileStorage::open(path, &options).unwrap();
    let mut create = luks::CreateOptions::new(passphrase());
    create.header.iter_time = iter_time;
    block_on(luks::create(&*file, &create)).unwrap();
    let volume = block_on(luks::open(file, &passphrase())).unwrap();
    block_on(volume.write(0, Buffer::from_slice(&image).into())).unwrap();
    block_on(volume.flush()).unwrap();
}

#[test]
fn memory_of_an_encrypted_base_is_never_written_in_the_clear_and_key_slots_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    // The base was encrypted, and what stands on it is not.
    encrypt(&folder.path().join("1"), Duration::from_millis(40));
    assert_readable(folder.path(), &["1", "2", "3", "4"]);
    let head = |name: &str| std::fs::read(folder.path().join(name)).unwrap()[..luks::HEADER_LENGTH].to_vec();
    let header = head("1");
    rebase(&directory, "2", None).unwrap();
    assert!(head("2") == header, "the same key slots, with the same iterations");
    rebase(&directory, "3", None).unwrap();
    rebase(&directory, "1", None).unwrap();
    assert!(head("3") == header && head("1") == header);
    assert_readable(folder.path(), &["1", "2", "3", "4"]);
    let mut listed = directory.list().unwrap();
    listed.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(listed.iter().map(|entry| entry.is_encrypted).collect::<Vec<_>>(), [true, true, true, false]);
}

#[test]
fn a_copy_by_hard_links_stays_readable() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let backup = folder.path().join("backup");
    std::fs::create_dir(&backup).unwrap();
    for name in ["1", "2", "3", "4"] {
        std::fs::hard_link(folder.path().join(name), backup.join(name)).unwrap();
    }
    std::fs::create_dir(backup.join("plain")).unwrap();
    for name in ["1", "2", "3", "4"] {
        std::fs::copy(folder.path().join("plain").join(name), backup.join("plain").join(name)).unwrap();
    }
    for (one, base) in [("3", None), ("2", None), ("3", Some("1"))] {
        rebase(&directory, one, base).unwrap();
        assert_readable(&backup, &["1", "2", "3", "4"]);
    }
    directory.remove(name("2")).unwrap();
    assert_readable(&backup, &["1", "2", "3", "4"]);
    assert_readable(folder.path(), &["1", "3", "4"]);
}

#[test]
fn the_file_keeps_its_owner_its_mode_its_time_and_its_working_set() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let path = folder.path().join("3");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(1234), Some(5678)).unwrap();
    }
    let written = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(written).unwrap();
    std::fs::write(folder.path().join("3.working-set"), b"limosa\x1aw and more").unwrap();
    let before = std::fs::metadata(&path).unwrap();
    rebase(&directory, "3", None).unwrap();
    let after = std::fs::metadata(&path).unwrap();
    assert_ne!(before.ino(), after.ino());
    assert_eq!((before.uid(), before.gid(), before.mode()), (after.uid(), after.gid(), after.mode()));
    assert_eq!(after.modified().unwrap(), written);
    assert!(folder.path().join("3.working-set").exists());
}

#[test]
fn a_chain_above_a_snapshot_does_not_become_too_long() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: String| folder.path().join(name);
    let plain = folder.path().join("plain");
    snapshot(&plain, 600, &[(1, 1)]);
    let make = |prefix: &str, count: usize| {
        for number in 0..count {
            let base = number.checked_sub(1).map(|below| path(format!("{prefix}{below}")));
            pack_file(&plain, &path(format!("{prefix}{number}")), base.as_deref(), &options());
        }
    };
    make("a", 9);
    make("b", 8);
    let directory = SnapshotDirectory::new(folder.path(), None);
    let refused = rebase(&directory, "a0", Some("b7")).unwrap_err();
    assert!(text(&refused).contains("17 images would be in the longest chain above it"), "{refused}");
    rebase(&directory, "a0", Some("b6")).unwrap();
    assert_eq!(Base::open(&path("a7".to_owned()), &Access::default()).unwrap().depth(), DEPTH_LIMIT - 1);
    open_snapshot(&path("a8".to_owned()), &Access::default()).unwrap();
}

#[test]
fn an_image_with_another_key_is_encrypted_and_keeps_everything() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    let other = luks::Passphrase::new(b"another secret".to_vec());
    let mut how: PackOptions = encrypted();
    how.encryption.as_mut().unwrap().passphrase = other;
    pack_file(&folder.path().join("plain/1"), &folder.path().join("secret"), None, &how);
    let listed = directory.list().unwrap();
    let secret = listed.iter().find(|entry| entry.name == "secret").unwrap();
    assert!(secret.is_encrypted && !secret.is_base_known && secret.fault.is_some());
    assert!(plan(&directory, 1).steps.is_empty());
    let refused = directory.remove(name("4")).unwrap_err();
    assert!(refused.is_about_passphrase(), "{refused}");
    directory.ignoring(["secret".into()]).remove(name("4")).unwrap();
}

#[test]
fn the_same_snapshot_packed_twice_is_two_bases() {
    let folder = tempfile::tempdir().unwrap();
    let directory = chain(folder.path(), &options());
    pack_file(&folder.path().join("plain/3"), &folder.path().join("copy"), None, &options());
    directory.remove(name("copy")).unwrap();
    pack_file(&folder.path().join("plain/3"), &folder.path().join("copy"), None, &options());
    // What stands on one that is missing may be repaired with the other one.
    std::fs::rename(folder.path().join("3"), folder.path().join("plain/moved")).unwrap();
    let refused = directory.remove(name("copy")).unwrap_err();
    assert!(matches!(refused, PackError::Needed { .. }), "{refused}");
}
