//! `save --background`: the VM continues while its memory is saved, and what is saved is of the instant at which it
//! began.

use std::os::unix::fs::FileExt as _;

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{Disk, DiskFormat, HeartbeatGuest, MemoryBackend};

/// The file system that is memory (linux/magic.h).
const TMPFS: i64 = 0x0102_1994;

#[test]
fn the_snapshot_is_of_the_moment_at_which_the_save_began() {
    needs_qemu!();
    for backend in [MemoryBackend::Anonymous, MemoryBackend::Memfd] {
        let machine = small().backend(backend);
        let vm = machine.start().unwrap();
        vm.wait_heartbeats(2).unwrap();
        let (_folder, file) = place();
        let found = Found::of(&vm);
        let before = vm.last_pass().unwrap();
        // Slow enough for the guest to change all of its memory meanwhile.
        let saving = start(save_arguments(&vm, &file, &["--background", "--json", "--max-bandwidth", "4M"]));
        wait_moving(&vm);
        vm.wait_heartbeats(1).unwrap();
        let meanwhile = vm.last_pass().unwrap();
        let report = saving.wait().json();
        assert_eq!((report["via"].as_str(), report["vm_state"].as_str()), (Some("socket"), Some("running")));
        assert!(report["downtime_ms"].as_f64().is_some(), "{report}");
        assert_eq!(report["pages"]["resent"], 0, "each page comes once");
        found.assert_same(&vm);
        assert_beats(&vm);

        let loaded = machine.start_incoming_stopped().unwrap();
        loaded.load_file(&file, 0).unwrap();
        loaded.wait_run_state("paused", SOON).unwrap();
        let lap = HeartbeatGuest::pass(|range| loaded.read_memory(range)).unwrap();
        assert!((before..=meanwhile).contains(&lap), "lap {lap}: the save began between {before} and {meanwhile}");
        loaded.check_heartbeat().unwrap();
        drop(loaded);
        let restored = machine.start_incoming().unwrap();
        let socket = restored.qmp_socket().display().to_string();
        limosa(["restore", "--qmp", &socket, &file.display().to_string()]).success();
        restored.wait_run_state("running", SOON).unwrap();
        assert_beats(&restored);
    }
}

#[test]
fn a_vm_that_is_paused_is_saved_and_stays_so() {
    needs_qemu!();
    let machine = small();
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    vm.stop().unwrap();
    let (_folder, file) = place();
    let found = Found::of(&vm);
    let report = save(&vm, &file, &["--background"]);
    assert!(report["downtime_ms"].is_null(), "{report}");
    found.assert_same(&vm);
    let restored = machine.start_incoming().unwrap();
    let socket = restored.qmp_socket().display().to_string();
    limosa(["restore", "--qmp", &socket, &file.display().to_string()]).success();
    assert_eq!(restored.run_state().unwrap(), "paused");
    restored.check_heartbeat().unwrap();
}

#[test]
fn a_background_save_that_is_killed_or_cancelled_leaves_nothing() {
    needs_qemu!();
    let vm = small().backend(MemoryBackend::Memfd).start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let (folder, file) = place();
    let found = Found::of(&vm);
    for kill in [false, true] {
        let saving = start(save_arguments(&vm, &file, &["--background", "--max-bandwidth", "1M"]));
        wait_for("a migration", || {
            (vm.execute("query-migrate", serde_json::json!({})).unwrap()["status"] == "active").then_some(())
        });
        if kill {
            limosa_testkit::kill9(saving.pid()).unwrap();
            saving.wait();
            // The watchdog holds the monitor as long as it has something to do.
            drop(limosa_testkit::Qmp::connect(&vm.qmp_socket(), SOON).unwrap());
        } else {
            saving.signal(rustix::process::Signal::INT);
            saving.wait().one_line(&["cancelled"]);
        }
        found.assert_same(&vm);
        assert_beats(&vm);
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

#[test]
fn what_cannot_be_saved_in_the_background_is_refused_in_one_line() {
    needs_qemu!();
    let (folder, file) = place();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let found = Found::of(&vm);
    let refused = |more: &[&str], words: &[&str]| {
        let more: Vec<&str> = ["--background"].iter().chain(more).copied().collect();
        limosa(save_arguments(&vm, &file, &more)).misused(words);
        found.assert_same(&vm);
    };
    refused(&["--via", "file"], &["--via socket"]);
    refused(&["--timeout", "1s", "--on-timeout", "pause"], &["--on-timeout cancel"]);
    let both = limosa(save_arguments(&vm, &file, &["--background", "--stop"]));
    assert_eq!(both.status.code(), Some(2), "{}", both.stderr);

    let disk = Disk::create(&folder.path().join("disk"), DiskFormat::Raw, 1 << 20).unwrap();
    let vm = small().disk(disk).start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    limosa(save_arguments(&vm, &file, &["--background"])).one_line(&["disk0", "different instants"]);
    assert_beats(&vm);
}

#[test]
fn memory_that_the_host_cannot_protect_is_refused_and_the_vm_untouched() {
    needs_qemu!();
    let (folder, file) = place();
    if rustix::fs::statfs(folder.path()).unwrap().f_type == TMPFS {
        return limosa_testkit::note_skip("the temporary folder is memory, which can be protected");
    }
    let memory = folder.path().join("memory");
    let kept = std::fs::File::create(&memory).unwrap();
    kept.set_len(2 << 20).unwrap();
    kept.write_all_at(&[1], 0).unwrap();
    // A shared mapping of a file on a disk: no kernel write-protects that for userfaultfd.
    let object = format!("memory-backend-file,id=more,size=2M,share=on,mem-path={}", memory.display());
    let machine = small().argument("-object").argument(&object).argument("-device").argument("pc-dimm,memdev=more");
    let machine = machine.argument("-m").argument("slots=1,maxmem=1G");
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    let found = Found::of(&vm);
    limosa(save_arguments(&vm, &file, &["--background"])).one_line(&["background", "QEMU says"]);
    found.assert_same(&vm);
    assert_beats(&vm);
    assert!(!file.exists());
    save(&vm, &file, &[]);
}
