//! The ends of a protection after which the VM runs on.

use std::thread;
use std::time::Duration;

use limosa_testkit::{HeartbeatGuest, Machine, Series, wait_gone};
use rustix::process::Signal;
use serde_json::json;

use crate::needs_newest_qemu;
use crate::scene::Scene;
use crate::stage::{Found, Program, assert_beats, load_in_stock_qemu, names, wait_for, watchdog};

#[test]
fn a_keeper_that_is_told_to_stop_leaves_the_vm_as_it_was_found_and_says_what_it_kept() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let found = Found::of(&vm);
    for signal in [Signal::INT, Signal::TERM] {
        let keeper = scene.protect(&vm, &["--every", "50ms", "--json"]);
        scene.wait_checkpoint(10, &keeper);
        keeper.signal(signal);
        let report = keeper.wait().json();
        assert_eq!((report["end"].as_str(), report["vm_state"].as_str()), (Some("asked"), Some("running")), "{report}");
        assert!(report["checkpoints"].as_u64() >= Some(10), "{report}");
        assert!(report["pause"]["median_ms"].as_f64() > Some(0.0), "{report}");
        assert!(report["pages"]["contents"].as_u64() > Some(10), "{report}");
        found.assert_same(&vm);
        assert_beats(&vm);
        assert_eq!(names(&scene.kept()), ["checkpoint.limosa"]);
        assert_eq!(names(&scene.path("tmp")), Vec::<String>::new());
        load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
        scene.forget();
    }
}

/// Kills a keeper after `moment` milliseconds, and waits until its watchdog has done its work.
fn kill_after(keeper: Program, moment: u64) {
    let watchdog = watchdog(&keeper).unwrap();
    thread::sleep(Duration::from_millis(moment));
    keeper.signal(Signal::KILL);
    keeper.wait();
    wait_gone(watchdog);
}

#[test]
fn a_keeper_that_hangs_is_ended_by_its_watchdog_and_the_vm_runs_on() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let found = Found::of(&vm);
    for moment in [0, 13, 29] {
        let keeper = scene.protect(&vm, &["--every", "20ms", "--stall-timeout", "200ms"]);
        scene.wait_checkpoint(2, &keeper);
        let watchdog = watchdog(&keeper).unwrap();
        thread::sleep(Duration::from_millis(moment));
        keeper.signal(Signal::STOP);
        wait_gone(watchdog);
        found.assert_same(&vm);
        assert_beats(&vm);
        let ended = keeper.wait();
        assert!(ended.stderr.contains("hung, and was ended by its watchdog"), "{}", ended.stderr);
        scene.forget();
    }
}

#[test]
fn a_killed_keeper_never_leaves_the_vm_standing_still() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let found = Found::of(&vm);
    for moment in [0, 3, 11, 23, 31, 47] {
        let keeper = scene.protect(&vm, &["--every", "20ms"]);
        scene.wait_checkpoint(2, &keeper);
        kill_after(keeper, moment);
        found.assert_same(&vm);
        assert_beats(&vm);
        scene.forget();
    }
}

#[test]
fn a_keeper_that_is_killed_while_the_base_comes_leaves_the_vm_running() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let found = Found::of(&vm);
    for moment in [0, 20, 60] {
        let keeper = scene.protect(&vm, &[]);
        kill_after(keeper, moment);
        found.assert_same(&vm);
        assert_beats(&vm);
    }
}

#[test]
fn a_guest_that_outruns_its_base_is_protected_with_a_longer_pause() {
    needs_newest_qemu!();
    let walker = HeartbeatGuest { rest: 0, ..HeartbeatGuest::over(48 << 20) };
    let scene = Scene::of(|_| Machine::heartbeat(walker).memory(128 << 20).series(Series::Newest));
    let vm = scene.guest();
    // So little that no round ends the base.
    vm.execute("migrate-set-parameters", json!({ "downtime-limit": 1 })).unwrap();
    let found = Found::of(&vm);
    let keeper = scene.protect(&vm, &["--every", "100ms"]);
    scene.wait_checkpoint(2, &keeper);
    keeper.signal(Signal::INT);
    let ended = keeper.wait();
    assert!(ended.stderr.contains("the guest writes faster than its memory is sent"), "{}", ended.stderr);
    ended.success();
    found.assert_same(&vm);
    assert_beats(&vm);
}

#[test]
fn a_vm_that_its_user_stops_is_not_started_by_a_checkpoint() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", "20ms"]);
    scene.wait_checkpoint(3, &keeper);
    vm.stop().unwrap();
    wait_for("the keeper to notice", || keeper.stderr().contains("the VM is stopped (paused)").then_some(()));
    thread::sleep(Duration::from_millis(200));
    assert_eq!(vm.run_state().unwrap(), "paused");
    let before = scene.newest().unwrap();
    vm.cont().unwrap();
    scene.wait_checkpoint(before + 3, &keeper);
    keeper.signal(Signal::INT);
    keeper.wait().success();
    assert_beats(&vm);
}

#[test]
fn a_vm_that_ends_by_itself_ends_its_protection_without_a_failure() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", "50ms", "--json"]);
    scene.wait_checkpoint(3, &keeper);
    vm.execute("quit", json!({})).unwrap();
    let report = keeper.wait().json();
    assert_eq!(report["end"], "vm-ended", "{report}");
}
