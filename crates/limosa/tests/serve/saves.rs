//! `limosa save --disks overlay --disk-server`: memory, and disks that `limosa serve` serves, are of one instant.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use limosa_testkit::{LinuxGuest, Machine, MemoryBackend, Qmp, Vm, kill9, kill9_after, wait_for};
use serde_json::Value;

use crate::bed::{Bed, Serving};
use crate::needs_qemu;
use crate::overlays::*;
use crate::stage::{
    Found, Program, SOON, limosa, names, save, save_arguments, start as start_limosa, wait_gone, watchdog,
};

/// The way in which QEMU has the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    VhostUser,
    Nbd,
}

/// A server of `image` in the bed, with its control socket `NAME.control`.
fn serve(bed: &Bed, way: Way, name: &str, image: &str) -> Serving {
    let control = format!("{name}.control");
    let words = [image, "--control", &control, "--allow-dir", "."];
    match way {
        Way::VhostUser => bed.serve_blk(name, &words),
        Way::Nbd => bed.serve(name, &words),
    }
}

/// Linux on the disk of this server.
fn machine(bed: &Bed, way: Way, name: &str) -> Machine {
    let guest = LinuxGuest { kernel_words: "no_timer_check".to_owned(), ..LinuxGuest::default() };
    let machine = Machine::linux(guest).backend(MemoryBackend::Memfd);
    let socket = bed.path(name).display().to_string();
    let words = match way {
        Way::VhostUser => [
            "-chardev".to_owned(),
            format!("socket,id=blk,path={socket},reconnect-ms=50"),
            "-device".to_owned(),
            "vhost-user-blk-pci,chardev=blk,id=disk0,num-queues=1".to_owned(),
        ],
        Way::Nbd => [
            "-drive".to_owned(),
            format!("if=none,id=disk0,format=raw,file=nbd+unix:///?socket={socket}"),
            "-device".to_owned(),
            "virtio-blk-pci,drive=disk0".to_owned(),
        ],
    };
    words.iter().fold(machine, |machine, word| machine.argument(word))
}

/// The words that name the server's control socket.
fn with_server(bed: &Bed, name: &str) -> [String; 2] {
    ["--disk-server".to_owned(), bed.path(&format!("{name}.control")).display().to_string()]
}

fn restore(vm: &Vm, snapshot: &Path, more: &[String]) -> limosa_testkit::Ended {
    let words = ["restore", "--qmp", vm.qmp_socket().to_str().unwrap(), snapshot.to_str().unwrap()].map(str::to_owned);
    limosa(words.into_iter().chain(more.iter().cloned()))
}

fn memory_and_served_disk(way: Way, via: &str, memory: &str) {
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let serving = serve(&bed, way, "first", "disk");
    let vm = start_writer(&machine(&bed, way, "first"));
    let snapshot = bed.path("snapshot");
    // It is not known which disk it is.
    let refused = limosa(save_arguments(&vm, &snapshot, &["--disks", "overlay"])).one_line(&["--disk-server"]);
    assert!(!snapshot.exists(), "{refused}");
    let before = wait_writes(vm.serial(), 2);
    let [option, control] = with_server(&bed, "first");
    let report = save(&vm, &snapshot, &["--disks", "overlay", &option, &control, "--via", via]);
    let overlay = &report["overlays"][0];
    assert_eq!(overlay["frozen"], Value::from(bed.path("disk").to_str().unwrap()), "{report}");
    assert_eq!(overlay["export"], "", "{report}");
    let after = wait_writes(vm.serial(), 5);
    let continued = PathBuf::from(overlay["overlay"].as_str().unwrap());
    assert!(continued.exists());
    let frozen = sectors_written(&bed.path("disk"), "qcow2");
    assert!((before..after).contains(&frozen), "{frozen} writes are in the frozen file, {before} and {after} around");
    bed.qemu_img(&["check", "-q", "@disk"]);

    // A disk that is not the frozen one, the one with which the VM continued, and one that nobody can look at.
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@other", "64M"]);
    let other = serve(&bed, way, "third", "other");
    let destination = machine(&bed, way, "third").start_incoming().unwrap();
    restore(&destination, &snapshot, &with_server(&bed, "third")).one_line(&["does not stand directly on"]);
    restore(&destination, &snapshot, &[]).one_line(&["--disk-server"]);
    restore(&destination, &snapshot, &with_server(&bed, "first")).one_line(&["is not served by"]);
    drop(destination);
    other.stop();
    let own = fresh_overlay(bed.path("").as_path(), "own", &bed.path("disk"), "qcow2");
    let second = serve(&bed, way, "second", "own");
    let restored = machine(&bed, way, "second").start_incoming().unwrap();
    let [option, control] = with_server(&bed, "second");
    let words = [option, control, "--memory".to_owned(), memory.to_owned(), "--json".to_owned()];
    let report = restore(&restored, &snapshot, &words).json();
    assert_eq!(report["mode"], memory, "{report}");
    wait_writes(restored.serial(), 4);
    let first = first_written(&restored);
    assert!((frozen..=frozen + 2).contains(&first), "{frozen} on the disk, and the guest's first is {first}");
    assert_never_torn(&restored);
    restored.stop().unwrap();
    let written = last_written(&restored);
    drop(restored);
    second.stop();
    assert!(sectors_written(&own, "qcow2") >= written);
    assert_eq!(sectors_written(&bed.path("disk"), "qcow2"), frozen, "the frozen file was written to");
    let used = serve(&bed, way, "used", "own");
    let destination = machine(&bed, way, "used").start_incoming().unwrap();
    restore(&destination, &snapshot, &with_server(&bed, "used")).one_line(&["has been written to"]);
    drop(destination);
    used.stop();

    wait_writes(vm.serial(), 2);
    assert_never_torn(&vm);
    vm.stop().unwrap();
    let written = last_written(&vm);
    drop(vm);
    serving.stop();
    assert!(sectors_written(&continued, "qcow2") >= written);
    bed.qemu_img(&["check", "-q", continued.to_str().unwrap()]);
}

#[test]
fn memory_and_a_disk_over_vhost_user_are_of_one_instant() {
    needs_qemu!();
    // The server waits for the guest's memory, too.
    memory_and_served_disk(Way::VhostUser, "file", "lazy");
}

#[test]
fn memory_and_a_disk_over_nbd_are_of_one_instant() {
    needs_qemu!();
    memory_and_served_disk(Way::Nbd, "socket", "eager");
}

/// How many overlays there are.
fn overlays(bed: &Bed) -> usize {
    let is_overlay = |name: &&String| name.contains(".overlay-") && !name.ends_with(".continued");
    names(bed.path("").as_path()).iter().filter(is_overlay).count()
}

/// A VM whose saves are killed.
struct Victim {
    bed: Bed,
    way: Way,
    serving: Serving,
    vm: Vm,
    found: Found,
    lasts: Duration,
    kept: usize,
    undone: usize,
}

impl Victim {
    fn new(way: Way) -> Self {
        let bed = Bed::new();
        bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
        let serving = serve(&bed, way, "first", "disk");
        let vm = start_writer(&machine(&bed, way, "first"));
        let found = Found::of(&vm);
        let mut this = Self { bed, way, serving, vm, found, lasts: Duration::ZERO, kept: 0, undone: 0 };
        let (top, begun) = (this.image(), Instant::now());
        this.start().wait().success();
        this.lasts = begun.elapsed();
        this.check_outcome(&top);
        this
    }

    fn start(&self) -> Program {
        let [option, control] = with_server(&self.bed, "first");
        let more = ["--disks", "overlay", &option, &control, "--max-bandwidth", "96M"];
        start_limosa(save_arguments(&self.vm, &self.bed.path("snapshot"), &more))
    }

    /// The image that is served.
    fn image(&self) -> String {
        let list = self.bed.refused(&["ctl", "first.control", "list", "--json"]).json();
        list["exports"][0]["image"].as_str().unwrap().to_owned()
    }

    fn overlays(&self) -> usize {
        overlays(&self.bed)
    }

    /// `top` was the disk's image before.
    #[track_caller]
    fn check_outcome(&mut self, top: &str) {
        // The watchdog holds the monitor as long as it has something to do.
        drop(Qmp::connect(&self.vm.qmp_socket(), SOON).unwrap());
        self.found.assert_same(&self.vm);
        wait_writes(self.vm.serial(), 2);
        assert_never_torn(&self.vm);
        let (snapshot, image) = (self.bed.path("snapshot"), self.image());
        if snapshot.exists() {
            assert_ne!(image, top, "the snapshot refers to the image, and the VM writes to it");
            let top = self.bed.path("").join(top);
            let own = fresh_overlay(self.bed.path("").as_path(), "own", &top, "qcow2");
            let second = serve(&self.bed, self.way, "second", "own");
            let restored = machine(&self.bed, self.way, "second").start_incoming().unwrap();
            restore(&restored, &snapshot, &with_server(&self.bed, "second")).success();
            wait_writes(restored.serial(), 2);
            assert_never_torn(&restored);
            drop(restored);
            second.stop();
            std::fs::remove_file(own).unwrap();
            std::fs::remove_file(snapshot).unwrap();
            self.kept += 1;
        } else {
            assert_eq!(image, top, "there is no snapshot, and the VM continues elsewhere");
            self.undone += 1;
        }
        assert_eq!(self.overlays(), self.kept, "an unused overlay, or one too few");
    }

    /// Stops the VM and looks for every write that the guest was told is durable.
    #[track_caller]
    fn end(self) {
        self.vm.stop().unwrap();
        let (image, last) = (self.image(), last_written(&self.vm));
        drop(self.vm);
        self.serving.stop();
        let image = self.bed.path("").join(image);
        let on_disk = sectors_written(&image, "qcow2");
        println!("{:?}: {} kept, {} undone, {on_disk} writes", self.way, self.kept, self.undone);
        assert!(on_disk >= last, "{last} were durable, {on_disk} are there");
        self.bed.qemu_img(&["check", "-q", image.to_str().unwrap()]);
        assert!(self.undone >= 1, "no kill came before the end: {} kept", self.kept);
    }
}

/// Rounds of kills; more are run by hand.
fn rounds() -> u32 {
    std::env::var("LIMOSA_SERVED_SAVE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(8)
}

fn killed_alone(way: Way) {
    let mut victim = Victim::new(way);
    for n in 0..rounds() {
        let top = victim.image();
        let saving = victim.start();
        // Half of them anywhere, and half near the end, where the disks change.
        let tenths = if n % 2 == 0 { n % 10..n % 10 + 1 } else { 7..10 };
        let window = victim.lasts * tenths.start / 10..victim.lasts * tenths.end / 10;
        let kill = kill9_after(saving.pid(), window, u64::from(n) + 1);
        let after = kill.after;
        kill.wait();
        if saving.wait().status.success() {
            victim.lasts = victim.lasts.min(after);
        }
        victim.check_outcome(&top);
    }
    victim.end();
}

#[test]
fn no_write_is_lost_when_limosa_is_killed_over_vhost_user() {
    needs_qemu!();
    killed_alone(Way::VhostUser);
}

#[test]
fn no_write_is_lost_when_limosa_is_killed_over_nbd() {
    needs_qemu!();
    killed_alone(Way::Nbd);
}

#[test]
fn resume_puts_a_served_disk_right_when_limosa_and_its_watchdog_are_killed() {
    needs_qemu!();
    let mut victim = Victim::new(Way::VhostUser);
    for n in 0..rounds() / 2 {
        let top = victim.image();
        let begun = Instant::now();
        let saving = victim.start();
        let Some(watchdog) = watchdog(&saving) else { panic!("no watchdog: {}", saving.stderr()) };
        std::thread::sleep(victim.lasts * (n % 5 + 3) / 9);
        if saving.is_running() {
            // limosa reaps its watchdog when it ends by itself, at any moment: then there is nothing to kill.
            let _ = kill9(watchdog);
        } else {
            victim.lasts = victim.lasts.min(begun.elapsed());
        }
        drop(saving);
        wait_gone(watchdog);
        let [option, control] = with_server(&victim.bed, "first");
        limosa(["resume", "--qmp", victim.vm.qmp_socket().to_str().unwrap(), &option, &control]).success();
        victim.check_outcome(&top);
    }
    victim.end();
}

#[test]
fn a_served_disk_comes_back_when_the_save_or_its_qemu_ends() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    let serving = serve(&bed, Way::Nbd, "first", "disk");
    let vm = start_writer(&machine(&bed, Way::Nbd, "first"));
    let [option, control] = with_server(&bed, "first");
    let image = || {
        let list = bed.refused(&["ctl", "first.control", "list", "--json"]).json();
        list["exports"][0]["image"].as_str().unwrap().to_owned()
    };
    let overlays = || overlays(&bed);
    let start = |rate: &str| {
        let more = ["--disks", "overlay", &option, &control, "--max-bandwidth", rate];
        start_limosa(save_arguments(&vm, &bed.path("snapshot"), &more))
    };
    let saving = start("8M");
    wait_for("the prepared overlay", || (overlays() == 1).then_some(()));
    saving.signal(rustix::process::Signal::INT);
    assert!(!saving.wait().status.success());
    assert_eq!((image().as_str(), overlays()), ("disk", 0));
    wait_writes(vm.serial(), 2);
    let saving = start("8M");
    wait_for("the prepared overlay", || (overlays() == 1).then_some(()));
    vm.stop().unwrap();
    kill9(vm.pid()).unwrap();
    let last = last_written(&vm);
    assert!(!saving.wait().status.success());
    drop(vm);
    assert_eq!((image().as_str(), overlays()), ("disk", 0));
    serving.stop();
    assert!(sectors_written(&bed.path("disk"), "qcow2") >= last);
}

#[test]
fn a_server_that_cannot_freeze_a_disk_is_found_before_the_vm_is_touched() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    // It may not create files.
    let serving = bed.serve("first", &["disk", "--control", "first.control"]);
    let vm = machine(&bed, Way::Nbd, "first").start().unwrap();
    let found = Found::of(&vm);
    let snapshot = bed.path("snapshot");
    let refused = |words: &[&str], says: &[&str]| {
        limosa(save_arguments(&vm, &snapshot, words)).one_line(says);
        found.assert_same(&vm);
        assert!(!snapshot.exists());
    };
    let [option, control] = with_server(&bed, "first");
    refused(&["--disks", "overlay", &option, &control], &["--allow-dir"]);
    let misused = limosa(save_arguments(&vm, &snapshot, &[&option, &control]));
    assert!(misused.status.code() == Some(2) && misused.stderr.contains("--disks overlay"), "{}", misused.stderr);
    refused(&["--disks", "overlay", &option, "/nonexistent"], &["does not answer"]);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@other", "64M"]);
    let other = bed.serve("second", &["other", "--control", "second.control"]);
    let second = with_server(&bed, "second");
    refused(&["--disks", "overlay", &option, &second[1]], &["is not served by"]);
    refused(&["--disks", "overlay", &option, &control, &option, &second[1]], &["serves no disk of this VM"]);
    other.stop();
    drop(vm);
    serving.stop();
}
