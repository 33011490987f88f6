//! A keeper that continues the VM by itself.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use limosa_testkit::{Program, Vm, kill9, wait_gone};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::line::Line;
use crate::needs_newest_qemu;
use crate::running::qemu_below;
use crate::scene::{Failover, Scene, assert_follows, kill_host, machine, text, wait_said};
use crate::stage::{assert_beats, limosa, wait_for};

const ANYWHERE: &str = "tcp:127.0.0.1:0";

/// A guest that is protected by a keeper which may fail over.
struct Pair {
    scene: Scene,
    line: Line,
    vm: Vm,
    protect: Program,
}

impl Pair {
    fn new(options: &[&str]) -> (Self, Program) {
        Self::with(options, "30ms")
    }

    /// With this time between checkpoints.
    fn with(options: &[&str], every: &str) -> (Self, Program) {
        Self::of(Scene::new(), options, every)
    }

    fn of(scene: Scene, options: &[&str], every: &str) -> (Self, Program) {
        let options: Vec<&str> = options.iter().chain(&["--lost-after", "1s"]).copied().collect();
        let (keeper, at) = scene.keep_for_failover(ANYWHERE, &options);
        let line = Line::to(&at);
        let vm = scene.guest();
        let protect = scene.protect_to(&vm, &line.uri(), &["--every", every, "--lost-after", "1s"]);
        scene.wait_checkpoint(20, &protect);
        (Self { scene, line, vm, protect }, keeper)
    }

    /// Kills the whole of the VM's host.
    fn kill(&self) {
        kill_host(&self.vm, &self.protect);
    }

    /// Sends a signal to the protection and to QEMU.
    fn signal(&self, signal: Signal) {
        for pid in [self.protect.pid(), self.vm.pid()] {
            kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
        }
    }

    /// Expects the guest to continue at the keeper where it was, and ends it.
    #[track_caller]
    fn assert_continues(&self, keeper: Program) {
        let last = self.vm.last_pass().unwrap();
        let failover = Failover::of(keeper, &self.scene);
        let first = failover.wait_passes(3);
        assert_follows(first, last, 20);
        failover.check_and_end();
    }
}

#[test]
fn a_keeper_continues_the_vm_when_its_host_is_killed_whenever_that_is() {
    needs_newest_qemu!();
    for (options, moment) in [
        (&["--standby", "--when-lost", "100ms", "--fenced"][..], 0),
        (&["--standby", "--when-lost", "100ms", "--fenced"], 11),
        (&["--standby", "--when-lost", "100ms", "--fenced"], 24),
        (&["--when-lost", "100ms", "--fenced"], 17),
    ] {
        let (pair, keeper) = Pair::new(options);
        pair.vm.wait_heartbeats(1).unwrap();
        thread::sleep(Duration::from_millis(moment));
        pair.kill();
        wait_said(&keeper, "the VM continues here");
        pair.assert_continues(keeper);
    }
}

#[test]
fn a_vm_whose_qemu_is_known_to_have_ended_continues_at_once() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::with(&["--standby", "--when-lost", "60m", "--fence", "true"], "400ms");
    // Between two checkpoints: in the middle of one nothing can be said.
    let newest = pair.scene.newest();
    wait_for("the next checkpoint", || (pair.scene.newest() > newest).then_some(()));
    thread::sleep(Duration::from_millis(100));
    let killed = Instant::now();
    kill9(pair.vm.pid()).unwrap();
    wait_said(&keeper, "the VM continues here");
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    pair.assert_continues(keeper);
}

#[test]
fn a_vm_whose_primary_cannot_be_fenced_stays_where_it_is_and_is_protected_again() {
    needs_newest_qemu!();
    let folder = tempfile::tempdir().unwrap();
    let off = folder.path().join("off");
    let fence = format!("test -e {}", off.display());
    let (pair, keeper) = Pair::new(&["--standby", "--when-lost", "100ms", "--fence", &fence]);
    pair.line.cut();
    wait_said(&keeper, "the fence command, failed");
    assert_eq!(pair.vm.run_state().unwrap(), "running");
    pair.line.mend();
    wait_for("the keeper to be back", || pair.protect.stderr().contains("is back").then_some(()));
    let _ = fs::remove_file(pair.scene.checkpoint());
    pair.scene.wait_checkpoint(10, &pair.protect);
    // The standby of the second series has its memory too.
    fs::write(&off, "").unwrap();
    pair.vm.wait_heartbeats(1).unwrap();
    pair.kill();
    wait_said(&keeper, "the VM continues here");
    pair.assert_continues(keeper);
}

#[test]
fn a_host_that_hung_and_comes_back_after_the_failover_does_not_run_its_vm() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::new(&["--standby", "--when-lost", "100ms", "--fenced"]);
    pair.signal(Signal::STOP);
    wait_said(&keeper, "the VM continues here");
    pair.signal(Signal::CONT);
    wait_for("the primary to be told", || {
        pair.protect.stderr().contains("was failed over by the keeper").then_some(())
    });
    assert_ne!(pair.vm.run_state().unwrap(), "running");
    let failover = Failover::of(keeper, &pair.scene);
    failover.wait_passes(2);
    failover.check_and_end();
}

#[test]
fn a_signal_begins_a_failover_of_a_vm_that_is_lost_and_of_no_other() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::new(&["--standby", "--fenced"]);
    keeper.signal(Signal::USR1);
    let before = pair.scene.newest().unwrap();
    pair.scene.wait_checkpoint(before + 10, &pair.protect);
    pair.kill();
    wait_said(&keeper, "may be lost");
    thread::sleep(Duration::from_millis(300));
    assert!(!keeper.stderr().contains("continues here"));
    keeper.signal(Signal::USR1);
    wait_said(&keeper, "the VM continues here");
    pair.assert_continues(keeper);
}

#[test]
fn a_protection_that_was_ended_on_purpose_is_not_failed_over() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::new(&["--standby", "--when-lost", "100ms", "--fenced"]);
    pair.protect.signal(Signal::INT);
    wait_said(&keeper, "its protection has ended");
    thread::sleep(Duration::from_millis(500));
    assert!(!keeper.stderr().contains("continues here"), "{}", keeper.stderr());
    keeper.signal(Signal::INT);
    keeper.wait().success();
}

#[test]
fn a_vm_that_is_lost_while_its_next_base_comes_is_failed_over_on_an_order_alone() {
    needs_newest_qemu!();
    for is_killed in [true, false] {
        let (pair, keeper) = Pair::new(&["--standby", "--when-lost", "2s", "--fenced"]);
        pair.line.cut();
        wait_said(&keeper, "may be lost");
        // The next base takes seconds.
        pair.line.delay(Duration::from_millis(100));
        pair.line.mend();
        wait_for("the keeper to be back", || pair.protect.stderr().contains("is back").then_some(()));
        thread::sleep(Duration::from_millis(500));
        if is_killed {
            pair.kill();
        } else {
            pair.protect.signal(Signal::INT);
        }
        wait_said(&keeper, "the VM is not failed over by itself");
        thread::sleep(Duration::from_millis(2500));
        assert!(!keeper.stderr().contains("the VM continues here"), "{}", keeper.stderr());
        if !is_killed {
            assert_beats(&pair.vm);
            kill9(pair.vm.pid()).unwrap();
        }
        keeper.signal(Signal::USR1);
        wait_said(&keeper, "the VM continues here");
        let failover = Failover::of(keeper, &pair.scene);
        failover.wait_passes(3);
        failover.check_and_end();
    }
}

#[test]
fn a_vm_that_has_got_a_device_while_its_keeper_was_away_is_not_protected_again() {
    needs_newest_qemu!();
    // q35 has no place for a device that is added.
    let (pair, keeper) = Pair::of(Scene::of(|_| machine().kind("pc")), &["--fenced"], "30ms");
    pair.line.cut();
    wait_for("the loss", || pair.protect.stderr().contains("continues without protection").then_some(()));
    let device = json!({ "driver": "virtio-rng-pci", "id": "late" });
    wait_for("QEMU to be out of COLO", || pair.vm.execute("device_add", device.clone()).ok());
    pair.line.mend();
    let refused = pair.protect.wait();
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stderr.contains("late (virtio-rng-pci) was added or removed"), "{}", refused.stderr);
    assert_beats(&pair.vm);
    keeper.signal(Signal::INT);
    keeper.wait().success();
}

#[test]
fn the_standby_of_a_keeper_that_is_killed_ends() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::new(&["--standby", "--fenced"]);
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", keeper.pid())).unwrap();
    let standby: u32 = children.trim().parse().unwrap();
    kill9(keeper.pid()).unwrap();
    wait_gone(standby);
    assert_eq!(pair.vm.run_state().unwrap(), "running");
}

#[test]
fn the_standby_of_a_keeper_that_is_killed_before_it_has_begun_ends() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let line = scene.survivor_line();
    let slow = ["--standby", "--fenced", "--", "sh", "-c", "sleep 1; exec \"$@\"", "sh"];
    let words: Vec<&str> = slow.into_iter().chain(line.iter().map(String::as_str)).collect();
    let (keeper, at) = Scene::keep_in(&scene.kept(), ANYWHERE, &words);
    let vm = scene.guest();
    let _protect = scene.protect_to(&vm, &at, &["--every", "50ms"]);
    let standby = wait_for("the standby", || qemu_below(keeper.pid()));
    kill9(keeper.pid()).unwrap();
    keeper.wait();
    wait_gone(standby);
}

#[test]
fn a_second_keeper_of_one_directory_and_a_failover_without_fencing_are_refused() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::new(&["--standby", "--fenced"]);
    let kept = pair.scene.kept();
    limosa(["keep", ANYWHERE, text(&kept)]).one_line(&[text(&kept)]);
    limosa(["keep", ANYWHERE, text(&kept), "--standby", "--", "qemu"]).misused(&["--fence"]);
    pair.protect.signal(Signal::INT);
    wait_said(&keeper, "its protection has ended");
    keeper.signal(Signal::INT);
    keeper.wait().success();
}

#[test]
fn a_keeper_that_waits_leaves_the_survivor_of_a_failover_by_hand_alone() {
    needs_newest_qemu!();
    for is_protected_again in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let ran = folder.path().join("ran");
        let fence = format!("touch {}", ran.display());
        let (pair, keeper) = Pair::new(&["--standby", "--when-lost", "3s", "--fence", &fence]);
        pair.kill();
        wait_said(&keeper, "may be lost");
        let failover = pair.scene.failover(&["--fenced"]);
        failover.wait_passes(2);
        let mut why = "the VM continues from its checkpoint already";
        if is_protected_again {
            why = "the directory has the checkpoint of another protection";
            let before = pair.scene.newest();
            let again = pair.scene.protect_at(&pair.scene.path("qmp"), &["--every", "50ms"]);
            wait_for("the base of the survivor", || (pair.scene.newest() < before).then_some(()));
            pair.scene.wait_checkpoint(2, &again);
            again.signal(Signal::INT);
            again.wait().success();
        }
        wait_said(&keeper, why);
        assert!(!ran.exists(), "the fence command was run");
        failover.check_and_end();
        keeper.signal(Signal::INT);
        keeper.wait().success();
    }
}

#[test]
fn a_failover_by_hand_beside_the_vm_that_a_keeper_continues_is_refused() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::new(&["--standby", "--when-lost", "100ms", "--fenced"]);
    pair.kill();
    wait_said(&keeper, "the VM continues here");
    let kept = pair.scene.kept();
    let failover = ["protect", "failover", text(&kept), "--fenced", "--", "qemu-system-x86_64"];
    limosa(failover).one_line(&["has continued from this checkpoint already"]);
    pair.assert_continues(keeper);
}
