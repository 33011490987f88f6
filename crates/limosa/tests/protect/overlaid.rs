//! Disks that QEMU opens itself: an overlay for each checkpoint, and after a failover memory and disk of one instant.
//!
//! `LIMOSA_PROTECT_KILLS=100` kills that often; `LIMOSA_PROTECT_SEED=N` begins with that seed.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{Disk, DiskFormat, Series, Vm, kill9, wait_gone};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::disks::assert_goes_on;
use crate::needs_newest_qemu;
use crate::overlays::{
    assert_never_torn, last_written, linux_on, sectors_written, start_writer, top_file, wait_writes,
};
use crate::scene::{Failover, Scene, for_each_seed, text};
use crate::stage::{Found, Program, limosa, names, start, wait_for, watchdog};

/// A Linux that has a disk in a file, and the folder of the test.
struct Bed {
    scene: Scene,
    format: DiskFormat,
}

impl Bed {
    fn new(format: DiskFormat) -> Self {
        let scene = Scene::of(|folder| {
            Disk::create(&folder.join("disk"), format, 16 << 20).unwrap();
            linux_on(&folder.join("disk"), format).series(Series::Newest)
        });
        Self { scene, format }
    }

    fn disk(&self) -> PathBuf {
        self.scene.path("disk")
    }

    fn format(&self) -> &'static str {
        match self.format {
            DiskFormat::Raw => "raw",
            DiskFormat::Qcow2 => "qcow2",
        }
    }

    fn protect(&self, vm: &Vm) -> Program {
        self.scene.protect(vm, &["--disks", "overlays"])
    }

    fn failover(&self) -> Failover<'_> {
        self.scene.failover(&["--fenced"])
    }

    /// Overlays beside the disk, in their order.
    fn overlays(&self) -> Vec<String> {
        let mut overlays = names(self.disk().parent().unwrap());
        overlays.retain(|name| name.starts_with("disk.overlay-"));
        overlays.sort_by_key(|name| name.rsplit('-').next().unwrap().parse::<u64>().unwrap());
        overlays
    }

    /// The files beside the disk.
    fn beside(&self) -> Vec<String> {
        let mut names = names(self.disk().parent().unwrap());
        names.retain(|name| name.starts_with("disk."));
        names
    }

    /// Expects the disk to be as before the protection.
    fn assert_undone(&self, vm: &Vm) {
        assert_eq!(self.beside(), Vec::<String>::new());
        assert_eq!(top_file(vm, "disk0"), self.disk());
        let nodes = vm.execute("query-named-block-nodes", json!({ "flat": true })).unwrap();
        let ours = |node: &&Value| node["node-name"].as_str().unwrap().starts_with("limosa");
        assert_eq!(nodes.as_array().unwrap().iter().find(ours), None);
    }

    fn check_image(&self) {
        // A QEMU that was killed may leave clusters that nothing refers to.
        if self.format == DiskFormat::Qcow2 {
            limosa(["img", "check", "-r", "leaks", text(&self.disk())]).success();
        }
    }
}

#[test]
fn a_vm_that_was_killed_continues_on_an_image_of_the_instant_of_its_memory() {
    needs_newest_qemu!();
    for format in [DiskFormat::Raw, DiskFormat::Qcow2] {
        let bed = Bed::new(format);
        let vm = start_writer(&bed.scene.machine);
        let keeper = bed.protect(&vm);
        bed.scene.wait_checkpoint(4, &keeper);
        wait_writes(vm.serial(), 5);
        let there = bed.overlays();
        assert!((2..=3).contains(&there.len()), "one that the VM writes to, the next one, a merged one: {there:?}");
        kill9(vm.pid()).unwrap();
        assert_eq!(keeper.wait().status.code(), Some(1));
        assert_never_torn(&vm);
        // The image alone is not its disk.
        let disk = bed.disk();
        for words in [&["info"][..], &["check", "-r", "all"], &["bench", "-w"]] {
            let refused = limosa([&["img"], words, &[text(&disk)]].concat());
            refused.one_line(&["are in overlays beside it", "disk.overlays", "`limosa protect failover`"]);
        }
        // One whose QEMU does not start can be repeated.
        let kept = bed.scene.kept();
        let failed = limosa(["protect", "failover", "--fenced", text(&kept), "--", "false"]);
        assert!(!failed.status.success());
        assert_eq!(bed.beside(), ["disk.overlays"], "{}", failed.stderr);
        assert_goes_on(bed.failover());
        // The VM has continued, and written to it since.
        let again = bed.failover().limosa.wait();
        assert!(again.stderr.contains("has continued from this checkpoint already"), "{}", again.stderr);
        let (line, checkpoint) = (bed.scene.survivor_line(), bed.scene.checkpoint());
        let again = limosa(["run", text(&checkpoint), "--"].into_iter().chain(line.iter().map(String::as_str)));
        assert!(again.stderr.contains("it was written since"), "{}", again.stderr);
        bed.check_image();
    }
}

#[test]
fn a_protection_that_ends_leaves_the_vm_its_image_and_no_checkpoint_to_continue_from() {
    needs_newest_qemu!();
    let bed = Bed::new(DiskFormat::Qcow2);
    let vm = start_writer(&bed.scene.machine);
    let found = Found::of(&vm);
    for signal in [Signal::INT, Signal::KILL] {
        let keeper = bed.protect(&vm);
        bed.scene.wait_checkpoint(2, &keeper);
        wait_writes(vm.serial(), 3);
        assert!(!bed.overlays().is_empty());
        let watchdog = watchdog(&keeper).unwrap();
        keeper.signal(signal);
        keeper.wait();
        wait_gone(watchdog);
        found.assert_same(&vm);
        bed.assert_undone(&vm);
        wait_writes(vm.serial(), 5);
        assert_never_torn(&vm);
        let refused = bed.failover().limosa.wait();
        assert!(refused.stderr.contains("its protection has ended"), "{}", refused.stderr);
        bed.scene.forget();
    }
    drop(vm);
    bed.check_image();
}

#[test]
fn a_vm_that_ends_by_itself_has_all_its_writes_in_its_image() {
    needs_newest_qemu!();
    let bed = Bed::new(DiskFormat::Raw);
    let vm = start_writer(&bed.scene.machine);
    let keeper = bed.protect(&vm);
    bed.scene.wait_checkpoint(2, &keeper);
    wait_writes(vm.serial(), 5);
    vm.execute("quit", json!({})).unwrap();
    let ended = keeper.wait();
    assert!(ended.status.success(), "{}", ended.stderr);
    assert_eq!(bed.beside(), Vec::<String>::new(), "{}", ended.stderr);
    let written = sectors_written(&bed.disk(), bed.format());
    assert!(written >= last_written(&vm), "{written} of {}", last_written(&vm));
}

#[test]
fn a_merge_at_the_end_that_was_cut_off_is_completed() {
    needs_newest_qemu!();
    let bed = Bed::new(DiskFormat::Qcow2);
    let vm = start_writer(&bed.scene.machine);
    let keeper = bed.protect(&vm);
    bed.scene.wait_checkpoint(3, &keeper);
    wait_writes(vm.serial(), 5);
    let (kept, watchdog) = (bed.scene.kept(), watchdog(&keeper).unwrap());
    limosa(["protect", "merge", text(&kept)]).one_line(&[text(&kept)]);
    for victim in [vm.pid(), watchdog, keeper.pid()] {
        kill9(victim).unwrap();
    }
    keeper.wait();
    wait_gone(vm.pid());
    assert_never_torn(&vm);
    let last = last_written(&vm);
    // As if the keeper had ended the protection, and had been killed with QEMU.
    let ledger = bed.scene.path("disk.overlays");
    let mut noted: Value = serde_json::from_slice(&std::fs::read(&ledger).unwrap()).unwrap();
    noted["image"] = json!({ "state": "ending" });
    std::fs::write(&ledger, noted.to_string()).unwrap();
    let refused = bed.failover().limosa.wait();
    refused.one_line(&["its protection has ended", "limosa protect merge DIR"]);
    limosa(["protect", "merge", text(&kept)]).success();
    assert_eq!(bed.beside(), Vec::<String>::new());
    let written = sectors_written(&bed.disk(), bed.format());
    assert!(written >= last, "{written} of {last}");
    bed.check_image();
    // It can be repeated, and the checkpoint is given up.
    limosa(["protect", "merge", text(&kept)]).success();
    bed.failover().limosa.wait().one_line(&["its protection has ended"]);
}

#[test]
fn a_disk_that_is_resized_ends_the_protection_and_none_is_plugged_meanwhile() {
    needs_newest_qemu!();
    for format in [DiskFormat::Raw, DiskFormat::Qcow2] {
        let bed = Bed::new(format);
        let vm = start_writer(&bed.scene.machine);
        let keeper = bed.protect(&vm);
        bed.scene.wait_checkpoint(2, &keeper);
        vm.execute("blockdev-add", json!({ "driver": "null-co", "node-name": "more", "size": 1 << 20 })).unwrap();
        let plugged = vm.execute("device_add", json!({ "driver": "virtio-blk-pci", "drive": "more" })).unwrap_err();
        assert!(plugged.to_string().contains("migrat"), "{plugged}");
        // While an overlay is merged QEMU resizes nothing; the next one may take its place meanwhile.
        wait_for("QEMU to resize the disk", || {
            let disks = vm.execute("query-block", json!({})).unwrap();
            let inserted = disks.as_array().unwrap().iter().find_map(|disk| disk["inserted"]["node-name"].as_str());
            vm.execute("block_resize", json!({ "node-name": inserted.unwrap(), "size": 32 << 20 })).ok()
        });
        let ended = keeper.wait();
        assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
        let why = "has 33554432 bytes, and had 16777216";
        assert!(ended.stderr.contains(why) && ended.stderr.contains("protection ended"), "{}", ended.stderr);
        vm.execute("blockdev-del", json!({ "node-name": "more" })).unwrap();
        bed.assert_undone(&vm);
        wait_writes(vm.serial(), 5);
        assert_never_torn(&vm);
        let info = limosa(["img", "info", "-U", "--output=json", "-f", bed.format(), text(&bed.disk())]).success();
        let info: Value = serde_json::from_str(&info.stdout).unwrap();
        assert_eq!(info["virtual-size"], 32 << 20, "{info}");
        let refused = bed.failover().limosa.wait();
        assert!(refused.stderr.contains("its protection has ended"), "{}", refused.stderr);
    }
}

#[test]
fn disks_and_periods_that_overlays_are_not_for_are_refused_by_name() {
    needs_newest_qemu!();
    let bed = Bed::new(DiskFormat::Qcow2);
    let vm = bed.scene.machine.start().unwrap();
    let found = Found::of(&vm);
    let refused = |more: &[&str], parts: &[&str]| {
        bed.scene.protect(&vm, &[&["--disks", "overlays"], more].concat()).wait().one_line(parts);
        found.assert_same(&vm);
        bed.assert_undone(&vm);
    };
    refused(&["--every", "900ms"], &["overlays of the disks need a period of at least 1 s"]);
    refused(&["--via", "background"], &["overlays cannot be put", "a background snapshot"]);
    let to = format!("unix:{}", bed.scene.path("nobody").display());
    let elsewhere = bed.scene.protect_to(&vm, &to, &["--disks", "overlays"]).wait();
    elsewhere.one_line(&["overlays are files of this host"]);
    // A job of somebody else's works on the disk.
    let target = bed.scene.path("copy");
    Disk::create(&target, DiskFormat::Raw, 16 << 20).unwrap();
    let job = json!({ "job-id": "copy", "device": "disk0-format", "target": text(&target), "sync": "full", "format": "raw",
        "mode": "existing", "speed": 1 });
    vm.execute("drive-backup", job).unwrap();
    refused(&[], &["a backup job (copy) works on the VM's disks"]);
    vm.execute("block-job-cancel", json!({ "device": "copy", "force": true })).unwrap();
}

/// Kills some of them at a random moment, and continues the VM.
fn kill_some(seed: u64) {
    let mut chance = SeededRandom::new(seed);
    let bed = Bed::new(if seed.is_multiple_of(2) { DiskFormat::Raw } else { DiskFormat::Qcow2 });
    let vm = start_writer(&bed.scene.machine);
    let keeper = bed.protect(&vm);
    bed.scene.wait_checkpoint(1, &keeper);
    thread::sleep(Duration::from_micros(chance.below(2_200_000)));
    let watchdog = watchdog(&keeper).unwrap();
    let mut victims = vec![vm.pid(), keeper.pid()];
    let first = victims.swap_remove(usize::try_from(chance.below(2)).unwrap());
    // The keeper's watchdog ends the protection if the VM lives.
    let may_have_ended = first == keeper.pid();
    kill9(first).unwrap();
    let soon = if chance.one_in(2) { 300_000 } else { 5_000 };
    thread::sleep(Duration::from_micros(chance.below(soon)));
    for victim in victims {
        kill9(victim).unwrap();
    }
    keeper.wait();
    wait_gone(watchdog);
    assert_never_torn(&vm);
    let last = last_written(&vm);
    drop(vm);
    // A failover may be killed as well, and is repeated.
    let kept = bed.scene.kept();
    let cut = start(["protect", "failover", "--fenced", text(&kept), "--", "false"]);
    thread::sleep(Duration::from_micros(chance.below(150_000)));
    cut.signal(Signal::KILL);
    cut.wait();
    let failover = bed.failover();
    if !may_have_ended || failover.is_running_soon() {
        assert_goes_on(failover);
    } else {
        let refused = failover.limosa.wait();
        assert!(refused.stderr.contains("its protection has ended"), "{}", refused.stderr);
        // Then the image has all that the VM has written, with the overlays that were not merged yet.
        let (disk, cut) = (bed.disk(), limosa(["protect", "merge", text(&kept)]));
        if cut.status.success() {
            assert_eq!(bed.beside(), Vec::<String>::new(), "{}", cut.stderr);
        } else {
            // In the moment in which the VM may have begun to write to the image.
            let top = bed.overlays().pop().unwrap();
            assert!(refused.stderr.contains(&top) && cut.stderr.contains("may be merged already"), "{}", cut.stderr);
            limosa(["img", "commit", "-q", "-b", text(&disk), text(&bed.scene.path(&top))]).success();
        }
        let written = sectors_written(&bed.disk(), bed.format());
        assert!(written >= last, "{written} of {last}");
    }
    bed.check_image();
}

#[test]
fn in_every_order_of_kills_memory_and_image_are_of_one_instant() {
    needs_newest_qemu!();
    for_each_seed(2, 1, |seed, _| kill_some(seed));
}
