//! The protected VM is lost, and continues from its newest checkpoint.

use std::thread;
use std::time::Duration;

use limosa_testkit::{Ended, kill9};

use crate::needs_newest_qemu;
use crate::scene::{Scene, assert_follows};
use crate::stage::{load_in_stock_qemu, names, wait_for};

/// Expects a keeper whose VM was killed to say so, and to leave one file.
#[track_caller]
fn assert_lost(scene: &Scene, ended: &Ended) {
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
    assert_eq!(names(&scene.kept()), ["checkpoint.limosa"]);
    assert_eq!(names(&scene.path("tmp")), Vec::<String>::new());
}

#[test]
fn beats_continue_from_the_newest_checkpoint_of_a_vm_that_was_killed() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", "50ms"]);
    scene.wait_checkpoint(30, &keeper);
    vm.wait_heartbeats(1).unwrap();
    kill9(vm.pid()).unwrap();
    assert_lost(&scene, &keeper.wait());
    let last = vm.last_pass().unwrap();
    let failover = scene.failover(&["--fenced"]);
    let first = failover.wait_passes(3);
    // The pass that was being announced is announced again, if not a later one.
    assert_follows(first, last, 1);
    failover.check_and_end();
}

#[test]
fn whenever_the_vm_is_killed_a_stock_qemu_loads_a_checkpoint_of_one_instant() {
    needs_newest_qemu!();
    for moment in [0, 37, 110, 195] {
        let scene = Scene::new();
        let vm = scene.guest();
        let keeper = scene.protect(&vm, &["--every", "20ms"]);
        scene.wait_checkpoint(5, &keeper);
        thread::sleep(Duration::from_millis(moment));
        kill9(vm.pid()).unwrap();
        assert_lost(&scene, &keeper.wait());
        load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
    }
}

#[test]
fn a_vm_that_was_failed_over_can_be_protected_again_in_the_same_directory() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", "20ms"]);
    scene.wait_checkpoint(20, &keeper);
    kill9(vm.pid()).unwrap();
    assert_lost(&scene, &keeper.wait());
    let again = load_in_stock_qemu(&scene.machine, &scene.checkpoint(), 0);
    let before = scene.newest();
    let keeper = scene.protect(&again, &["--every", "50ms"]);
    wait_for("the base of a second series", || (scene.newest() < before).then_some(()));
    scene.wait_checkpoint(3, &keeper);
    again.wait_heartbeats(1).unwrap();
    kill9(again.pid()).unwrap();
    assert_lost(&scene, &keeper.wait());
    let last = again.last_pass().unwrap();
    let failover = scene.failover(&["--fence", "true"]);
    let first = failover.wait_passes(2);
    assert_follows(first, last, 1);
    failover.check_and_end();
}
