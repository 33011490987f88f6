//! A protected guest, and the directory of its checkpoints.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use limosa_snapshot::Snapshot;
use limosa_testkit::{Accelerator, HeartbeatGuest, Machine, Qmp, Series, Vm, kill9, pass_numbers, scratch, wait_gone};
use serde_json::json;
use tempfile::TempDir;

use crate::stage::{Program, SOON, start, start_command, stop_and_check, wait_for, watchdog};

/// Returns from the test if its QEMU is switched off.
#[macro_export]
macro_rules! needs_newest_qemu {
    () => {
        if limosa_testkit::qemu_skipped() || limosa_testkit::series_skipped() {
            return;
        }
    };
}

/// A guest of 8 MiB in the newest QEMU.
pub(crate) fn machine() -> Machine {
    Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(8 << 20) }).series(Series::Newest)
}

/// The folder of one test.
pub(crate) struct Scene {
    folder: TempDir,
    pub(crate) machine: Machine,
    /// QEMU's command line for a survivor; making it makes files.
    line: OnceLock<Vec<String>>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::of(|_| machine())
    }

    /// The folder of a test with this machine, whose sockets are in the folder.
    pub(crate) fn of(machine: impl FnOnce(&Path) -> Machine) -> Self {
        let folder = scratch().unwrap();
        std::fs::create_dir(folder.path().join("tmp")).unwrap();
        let machine = machine(folder.path()).accelerator(accelerator());
        Self { folder, machine, line: OnceLock::new() }
    }

    /// Starts the guest and waits until it beats.
    pub(crate) fn guest(&self) -> Vm {
        let vm = self.machine.start().unwrap();
        vm.wait_heartbeats(2).unwrap();
        vm
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The directory of the checkpoints.
    pub(crate) fn kept(&self) -> PathBuf {
        self.path("kept")
    }

    pub(crate) fn checkpoint(&self) -> PathBuf {
        self.kept().join("checkpoint.limosa")
    }

    /// `limosa protect --qmp ... MORE DIR`.
    pub(crate) fn protect(&self, vm: &Vm, more: &[&str]) -> Program {
        self.protect_at(&vm.qmp_socket(), more)
    }

    /// As [`protect`](Self::protect), for the VM with this monitor.
    pub(crate) fn protect_at(&self, qmp: &Path, more: &[&str]) -> Program {
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.args(["protect", "--qmp"]).arg(qmp).args(more).arg(self.kept());
        command.env("TMPDIR", self.path("tmp")).env_remove("XDG_RUNTIME_DIR");
        start_command(command)
    }

    /// `limosa protect --qmp ... --to URI MORE`.
    pub(crate) fn protect_to(&self, vm: &Vm, uri: &str, more: &[&str]) -> Program {
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.args(["protect", "--qmp"]).arg(vm.qmp_socket()).args(["--to", uri]).args(more);
        command.env("TMPDIR", self.path("tmp")).env_remove("XDG_RUNTIME_DIR");
        start_command(command)
    }

    /// `limosa keep URI DIR MORE`, once it listens, and its address.
    pub(crate) fn keep(&self, uri: &str, more: &[&str]) -> (Program, String) {
        Self::keep_in(&self.kept(), uri, more)
    }

    /// As [`keep`](Self::keep), in this directory.
    pub(crate) fn keep_in(kept: &Path, uri: &str, more: &[&str]) -> (Program, String) {
        let keeper = start(["keep", uri, text(kept)].iter().chain(more));
        let address = wait_for("the keeper to listen", || {
            assert!(keeper.is_running(), "limosa ended: {}", keeper.stderr());
            let said = keeper.stderr();
            Some(said.split_once("listening on ")?.1.split_once('\n')?.0.to_owned())
        });
        (keeper, address)
    }

    /// As [`protect`](Self::protect), once a few checkpoints count.
    pub(crate) fn protected(&self, vm: &Vm, options: &[&str], more: &[&str]) -> Program {
        let keeper = self.protect(vm, &[options, more].concat());
        self.wait_checkpoint(3, &keeper);
        keeper
    }

    /// The number of the newest checkpoint, if there is one.
    pub(crate) fn newest(&self) -> Option<u64> {
        Self::newest_in(&self.kept())
    }

    /// As [`newest`](Self::newest), in this directory.
    pub(crate) fn newest_in(kept: &Path) -> Option<u64> {
        // It may become the spare while it is read.
        Snapshot::open(&kept.join("checkpoint.limosa")).ok()?.manifest()?.checkpoint
    }

    /// Forgets all checkpoints, so that the next series is waited for.
    pub(crate) fn forget(&self) {
        std::fs::remove_dir_all(self.kept()).unwrap();
    }

    /// Waits until a checkpoint of this number or a later one counts.
    pub(crate) fn wait_checkpoint(&self, number: u64, keeper: &Program) {
        wait_for("checkpoints", || {
            let newest = self.newest();
            assert!(keeper.is_running() || newest >= Some(number), "limosa ended: {}", keeper.stderr());
            newest.filter(|newest| *newest >= number)
        });
    }

    /// `limosa protect gate ...` between `vm.net` and `world.net`, once it listens.
    pub(crate) fn gate(&self, more: &[&str]) -> Program {
        let at = |name: &str| self.path(name).display().to_string();
        let net = format!("unix:{}", at("world.net"));
        let (socket, listen) = (at("gate"), at("vm.net"));
        let arguments = ["protect", "gate", &socket, "--listen", &listen, "--net", &net];
        let gate = start(arguments.iter().chain(more));
        wait_for("the gate", || self.path("gate").exists().then_some(()));
        gate
    }

    /// QEMU's command line for a VM that continues, with a monitor at `qmp`.
    pub(crate) fn survivor_line(&self) -> Vec<String> {
        let make = || {
            let mut line = self.machine.command_line(self.folder.path()).unwrap();
            let qmp = self.path("qmp");
            line.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", qmp.display())]);
            line
        };
        self.line.get_or_init(make).clone()
    }

    /// `limosa protect failover OPTIONS DIR -- QEMU`.
    pub(crate) fn failover(&self, options: &[&str]) -> Failover<'_> {
        let (line, kept) = (self.survivor_line(), self.kept());
        let mut arguments = vec!["protect", "failover"];
        arguments.extend_from_slice(options);
        arguments.extend([text(&kept), "--"]);
        arguments.extend(line.iter().map(String::as_str));
        Failover { limosa: start(arguments), scene: self }
    }

    /// `limosa keep URI DIR OPTIONS -- QEMU`, once it listens, and its address.
    pub(crate) fn keep_for_failover(&self, uri: &str, options: &[&str]) -> (Program, String) {
        self.keep_for_failover_in(&self.kept(), uri, options)
    }

    /// As [`keep_for_failover`](Self::keep_for_failover), in this directory.
    pub(crate) fn keep_for_failover_in(&self, kept: &Path, uri: &str, options: &[&str]) -> (Program, String) {
        let line = self.survivor_line();
        let line = ["--"].into_iter().chain(line.iter().map(String::as_str));
        Self::keep_in(kept, uri, &options.iter().copied().chain(line).collect::<Vec<_>>())
    }
}

/// Waits until a limosa has said something.
pub(crate) fn wait_said(limosa: &Program, what: &str) {
    wait_for(what, || {
        assert!(limosa.is_running(), "limosa ended: {}", limosa.stderr());
        limosa.stderr().contains(what).then_some(())
    });
}

/// Kills everything on the host of a VM.
pub(crate) fn kill_host(vm: &Vm, protect: &Program) {
    let dog = watchdog(protect).unwrap();
    for pid in [dog, protect.pid(), vm.pid()] {
        kill9(pid).unwrap();
    }
    wait_gone(vm.pid());
}

/// A VM that continues from a checkpoint.
pub(crate) struct Failover<'a> {
    pub(crate) limosa: Program,
    scene: &'a Scene,
}

impl<'a> Failover<'a> {
    /// The VM that a keeper has continued.
    pub(crate) fn of(keeper: Program, scene: &'a Scene) -> Self {
        Self { limosa: keeper, scene }
    }

    /// Waits for the guest to have said `count` numbers of passes; the first of them.
    pub(crate) fn wait_passes(&self, count: usize) -> u32 {
        wait_for("the guest's passes", || {
            let running = self.limosa.is_running();
            let passes = pass_numbers(&self.limosa.stdout());
            assert!(running || passes.len() >= count, "limosa ended: {}", self.limosa.stderr());
            passes.get(count - 1).and(passes.first()).copied()
        })
    }

    /// Expects the guest's memory and CPU to be of one instant, and ends it.
    #[track_caller]
    pub(crate) fn check_and_end(self) {
        let mut qmp = self.monitor();
        let guest = self.scene.machine.heartbeat_guest().unwrap();
        stop_and_check(&mut qmp, &guest, &self.scene.path("picture"));
        self.quit(qmp);
    }

    /// Whether its guest says something; false: limosa has ended.
    pub(crate) fn is_running_soon(&self) -> bool {
        wait_for("the guest", || {
            let running = self.limosa.is_running();
            (!running || !self.limosa.stdout().is_empty()).then_some(running)
        })
    }

    /// Ends it.
    pub(crate) fn end(self) {
        let qmp = self.monitor();
        self.quit(qmp);
    }

    fn monitor(&self) -> Qmp {
        Qmp::connect(&self.scene.path("qmp"), SOON).unwrap()
    }

    fn quit(self, mut qmp: Qmp) {
        qmp.execute("quit", json!({})).unwrap();
        drop(qmp);
        self.limosa.wait();
    }
}

/// Expects the first pass that a survivor says to be at most `behind` before the last one that the killed guest said,
/// or the next one. Lines of a serial port do not wait for checkpoints, and the one on its way may be cut in two.
#[track_caller]
pub(crate) fn assert_follows(first: u32, last: u32, behind: u32) {
    assert!((last.saturating_sub(behind)..=last + 2).contains(&first), "pass {first} after {last}");
}

/// The accelerator of all guests: translation, or the kernel if `LIMOSA_PROTECT_KVM=1` asks for it.
fn accelerator() -> Accelerator {
    if std::env::var_os("LIMOSA_PROTECT_KVM").is_none_or(|asked| asked != "1") {
        return Accelerator::Tcg;
    }
    assert!(Accelerator::kvm_runs_guests(), "LIMOSA_PROTECT_KVM=1, and KVM runs no guest on this machine");
    Accelerator::Kvm
}

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Tries seeds from `LIMOSA_PROTECT_SEED` on. They have `LIMOSA_PROTECT_KILLS` rounds together, or `kills`, and each
/// has `most` at most. `lives` gets the seed and its rounds.
pub(crate) fn for_each_seed(kills: u64, most: u64, lives: impl Fn(u64, u64)) {
    let (mut seed, mut left) = (setting("LIMOSA_PROTECT_SEED", 1), setting("LIMOSA_PROTECT_KILLS", kills));
    while left > 0 {
        let rounds = left.min(most);
        let lived = catch_unwind(AssertUnwindSafe(|| lives(seed, rounds)));
        assert!(lived.is_ok(), "seed {seed}");
        (seed, left) = (seed + 1, left - rounds);
    }
}

/// A path as text; the tests' own paths are.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
