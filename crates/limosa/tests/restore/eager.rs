//! Eager restores: by QEMU reading the file, and by limosa sending it.

use limosa_testkit::{Disk, DiskFormat, Qmp};
use serde_json::json;

use crate::needs_qemu;
use crate::scene::{Saved, Scene, assert_consistent, beat, load_ballast, migration_status, saved_beat};
use crate::stage::{Found, SOON};

/// Restores eagerly with `how` and expects the very instant that was saved, and nothing left behind.
fn comes_back_eagerly(scene: &Scene, saved: &Saved, how: &[&str]) {
    let destination = beat().start_incoming().unwrap();
    let found = Found::of(&destination);
    let words: Vec<&str> = ["--memory", "eager", "--paused", "--json"].iter().chain(how).copied().collect();
    let report = scene.restore(&saved.snapshot, &destination, &words).json();
    assert_eq!((report["mode"].as_str(), report["vm_state"].as_str()), (Some("eager"), Some("paused")), "{report}");
    let sent = report["channel"].is_object();
    assert_eq!(sent, how.contains(&"socket") || how.contains(&"--listen"), "{how:?}: {report}");
    assert_eq!(migration_status(&destination), "completed");
    found.assert_same_but(&destination, "paused");
    scene.assert_tidy();
    saved.assert_is_back(&destination);
}

#[test]
fn a_beat_guest_comes_back_eagerly_by_file_and_through_a_socket() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    comes_back_eagerly(&scene, &saved, &["--via", "file"]);
    comes_back_eagerly(&scene, &saved, &["--via", "socket"]);
    comes_back_eagerly(&scene, &saved, &["--via", "auto"]);
    let listen = format!("unix:{}", scene.path("incoming").display());
    comes_back_eagerly(&scene, &saved, &["--listen", &listen]);
}

#[test]
fn a_checksummed_guest_comes_back_eagerly_by_file_and_through_a_socket() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &["--checksum"]);
    comes_back_eagerly(&scene, &saved, &["--via", "file"]);
    comes_back_eagerly(&scene, &saved, &["--via", "socket"]);
}

#[test]
fn a_file_that_stock_qemu_wrote_comes_back_eagerly() {
    needs_qemu!();
    for threads in [0, 2] {
        let scene = Scene::new();
        let source = beat().start().unwrap();
        source.wait_heartbeats(2).unwrap();
        load_ballast(&source);
        let snapshot = scene.path("snapshot");
        source.save_file(&snapshot, threads).unwrap();
        let saved = Saved { snapshot, beat: source.check_heartbeat().unwrap(), lap: source.last_pass().unwrap() };
        drop(source);
        comes_back_eagerly(&scene, &saved, &["--via", "file"]);
        comes_back_eagerly(&scene, &saved, &["--via", "socket"]);
    }
}

#[test]
fn a_running_guest_that_comes_back_eagerly_goes_on_by_itself() {
    needs_qemu!();
    let scene = Scene::new();
    let saved = saved_beat(&scene, &beat(), &[]);
    for via in ["file", "socket"] {
        let destination = beat().start_incoming().unwrap();
        scene.restore(&saved.snapshot, &destination, &["--memory", "eager", "--via", via]).success();
        assert_eq!(destination.run_state().unwrap(), "running");
        saved.assert_goes_on(&destination);
        assert_consistent(&destination);
    }
}

#[test]
fn a_guest_whose_disk_another_vm_has_open_is_not_started_and_qemus_reason_is_reported() {
    needs_qemu!();
    let scene = Scene::new();
    let disk = Disk::create(&scene.path("disk"), DiskFormat::Raw, 1 << 20).unwrap();
    let machine = beat().disk(disk);
    let source = machine.start().unwrap();
    source.wait_heartbeats(2).unwrap();
    let snapshot = scene.save(&source, "snapshot", &["--stop"]);
    let waiting = [machine.start_incoming().unwrap(), machine.start_incoming().unwrap()];
    // The source continues, and has its disk open again.
    Qmp::connect(&source.qmp_socket(), SOON).unwrap().execute("cont", json!({})).unwrap();
    for (destination, via) in waiting.iter().zip(["file", "socket"]) {
        let ended = scene.restore(&snapshot, destination, &["--memory", "eager", "--disks", "ignore", "--via", via]);
        ended.one_line(&["cannot start it", "lock"]);
        assert_ne!(destination.run_state().unwrap(), "running");
    }
}
