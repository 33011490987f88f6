//! Checkpoints without COLO: the QEMU of the machine, whose COLO does not work.

use std::thread;
use std::time::Duration;

use limosa_testkit::{HeartbeatGuest, LinuxGuest, Machine, Program, Series, Vm, kill9, series_skipped};
use rustix::process::Signal;
use serde_json::json;

use crate::gate::{connected, counting, survivor};
use crate::line::Line;
use crate::needs_qemu;
use crate::outside::Outside;
use crate::scene::{Failover, Scene, kill_host, wait_said};
use crate::stage::{Found, assert_beats, load_in_stock_qemu, names, wait_gone, watchdog};

const BACKGROUND: [&str; 4] = ["--via", "background", "--every", "1s"];

/// A guest of 8 MiB in the installed QEMU.
fn machine() -> Machine {
    Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(8 << 20) })
}

fn protect(scene: &Scene, vm: &Vm, more: &[&str]) -> Program {
    scene.protect(vm, &[&BACKGROUND, more].concat())
}

#[test]
fn a_qemu_whose_colo_does_not_work_is_protected_by_background_snapshots_and_left_as_it_was_found() {
    needs_qemu!();
    protected_and_left(machine());
}

#[test]
fn a_qemu_whose_background_snapshots_could_cost_the_vm_is_refused() {
    needs_qemu!();
    if series_skipped() {
        return;
    }
    let scene = Scene::of(|_| machine().kind("pc-q35-7.2").series(Series::Oldest));
    let vm = scene.guest();
    let found = Found::of(&vm);
    protect(&scene, &vm, &[]).wait().one_line(&["QEMU 7.2", "leaves the VM hanging"]);
    found.assert_same(&vm);
    assert_beats(&vm);
}

#[test]
fn a_qemu_whose_colo_works_is_protected_by_background_snapshots_if_they_are_asked_for() {
    needs_qemu!();
    if !series_skipped() {
        protected_and_left(machine().kind("pc-q35-7.2").series(Series::Newest));
    }
}

fn protected_and_left(machine: Machine) {
    let scene = Scene::of(|_| machine);
    let vm = scene.guest();
    let found = Found::of(&vm);
    let keeper = protect(&scene, &vm, &["--json"]);
    scene.wait_checkpoint(4, &keeper);
    vm.wait_heartbeats(1).unwrap();
    keeper.signal(Signal::INT);
    let ended = keeper.wait();
    assert!(ended.stderr.contains("background snapshots, one every 1 s"), "{}", ended.stderr);
    let report = ended.json();
    assert_eq!((report["end"].as_str(), report["vm_state"].as_str()), (Some("asked"), Some("running")), "{report}");
    assert!(report["checkpoints"].as_u64() >= Some(4), "{report}");
    let (pause, period) = (&report["pause"]["median_ms"], &report["period"]["median_ms"]);
    assert!(pause.as_f64() > Some(0.0) && pause.as_f64() < Some(500.0), "{report}");
    assert!(period.as_f64() > Some(900.0), "{report}");
    // All of it comes each time, and what has not changed is not written again.
    let (contents, unchanged) = (&report["pages"]["contents"], &report["pages"]["unchanged"]);
    assert!(unchanged.as_u64() > Some(100) && contents.as_u64() > unchanged.as_u64(), "{report}");
    found.assert_same(&vm);
    assert_beats(&vm);
    assert_eq!(names(&scene.kept()), ["checkpoint.limosa"]);
    assert_eq!(names(&scene.path("tmp")), Vec::<String>::new());
    // QEMU loads such a file by itself from 9.0 on.
    let stock = scene.machine.clone().series(Series::Installed);
    load_in_stock_qemu(&stock, &scene.checkpoint(), 0);
}

#[test]
fn whenever_the_vm_is_killed_a_stock_qemu_loads_a_snapshot_of_one_instant() {
    needs_qemu!();
    for moment in [0, 300, 700] {
        let scene = Scene::of(|_| machine());
        let vm = scene.guest();
        let keeper = protect(&scene, &vm, &[]);
        scene.wait_checkpoint(2, &keeper);
        thread::sleep(Duration::from_millis(moment));
        kill9(vm.pid()).unwrap();
        let ended = keeper.wait();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
        assert_eq!(names(&scene.kept()), ["checkpoint.limosa"]);
        load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
    }
}

#[test]
fn a_killed_keeper_leaves_the_vm_as_it_was_found() {
    needs_qemu!();
    let scene = Scene::of(|_| machine());
    let vm = scene.guest();
    let found = Found::of(&vm);
    for moment in [0, 11, 340] {
        let keeper = protect(&scene, &vm, &[]);
        scene.wait_checkpoint(1, &keeper);
        let dog = watchdog(&keeper).unwrap();
        thread::sleep(Duration::from_millis(moment));
        keeper.signal(Signal::KILL);
        keeper.wait();
        wait_gone(dog);
        found.assert_same(&vm);
        assert_beats(&vm);
        scene.forget();
    }
}

#[test]
fn with_a_gate_nothing_is_seen_outside_that_the_survivor_does_not_know() {
    needs_qemu!();
    let scene = Scene::of(|folder| connected(Machine::linux(LinuxGuest::default()), &folder.join("vm.net")));
    let outside = Outside::listen(&scene.path("world.net"));
    let _gate = scene.gate(&[]);
    let mut vm = counting(&scene);
    let gate = scene.path("gate").display().to_string();
    for moment in [0, 900] {
        let keeper = protect(&scene, &vm, &["--gate", &gate]);
        scene.wait_checkpoint(2, &keeper);
        outside.wait_counts(5);
        thread::sleep(Duration::from_millis(moment));
        kill9(vm.pid()).unwrap();
        assert_eq!(keeper.wait().status.code(), Some(1));
        vm = survivor(&scene);
        outside.wait_counts(3);
        // What was sent between the seal and the snapshot may be lost; nothing comes again.
        let counts = outside.counts();
        assert!(counts.windows(2).all(|pair| pair[0] < pair[1]), "{counts:?}");
        scene.forget();
    }
}

/// Has a keeper get background snapshots of a guest, and waits for a few.
fn protected_elsewhere(options: &[&str]) -> (Scene, Vm, Program, Program) {
    let scene = Scene::of(|_| machine());
    let (keeper, at) = scene.keep_for_failover("tcp:127.0.0.1:0", &[options, &["--lost-after", "1s"]].concat());
    let vm = scene.guest();
    let protect = scene.protect_to(&vm, &at, &[&BACKGROUND[..], &["--lost-after", "1s", "--json"]].concat());
    scene.wait_checkpoint(2, &protect);
    (scene, vm, protect, keeper)
}

#[test]
fn a_keeper_on_another_host_continues_a_vm_from_background_snapshots() {
    needs_qemu!();
    for (standby, moment) in [(&["--standby"][..], 0), (&[], 600)] {
        let (scene, vm, protect, keeper) =
            protected_elsewhere(&[standby, &["--when-lost", "100ms", "--fenced"]].concat());
        vm.wait_heartbeats(1).unwrap();
        thread::sleep(Duration::from_millis(moment));
        kill_host(&vm, &protect);
        wait_said(&keeper, "the VM continues here");
        let last = vm.last_pass().unwrap();
        let failover = Failover::of(keeper, &scene);
        let first = failover.wait_passes(2);
        assert!(first <= last + 2, "pass {first} after {last}");
        failover.check_and_end();
    }
}

#[test]
fn a_keeper_on_another_host_is_told_why_its_background_snapshots_end_whenever_that_is() {
    needs_qemu!();
    for moment in [0, 350, 800] {
        let (scene, vm, protect, keeper) = protected_elsewhere(&["--when-lost", "100ms", "--fenced"]);
        thread::sleep(Duration::from_millis(moment));
        protect.signal(Signal::INT);
        let report = protect.wait().json();
        assert_eq!((report["end"].as_str(), report["vm_state"].as_str()), (Some("asked"), Some("running")), "{report}");
        assert!(report["checkpoints"].as_u64() >= Some(2), "{report}");
        assert!(report["pages"]["unchanged"].as_u64() > Some(100), "{report}");
        wait_said(&keeper, "its protection has ended; the VM continues there");
        assert_beats(&vm);
        load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
        keeper.signal(Signal::INT);
        let ended = keeper.wait().success();
        assert!(!ended.stderr.contains("continues here"), "{}", ended.stderr);
    }
    let (_scene, vm, protect, keeper) = protected_elsewhere(&["--when-lost", "100ms", "--fenced"]);
    vm.execute("quit", json!({})).unwrap();
    assert_eq!(protect.wait().json()["end"], "vm-ended");
    wait_said(&keeper, "the VM has ended by itself");
}

#[test]
fn a_vm_whose_keeper_was_lost_is_protected_by_background_snapshots_again() {
    needs_qemu!();
    let scene = Scene::of(|_| machine());
    let (_keeper, at) = scene.keep("tcp:127.0.0.1:0", &[]);
    let line = Line::to(&at);
    let vm = scene.guest();
    let protect = scene.protect_to(&vm, &line.uri(), &[&BACKGROUND[..], &["--lost-after", "1s"]].concat());
    scene.wait_checkpoint(2, &protect);
    line.cut();
    wait_said(&protect, "the VM continues without protection until it is back");
    assert_beats(&vm);
    line.mend();
    wait_said(&protect, "is back");
    let _ = std::fs::remove_file(scene.checkpoint());
    scene.wait_checkpoint(2, &protect);
    load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
}

#[test]
fn a_period_that_is_too_short_is_refused() {
    needs_qemu!();
    let scene = Scene::of(|_| machine());
    let vm = scene.guest();
    let short = scene.protect(&vm, &["--via", "background", "--every", "300ms"]).wait();
    short.one_line(&["a period of at least 1 s"]);
}
