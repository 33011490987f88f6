//! Disks without room: that of the cache of objects, and that of the files that become objects.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use limosa_testkit::stores_skipped;

use crate::far::Far;
use crate::needs_qemu;
use crate::scene::{assert_failed, beat, load_ballast, text};
use crate::stage::{Found, Mounted, assert_beats, names, start_command};

/// Takes all the room of a file system.
fn fill(folder: &Path) {
    let mut file = File::create(folder.join("full")).unwrap();
    for size in [64 << 10, 1] {
        let piece = vec![1; size];
        loop {
            match file.write(&piece) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn a_cache_on_a_disk_without_room_costs_one_warning_and_no_restore() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let url = far.packed("vm.qcow2", &[]);
    for memory in ["lazy", "eager"] {
        // One that is full before, and one that becomes full on the way.
        for is_full in [true, false] {
            let room = Mounted::new("1M");
            if is_full {
                fill(room.path());
            }
            let destination = beat().start_incoming().unwrap();
            let socket = destination.qmp_socket();
            let words = ["restore", &url, "--qmp", text(&socket), "--paused", "--memory", memory];
            let mut command = far.command(&words);
            command.env("LIMOSA_CACHE_DIR", room.path().join("cache"));
            let said = start_command(command).wait().success().stderr;
            let warnings: Vec<_> = said.lines().filter(|line| line.contains("cache")).collect();
            let [warning] = warnings.as_slice() else { panic!("{memory}, {is_full}: {said}") };
            assert!(warning.contains("No space left") && warning.contains("without"), "{said}");
            far.saved.assert_is_back(&destination);
        }
    }
}

#[test]
fn a_temporary_folder_without_room_fails_in_one_line_and_leaves_nothing() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let far = Far::new();
    let (snapshot, url) = (text(&far.saved.snapshot), "s3://bucket/vm.qcow2");
    let run = |room: &Mounted, words: &[&str]| {
        let mut command = far.command(words);
        command.env("TMPDIR", room.path());
        start_command(command).wait()
    };
    let room = Mounted::new("2M");
    let folder = format!("{}: has no room", text(room.path()));
    run(&room, &["pack", snapshot, url]).one_line(&[&folder, "TMPDIR", url, "No space left on device"]);
    let image = ["img", "convert", "-f", "raw", "-O", "qcow2", snapshot, "s3://bucket/disk.qcow2"];
    assert_failed(&run(&room, &image), &[&folder, "TMPDIR", "No space left on device"]);
    let source = beat().start().unwrap();
    source.wait_heartbeats(1).unwrap();
    load_ballast(&source);
    let (found, socket) = (Found::of(&source), source.qmp_socket());
    let save = ["save", "--pack", "zstd", "--qmp", text(&socket), url];
    assert_failed(&run(&room, &save), &["No space left on device", text(room.path())]);
    found.assert_same(&source);
    assert_beats(&source);
    assert_eq!(names(room.path()), [""; 0]);
    // There is room for the plain snapshot, and none for what is made of it: it stays, and is packed elsewhere.
    let room = Mounted::new("32M");
    let failed = run(&room, &save);
    let [plain] = &*names(room.path()) else { panic!("{}", failed.stderr) };
    assert!(plain.ends_with(".unpacked"), "{plain}");
    assert_failed(&failed, &["No space left on device", &format!("limosa pack {}/{plain} {url}", text(room.path()))]);
    found.assert_same(&source);
    assert_beats(&source);
    let requests = far.proxy.take_requests();
    assert!(requests.iter().all(|request| !["PUT", "POST"].contains(&request.method.as_str())), "{requests:?}");
    assert_eq!(names(&far.server.folder()), [""; 0]);
    far.run(&["pack", text(&room.path().join(plain)), url]).success();
}
