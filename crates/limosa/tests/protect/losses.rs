//! The keeper on another host is lost, and comes back.

use std::thread;
use std::time::Duration;

use limosa_testkit::{Program, Vm};
use rustix::process::Signal;
use serde_json::json;

use crate::line::Line;
use crate::needs_newest_qemu;
use crate::scene::{Scene, text};
use crate::stage::{Found, assert_beats, limosa, load_in_stock_qemu, wait_for};

const ANYWHERE: &str = "tcp:127.0.0.1:0";

/// A protected guest whose line to its keeper can be cut.
struct Protected {
    scene: Scene,
    keeper: Program,
    line: Line,
    vm: Vm,
    found: Found,
    protect: Program,
}

impl Protected {
    fn new(more: &[&str]) -> Self {
        let scene = Scene::new();
        let (keeper, at) = scene.keep(ANYWHERE, &["--lost-after", "1s"]);
        let line = Line::to(&at);
        let vm = scene.guest();
        let found = Found::of(&vm);
        let more: Vec<&str> = ["--every", "30ms", "--lost-after", "1s", "--json"].iter().chain(more).copied().collect();
        let protect = scene.protect_to(&vm, &line.uri(), &more);
        scene.wait_checkpoint(10, &protect);
        Self { scene, keeper, line, vm, found, protect }
    }

    fn wait_said(&self, what: &str, times: usize) {
        wait_for(what, || {
            assert!(self.protect.is_running(), "limosa ended: {}", self.protect.stderr());
            (self.protect.stderr().matches(what).count() >= times).then_some(())
        });
    }

    /// Waits until the VM is protected again, by a series that has a base of its own.
    fn wait_protected_again(&self, times: usize) {
        self.wait_said("is back; it gets all of the VM", times);
        let _ = std::fs::remove_file(self.scene.checkpoint());
        self.scene.wait_checkpoint(5, &self.protect);
    }

    /// Ends the protection; the VM is as it was found.
    fn end(self, bases: u64) {
        self.protect.signal(Signal::INT);
        let report = self.protect.wait().json();
        assert_eq!((report["end"].as_str(), report["bases"].as_u64()), (Some("asked"), Some(bases)), "{report}");
        self.found.assert_same(&self.vm);
        assert_beats(&self.vm);
        load_in_stock_qemu(&self.scene.machine, &self.scene.checkpoint(), 0);
        drop(self.keeper);
    }
}

#[test]
fn a_vm_whose_line_is_cut_continues_and_is_protected_again_when_it_is_back() {
    needs_newest_qemu!();
    let protected = Protected::new(&[]);
    for times in 1..=3 {
        thread::sleep(Duration::from_millis(7 * u64::try_from(times).unwrap()));
        protected.line.cut();
        protected.wait_said("continues without protection", times);
        assert_eq!(protected.vm.run_state().unwrap(), "running");
        assert_beats(&protected.vm);
        protected.line.mend();
        protected.wait_protected_again(times);
    }
    protected.end(4);
}

#[test]
fn a_line_on_which_nothing_passes_any_more_is_as_one_that_was_cut() {
    needs_newest_qemu!();
    let protected = Protected::new(&[]);
    protected.line.stall(true);
    protected.wait_said("continues without protection", 1);
    assert_beats(&protected.vm);
    protected.line.cut();
    protected.line.mend();
    protected.wait_protected_again(1);
    protected.end(2);
}

#[test]
fn a_keeper_that_hangs_costs_the_vm_no_more_than_the_stall_timeout() {
    needs_newest_qemu!();
    let protected = Protected::new(&["--stall-timeout", "500ms"]);
    protected.keeper.signal(Signal::STOP);
    protected.wait_said("continues without protection", 1);
    assert_beats(&protected.vm);
    protected.keeper.signal(Signal::CONT);
    protected.wait_protected_again(1);
    protected.end(2);
}

#[test]
fn a_vm_that_is_to_stand_still_does_so_until_the_line_is_back() {
    needs_newest_qemu!();
    let protected = Protected::new(&["--on-loss", "pause"]);
    for times in 1..=2 {
        protected.line.cut();
        protected.wait_said("stands still until it is back", times);
        let passes = protected.vm.last_pass();
        thread::sleep(Duration::from_millis(500));
        assert_ne!(protected.vm.run_state().unwrap(), "running");
        assert_eq!(protected.vm.last_pass(), passes);
        protected.line.mend();
        protected.wait_protected_again(times);
        // A stop for a look at its memory would be lost in a checkpoint's own.
        protected.vm.wait_heartbeats(2).unwrap();
    }
    protected.line.stall(true);
    protected.wait_said("stands still until it is back", 3);
    thread::sleep(Duration::from_millis(300));
    assert_ne!(protected.vm.run_state().unwrap(), "running");
    protected.end(3);
}

#[test]
fn a_vm_that_stands_still_is_its_users_to_continue() {
    needs_newest_qemu!();
    let protected = Protected::new(&["--on-loss", "pause"]);
    protected.line.cut();
    protected.wait_said("stands still until it is back", 1);
    // Between two checkpoints it was stopped; in the middle of one QEMU has no command for it but this.
    if protected.vm.execute("cont", json!({})).is_err() {
        protected.vm.execute("x-colo-lost-heartbeat", json!({})).unwrap();
    }
    protected.wait_said("the VM was continued without protection", 1);
    assert_beats(&protected.vm);
    protected.line.mend();
    protected.wait_protected_again(1);
    protected.end(2);
}

#[test]
fn a_vm_that_was_failed_over_meanwhile_does_not_run_at_its_old_place() {
    needs_newest_qemu!();
    for on_loss in ["continue", "pause"] {
        let protected = Protected::new(&["--on-loss", on_loss]);
        protected.line.cut();
        protected.wait_said("is lost", 1);
        wait_for("the keeper to notice", || protected.keeper.stderr().contains("may be lost").then_some(()));
        let failover = protected.scene.failover(&["--fenced"]);
        failover.wait_passes(2);
        protected.line.mend();
        let ended = protected.protect.wait();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains("was failed over by the keeper"), "{}", ended.stderr);
        assert!(ended.stderr.contains("end it"), "{}", ended.stderr);
        thread::sleep(Duration::from_millis(200));
        assert_ne!(protected.vm.run_state().unwrap(), "running", "{on_loss}");
        // The one that stood still is in COLO, whose end would start it.
        let refused = limosa(["resume", "--qmp", text(&protected.vm.qmp_socket())]);
        assert_eq!(refused.status.code(), Some(1), "{on_loss}: {}", refused.stderr);
        if on_loss == "pause" {
            assert!(refused.stderr.contains("was failed over"), "{}", refused.stderr);
        }
        assert_ne!(protected.vm.run_state().unwrap(), "running", "{on_loss}");
        failover.check_and_end();
    }
}
