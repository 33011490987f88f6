//! SIGKILL at random moments of a save, by either route.
//!
//! Law: after every kill, at any moment, the VM runs, QEMU is as it was, and under the snapshot's name there is
//! nothing or a whole file.

use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use limosa_testkit::{HeartbeatGuest, Machine, MemoryBackend, Qmp, Vm, kill9, kill9_after};
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;

use crate::stage::*;

/// RAM: the guest changes 16 MiB of it all the time and fills most of the rest once, so that a save lasts.
const MEMORY: u64 = 256 << 20;
const FILLED: Range<u64> = 32 << 20..224 << 20;
/// Makes a save last about a second, so that random moments hit every part of it.
const RATE: &str = "192M";

/// A VM that is saved and killed over again.
pub(crate) struct Victim {
    machine: Machine,
    vm: Vm,
    found: Found,
    folder: TempDir,
    file: PathBuf,
    more: Vec<&'static str>,
    /// How long a save takes that is not killed: no longer than the shortest that was over before its kill came, since
    /// the machine may have been busier when the first was measured.
    lasts: Duration,
}

/// The state after a kill.
#[derive(Debug, Default)]
pub(crate) struct KillOutcomes {
    pub(crate) files: u32,
    pub(crate) none: u32,
    pub(crate) stopped: u32,
}

impl Victim {
    pub(crate) fn new(more: &[&'static str]) -> Self {
        let machine = Machine::heartbeat(HeartbeatGuest::over(16 << 20)).memory(MEMORY).backend(MemoryBackend::Memfd);
        let vm = machine.start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        let contents: Vec<u8> = (0..1 << 20).map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()[3] | 1).collect();
        for offset in FILLED.step_by(1 << 20) {
            vm.memory_file().unwrap().write_all_at(&contents, offset).unwrap();
        }
        let (folder, file) = place();
        let found = Found::of(&vm);
        let more = [&["--max-bandwidth", RATE], more].concat();
        let mut this = Self { machine, vm, found, folder, file, more, lasts: Duration::ZERO };
        let begun = Instant::now();
        this.start().wait().success();
        this.lasts = begun.elapsed();
        this.check_outcome(&mut KillOutcomes::default());
        this
    }

    fn start(&self) -> Program {
        start(save_arguments(&self.vm, &self.file, &self.more))
    }

    /// Moments from the first to the last of a save, and then some about its beginning, when the record of the job is
    /// made, and its end, where the most is at stake.
    fn moments(spread: u32, at_the_ends: u32) -> Vec<(u64, Range<f64>)> {
        let share = |n: u32| f64::from(n) / f64::from(spread);
        let slices = (0..spread).map(|n| share(n)..share(n + 1));
        let beginning = (0..at_the_ends).map(|_| 0.0..0.05);
        let end = (0..at_the_ends).map(|_| 0.8..1.05);
        (1..).zip(slices.chain(beginning).chain(end)).collect()
    }

    fn window(&self, share: &Range<f64>) -> Range<Duration> {
        self.lasts.mul_f64(share.start)..self.lasts.mul_f64(share.end)
    }

    /// Kills limosa alone, at a moment in each of `times` parts of the save and as often about its beginning and its
    /// end.
    pub(crate) fn survives_kills_of_limosa(&mut self, spread: u32, at_the_ends: u32) -> KillOutcomes {
        let mut outcomes = KillOutcomes::default();
        for (seed, share) in Self::moments(spread, at_the_ends) {
            self.kill_within(&share, seed);
            self.check_outcome(&mut outcomes);
        }
        outcomes
    }

    /// Kills limosa at a moment within this share of its save.
    fn kill_within(&mut self, share: &Range<f64>, seed: u64) {
        let saving = self.start();
        let kill = kill9_after(saving.pid(), self.window(share), seed);
        let after = kill.after;
        println!("killed after {after:?} of {:?}", self.lasts);
        kill.wait();
        if saving.wait().status.success() {
            self.lasts = self.lasts.min(after);
        }
    }

    /// Interrupts limosa, as Ctrl-C does, so often within the time in which a migration begins and QEMU makes its
    /// channels.
    pub(crate) fn survives_interrupts_at_the_beginning(&self, times: u32) -> KillOutcomes {
        let mut outcomes = KillOutcomes::default();
        for nth in 0..times {
            let saving = self.start();
            std::thread::sleep(Duration::from_millis(60) * nth / times);
            saving.signal(Signal::INT);
            let ended = saving.wait();
            assert!(!ended.status.success() || self.file.exists(), "{}", ended.stderr);
            self.check_outcome(&mut outcomes);
        }
        outcomes
    }

    /// Kills the watchdog alone: the save continues.
    pub(crate) fn survives_the_death_of_the_watchdog(&self) {
        for part in 0..4 {
            let saving = self.start();
            let Some(watchdog) = watchdog(&saving) else { panic!("no watchdog: {}", saving.stderr()) };
            // At its rate the second half of the memory is still to come. It is not our child, but limosa does not reap
            // it before its own end.
            self.wait_moved(part * (FILLED.end - FILLED.start) / 8);
            kill9(watchdog).unwrap();
            let ended = saving.wait().success();
            assert!(ended.stderr.contains("the watchdog process had died"), "{}", ended.stderr);
            assert!(self.file.exists());
            self.check_outcome(&mut KillOutcomes::default());
        }
    }

    /// Waits until the save that runs has moved `bytes` bytes. What QEMU says of an earlier one does not count.
    #[track_caller]
    fn wait_moved(&self, bytes: u64) {
        wait_for("memory to move", || {
            let info = self.vm.execute("query-migrate", json!({})).unwrap();
            (info["status"] == "active" && info["ram"]["transferred"].as_u64() >= Some(bytes)).then_some(())
        });
    }

    /// Kills both: the next person to come is told, and `limosa resume` puts all right.
    pub(crate) fn is_repaired_when_both_die(&mut self) -> KillOutcomes {
        let mut outcomes = KillOutcomes::default();
        let mut left_over = 0;
        for (seed, share) in Self::moments(8, 4) {
            let window = self.window(&share);
            let begun = Instant::now();
            let saving = self.start();
            let Some(watchdog) = watchdog(&saving) else { panic!("no watchdog: {}", saving.stderr()) };
            std::thread::sleep(window.start + (window.end - window.start) * u32::try_from(seed % 5).unwrap() / 5);
            if saving.is_running() {
                // limosa reaps its watchdog when it ends by itself, at any moment: then there is nothing to kill.
                let _ = kill9(watchdog);
            } else {
                self.lasts = self.lasts.min(begun.elapsed());
            }
            drop(saving);
            wait_gone(watchdog);
            let monitor = self.vm.qmp_socket().display().to_string();
            if Found::of(&self.vm) != self.found {
                let next = limosa(save_arguments(&self.vm, Path::new("/nowhere/x"), &[]));
                let said = next.one_line(&[]);
                left_over += u32::from(said.contains("was interrupted: run 'limosa resume' first"));
                println!("{said}");
            }
            let resumed = limosa(["resume", "--qmp", &monitor]).success();
            println!("{}", resumed.stderr);
            self.check_outcome(&mut outcomes);
        }
        assert!(left_over >= 3, "only {left_over} of these kills left something to repair");
        outcomes
    }

    /// Kills limosa while it saves with `--stop`: the VM is given up only for a whole file.
    pub(crate) fn survives_kills_with_stop(mut self) -> KillOutcomes {
        self.more.push("--stop");
        let mut outcomes = KillOutcomes::default();
        for (seed, share) in Self::moments(8, 8) {
            self.kill_within(&share, seed);
            self.check_outcome(&mut outcomes);
        }
        outcomes
    }

    /// Waits until the watchdog has gone, and looks at what is left. The file is taken away again.
    #[track_caller]
    fn check_outcome(&self, outcomes: &mut KillOutcomes) {
        // The watchdog holds the monitor as long as it has something to do.
        let free = Qmp::connect(&self.vm.qmp_socket(), SOON);
        assert!(free.is_ok(), "{:#}; QEMU: {:?}: {}", free.unwrap_err(), self.vm.process().try_wait(), self.vm.log());
        let left = names(self.folder.path());
        match left.as_slice() {
            [] => outcomes.none += 1,
            [name] if name == "vm.snapshot" => {
                outcomes.files += 1;
                let loaded = load_in_stock_qemu(&self.machine, &self.file, 2);
                let mut page = [0; 4096];
                loaded.memory_file().unwrap().read_exact_at(&mut page, FILLED.end - 4096).unwrap();
                assert!(page.iter().all(|byte| byte & 1 == 1), "the last pages are not in the file");
                std::fs::remove_file(&self.file).unwrap();
            }
            other => panic!("left behind: {other:?}"),
        }
        if self.more.contains(&"--stop") && self.vm.run_state().unwrap() == "postmigrate" {
            assert_eq!(left.len(), 1, "the VM was given up without a file");
            outcomes.stopped += 1;
            self.vm.cont().unwrap();
        }
        self.found.assert_same(&self.vm);
        assert_beats(&self.vm);
    }
}
