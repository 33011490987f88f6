//! A saved guest and its clones, each with its serial port in a file.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::{Path, PathBuf};

use limosa_testkit::{HeartbeatGuest, Machine, Qmp, Vm, is_alive, kill9, pass_numbers, scratch};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::stage::*;

/// A saved guest and the folder of its clones; what is left of them ends with this.
pub(crate) struct Scene {
    pub(crate) folder: TempDir,
    pub(crate) snapshot: PathBuf,
    pub(crate) line: Vec<String>,
    pub(crate) lap: u32,
    pub(crate) guest: HeartbeatGuest,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::saved_by(|source, snapshot| {
            save(source, snapshot, &["--stop"]);
        })
    }

    /// A guest that was saved by `save_vm`, running until then or stopped.
    pub(crate) fn saved_by(save_vm: impl FnOnce(&Vm, &Path)) -> Self {
        let machine = Machine::heartbeat(HeartbeatGuest { rest: 5, ..HeartbeatGuest::over(1 << 20) });
        Self::between(&machine, &machine, save_vm)
    }

    /// A heartbeat guest that was saved in one machine, and is cloned in another.
    pub(crate) fn between(source: &Machine, machine: &Machine, save_vm: impl FnOnce(&Vm, &Path)) -> Self {
        let folder = scratch().unwrap();
        let guest = source.heartbeat_guest().unwrap();
        let source = source.start().unwrap();
        source.wait_heartbeats(2).unwrap();
        let snapshot = folder.path().join("snapshot");
        save_vm(&source, &snapshot);
        let lap = source.last_pass().unwrap();
        let line = Self::line(machine, folder.path());
        Self { folder, snapshot, line, lap, guest }
    }

    /// The machine's command line, with each clone's serial port in a file of its own.
    pub(crate) fn line(machine: &Machine, folder: &Path) -> Vec<String> {
        let words = machine.command_line(folder).unwrap();
        let serial = format!("file:{}/serial-{{n}}", folder.display());
        words.into_iter().map(|word| if word == "stdio" { serial.clone() } else { word }).collect()
    }

    pub(crate) fn clones(&self) -> PathBuf {
        self.folder.path().join("clones")
    }

    pub(crate) fn start(&self, count: u32, options: &[&str], more: &[&str]) -> Program {
        self.clone_with(&[&["--count", &count.to_string()], options].concat(), more)
    }

    /// Has QEMUs wait in a pool; the report.
    pub(crate) fn pool(&self, count: u32, more: &[&str]) -> Value {
        self.clone_with(&["--pool", &count.to_string(), "--json"], more).wait().json()
    }

    pub(crate) fn clone_with(&self, options: &[&str], more: &[&str]) -> Program {
        let clones = self.clones();
        let mut words = vec!["clone", self.snapshot.to_str().unwrap(), "--dir", clones.to_str().unwrap()];
        words.extend(options);
        words.push("--");
        words.extend(self.line.iter().map(String::as_str));
        words.extend(more);
        start(words)
    }

    pub(crate) fn serial(&self, number: u64) -> String {
        std::fs::read_to_string(self.folder.path().join(format!("serial-{number}"))).unwrap_or_default()
    }

    /// Waits until a clone has announced `count` laps; all of them.
    pub(crate) fn laps(&self, number: u64, count: usize) -> Vec<u32> {
        wait_for("laps", || {
            let laps = pass_numbers(&self.serial(number));
            (laps.len() >= count).then_some(laps)
        })
    }

    /// Expects a clone to continue from the saved moment, with its memory and its CPU of one moment.
    #[track_caller]
    pub(crate) fn assert_goes_on(&self, clone: &Value) {
        let number = clone["number"].as_u64().unwrap();
        let laps = self.laps(number, 3);
        assert!((self.lap + 1..=self.lap + 2).contains(&laps[0]), "{laps:?} after {}", self.lap);
        assert!(laps.windows(2).all(|pair| pair[1] == pair[0] + 1), "{laps:?}");
        let mut qmp = Qmp::connect(Path::new(clone["monitor"].as_str().unwrap()), SOON).unwrap();
        stop_and_check(&mut qmp, &self.guest, &self.folder.path().join(format!("picture-{number}")));
        qmp.execute("cont", json!({})).unwrap();
    }

    pub(crate) fn list(&self) -> Vec<Value> {
        let listed = limosa(["clone", "list", "--json", self.clones().to_str().unwrap()]).json();
        listed["clones"].as_array().unwrap().clone()
    }

    /// The QEMUs that were started for clones, recorded or not.
    pub(crate) fn processes(&self) -> Vec<u32> {
        processes_of(&self.clones())
    }
}

/// Processes that name this folder on their command line, limosa's own apart.
pub(crate) fn processes_of(folder: &Path) -> Vec<u32> {
    let mark = folder.to_str().unwrap().to_owned();
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let text = String::from_utf8_lossy(&words);
        // The first word is that of a loader, where a QEMU brings its own.
        let program = text.split('\0').next().unwrap_or_default();
        !program.ends_with("limosa") && text.contains("qemu-system") && text.contains(&mark) && is_alive(*pid)
    })
    .collect()
}

impl Drop for Scene {
    fn drop(&mut self) {
        for pid in self.processes() {
            // It may end by itself.
            let _ = kill9(pid);
        }
    }
}

/// The processes of clones that are there by the list.
pub(crate) fn pids(listed: &[Value]) -> Vec<u32> {
    let lives = |clone: &&Value| ["waiting", "loaded", "running"].contains(&clone["state"].as_str().unwrap());
    let pid = |clone: &Value| u32::try_from(clone["process"]["pid"].as_u64()?).ok();
    listed.iter().filter(lives).filter_map(pid).collect()
}
