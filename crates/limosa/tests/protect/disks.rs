//! Disks that belong to the checkpoints: after a failover memory and disk are of one instant, in every order of kills.
//!
//! `LIMOSA_PROTECT_KILLS=100` kills that often; `LIMOSA_PROTECT_SEED=N` begins with that seed.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{Disk, DiskFormat, LinuxGuest, Machine, MemoryBackend, Series, Vm, kill9};
use rustix::process::Signal;

use crate::needs_newest_qemu;
use crate::overlays::{assert_never_torn, start_writer, wait_writes};
use crate::scene::{Failover, Scene, for_each_seed, text};
use crate::stage::{Program, limosa, start, wait_for};

/// How the VM reaches its disk.
#[derive(Clone, Copy)]
pub(crate) enum Transport {
    Nbd,
    VhostUser,
}

/// A Linux whose disk is served, and the folder of the test.
pub(crate) struct Bed {
    pub(crate) scene: Scene,
    pub(crate) format: DiskFormat,
    transport: Transport,
}

impl Bed {
    /// Over NBD.
    pub(crate) fn new(format: DiskFormat) -> Self {
        Self::over(Transport::Nbd, format, |machine, _| machine)
    }

    /// Over one of both, for a machine that has more; the sockets of that are in the folder.
    pub(crate) fn over(transport: Transport, format: DiskFormat, more: impl FnOnce(Machine, &Path) -> Machine) -> Self {
        let guest = LinuxGuest { kernel_words: "no_timer_check".to_owned(), ..LinuxGuest::default() };
        let bed = Self::with(transport, format, |folder| more(Machine::linux(guest), folder));
        Disk::create(&bed.path("disk"), format, 16 << 20).unwrap();
        bed
    }

    /// The folder of a test with this machine, which gets the disk over NBD.
    pub(crate) fn of(format: DiskFormat, machine: impl FnOnce(&Path) -> Machine) -> Self {
        Self::with(Transport::Nbd, format, machine)
    }

    fn with(transport: Transport, format: DiskFormat, machine: impl FnOnce(&Path) -> Machine) -> Self {
        let scene = Scene::of(|folder| {
            let socket = folder.join("disk.socket");
            let socket = socket.display();
            let machine = machine(folder).series(Series::Newest);
            let (machine, words) = match transport {
                Transport::Nbd => {
                    let server = format!("server.type=unix,server.path={socket}");
                    let node = format!("driver=nbd,node-name=disk,{server},export=vm,reconnect-delay=10");
                    (machine, ["-blockdev".to_owned(), node, "virtio-blk-pci,id=disk0,drive=disk".to_owned()])
                }
                Transport::VhostUser => {
                    let chardev = format!("socket,id=blk,path={socket},reconnect-ms=50");
                    let device = "vhost-user-blk-pci,chardev=blk,id=disk0,num-queues=1".to_owned();
                    (machine.backend(MemoryBackend::Memfd), ["-chardev".to_owned(), chardev, device])
                }
            };
            let [back, what, device] = words;
            [back, what, "-device".to_owned(), device].iter().fold(machine, |machine, word| machine.argument(word))
        });
        Self { scene, format, transport }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scene.path(name)
    }

    pub(crate) fn format(&self) -> &'static str {
        match self.format {
            DiskFormat::Raw => "raw",
            DiskFormat::Qcow2 => "qcow2",
        }
    }

    pub(crate) fn control(&self) -> String {
        self.path("control").display().to_string()
    }

    pub(crate) fn serve(&self, more: &[&str]) -> Program {
        self.try_serve(more).unwrap()
    }

    /// Starts the disk server; `None`: the image is not as of the epoch that was asked for.
    pub(crate) fn try_serve(&self, more: &[&str]) -> Option<Program> {
        for left in ["control", "disk.socket"] {
            let _ = std::fs::remove_file(self.path(left));
        }
        let (disk, socket) = (self.path("disk"), self.path("disk.socket").display().to_string());
        let (way, at) = match self.transport {
            Transport::Nbd => ("--nbd", format!("unix:{socket}")),
            Transport::VhostUser => ("--vhost-user-blk", socket),
        };
        let (folder, control) = (disk.parent().unwrap(), self.control());
        let words = ["serve", "-f", self.format(), text(&disk), "--name", "vm", way, &at];
        let steered = ["--control", &control, "--allow-dir", text(folder)];
        let server = start(words.iter().chain(&steered).chain(more));
        let is_served = wait_for("the disk server", || {
            let exists = self.path("control").exists();
            (exists || !server.is_running()).then_some(exists)
        });
        if is_served {
            return Some(server);
        }
        let said = server.wait().stderr;
        assert!(said.contains("is not there"), "limosa ended: {said}");
        None
    }

    fn protect(&self, vm: &Vm) -> Program {
        self.scene.protect(vm, &["--every", "50ms", "--disk-server", &self.control()])
    }

    pub(crate) fn failover(&self) -> Failover<'_> {
        self.scene.failover(&["--fenced", "--disk-server", &self.control()])
    }

    /// As [`assert_goes_on`], and no log is left.
    pub(crate) fn assert_goes_on(&self, failover: Failover<'_>) {
        assert_goes_on(failover);
        assert!(!self.path("disk.epochs").exists());
    }
}

/// Expects the VM to write to its disk, and to find there what its memory knows, and no more.
pub(crate) fn assert_goes_on(failover: Failover<'_>) {
    wait_for("writes of the VM that continues", || {
        let said = failover.limosa.stdout();
        assert!(!said.contains("torn"), "memory and disk are of different instants: {said}");
        let running = failover.limosa.is_running();
        let count = said.matches("disk ").count();
        assert!(running || count >= 5, "limosa ended: {}", failover.limosa.stderr());
        (count >= 5).then_some(())
    });
    failover.end();
}

/// Protects a VM that writes, and kills it after some checkpoints. Returns the disk server.
fn kill_vm(bed: &Bed) -> Program {
    let server = bed.serve(&[]);
    let vm = start_writer(&bed.scene.machine);
    let keeper = bed.protect(&vm);
    bed.scene.wait_checkpoint(5, &keeper);
    wait_writes(vm.serial(), 10);
    kill9(vm.pid()).unwrap();
    assert_eq!(keeper.wait().status.code(), Some(1));
    assert_never_torn(&vm);
    server
}

#[test]
fn a_vm_that_was_killed_continues_on_a_disk_of_the_instant_of_its_memory() {
    needs_newest_qemu!();
    for format in [DiskFormat::Raw, DiskFormat::Qcow2] {
        let bed = Bed::new(format);
        let server = kill_vm(&bed);
        bed.assert_goes_on(bed.failover());
        // The VM has continued, and written to it since.
        let again = bed.failover().limosa.wait();
        assert!(again.stderr.contains("has continued from this checkpoint already"), "{}", again.stderr);
        let (disk_server, line, checkpoint) = (bed.control(), bed.scene.survivor_line(), bed.scene.checkpoint());
        let words = ["run", text(&checkpoint), "--disk-server", &disk_server, "--"];
        let again = limosa(words.into_iter().chain(line.iter().map(String::as_str)));
        assert!(again.stderr.contains("it was written since"), "{}", again.stderr);
        server.signal(Signal::TERM);
        server.wait().success();
    }
}

#[test]
fn a_disk_over_vhost_user_goes_with_the_checkpoints_as_one_over_nbd() {
    needs_newest_qemu!();
    let bed = Bed::over(Transport::VhostUser, DiskFormat::Qcow2, |machine, _| machine);
    let server = kill_vm(&bed);
    bed.assert_goes_on(bed.failover());
    server.signal(Signal::TERM);
    server.wait().success();
}

#[test]
fn a_protection_that_ends_leaves_the_vm_its_disk_and_no_checkpoint_to_continue_from() {
    needs_newest_qemu!();
    let bed = Bed::new(DiskFormat::Qcow2);
    let server = bed.serve(&[]);
    let vm = start_writer(&bed.scene.machine);
    for signal in [Signal::INT, Signal::KILL] {
        let keeper = bed.protect(&vm);
        bed.scene.wait_checkpoint(3, &keeper);
        wait_writes(vm.serial(), 3);
        assert!(bed.path("disk.epochs").exists());
        keeper.signal(signal);
        keeper.wait();
        wait_for("the end of the log", || (!bed.path("disk.epochs").exists()).then_some(()));
        wait_writes(vm.serial(), 5);
        assert_never_torn(&vm);
        let refused = bed.failover().limosa.wait();
        assert!(refused.stderr.contains("its protection has ended"), "{}", refused.stderr);
        bed.scene.forget();
    }
    drop(vm);
    server.signal(Signal::TERM);
    server.wait().success();
    limosa(["img", "check", text(&bed.path("disk"))]).success();
}

/// Kills some of them at a random moment, and continues the VM.
fn kill_some(seed: u64) {
    let mut chance = SeededRandom::new(seed);
    let bed = Bed::new(if seed.is_multiple_of(2) { DiskFormat::Raw } else { DiskFormat::Qcow2 });
    let server = bed.serve(&[]);
    let vm = start_writer(&bed.scene.machine);
    let keeper = bed.protect(&vm);
    bed.scene.wait_checkpoint(2, &keeper);
    thread::sleep(Duration::from_micros(chance.below(400_000)));
    let mut victims = vec![vm.pid(), keeper.pid(), server.pid()];
    // The keeper's watchdog ends protection if the VM lives; what is kept is no checkpoint of it any more.
    let mut may_have_ended = false;
    // At first one or more of them; the others end soon after, as their hosts do.
    let first = 1 + chance.below(3);
    for number in 0..3 {
        let victim = victims.swap_remove(usize::try_from(chance.below(victims.len() as u64)).unwrap());
        if number >= first {
            thread::sleep(Duration::from_micros(chance.below(30_000)));
        }
        kill9(victim).unwrap();
        may_have_ended |= victim == keeper.pid() && victims.contains(&vm.pid());
    }
    keeper.wait();
    server.wait();
    assert_never_torn(&vm);
    drop(vm);
    let epoch = bed.scene.newest().unwrap().to_string();
    let Some(server) = bed.try_serve(&["--fenced", "--epoch", &epoch]) else {
        assert!(may_have_ended);
        return;
    };
    let failover = bed.failover();
    if may_have_ended && !failover.is_running_soon() {
        let refused = failover.limosa.wait();
        assert!(refused.stderr.contains("its protection has ended"), "{}", refused.stderr);
    } else {
        bed.assert_goes_on(failover);
    }
    server.signal(Signal::TERM);
    server.wait().success();
    if bed.format == DiskFormat::Qcow2 {
        limosa(["img", "check", text(&bed.path("disk"))]).success();
    }
}

#[test]
fn in_every_order_of_kills_memory_and_disk_are_of_one_instant() {
    needs_newest_qemu!();
    for_each_seed(2, 1, |seed, _| kill_some(seed));
}
