//! Disks that belong to checkpoints which are kept on another host.
//!
//! `LIMOSA_PROTECT_KILLS=100` kills that often; `LIMOSA_PROTECT_SEED=N` begins with that seed.

use std::thread;
use std::time::Duration;

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{DiskFormat, Program, Vm, kill9, wait_gone};
use rustix::process::Signal;

use crate::disks::Bed;
use crate::line::Line;
use crate::needs_newest_qemu;
use crate::overlays::{assert_never_torn, start_writer, wait_writes};
use crate::scene::{Failover, for_each_seed, text, wait_said};
use crate::stage::{limosa, wait_for, watchdog};

const ANYWHERE: &str = "tcp:127.0.0.1:0";
const STANDBY: [&str; 4] = ["--standby", "--when-lost", "100ms", "--fenced"];

/// A VM with a served disk whose checkpoints a keeper elsewhere has.
struct Pair {
    bed: Bed,
    server: Program,
    line: Line,
    vm: Vm,
    protect: Program,
}

impl Pair {
    /// With a keeper that may fail over, or one that leaves it to its user.
    fn new(format: DiskFormat, standby: bool, more: &[&str]) -> (Self, Program) {
        let bed = Bed::new(format);
        let server = bed.serve(&[]);
        let control = bed.control();
        let (keeper, at) = if standby {
            bed.scene.keep_for_failover(ANYWHERE, &[&STANDBY[..], &["--disk-server", &control]].concat())
        } else {
            bed.scene.keep(ANYWHERE, &[])
        };
        let line = Line::to(&at);
        let vm = start_writer(&bed.scene.machine);
        let more = [&["--every", "50ms", "--lost-after", "1s", "--disk-server", &control], more].concat();
        let protect = bed.scene.protect_to(&vm, &line.uri(), &more);
        bed.scene.wait_checkpoint(5, &protect);
        (Self { bed, server, line, vm, protect }, keeper)
    }

    fn wait_said(&self, what: &str) {
        wait_said(&self.protect, what);
    }

    /// Kills QEMU, the protection and its watchdog, in this order of time.
    fn kill_host(&self, chance: &mut SeededRandom) {
        let mut victims = vec![watchdog(&self.protect).unwrap(), self.protect.pid(), self.vm.pid()];
        // A watchdog that sees a protection end while its VM lives ends epochs.
        let dog = victims.remove(0);
        kill9(dog).unwrap();
        if chance.one_in(2) {
            victims.reverse();
        }
        for victim in victims {
            kill9(victim).unwrap();
            thread::sleep(Duration::from_micros(chance.below(20_000)));
        }
        wait_gone(self.vm.pid());
    }

    fn end_server(self) {
        let Self { bed, server, .. } = self;
        server.signal(Signal::TERM);
        server.wait().success();
        limosa(["img", "check", "-f", bed.format(), text(&bed.path("disk"))]);
    }
}

#[test]
fn a_vm_whose_host_is_killed_continues_at_its_keeper_on_a_disk_of_the_same_instant() {
    needs_newest_qemu!();
    for_each_seed(3, 1, |seed, _| {
        let mut chance = SeededRandom::new(seed);
        let format = if seed.is_multiple_of(2) { DiskFormat::Raw } else { DiskFormat::Qcow2 };
        let standby = !seed.is_multiple_of(3);
        let (pair, keeper) = Pair::new(format, standby, &[]);
        wait_writes(pair.vm.serial(), 2);
        thread::sleep(Duration::from_micros(chance.below(200_000)));
        // The keeper's line ends with the host, or before it.
        if chance.one_in(3) {
            pair.line.cut();
        }
        pair.kill_host(&mut chance);
        assert_never_torn(&pair.vm);
        println!("seed {seed}: {format:?}, standby: {standby}");
        if standby {
            pair.bed.assert_goes_on(Failover::of(keeper, &pair.bed.scene));
        } else {
            wait_for("the keeper to notice", || keeper.stderr().contains("lost").then_some(()));
            pair.bed.assert_goes_on(pair.bed.failover());
        }
        pair.end_server();
    });
}

#[test]
fn a_vm_that_continues_without_its_keeper_has_its_disk_and_begins_again_with_the_next_one() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::new(DiskFormat::Qcow2, false, &[]);
    pair.line.cut();
    pair.wait_said("continues without protection");
    wait_for("the end of the log", || (!pair.bed.path("disk.epochs").exists()).then_some(()));
    wait_writes(pair.vm.serial(), 3);
    wait_for("the keeper to notice", || keeper.stderr().contains("lost").then_some(()));
    let refused = pair.bed.failover().limosa.wait();
    assert!(refused.stderr.contains("its protection has ended"), "{}", refused.stderr);
    std::fs::remove_dir_all(pair.bed.scene.kept()).unwrap();
    std::fs::create_dir(pair.bed.scene.kept()).unwrap();
    pair.line.mend();
    pair.bed.scene.wait_checkpoint(5, &pair.protect);
    assert!(pair.bed.path("disk.epochs").exists());
    pair.kill_host(&mut SeededRandom::new(1));
    assert_never_torn(&pair.vm);
    wait_for("the keeper to notice", || (keeper.stderr().matches("lost").count() >= 2).then_some(()));
    pair.bed.assert_goes_on(pair.bed.failover());
    pair.end_server();
}

#[test]
fn a_vm_that_was_continued_without_protection_is_not_fenced_for_a_checkpoint_without_a_disk() {
    needs_newest_qemu!();
    let (pair, keeper) = Pair::new(DiskFormat::Raw, true, &["--on-loss", "continue"]);
    // The keeper is silent for longer than its primary waits.
    keeper.signal(Signal::STOP);
    pair.wait_said("continues without protection");
    wait_for("the end of the log", || (!pair.bed.path("disk.epochs").exists()).then_some(()));
    pair.line.cut();
    keeper.signal(Signal::CONT);
    wait_for("the keeper to leave it alone", || keeper.stderr().contains("not failed over: ").then_some(()));
    assert!(keeper.stderr().contains("its protection has ended"), "{}", keeper.stderr());
    wait_writes(pair.vm.serial(), 3);
    assert_never_torn(&pair.vm);
}

#[test]
fn a_keeper_that_has_to_continue_a_vm_knows_the_server_of_its_disks() {
    needs_newest_qemu!();
    let bed = Bed::new(DiskFormat::Raw);
    let _server = bed.serve(&[]);
    let (_keeper, at) = bed.scene.keep_for_failover(ANYWHERE, &["--standby", "--fenced"]);
    let vm = start_writer(&bed.scene.machine);
    let refused = bed.scene.protect_to(&vm, &at, &["--disk-server", &bed.control()]).wait();
    refused.one_line(&["knows no server of its disks"]);
    wait_writes(vm.serial(), 2);
}
