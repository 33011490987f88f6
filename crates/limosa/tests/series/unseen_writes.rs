//! An emulated VM of a QEMU that does not see all that it writes: it stands still while it is saved.

use std::path::Path;
use std::time::Duration;

use limosa_testkit::{HeartbeatGuest, Machine, Qmp, Series, Vm, kill9, qemu_skipped, series_skipped};
use rustix::process::Signal;
use serde_json::json;

use crate::scene::{Scene, assert_consistent, assert_failed};
use crate::stage::{Found, Program, assert_beats, limosa, save, save_arguments, start, wait_for, wait_moving};

/// The save of so little memory takes a while.
const SLOWLY: [&str; 2] = ["--max-bandwidth", "100K"];

/// Writes the same few pages all the time: QEMU's emulation knows all of them.
fn machine() -> Machine {
    let guest = HeartbeatGuest { rest: 0, ..HeartbeatGuest::over(256 << 10) };
    Machine::heartbeat(guest).memory(16 << 20).kind("pc-q35-7.2").series(Series::Oldest)
}

/// A folder, a guest that runs, and its QEMU as it was found; none where such tests are skipped.
fn set_up() -> Option<(Scene, Vm, Found)> {
    if qemu_skipped() || series_skipped() {
        return None;
    }
    let vm = machine().start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let found = Found::of(&vm);
    Some((Scene::new(), vm, found))
}

/// Starts a slow save, and waits until QEMU sends memory.
fn saving(vm: &Vm, snapshot: &Path) -> Program {
    let saving = start(save_arguments(vm, snapshot, &SLOWLY));
    wait_moving(vm);
    saving
}

#[test]
fn all_that_an_emulated_vm_of_an_old_qemu_writes_is_in_its_snapshot() {
    let Some((scene, vm, found)) = set_up() else { return };
    for how in [&["--max-bandwidth", "1M"][..], &["--channels", "2"], &["--stop"]] {
        let snapshot = scene.path("snapshot");
        let how = [&["--force"], how].concat();
        let saved = limosa(save_arguments(&vm, &snapshot, &how));
        assert!(saved.stderr.contains("the VM stands still while it is saved: QEMU 7.2"), "{}", saved.stderr);
        saved.success();
        if !how.contains(&"--stop") {
            found.assert_same(&vm);
            assert_beats(&vm);
        }
        // As one that runs.
        for series in [Series::Oldest, Series::Installed] {
            let back = machine().series(series).start_incoming().unwrap();
            scene.restore(&snapshot, &back, &["--memory", "lazy"]).success();
            assert_eq!(back.run_state().unwrap(), "running");
            back.wait_heartbeats(1).unwrap();
            assert_consistent(&back);
        }
    }
}

#[test]
fn a_vm_that_is_continued_while_it_must_stand_still_is_not_saved() {
    let Some((scene, vm, found)) = set_up() else { return };
    // Also one that its user had stopped before.
    for stop in [false, true] {
        if stop {
            vm.stop().unwrap();
        }
        let saving = saving(&vm, &scene.path("snapshot"));
        vm.execute("cont", json!({})).unwrap();
        assert_failed(&saving.wait(), &["was continued while it had to stand still"]);
        assert!(!scene.path("snapshot").exists());
        if stop {
            vm.execute("cont", json!({})).unwrap();
        }
        found.assert_same(&vm);
        assert_beats(&vm);
    }
}

#[test]
fn a_time_out_ends_a_save_that_a_vm_stands_still_for() {
    let Some((scene, vm, found)) = set_up() else { return };
    let how = [&SLOWLY[..], &["--timeout", "500ms"]].concat();
    assert_failed(&limosa(save_arguments(&vm, &scene.path("snapshot"), &how)), &["not done within 0.5 s"]);
    found.assert_same(&vm);
    assert_beats(&vm);
}

#[test]
fn a_vm_whose_save_ends_while_it_stands_still_runs_again() {
    let Some((scene, vm, found)) = set_up() else { return };
    for kill in [true, false] {
        let saving = saving(&vm, &scene.path("snapshot"));
        assert_eq!(vm.run_state().unwrap(), "paused");
        if kill {
            kill9(saving.pid()).unwrap();
            saving.wait();
        } else {
            saving.signal(Signal::INT);
            assert_failed(&saving.wait(), &["cancelled"]);
        }
        wait_for("the VM to run", || (vm.run_state().unwrap() == "running").then_some(()));
        // The watchdog holds the monitor as long as it has something to do.
        drop(Qmp::connect(&vm.qmp_socket(), Duration::from_secs(60)).unwrap());
        found.assert_same(&vm);
        assert_beats(&vm);
        assert!(!scene.path("snapshot").exists());
    }
}

#[test]
fn a_vm_that_was_stopped_before_comes_back_stopped() {
    let Some((scene, vm, _)) = set_up() else { return };
    vm.stop().unwrap();
    let snapshot = scene.path("snapshot");
    save(&vm, &snapshot, &[]);
    let back = machine().start_incoming().unwrap();
    scene.restore(&snapshot, &back, &["--memory", "eager"]).success();
    assert_eq!(back.run_state().unwrap(), "paused");
    back.check_heartbeat().unwrap();
}

/// Such a QEMU keeps the memory protected, and the VM hangs at its next write.
#[test]
fn a_background_snapshot_that_could_cost_the_vm_is_refused() {
    let Some((scene, vm, found)) = set_up() else { return };
    let refused = limosa(save_arguments(&vm, &scene.path("snapshot"), &["--background"]));
    assert_failed(&refused, &["QEMU 7.2", "leaves the VM hanging", "leave --background out"]);
    found.assert_same(&vm);
    assert_beats(&vm);
    assert!(!scene.path("snapshot").exists());
}
