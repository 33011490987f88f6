//! limosa, or limosa and its watchdog, are killed at random moments of a save with overlays, while the guest writes.
//!
//! Law: the VM runs, on the disks that it had, or, where a complete snapshot has its name, on overlays over them; no
//! unused overlay is left, and no write is lost.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::needs_qemu;
use crate::overlays::*;
use crate::stage::*;
use limosa_testkit::{Disk, DiskFormat, Qmp, Vm, kill9, kill9_after};

struct Victim {
    folder: tempfile::TempDir,
    vm: Vm,
    found: Found,
    via: &'static str,
    /// How long a save takes that is not killed: no longer than the shortest that was over before its kill came, since
    /// the machine may have been busier when the first was measured.
    lasts: Duration,
    /// How many overlays were kept because the snapshot was there, and how many kills left the disks as they were.
    kept: u32,
    undone: u32,
}

impl Victim {
    fn new(via: &'static str) -> Self {
        let folder = limosa_testkit::scratch().unwrap();
        let image = folder.path().join("disk.raw");
        Disk::create(&image, DiskFormat::Raw, 64 << 20).unwrap();
        let vm = start_writer(&linux_on(&image, DiskFormat::Raw));
        let found = Found::of(&vm);
        let mut this = Self { folder, vm, found, via, lasts: Duration::ZERO, kept: 0, undone: 0 };
        let begun = Instant::now();
        let top = this.top();
        this.start().wait().success();
        this.lasts = begun.elapsed();
        this.check_outcome(&top);
        this
    }

    fn snapshot(&self) -> PathBuf {
        self.folder.path().join("snapshot")
    }

    fn start(&self) -> Program {
        let more = ["--disks", "overlay", "--via", self.via, "--max-bandwidth", "96M"];
        start(save_arguments(&self.vm, &self.snapshot(), &more))
    }

    fn top(&self) -> PathBuf {
        top_file(&self.vm, "disk0")
    }

    /// `top` is the file that the VM wrote to before.
    #[track_caller]
    fn check_outcome(&mut self, top: &PathBuf) {
        // The watchdog holds the monitor as long as it has something to do.
        drop(Qmp::connect(&self.vm.qmp_socket(), SOON).unwrap());
        self.found.assert_same(&self.vm);
        wait_writes(self.vm.serial(), 2);
        assert_never_torn(&self.vm);
        let now = self.top();
        if self.snapshot().exists() {
            assert_ne!(&now, top, "the snapshot refers to the disk, and the VM writes to it");
            let format = if top.extension().is_some_and(|end| end == "raw") { "raw" } else { "qcow2" };
            let own = fresh_overlay(self.folder.path(), "own", top, format);
            let restored = linux_on(&own, DiskFormat::Qcow2).start_incoming().unwrap();
            let socket = restored.qmp_socket().display().to_string();
            limosa(["restore", "--qmp", &socket, &self.snapshot().display().to_string()]).success();
            wait_writes(restored.serial(), 2);
            assert_never_torn(&restored);
            drop(restored);
            std::fs::remove_file(own).unwrap();
            std::fs::remove_file(self.snapshot()).unwrap();
            self.kept += 1;
        } else {
            assert_eq!(&now, top, "there is no snapshot, and the VM goes on elsewhere");
            self.undone += 1;
        }
        let left = names(self.folder.path());
        let overlays = usize::try_from(self.kept).unwrap();
        assert_eq!(left.len(), 1 + overlays, "an unused overlay, or one too few: {left:?}");
    }

    /// Stops the VM and looks for every write that the guest was told is durable.
    #[track_caller]
    fn end(self) {
        self.vm.stop().unwrap();
        let (top, last) = (self.top(), last_written(&self.vm));
        let format = if top.extension().is_some_and(|end| end == "raw") { "raw" } else { "qcow2" };
        let on_disk = sectors_written(&top, format);
        println!("{}: {} kept, {} undone, {on_disk} writes", self.via, self.kept, self.undone);
        assert!(on_disk >= last, "{last} were durable, {on_disk} are there");
        drop(self.vm);
        for name in names(self.folder.path()) {
            if !name.ends_with(".raw") {
                qemu_img(&["check", "-q", self.folder.path().join(name).to_str().unwrap()]);
            }
        }
        assert!(self.undone >= 1, "no kill came before the end: {} kept", self.kept);
    }
}

fn killed_alone(via: &'static str) {
    let mut victim = Victim::new(via);
    let spread = (0..10).map(|n| n..n + 1);
    let end = (0..12).map(|_| 7..10);
    for (seed, tenths) in (1..).zip(spread.chain(end)) {
        let top = victim.top();
        let saving = victim.start();
        let window = victim.lasts * tenths.start / 10..victim.lasts * tenths.end / 10;
        let kill = kill9_after(saving.pid(), window, seed);
        let after = kill.after;
        kill.wait();
        if saving.wait().status.success() {
            victim.lasts = victim.lasts.min(after);
        }
        victim.check_outcome(&top);
    }
    victim.end();
}

fn killed_with_its_watchdog(via: &'static str) {
    let mut victim = Victim::new(via);
    for n in 0..10 {
        let top = victim.top();
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
        limosa(["resume", "--qmp", &victim.vm.qmp_socket().display().to_string()]).success();
        victim.check_outcome(&top);
    }
    victim.end();
}

#[test]
fn no_write_is_lost_when_limosa_is_killed_while_qemu_writes_the_file() {
    needs_qemu!();
    killed_alone("file");
}

#[test]
fn no_write_is_lost_when_limosa_is_killed_while_it_writes_the_file() {
    needs_qemu!();
    killed_alone("socket");
}

#[test]
fn resume_puts_the_disks_right_when_limosa_and_its_watchdog_are_killed() {
    needs_qemu!();
    killed_with_its_watchdog("file");
    killed_with_its_watchdog("socket");
}
