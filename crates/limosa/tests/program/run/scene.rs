//! A saved guest, and limosa in front of the QEMU that it comes back in.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use limosa_testkit::{HeartbeatGuest, Machine, Qmp, is_alive, listens, pass_numbers, scratch};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use crate::stage::{Ended, Program, SOON, names, save, start_command, stop_and_check, wait_for};

/// The folder of one test with a guest saved at an instant that is known, and the command line that it runs with.
pub(crate) struct Scene {
    folder: TempDir,
    machine: Machine,
    pub(crate) snapshot: PathBuf,
    pub(crate) lap: u32,
    pub(crate) line: Vec<String>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let machine = Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(64 << 10) });
        Self::between(&machine, &machine)
    }

    /// A guest that was saved in one machine, and runs in another.
    pub(crate) fn between(source: &Machine, machine: &Machine) -> Self {
        let folder = scratch().unwrap();
        std::fs::create_dir(folder.path().join("tmp")).unwrap();
        let source = source.start().unwrap();
        source.wait_heartbeats(2).unwrap();
        let snapshot = folder.path().join("snapshot");
        save(&source, &snapshot, &["--stop"]);
        let lap = source.last_pass().unwrap();
        let mut line = machine.command_line(folder.path()).unwrap();
        for monitor in ["qmp", "limosa-qmp"] {
            let path = folder.path().join(monitor);
            line.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", path.display())]);
        }
        Self { folder, machine: machine.clone(), snapshot, lap, line }
    }

    /// Saves a VM that has a balloon besides.
    pub(crate) fn save_with_balloon(&self) -> PathBuf {
        let source = self.machine.clone().balloon().start().unwrap();
        source.wait_heartbeats(1).unwrap();
        let snapshot = self.path("balloon");
        save(&source, &snapshot, &["--stop"]);
        snapshot
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `limosa run OPTIONS SNAPSHOT -- WORDS`.
    pub(crate) fn command(&self, options: &[&str], snapshot: &Path, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.arg("run").args(options).arg(snapshot).arg("--").args(words);
        command.env("TMPDIR", self.path("tmp")).env_remove("XDG_RUNTIME_DIR");
        command
    }

    /// Runs the saved guest with `more` at the end of QEMU's command line.
    pub(crate) fn start(&self, options: &[&str], more: &[&str]) -> Run<'_> {
        self.start_behind(&[], options, more)
    }

    /// The same, with another program before QEMU.
    pub(crate) fn start_behind(&self, wrapper: &[&str], options: &[&str], more: &[&str]) -> Run<'_> {
        let words = [wrapper, &words_of(&self.line), more].concat();
        let _ = std::fs::remove_file(self.path("qmp"));
        Run { limosa: start_command(self.command(options, &self.snapshot, &words)), scene: self }
    }

    /// Runs the saved guest with a command line that is not expected to work.
    pub(crate) fn run_words(&self, words: &[&str]) -> Ended {
        self.run_snapshot(&self.snapshot, words)
    }

    /// The same with another file.
    pub(crate) fn run_snapshot(&self, snapshot: &Path, words: &[&str]) -> Ended {
        start_command(self.command(&[], snapshot, words)).wait()
    }

    /// Runs what never opens a monitor, and is not waited for long.
    pub(crate) fn run_in_vain(&self, words: &[&str]) -> Ended {
        start_command(self.command(&["--start-within", "5s"], &self.snapshot, words)).wait()
    }

    /// Expects that limosa has left nothing in its temporary directory.
    #[track_caller]
    pub(crate) fn assert_tidy(&self) {
        assert_eq!(names(&self.path("tmp")), Vec::<String>::new());
    }

    /// Expects that no process is left that was started from this scene.
    #[track_caller]
    pub(crate) fn assert_no_process_left(&self) {
        assert_eq!(self.processes(), Vec::<u32>::new());
    }

    fn processes(&self) -> Vec<u32> {
        let mark = format!("TMPDIR={}", self.path("tmp").display());
        let processes = std::fs::read_dir("/proc").unwrap();
        let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid: &u32| {
            let words = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            words.split(|&byte| byte == 0).any(|word| word == mark.as_bytes()) && is_alive(*pid)
        })
        .collect()
    }
}

impl Drop for Scene {
    /// A QEMU outlives a limosa that is killed, so a test that fails has to end it.
    fn drop(&mut self) {
        for pid in self.processes() {
            send(pid, Signal::KILL);
        }
    }
}

/// A limosa in front of its QEMU.
pub(crate) struct Run<'a> {
    pub(crate) limosa: Program,
    scene: &'a Scene,
}

impl Run<'_> {
    /// The QEMU behind limosa, once it is there.
    pub(crate) fn qemu(&self) -> u32 {
        let limosa = self.limosa.pid();
        wait_for("QEMU", || child_of(limosa))
    }

    /// Waits for the guest to have said `count` lap numbers on limosa's stdout; the first of them.
    pub(crate) fn wait_laps(&self, count: usize) -> u32 {
        wait_for("the guest's laps", || {
            let running = self.limosa.is_running();
            let laps = pass_numbers(&self.limosa.stdout());
            assert!(running || laps.len() >= count, "limosa ended: {}", self.limosa.stderr());
            laps.get(count - 1).and(laps.first()).copied()
        })
    }

    /// Expects the guest to go on where it was when it was saved.
    #[track_caller]
    pub(crate) fn assert_goes_on(&self) {
        let first = self.wait_laps(2);
        // A guest that was saved while it said its number says the rest of it here: that is no full line.
        let whole = self.limosa.stdout().lines().next().is_some_and(|line| line.len() == 8);
        assert_eq!(first, self.scene.lap + if whole { 1 } else { 2 }, "{}", self.limosa.stdout());
    }

    /// QEMU's monitor, the one that the user gave it.
    pub(crate) fn qmp(&self) -> Mutex<Qmp> {
        let path = self.scene.path("qmp");
        wait_for("QEMU's monitor", || {
            assert!(self.limosa.is_running(), "limosa ended: {}", self.limosa.stderr());
            listens(self.limosa.pid(), &path).then_some(())
        });
        Mutex::new(Qmp::connect(&path, SOON).unwrap())
    }

    /// Expects the guest's memory and CPU to be of one instant.
    #[track_caller]
    pub(crate) fn check_memory(&self, qmp: &Mutex<Qmp>) {
        let guest = self.scene.machine.heartbeat_guest().unwrap();
        let mut qmp = qmp.lock().unwrap();
        stop_and_check(&mut qmp, &guest, &self.scene.path("picture"));
        qmp.execute("cont", json!({})).unwrap();
    }

    pub(crate) fn wait(self) -> Ended {
        self.limosa.wait()
    }
}

pub(crate) fn child_of(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_ascii_whitespace().next()?.parse().ok()
}

pub(crate) fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

/// A path as text; the tests' own paths are.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub(crate) fn words_of(line: &[String]) -> Vec<&str> {
    line.iter().map(String::as_str).collect()
}
