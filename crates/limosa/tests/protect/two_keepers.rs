//! Two keepers with directories of their own: the VM continues at the one that has it, and at no other.

use std::path::Path;
use std::thread;
use std::time::Duration;

use limosa_testkit::{Program, wait_gone};
use rustix::process::Signal;

use crate::gate;
use crate::needs_newest_qemu;
use crate::scene::{Failover, Scene, assert_follows, kill_host, wait_said};
use crate::stage::{wait_for, watchdog};

const ANYWHERE: &str = "tcp:127.0.0.1:0";

/// Waits for a few checkpoints in the directory of the second keeper.
fn wait_kept(kept: &Path, protect: &Program) {
    wait_for("checkpoints at the other keeper", || {
        assert!(protect.is_running(), "limosa ended: {}", protect.stderr());
        (Scene::newest_in(kept) >= Some(10)).then_some(())
    });
}

#[test]
fn a_keeper_whose_vm_has_gone_to_another_one_is_told_so_and_leaves_it_alone() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let options = ["--standby", "--when-lost", "100ms", "--fenced"];
    let (left, at) = scene.keep_for_failover(ANYWHERE, &options);
    let vm = scene.guest();
    let protect = scene.protect_to(&vm, &at, &["--every", "30ms"]);
    scene.wait_checkpoint(10, &protect);
    protect.signal(Signal::INT);
    protect.wait().success();
    wait_said(&left, "its protection has ended; the VM continues there");
    let other = scene.path("other");
    let (keeper, at) = scene.keep_for_failover_in(&other, ANYWHERE, &options);
    let protect = scene.protect_to(&vm, &at, &["--every", "30ms"]);
    wait_kept(&other, &protect);
    vm.wait_heartbeats(1).unwrap();
    kill_host(&vm, &protect);
    wait_said(&keeper, "the VM continues here");
    let failover = Failover::of(keeper, &scene);
    assert_follows(failover.wait_passes(3), vm.last_pass().unwrap(), 20);
    failover.check_and_end();
    assert!(!left.stderr().contains("continues here"), "{}", left.stderr());
    left.signal(Signal::INT);
    left.wait().success();
}

#[test]
fn a_keeper_that_was_left_without_a_word_is_not_let_by_the_gate_that_has_the_vm_for_another() {
    needs_newest_qemu!();
    let (scene, outside) = gate::scene();
    let _gate = scene.gate(&["--grace", "200ms"]);
    let vm = gate::counting(&scene);
    let gate = scene.path("gate").display().to_string();
    // Both fail over at a signal, and have the gate for their fence. A gate takes the standby that connected first.
    let (left, at) = scene.keep_for_failover(ANYWHERE, &["--gate", &gate]);
    let protect = scene.protect_to(&vm, &at, &["--every", "50ms", "--gate", &gate]);
    scene.wait_checkpoint(10, &protect);
    let dog = watchdog(&protect).unwrap();
    protect.signal(Signal::KILL);
    protect.wait();
    wait_gone(dog);
    wait_said(&left, "may be lost");
    let other = scene.path("other");
    let (keeper, at) = scene.keep_for_failover_in(&other, ANYWHERE, &["--standby", "--gate", &gate]);
    let protect = scene.protect_to(&vm, &at, &["--every", "50ms", "--gate", &gate]);
    wait_kept(&other, &protect);
    left.signal(Signal::USR1);
    wait_said(&left, "not failed over: ");
    // It stands still for each checkpoint.
    wait_for("the VM to run", || (vm.run_state().unwrap() == "running").then_some(()));
    outside.wait_counts(5);
    kill_host(&vm, &protect);
    wait_said(&keeper, "may be lost");
    for one in [&keeper, &left] {
        one.signal(Signal::USR1);
    }
    wait_said(&keeper, "the VM continues here");
    outside.wait_counts(10);
    wait_for("the refusal", || (left.stderr().matches("not failed over: ").count() >= 2).then_some(()));
    thread::sleep(Duration::from_millis(200));
    assert!(!left.stderr().contains("continues here"), "{}", left.stderr());
    let counts = outside.counts();
    assert!(counts.is_sorted_by(|one, next| one < next), "{counts:?}");
}
