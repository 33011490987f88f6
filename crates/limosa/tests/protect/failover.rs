//! The protected VM is lost, and continues from its newest checkpoint.

use std::thread;
use std::time::Duration;

use limosa_testkit::{Ended, kill9};

use crate::needs_newest_qemu;
use crate::scene::{Failover, Scene, assert_follows, machine, text};
use crate::stage::{limosa, load_in_stock_qemu, names, start, wait_for};

/// Expects a keeper whose VM was killed to say so, and to leave one file.
#[track_caller]
fn assert_lost(scene: &Scene, ended: &Ended) {
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
    assert_eq!(names(&scene.kept()), ["checkpoint.limosa"]);
    assert_eq!(names(&scene.path("tmp")), Vec::<String>::new());
}

/// Kills a protected VM after a number of checkpoints, and returns its last pass.
fn lose_after(scene: &Scene, every: &str, checkpoints: u64) -> u32 {
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", every]);
    scene.wait_checkpoint(checkpoints, &keeper);
    vm.wait_heartbeats(1).unwrap();
    kill9(vm.pid()).unwrap();
    assert_lost(scene, &keeper.wait());
    vm.last_pass().unwrap()
}

#[test]
fn beats_continue_from_the_newest_checkpoint_of_a_vm_that_was_killed() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let last = lose_after(&scene, "50ms", 30);
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
fn a_checkpoint_is_restored_in_every_way_in_which_a_snapshot_is() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let last = lose_after(&scene, "30ms", 20);
    let first = scene.failover(&["--fenced", "--memory", "lazy"]);
    assert_follows(first.wait_passes(3), last, 2);
    first.check_and_end();
    // Its VM is gone, and the file is as it was.
    let (checkpoint, line) = (scene.checkpoint(), scene.survivor_line());
    for (memory, said) in [("lazy", "restoring lazily"), ("eager", "restoring eagerly"), ("mapped", "mapped")] {
        let words = ["run", text(&checkpoint), "--memory", memory, "-v", "--"].into_iter();
        let limosa = start(words.chain(line.iter().map(String::as_str)));
        let again = Failover::of(limosa, &scene);
        assert_follows(again.wait_passes(3), last, 2);
        assert!(again.limosa.stderr().contains(said), "{}", again.limosa.stderr());
        again.check_and_end();
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

#[test]
fn a_failover_whose_qemu_did_not_start_can_be_repeated_and_one_beside_its_survivor_is_refused() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", "50ms"]);
    scene.wait_checkpoint(5, &keeper);
    kill9(vm.pid()).unwrap();
    assert_lost(&scene, &keeper.wait());
    let (kept, line) = (scene.kept(), scene.survivor_line());
    let with = |more: &str| {
        let words = ["protect", "failover", "--fenced", text(&kept), "--"].into_iter();
        limosa(words.chain(line.iter().map(String::as_str)).chain([more]))
    };
    for _ in 0..2 {
        let failed = with("-no-such-option");
        assert_ne!(failed.status.code(), Some(0), "{}", failed.stderr);
        assert!(!failed.stderr.contains("already"), "{}", failed.stderr);
    }
    let unfenced = scene.failover(&[]).limosa.wait();
    unfenced.one_line(&["the protected VM may still run", "it has neither networks nor writable disks", "--fenced"]);
    let failover = scene.failover(&["--fenced"]);
    failover.wait_passes(2);
    with("-S").one_line(&[text(&kept), "has continued from this checkpoint already", "limosa run"]);
    failover.check_and_end();
    with("-S").one_line(&["has continued from this checkpoint already"]);
}

#[test]
fn a_vm_that_may_run_is_not_failed_over_while_it_has_a_network_or_a_disk_of_its_own() {
    needs_newest_qemu!();
    let scene = Scene::of(|_| machine().argument("-nic").argument("user,id=net7"));
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--output", "free"]);
    scene.wait_checkpoint(2, &keeper);
    kill9(vm.pid()).unwrap();
    keeper.wait();
    let refused = scene.failover(&[]).limosa.wait();
    refused.one_line(&["the protected VM may still run", "its networks (net7) have no gates", "--fence COMMAND"]);
    let failover = scene.failover(&["--fenced"]);
    failover.wait_passes(1);
    failover.check_and_end();
}
