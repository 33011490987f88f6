//! Disk and network together: after any kill, no request is missing that a client outside saw acknowledged.
//!
//! A Linux guest serves requests from a database on a served disk, behind a gate. The VM, `limosa protect`, its
//! watchdog, the server of disks and the gate are killed, or hang, at random moments, one or two of them at once. What
//! is documented for that is done, and the guest must answer on the same TCP connection as if nothing had been. Where
//! the documents say that no failover is possible, because the protection had ended before the VM, the VM boots from
//! its disk, which must have what was acknowledged as well.
//!
//! `LIMOSA_PROTECT_KILLS=300` does that often; `LIMOSA_PROTECT_SEED=N` begins with that seed. A seed is one guest, and
//! it lives through [`ROUNDS`] rounds.

use std::fmt;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{DiskFormat, Machine, Program, is_alive, kill9, wait_gone};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::disks::Bed;
use crate::file_system::{check_disk, make_disk};
use crate::gate::networked;
use crate::needs_newest_qemu;
use crate::network::{Namespace, network_skipped};
use crate::requests::{Client, Counts, GUEST_MAC, guest, prepare};
use crate::running::{Running, open_gate};
use crate::scene::{for_each_seed, text};
use crate::stage::{start_command, wait_for, watchdog};

/// Rounds of a guest.
const ROUNDS: u64 = 5;

/// A process that may be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Vm,
    Keeper,
    Watchdog,
    Server,
    Gate,
}

const PARTS: [Part; 5] = [Part::Vm, Part::Keeper, Part::Watchdog, Part::Server, Part::Gate];

/// One that was killed, or stopped for good.
#[derive(Debug, Clone, Copy)]
struct Lost {
    part: Part,
    hangs: bool,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{}", self.part, if self.hangs { " (hangs)" } else { "" })
    }
}

/// The VM and all that it needs.
struct World {
    client: Option<Client>,
    counts: Arc<Counts>,
    vm: Option<Running>,
    keeper: Option<(Program, u32)>,
    server: Option<Program>,
    gate: Option<Program>,
    bed: Bed,
    network: Namespace,
    boots: u64,
}

impl World {
    /// A guest that answers, without protection.
    fn new(format: DiskFormat) -> Self {
        let machine = |folder: &std::path::Path| networked(Machine::linux(guest()), folder);
        let bed = Bed::of(format, |folder| machine(folder).memory(160 << 20));
        make_disk(&bed);
        let (network, counts) = (Namespace::with_tap(GUEST_MAC), Arc::default());
        let (client, vm, keeper, server, gate) = (None, None, None, None, None);
        let mut world = Self { client, counts, vm, keeper, server, gate, bed, network, boots: 0 };
        world.open_gate();
        world.server = Some(world.bed.serve(&[]));
        world.boot();
        world
    }

    fn open_gate(&mut self) {
        self.gate = Some(open_gate(&self.bed.scene, &self.network, &[]));
    }

    /// Boots the guest from its disk, and connects to it.
    fn boot(&mut self) {
        let vm = self.bed.scene.machine.start().unwrap();
        prepare(&vm, Some(self.boots));
        self.boots += 1;
        self.vm = Some(Running::first(vm));
        self.client = Some(Client::connect(&self.network, &self.counts));
    }

    fn client(&self) -> &Client {
        self.client.as_ref().unwrap()
    }

    fn vm(&self) -> &Running {
        self.vm.as_ref().unwrap()
    }

    fn protect(&mut self, every: &str) {
        if self.bed.scene.kept().exists() {
            self.bed.scene.forget();
        }
        let (gate, server) = (self.bed.path("gate"), self.bed.control());
        let options = ["--every", every, "--gate", text(&gate), "--disk-server", &server];
        let keeper = self.bed.scene.protect_at(&self.vm().qmp, &options);
        self.bed.scene.wait_checkpoint(2, &keeper);
        let dog = watchdog(&keeper).unwrap();
        self.keeper = Some((keeper, dog));
    }

    /// Loses a part; false: what was lost before has ended it already, as a keeper's watchdog ends with it.
    fn lose(&self, lost: Lost) -> bool {
        let keeper = self.keeper.as_ref().unwrap();
        let pid = match lost.part {
            Part::Vm => self.vm().pid,
            Part::Keeper => keeper.0.pid(),
            Part::Watchdog => keeper.1,
            Part::Server => self.server.as_ref().unwrap().pid(),
            Part::Gate => self.gate.as_ref().unwrap().pid(),
        };
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        match kill_process(pid, if lost.hangs { Signal::STOP } else { Signal::KILL }) {
            Ok(()) => true,
            Err(Errno::SRCH) => false,
            Err(error) => panic!("{lost}: {error}"),
        }
    }

    /// Waits for the end of the protection, which has lost something.
    fn wait_keeper(&mut self, lost: &[Lost]) {
        let Some((keeper, dog)) = self.keeper.take() else { return };
        if lost.iter().any(|lost| lost.part == Part::Keeper && lost.hangs) {
            // Its watchdog ends it, unless that is lost as well, or was dismissed because the protection had ended.
            wait_for("the end of a keeper that hangs", || (!keeper.is_running() || !is_alive(dog)).then_some(()));
            let _ = kill9(keeper.pid());
        } else if lost.iter().any(|lost| lost.part == Part::Watchdog) && lost.iter().any(|lost| lost.hangs) {
            // Neither is left to notice it.
            kill9(keeper.pid()).unwrap();
        }
        keeper.wait();
        wait_gone(dog);
    }

    /// Does what is documented for this loss; how it went.
    fn recover(&mut self, lost: &[Lost]) -> &'static str {
        let is_lost = |part| lost.iter().any(|lost| lost.part == part);
        if is_lost(Part::Gate) {
            self.gate.take().unwrap().wait();
            self.open_gate();
        }
        if is_lost(Part::Vm) || is_lost(Part::Server) {
            return self.fail_over(lost);
        }
        if is_lost(Part::Keeper) || is_lost(Part::Gate) {
            self.wait_keeper(lost);
        }
        if is_lost(Part::Keeper) && is_lost(Part::Watchdog) {
            let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
            command.args(["resume", "--qmp"]).arg(&self.vm().qmp).args(["--disk-server", &self.bed.control()]);
            start_command(command).wait().success();
        }
        // The next one has a watchdog.
        if let Some((keeper, dog)) = self.keeper.take().filter(|_| is_lost(Part::Watchdog)) {
            keeper.signal(Signal::INT);
            keeper.wait().success();
            wait_gone(dog);
        }
        "the VM runs"
    }

    fn fail_over(&mut self, lost: &[Lost]) -> &'static str {
        let at = |part| lost.iter().position(|lost| lost.part == part).unwrap_or(lost.len());
        // Its watchdog, or the keeper without its gate, gives the VM its disk back, if it has the time.
        let may_have_ended = at(Part::Keeper).min(at(Part::Gate)) < at(Part::Vm).min(at(Part::Server));
        // The fence.
        self.vm.take().unwrap().kill();
        self.wait_keeper(lost);
        if at(Part::Server) < lost.len() {
            self.server.take().unwrap().wait();
            let newest = self.bed.scene.newest().unwrap().to_string();
            self.server = self.bed.try_serve(&["--fenced", "--epoch", &newest]);
            if self.server.is_none() {
                assert!(may_have_ended, "the disk is not as of checkpoint {newest}");
                self.server = Some(self.bed.serve(&["--fenced"]));
                return self.boot_again();
            }
        }
        let failover = self.bed.failover().limosa;
        if self.client().is_answered(1, || !failover.is_running()) {
            self.vm = Some(Running::survivor(failover, self.bed.path("qmp")));
            return "failed over";
        }
        let ended = failover.wait();
        let is_refused = ended.stderr.contains("its protection has ended");
        assert!(may_have_ended && is_refused, "{}: {}{}", ended.status, ended.stderr, ended.stdout);
        self.boot_again()
    }

    fn boot_again(&mut self) -> &'static str {
        self.client.take().unwrap().end();
        self.boot();
        "booted"
    }

    /// Loses something at a random moment, and makes it good; what it was, and how it went.
    fn round(&mut self, chance: &mut SeededRandom) -> String {
        let every = ["20ms", "50ms", "event", "100ms"][usize::try_from(chance.below(4)).unwrap()];
        if self.keeper.is_none() {
            self.protect(every);
        }
        self.client().wait_answered(2);
        thread::sleep(Duration::from_micros(chance.below(400_000)));
        let mut parts = PARTS.to_vec();
        let mut lost = Vec::new();
        for number in 0..1 + chance.below(2) {
            let part = parts.swap_remove(usize::try_from(chance.below(parts.len() as u64)).unwrap());
            let hangs = matches!(part, Part::Vm | Part::Keeper) && chance.below(4) == 0;
            if number > 0 && chance.below(2) == 0 {
                thread::sleep(Duration::from_micros(chance.below(30_000)));
            }
            if self.lose(Lost { part, hangs }) {
                lost.push(Lost { part, hangs });
            }
        }
        thread::sleep(Duration::from_micros(chance.below(1_500_000)));
        let done = self.recover(&lost);
        self.client().wait_answered(3);
        self.client().audit(&self.network, true);
        let lost: Vec<String> = lost.iter().map(Lost::to_string).collect();
        format!("{} at {every}: {done}, longest answer {:?}", lost.join(", "), self.counts.take_longest())
    }

    /// Ends everything, and checks the disk.
    fn end(mut self) -> u64 {
        self.client.take().unwrap().end();
        if let Some((keeper, dog)) = self.keeper.take() {
            keeper.signal(Signal::INT);
            keeper.wait().success();
            wait_for("the end of the watchdog", || (!is_alive(dog)).then_some(()));
        }
        self.vm.take().unwrap().kill();
        let server = self.server.take().unwrap();
        server.signal(Signal::TERM);
        server.wait().success();
        let acknowledged = self.counts.acknowledged();
        check_disk(&self.bed, acknowledged);
        acknowledged
    }
}

#[test]
fn whatever_is_killed_no_request_is_missing_that_was_acknowledged() {
    needs_newest_qemu!();
    if network_skipped() {
        return;
    }
    for_each_seed(4, ROUNDS, |seed, rounds| {
        let mut chance = SeededRandom::new(seed);
        let format = if seed.is_multiple_of(2) { DiskFormat::Raw } else { DiskFormat::Qcow2 };
        let mut world = World::new(format);
        for round in 1..=rounds {
            println!("seed {seed}, round {round}: {}", world.round(&mut chance));
        }
        println!("seed {seed}: {} requests were acknowledged", world.end());
    });
}

#[test]
fn a_vm_whose_disk_server_is_killed_stands_still_and_nothing_is_missing_when_it_is_failed_over() {
    needs_newest_qemu!();
    if network_skipped() {
        return;
    }
    let mut world = World::new(DiskFormat::Raw);
    world.protect("50ms");
    world.client().wait_answered(5);
    let lost = Lost { part: Part::Server, hangs: false };
    world.lose(lost);
    let (keeper, dog) = world.keeper.take().unwrap();
    let ended = keeper.wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    wait_gone(dog);
    // What it had answered and what had not left is sent again, if it runs.
    thread::sleep(Duration::from_secs(2));
    world.recover(&[lost]);
    world.client().wait_answered(3);
    world.client().audit(&world.network, true);
    assert!(ended.stderr.contains("the VM was stopped, as its disk"), "{}", ended.stderr);
    world.end();
}
