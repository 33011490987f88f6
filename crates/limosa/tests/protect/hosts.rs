//! Two hosts, which are network namespaces: after any loss of one, of a process there, of the server of its disk or of
//! the cable between them, no request is missing that a client outside saw acknowledged.
//!
//! The VM and `limosa protect --to` are on one host, `limosa keep --standby` on the other. The gate and the client are
//! on a third. The guest has its database on a disk. Its image is on storage that both hosts reach; its server is on
//! the VM's host, and is lost with that or survives it, or is lost alone.
//!
//! `LIMOSA_PROTECT_KILLS=100` loses something that often; `LIMOSA_PROTECT_SEED=N` begins with that seed. A seed is one
//! guest, which lives through [`ROUNDS`] rounds.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_snapshot::Snapshot;
use limosa_storage::testing::SeededRandom;
use limosa_testkit::{DiskFormat, Machine, Program, is_alive, kill9, wait_gone};
use rustix::process::Signal;

use crate::disks::Bed;
use crate::file_system::{check_disk, make_disk};
use crate::gate::networked;
use crate::line::Line;
use crate::needs_newest_qemu;
use crate::network::{Namespace, network_skipped};
use crate::requests::{Client, Counts, GUEST_MAC, guest, prepare};
use crate::running::{Running, open_gate, qemu_below, signal};
use crate::scene::{for_each_seed, text};
use crate::stage::{SOON, start_command, wait_for, watchdog};

/// Rounds of a guest.
const ROUNDS: u64 = 5;
/// The keeper's host.
const KEEPER: &str = "10.8.0.2";

/// A loss.
#[derive(Debug, Clone, Copy)]
enum Loss {
    /// The VM's host. The server of its disk is elsewhere.
    Host,
    HostAndServer,
    Vm,
    Protect,
    Keeper,
    Standby,
    Server,
    VmAndKeeper,
    VmAndServer,
    KeeperAndServer,
    ProtectAndStandby,
    HostHangs,
    KeeperHangs,
    /// The cable, for as long as this.
    Cable(Duration),
}

impl Loss {
    fn draw(chance: &mut SeededRandom) -> Self {
        match chance.below(15) {
            0 => Self::Host,
            1 => Self::HostAndServer,
            2 => Self::Vm,
            3 => Self::Protect,
            4 => Self::Keeper,
            5 => Self::Standby,
            6 => Self::Server,
            7 => Self::VmAndKeeper,
            8 => Self::VmAndServer,
            9 => Self::KeeperAndServer,
            10 => Self::ProtectAndStandby,
            11 => Self::HostHangs,
            12 => Self::KeeperHangs,
            13 => Self::Cable(Duration::from_millis(chance.below(600))),
            _ => Self::Cable(Duration::from_secs(60)),
        }
    }
}

/// The hosts, and what runs on them.
struct Hosts {
    client: Option<Client>,
    counts: Arc<Counts>,
    vm: Option<Running>,
    protect: Option<(Program, u32)>,
    keeper: Option<Program>,
    server: Option<Program>,
    _gate: Program,
    bed: Bed,
    primary: Namespace,
    secondary: Namespace,
    world: Namespace,
    /// Counts the keepers: each has its own port, directory and standby.
    number: u16,
}

impl Hosts {
    /// A guest that answers, without protection.
    fn new(format: DiskFormat) -> Self {
        let machine = |folder: &Path| networked(Machine::linux(guest()), folder);
        let bed = Bed::of(format, |folder| machine(folder).memory(160 << 20));
        make_disk(&bed);
        let world = Namespace::with_tap(GUEST_MAC);
        let [primary, secondary] = Namespace::pair();
        // Without a grace of its own: a keeper that fails over by itself says how long output has to be held.
        let gate = open_gate(&bed.scene, &world, &[]);
        let server = Some(bed.serve(&[]));
        let vm = bed.scene.machine.start().unwrap();
        prepare(&vm, Some(0));
        let counts = Arc::default();
        let client = Some(Client::connect(&world, &counts));
        let (vm, protect, keeper) = (Some(Running::first(vm)), None, None);
        Self { client, counts, vm, protect, keeper, server, _gate: gate, bed, primary, secondary, world, number: 0 }
    }

    fn client(&self) -> &Client {
        self.client.as_ref().unwrap()
    }

    fn vm(&self) -> &Running {
        self.vm.as_ref().unwrap()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.bed.path(&format!("{name}{}", self.number))
    }

    fn address(&self) -> String {
        format!("tcp:{KEEPER}:{}", 4447 + self.number)
    }

    /// QEMU's command line for the VM that continues.
    fn line(&self) -> Vec<String> {
        let folder = self.at("host");
        std::fs::create_dir_all(&folder).unwrap();
        let mut line = self.bed.scene.machine.command_line(&folder).unwrap();
        line.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", self.at("qmp").display())]);
        line
    }

    /// A shell command that kills the VM's host, and is over when that is dead. The VM is first: a watchdog that saw
    /// `limosa protect` end before it would end the epochs of its disk.
    fn fence(&self) -> String {
        let pids = [self.vm().pid].into_iter().chain(self.protect.iter().map(|(limosa, _)| limosa.pid()));
        let each =
            |pid: u32| format!("kill -9 {pid}; while grep -q '^State:.[^Z]' /proc/{pid}/status; do sleep 0.01; done; ");
        format!("exec 2>/dev/null; {}true", pids.map(each).collect::<String>())
    }

    /// Starts the next keeper, with a standby.
    fn open_keeper(&mut self, more: &[&str]) {
        let fence = self.at("fence");
        if !fence.exists() {
            std::fs::write(&fence, "exit 1").unwrap();
        }
        let mut command = self.secondary.command(env!("CARGO_BIN_EXE_limosa"));
        command.args(["keep", &self.address(), text(&self.at("kept")), "--standby", "--lost-after", "1s"]);
        command.args(["--fence", &format!("sh {}", fence.display()), "--disk-server", &self.bed.control()]);
        command.args(more).arg("--").args(self.line());
        let keeper = start_command(command);
        wait_for("the keeper to listen", || {
            assert!(keeper.is_running(), "limosa ended: {}", keeper.stderr());
            keeper.stderr().contains("listening on ").then_some(())
        });
        self.keeper = Some(keeper);
    }

    /// Protects the VM by a new keeper, over this line or the cable.
    fn protect(&mut self, line: Option<&Line>, keeper: &[&str], more: &[&str]) {
        self.number += 1;
        self.open_keeper(keeper);
        self.protect_again(line, more);
    }

    fn protect_again(&mut self, line: Option<&Line>, more: &[&str]) {
        let to = line.map_or_else(|| self.address(), Line::uri);
        let mut command = self.primary.command(env!("CARGO_BIN_EXE_limosa"));
        command.args(["protect", "--qmp"]).arg(&self.vm().qmp).args(["--to", &to, "--lost-after", "1s"]);
        command.arg("--gate").arg(self.bed.path("gate")).args(["--disk-server", &self.bed.control()]).args(more);
        command.env("TMPDIR", self.bed.path("tmp"));
        command.env_remove("XDG_RUNTIME_DIR");
        let limosa = start_command(command);
        self.wait_kept(&limosa, 3);
        let dog = watchdog(&limosa).unwrap();
        self.protect = Some((limosa, dog));
        std::fs::write(self.at("fence"), self.fence()).unwrap();
    }

    fn newest(&self) -> Option<u64> {
        Snapshot::open(&self.at("kept").join("checkpoint.limosa")).ok()?.manifest()?.checkpoint
    }

    fn wait_kept(&self, limosa: &Program, number: u64) {
        wait_for("checkpoints", || {
            assert!(limosa.is_running(), "limosa ended: {}", limosa.stderr());
            self.newest().filter(|newest| *newest >= number)
        });
    }

    /// Kills the whole of the VM's host.
    fn kill_host(&self) {
        let (limosa, dog) = self.protect.as_ref().unwrap();
        for pid in [*dog, limosa.pid(), self.vm().pid] {
            kill9(pid).unwrap();
        }
    }

    /// Waits until the keeper has continued the VM, and the client is answered.
    fn wait_failed_over(&mut self) {
        let keeper = self.keeper.take().unwrap();
        let begun = Instant::now();
        wait_for("the failover", || {
            let said = keeper.stderr();
            assert!(keeper.is_running() && begun.elapsed() < SOON / 2, "not failed over: {said}");
            said.contains("the VM continues here").then_some(())
        });
        self.vm.take().unwrap().kill();
        self.vm = Some(Running::survivor(keeper, self.at("qmp")));
        self.client().wait_answered(3);
    }

    /// Ends the protection of a VM that may have been failed over.
    fn end_protection(&mut self) {
        if let Some((limosa, dog)) = self.protect.take() {
            if limosa.is_running() {
                limosa.signal(Signal::INT);
            }
            limosa.wait();
            wait_gone(dog);
        }
        if let Some(keeper) = self.keeper.take() {
            keeper.signal(Signal::INT);
            keeper.wait().success();
        }
    }

    /// Loses something, and waits until the client is answered again.
    fn lose(&mut self, loss: Loss) {
        let (limosa, dog) = self.protect.as_ref().map(|(limosa, dog)| (limosa.pid(), *dog)).unwrap();
        let [keeper, server] = [&self.keeper, &self.server].map(|program| program.as_ref().unwrap().pid());
        let standby = || wait_for("the standby", || qemu_below(keeper));
        let kill = |pid: u32| kill9(pid).unwrap();
        match loss {
            Loss::Host => self.kill_host(),
            Loss::HostAndServer => {
                kill(dog);
                [server, limosa, self.vm().pid].into_iter().for_each(kill);
                return self.fail_over_with_another_server();
            }
            Loss::Vm => kill(self.vm().pid),
            Loss::VmAndServer => {
                [self.vm().pid, server].into_iter().for_each(kill);
                return self.fail_over_with_another_server();
            }
            Loss::Server => {
                kill(server);
                // The VM stands still until it is fenced.
                let (limosa, _) = self.protect.as_ref().unwrap();
                wait_for("the end of the protection", || (!limosa.is_running()).then_some(()));
                return self.fail_over_with_another_server();
            }
            Loss::Standby => return kill(standby()),
            Loss::Protect | Loss::ProtectAndStandby => {
                if let Loss::ProtectAndStandby = loss {
                    kill(standby());
                }
                kill(limosa);
                return self.wait_let_go_or_failed_over();
            }
            Loss::HostHangs => [limosa, dog, self.vm().pid].into_iter().for_each(|pid| signal(pid, Signal::STOP)),
            Loss::Keeper => {
                let standby = standby();
                kill(keeper);
                self.keeper.take().unwrap().wait();
                // It ends with its stream, and would have the gate.
                wait_gone(standby);
                return self.open_keeper(&FAILS_OVER);
            }
            Loss::VmAndKeeper | Loss::KeeperAndServer => {
                let standby = standby();
                kill(keeper);
                kill(if let Loss::VmAndKeeper = loss { self.vm().pid } else { server });
                wait_gone(standby);
                self.keeper.take().unwrap().wait();
                // The fence. A `limosa protect` whose VM stands still waits for its keeper.
                let _ = kill9(self.vm().pid);
                if let Loss::KeeperAndServer = loss {
                    self.restart_server();
                }
                return self.fail_over_by_hand();
            }
            Loss::KeeperHangs => {
                signal(keeper, Signal::STOP);
                let before = self.newest();
                thread::sleep(Duration::from_secs(4));
                signal(keeper, Signal::CONT);
                // It may take its primary for lost, before that is back.
                return self.wait_back_or_failed_over(before);
            }
            Loss::Cable(time) => {
                self.primary.cut();
                if time < Duration::from_secs(1) {
                    thread::sleep(time);
                    return self.primary.mend();
                }
            }
        }
        self.wait_failed_over();
        if let Loss::Cable(_) = loss {
            self.primary.mend();
        }
        // The fence has killed it; its watchdog has nothing left to do.
        if let Loss::HostHangs = loss {
            signal(dog, Signal::CONT);
        }
    }

    /// Starts the server of the disk again. The VM is off, or is killed now.
    fn restart_server(&mut self) {
        let _ = kill9(self.vm().pid);
        wait_gone(self.vm().pid);
        self.server.take().unwrap().wait();
        // Nothing comes any more when both ends have seen it.
        if let Some((limosa, _)) = &self.protect {
            wait_for("the end of the protection", || (!limosa.is_running()).then_some(()));
        }
        wait_for("the keeper to notice", || {
            self.keeper.as_ref().is_none_or(|keeper| keeper.stderr().contains(" is the last one")).then_some(())
        });
        let newest = self.newest().unwrap().to_string();
        let server = self.bed.try_serve(&["--fenced", "--epoch", &newest]);
        self.server = Some(server.unwrap_or_else(|| panic!("the disk is not as of checkpoint {newest}")));
    }

    /// Does what is documented for a VM whose disk has lost its server.
    fn fail_over_with_another_server(&mut self) {
        self.restart_server();
        // A primary that had the time has said that its protection is over, and it takes its user. Otherwise the keeper
        // tries again until there is a server.
        if self.keeper.as_ref().unwrap().stderr().contains("its protection has ended; ") {
            self.fail_over_by_hand();
        } else {
            self.wait_failed_over();
        }
    }

    /// Waits until the keeper leaves a VM alone that was given its disk by the watchdog, or has failed it over before.
    fn wait_let_go_or_failed_over(&mut self) {
        let failed_over = wait_for("the watchdog or the standby", || {
            let keeper = self.keeper.as_ref().unwrap().stderr();
            let left_alone = keeper.contains("not failed over: ") && keeper.contains("its protection has ended");
            left_alone.then_some(false).or_else(|| keeper.contains("the VM continues here").then_some(true))
        });
        if failed_over {
            self.wait_failed_over();
        }
    }

    /// Waits until the primary is protected by the keeper again, or its standby has the VM.
    fn wait_back_or_failed_over(&mut self, before: Option<u64>) {
        let mut is_new = false;
        let failed_over = wait_for("the primary or its standby", || {
            let keeper = self.keeper.as_ref().unwrap().stderr();
            if keeper.contains("the VM continues here") {
                return Some(true);
            }
            // The base of another series is followed by checkpoints of its own.
            let newest = self.newest();
            is_new |= newest < before;
            (is_new && newest >= Some(3)).then_some(false)
        });
        if failed_over {
            self.wait_failed_over();
        }
    }

    /// Continues the VM from the directory of the keeper, on its host.
    fn fail_over_by_hand(&mut self) {
        self.vm.take().unwrap().kill();
        let mut command = self.secondary.command(env!("CARGO_BIN_EXE_limosa"));
        command.args(["protect", "failover", "--fenced", "--disk-server", &self.bed.control(), text(&self.at("kept"))]);
        command.arg("--").args(self.line());
        let limosa = start_command(command);
        let answered = self.client().is_answered(3, || !limosa.is_running());
        assert!(answered, "limosa ended: {}", limosa.stderr());
        self.vm = Some(Running::survivor(limosa, self.at("qmp")));
    }

    fn end(mut self) -> u64 {
        self.end_protection();
        self.client.take().unwrap().end();
        self.vm.take().unwrap().kill();
        let server = self.server.take().unwrap();
        server.signal(Signal::TERM);
        server.wait().success();
        check_disk(&self.bed, self.counts.acknowledged());
        self.counts.acknowledged()
    }
}

/// A keeper that fails over soon.
const FAILS_OVER: [&str; 2] = ["--when-lost", "300ms"];

#[test]
fn whatever_becomes_of_two_hosts_no_request_is_missing_that_was_acknowledged() {
    needs_newest_qemu!();
    if network_skipped() {
        return;
    }
    for_each_seed(3, ROUNDS, |seed, rounds| {
        let mut chance = SeededRandom::new(seed);
        let mut hosts = Hosts::new(if seed.is_multiple_of(2) { DiskFormat::Raw } else { DiskFormat::Qcow2 });
        for round in 1..=rounds {
            let every = ["20ms", "50ms", "event", "100ms"][usize::try_from(chance.below(4)).unwrap()];
            hosts.protect(None, &FAILS_OVER, &["--every", every, "--on-loss", "pause"]);
            hosts.client().wait_answered(3);
            thread::sleep(Duration::from_micros(chance.below(400_000)));
            let loss = Loss::draw(&mut chance);
            print!("seed {seed}, round {round}: {loss:?} at {every}");
            hosts.lose(loss);
            hosts.client().wait_answered(3);
            hosts.client().audit(&hosts.world, true);
            println!(", longest answer {:?}", hosts.counts.take_longest());
            hosts.end_protection();
        }
        println!("seed {seed}: {} requests were acknowledged", hosts.end());
    });
}

#[test]
fn over_a_line_that_is_slow_and_stops_now_and_then_no_acknowledged_request_is_missing() {
    needs_newest_qemu!();
    if network_skipped() {
        return;
    }
    let mut hosts = Hosts::new(DiskFormat::Qcow2);
    // It is where the primary is, as its connections are.
    let next = format!("tcp:{KEEPER}:{}", 4448);
    let line = hosts.primary.within(|| Line::to(&next));
    hosts.protect(Some(&line), &FAILS_OVER, &["--every", "event", "--on-loss", "pause"]);
    let mut chance = SeededRandom::new(36);
    for _ in 0..5 {
        line.delay(Duration::from_micros(chance.below(20_000)));
        hosts.client().wait_answered(3);
        line.stall(true);
        thread::sleep(Duration::from_millis(chance.below(500)));
        line.stall(false);
    }
    hosts.client().wait_answered(3);
    hosts.kill_host();
    hosts.wait_failed_over();
    hosts.client().audit(&hosts.world, true);
    hosts.end();
}

#[test]
fn a_vm_that_continues_without_its_keeper_is_protected_again_and_nothing_acknowledged_is_missing_then() {
    needs_newest_qemu!();
    if network_skipped() {
        return;
    }
    let mut hosts = Hosts::new(DiskFormat::Qcow2);
    // The keeper does not fail over by itself: the VM runs.
    hosts.protect(None, &[], &["--every", "50ms", "--on-loss", "continue"]);
    hosts.client().wait_answered(3);
    hosts.primary.cut();
    let said = |hosts: &Hosts, what: &str| {
        wait_for(what, || hosts.protect.as_ref().unwrap().0.stderr().contains(what).then_some(()));
    };
    said(&hosts, "continues without protection");
    hosts.client().wait_answered(10);
    hosts.primary.mend();
    said(&hosts, "is back; it gets all of the VM");
    // The checkpoint of before is not the VM any more.
    let old = hosts.newest();
    wait_for("the base of a second series", || (hosts.newest() < old).then_some(()));
    hosts.wait_kept(&hosts.protect.as_ref().unwrap().0, 3);
    hosts.client().wait_answered(3);
    hosts.kill_host();
    // For the second time.
    let losses = || hosts.keeper.as_ref().unwrap().stderr().matches("may be lost").count();
    wait_for("the keeper to notice", || (losses() >= 2).then_some(()));
    hosts.keeper.as_ref().unwrap().signal(Signal::USR1);
    hosts.wait_failed_over();
    hosts.client().audit(&hosts.world, true);
    assert!(!is_alive(hosts.protect.as_ref().unwrap().1));
    hosts.end();
}
