//! Under the target's name there is nothing new, or a whole file.

use crate::fixture;
use limosa_migrate::stored::PageSink;
use limosa_testkit::own_test_name;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::fixture::{QUICK, names, page, range, small, tail, writer};
use limosa_page::PageNumber;
use limosa_snapshot::{Durability, Manifest, Snapshot, SnapshotError, UnnamedFile, WriteBehind};

/// Set for this test binary when it runs as a child of another test.
const CHILD: &str = "LIMOSA_SNAPSHOT_TEST_CHILD";

fn refusal(target: &Path, replace: bool) -> SnapshotError {
    UnnamedFile::create(target, replace).map(|_| ()).unwrap_err()
}

/// Tries until it succeeds: while another test of this process starts a child, that child has copies of our locked
/// descriptors, between its fork and its exec.
fn eventually<T, E: std::fmt::Display>(mut act: impl FnMut() -> Result<T, E>) -> T {
    for _ in 0..1000 {
        if let Ok(done) = act() {
            return done;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    act().unwrap_or_else(|error| panic!("{error}"))
}

/// A child that does not outlive its test, however that ends.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn nothing_is_seen_before_publishing_and_a_whole_file_after_it() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let pending = UnnamedFile::create(&target, false).unwrap();
    pending.file().write_all_at(b"contents", 0).unwrap();
    assert_eq!(names(directory.path()), [] as [&str; 0]);
    assert_eq!(pending.publish(Durability::Synced).unwrap(), target);
    assert_eq!(names(directory.path()), ["vm"]);
    assert_eq!(std::fs::read(&target).unwrap(), b"contents");
}

#[test]
fn a_dropped_file_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let pending = UnnamedFile::create(&directory.path().join("vm"), false).unwrap();
    pending.file().write_all_at(b"contents", 0).unwrap();
    drop(pending);
    assert_eq!(names(directory.path()), [] as [&str; 0]);
}

#[test]
fn a_name_without_a_directory_part_is_in_the_current_directory() {
    let pending = UnnamedFile::create(Path::new("limosa-snapshot-test-target"), false).unwrap();
    assert_eq!(pending.target(), Path::new("limosa-snapshot-test-target"));
}

#[test]
fn an_existing_file_is_refused_before_anything_begins_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    std::fs::write(&target, b"old").unwrap();
    let error = refusal(&target, false);
    assert!(matches!(error, SnapshotError::Exists { .. }));
    assert_eq!(std::fs::read(&target).unwrap(), b"old");
}

#[test]
fn a_name_that_somebody_took_meanwhile_stays_theirs() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let pending = UnnamedFile::create(&target, false).unwrap();
    std::fs::write(&target, b"theirs").unwrap();
    let error = pending.publish(Durability::Unsynced).unwrap_err();
    assert!(matches!(error, SnapshotError::Exists { .. }), "{error}");
    assert_eq!(std::fs::read(&target).unwrap(), b"theirs");
    assert_eq!(names(directory.path()), ["vm"]);
}

#[test]
fn force_replaces_in_one_step_and_old_readers_keep_the_old_file() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", QUICK);
    let old = Snapshot::open(&target).unwrap();
    let pending = UnnamedFile::create(&target, true).unwrap();
    pending.file().write_all_at(b"new", 0).unwrap();
    pending.publish(Durability::Synced).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
    assert_eq!(names(directory.path()), ["vm"]);
    let mut buffer = [0; 4096];
    old.read_pages(0, range(300, 301), &mut buffer).unwrap();
    assert_eq!(buffer, page(1));
    let error = old.lock_serving().unwrap_err();
    assert!(matches!(error, SnapshotError::Changed { .. }), "{error}");
}

#[test]
fn force_without_an_existing_file_publishes_too() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    UnnamedFile::create(&target, true).unwrap().publish(Durability::Unsynced).unwrap();
    assert_eq!(names(directory.path()), ["vm"]);
}

#[test]
fn force_replaces_what_was_published_meanwhile_unless_it_is_being_served() {
    let directory = tempfile::tempdir().unwrap();
    // A name that was free when the save began, and one whose file was moved away since.
    for was_free in [true, false] {
        let name = if was_free { "free" } else { "moved" };
        let target = directory.path().join(name);
        let begin = || {
            if !was_free {
                std::fs::write(&target, b"old").unwrap();
            }
            let pending = UnnamedFile::create(&target, true).unwrap();
            pending.file().write_all_at(b"new", 0).unwrap();
            if !was_free {
                std::fs::remove_file(&target).unwrap();
            }
            pending
        };
        let pending = begin();
        small(directory.path(), name, QUICK);
        let served = Snapshot::open(&target).unwrap();
        served.lock_serving().unwrap();
        let error = pending.publish(Durability::Unsynced).unwrap_err();
        assert!(matches!(error, SnapshotError::Locked { .. }), "{error}");
        served.lock_serving().unwrap();
        drop(served);
        std::fs::remove_file(&target).unwrap();

        let pending = begin();
        small(directory.path(), name, QUICK);
        pending.publish(Durability::Unsynced).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        std::fs::remove_file(&target).unwrap();
    }
    assert_eq!(names(directory.path()), [] as [&str; 0]);
}

#[test]
fn what_is_no_regular_file_is_refused_also_with_force() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::create_dir(at("directory")).unwrap();
    std::fs::write(at("file"), b"").unwrap();
    symlink(at("file"), at("link")).unwrap();
    symlink(at("nowhere"), at("dangling")).unwrap();
    assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    let mut refused: Vec<PathBuf> = ["directory", "link", "dangling", "pipe"].iter().map(|name| at(name)).collect();
    refused.extend(["/dev/null", "/", "..", ""].map(PathBuf::from));
    refused.push(at("new/"));
    refused.push(at("missing/vm"));
    refused.push(at("file/vm"));
    for target in refused {
        let error = refusal(&target, true);
        assert!(matches!(error, SnapshotError::Target { .. }), "{}: {error}", target.display());
        assert!(Snapshot::open(&target).is_err());
    }
    assert_eq!(names(directory.path()), ["dangling", "directory", "file", "link", "pipe"]);
}

#[test]
fn a_directory_where_no_file_can_be_made_is_refused() {
    let error = refusal(Path::new("/proc/vm"), false);
    assert!(error.to_string().starts_with("/proc/vm: "), "{error}");
}

#[test]
fn a_file_that_is_being_served_cannot_be_replaced_and_one_that_is_being_replaced_cannot_be_served() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", QUICK);
    let (one, two) = (Snapshot::open(&target).unwrap(), Snapshot::open(&target).unwrap());
    one.lock_serving().unwrap();
    two.lock_serving().unwrap();
    assert!(matches!(refusal(&target, true), SnapshotError::Locked { .. }));
    drop(one);
    assert!(matches!(refusal(&target, true), SnapshotError::Locked { .. }));
    drop(two);
    let pending = eventually(|| UnnamedFile::create(&target, true));
    let late = Snapshot::open(&target).unwrap();
    assert!(matches!(late.lock_serving(), Err(SnapshotError::Locked { .. })));
    assert!(matches!(refusal(&target, true), SnapshotError::Locked { .. }), "two saves for one name");
    drop(pending);
    eventually(|| late.lock_serving());
}

#[test]
fn a_published_file_can_be_served_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let pending = UnnamedFile::create(&target, false).unwrap();
    let copy = pending.file().try_clone().unwrap();
    pending.publish(Durability::Unsynced).unwrap();
    // `copy` shares the open file description that held the lock.
    eventually(|| UnnamedFile::create(&target, true));
    drop(copy);
}

#[test]
fn the_lock_of_a_server_lives_in_whoever_inherits_its_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", QUICK);
    let snapshot = Snapshot::open(&target).unwrap();
    snapshot.lock_serving().unwrap();
    let inherited = File::from(snapshot.file().try_clone_to_owned().unwrap());
    // The command keeps its copy of the descriptor as long as it lives: not beyond this statement.
    let pager = Command::new("sleep").arg("1000").stdin(Stdio::from(inherited)).stdout(Stdio::null()).spawn();
    let pager = Ended(pager.unwrap());
    drop(snapshot);
    assert!(matches!(refusal(&target, true), SnapshotError::Locked { .. }));
    drop(pager);
    eventually(|| UnnamedFile::create(&target, true));
}

#[test]
fn qemu_gets_a_write_only_description_of_the_same_file() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let pending = UnnamedFile::create(&target, false).unwrap();
    let behind = WriteBehind::for_other_writer(&pending).unwrap();
    let mut theirs = File::from(pending.writer_descriptor(false).unwrap());
    theirs.write_all(b"contents").unwrap();
    assert!(theirs.read_at(&mut [0], 0).is_err(), "the access mode has to be exactly O_WRONLY");
    let mut back = [0; 8];
    pending.file().read_exact_at(&mut back, 0).unwrap();
    assert_eq!(&back, b"contents");
    drop(behind);
    pending.publish(Durability::Unsynced).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"contents");
}

/// Runs one test of this binary in a child process, through `wrapper` if there is one.
fn child(test: &str, directory: &Path, wrapper: &[&str]) -> Child {
    let me = std::env::current_exe().unwrap();
    let mut command = match wrapper.split_first() {
        None => Command::new(me),
        Some((program, arguments)) => {
            let mut command = Command::new(program);
            command.args(arguments).arg(me);
            command
        }
    };
    command.args(["--exact", test, "--nocapture"]).env(CHILD, directory);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_save_killed_at_any_moment_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    for delay in [0, 3, 10, 30] {
        let mut child = child(own_test_name!(child_that_saves_until_it_is_killed), directory.path(), &[]);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("saving")), "the child did not begin");
        std::thread::sleep(Duration::from_millis(delay));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(names(directory.path()), [] as [&str; 0]);
    }
}

#[test]
fn child_that_saves_until_it_is_killed() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let mut writer = writer(&Path::new(&directory).join("vm"), 100_000, QUICK);
    println!("saving");
    for first in (0_u64..).map(|at| at % 99_000) {
        fixture::put(&mut writer, 0, first, &[first; 16]);
    }
}

#[test]
fn a_full_disk_is_named_and_nothing_is_left_on_it() {
    let directory = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size=3m limosa-test {} && exec \"$@\"", directory.path().display());
    // Where this process may not mount, a limit on the size of files has the same effect by another error number.
    let limit = "trap '' XFSZ; ulimit -f 6144; exec \"$@\"";
    let ways: [&[&str]; 3] = [
        &["unshare", "-m", "sh", "-c", &mount, "sh"],
        &["unshare", "-Urm", "sh", "-c", &mount, "sh"],
        &["sh", "-c", limit, "sh"],
    ];
    for way in ways {
        let output =
            child(own_test_name!(child_that_fills_its_disk), directory.path(), way).wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        if said.contains("child_that_fills_its_disk") {
            assert!(output.status.success() && said.contains("filled it"), "{said}");
            return;
        }
    }
    panic!("the child did not run in any way");
}

#[test]
fn child_that_fills_its_disk() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let target = Path::new(&directory).join("vm");
    let mut sink = writer(&target, 100_000, QUICK);
    let page = page(1);
    let pages = [std::io::IoSlice::new(&page); 16];
    let error = (0..1000).find_map(|at| sink.put_pages(0, PageNumber(at * 16), &pages).err()).expect("it fits?");
    let error = error.downcast::<SnapshotError>().unwrap();
    assert!(error.is_full(), "{error}");
    let said = error.to_string();
    assert!(said.contains("no room left") && said.contains("vm:") && said.contains("at offset 0x"), "{said}");
    drop(sink);
    assert_eq!(names(Path::new(&directory)), [] as [&str; 0]);

    // Exactly full with the last page in: then it is the frame or the device state that has no room.
    let mut sink = writer(&target, 100_000, QUICK);
    while sink.put_pages(0, PageNumber(sink.statistics().normal), &pages[..1]).is_ok() {}
    let error = sink.finish(&tail("running"), Manifest::new()).unwrap_err();
    assert!(error.is_full(), "{error}");
    assert_eq!(names(Path::new(&directory)), [] as [&str; 0]);
    println!("filled it");
}
