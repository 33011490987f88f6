//! Output held by QEMU's filters: the VM's network was not prepared, and its frames reach the world directly.

use std::thread;
use std::time::Duration;

use limosa_testkit::{LinuxGuest, Machine, Program, Series, Vm, kill9};
use rustix::process::Signal;

use crate::gate::{connected, counting, survivor};
use crate::needs_newest_qemu;
use crate::outside::Outside;
use crate::scene::{Scene, machine as machine_without_network, text};
use crate::stage::{Found, kill_watchdog_left_by, limosa, wait_for, wait_gone, watchdog};

/// A scene whose VM has a network card that is connected to the world without a gate.
fn scene() -> (Scene, Outside) {
    let machine = Machine::linux(LinuxGuest::default()).series(Series::Newest);
    let scene = Scene::of(|folder| connected(machine, &folder.join("world.net")));
    let outside = Outside::listen(&scene.path("world.net"));
    (scene, outside)
}

fn protect(scene: &Scene, vm: &Vm, more: &[&str]) -> Program {
    scene.protected(vm, &["--output", "filter", "--json"], more)
}

#[test]
fn nothing_is_seen_outside_that_the_survivor_does_not_know_whenever_the_vm_is_killed() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let mut vm = counting(&scene);
    outside.wait_counts(3);
    for (every, moment) in [("20ms", 3), ("50ms", 131), ("100ms", 57), ("300ms", 210)] {
        let keeper = protect(&scene, &vm, &["--every", every]);
        outside.wait_counts(5);
        thread::sleep(Duration::from_millis(moment));
        kill9(vm.pid()).unwrap();
        let ended = keeper.wait();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        let last = *outside.counts().last().unwrap();
        vm = survivor(&scene);
        outside.wait_counts(3);
        // A batch may be lost with the VM. None comes again.
        let counts = outside.counts();
        assert!(counts.windows(2).all(|pair| pair[0] < pair[1]), "killed behind {last}: {counts:?}");
        scene.forget();
    }
}

#[test]
fn filters_are_removed_however_the_protection_ends() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let vm = counting(&scene);
    let found = Found::of(&vm);
    let keeper = protect(&scene, &vm, &["--every", "50ms"]);
    let held = Found::of(&vm);
    assert_ne!(held, found);
    keeper.signal(Signal::INT);
    let report = keeper.wait().json();
    assert_eq!(report["output"], "filter", "{report}");
    found.assert_same(&vm);
    outside.wait_counts(5);
    scene.forget();
    // Killed: by the watchdog.
    let keeper = protect(&scene, &vm, &["--every", "50ms"]);
    let dog = watchdog(&keeper).unwrap();
    keeper.signal(Signal::KILL);
    keeper.wait();
    wait_gone(dog);
    found.assert_same(&vm);
    outside.wait_counts(5);
    scene.forget();
    // Killed with its watchdog: by a person.
    let keeper = protect(&scene, &vm, &["--every", "50ms"]);
    let (pid, dog) = (keeper.pid(), watchdog(&keeper).unwrap());
    kill9(dog).unwrap();
    wait_gone(dog);
    keeper.signal(Signal::KILL);
    keeper.wait();
    kill_watchdog_left_by(pid);
    limosa(["resume", "--qmp", text(&vm.qmp_socket())]).success();
    found.assert_same(&vm);
    outside.wait_counts(5);
    outside.assert_whole();
}

#[test]
fn a_packet_waits_for_its_checkpoint() {
    needs_newest_qemu!();
    let (scene, outside) = scene();
    let vm = counting(&scene);
    let keeper = protect(&scene, &vm, &["--every", "2s"]);
    // Twenty milliseconds from one to the next, if the machine has time for it; those of an epoch come together.
    let before = outside.counts().len();
    let first = wait_for("an epoch", || Some(outside.counts().len()).filter(|count| *count > before));
    thread::sleep(Duration::from_millis(500));
    let now = outside.counts().len();
    assert!(now - before >= 3, "{before} {first} {now}");
    thread::sleep(Duration::from_millis(500));
    assert_eq!(outside.counts().len(), now, "nothing leaves between checkpoints");
    keeper.signal(Signal::INT);
    keeper.wait().success();
    outside.assert_whole();
}

#[test]
fn vms_and_options_without_filters_are_refused_by_name() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let found = Found::of(&vm);
    scene.protect(&vm, &["--output", "filter"]).wait().one_line(&["no network whose output could be held"]);
    scene.protect(&vm, &["--output", "filter", "--every", "event"]).wait().misused(&["--every event needs --gate"]);
    scene.protect(&vm, &["--output", "filter", "--gate", "/run/a"]).wait().misused(&["--gate"]);
    let ended = scene.protect(&vm, &["--output", "filter", "--every", "90m"]).wait();
    ended.one_line(&["at most an hour"]);
    found.assert_same(&vm);
    drop(vm);
    // One whose filters would hold the other direction.
    let hub = machine_without_network().argument("-net").argument("nic").argument("-net").argument("user");
    let vm = hub.start().unwrap();
    let found = Found::of(&vm);
    let ended = scene.protect(&vm, &["--output", "filter"]).wait();
    ended.one_line(&["the network hub0port", "is a port of a hub"]);
    found.assert_same(&vm);
}
