//! The identity of clones and restored VMs: clock, random numbers, names, network. Runs the recipes of docs/clones.md.

mod clock;
mod names;
mod network;
mod random_numbers;
mod recipes;

use std::path::{Path, PathBuf};

use limosa_testkit::{LinuxGuest, Machine, Serial, Series, Vm, kill9, scratch, wait_for};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::clone_scene::processes_of;
use crate::stage::*;

/// A Linux guest that was saved, and the folder of its clones; QEMUs that use it end with this.
struct LinuxScene {
    folder: TempDir,
    snapshot: PathBuf,
    line: Vec<String>,
}

impl LinuxScene {
    /// Saves a guest whose QEMU has some more arguments, given the folder of its sockets, when `prepare` has done to it
    /// what there is to do.
    fn new(guest: &LinuxGuest, more: &dyn Fn(&str) -> Vec<String>, prepare: impl FnOnce(&Vm)) -> Self {
        Self::in_series(Series::Installed, guest, more, prepare)
    }

    /// Saves a guest as `new` does, in a series of QEMU; its clones are of the same one.
    fn in_series(
        series: Series,
        guest: &LinuxGuest,
        more: &dyn Fn(&str) -> Vec<String>,
        prepare: impl FnOnce(&Vm),
    ) -> Self {
        let folder = scratch().unwrap();
        let source_folder = folder.path().join("source");
        std::fs::create_dir(&source_folder).unwrap();
        let machine = |folder: &str| {
            let machine = Machine::linux(guest.clone()).series(series);
            more(folder).iter().fold(machine, |machine, word| machine.argument(word))
        };
        let source = machine(source_folder.to_str().unwrap()).start().unwrap();
        source.wait_counts(3).unwrap();
        prepare(&source);
        let snapshot = folder.path().join("snapshot");
        save(&source, &snapshot, &["--stop"]);
        drop(source);
        let words = machine("{dir}").command_line(folder.path()).unwrap();
        let serial = "unix:{dir}/serial,server=on,wait=off".to_owned();
        let line = words.into_iter().map(|word| if word == "stdio" { serial.clone() } else { word }).collect();
        Self { folder, snapshot, line }
    }

    fn clones(&self) -> PathBuf {
        self.folder.path().join("clones")
    }

    fn clone_with(&self, options: &[&str], wrapper: &[&str]) -> Program {
        let clones = self.clones();
        let mut words = vec!["clone", self.snapshot.to_str().unwrap(), "--dir", clones.to_str().unwrap()];
        words.extend(options);
        words.push("--");
        words.extend(wrapper);
        words.extend(self.line.iter().map(String::as_str));
        start(words)
    }

    /// Starts clones that share the snapshot's memory; their reports.
    fn start(&self, count: u32, options: &[&str], wrapper: &[&str]) -> Vec<Value> {
        self.start_by("mapped", count, options, wrapper)
    }

    /// Starts clones whose memory comes in this way; their reports.
    fn start_by(&self, memory: &str, count: u32, options: &[&str], wrapper: &[&str]) -> Vec<Value> {
        let count = count.to_string();
        let options = [&["--count", &count, "--json", "--memory", memory], options].concat();
        let report = self.clone_with(&options, wrapper).wait().json();
        assert_eq!(report["failed"], json!([]), "{report}");
        report["clones"].as_array().unwrap().clone()
    }
}

impl Drop for LinuxScene {
    fn drop(&mut self) {
        for pid in processes_of(self.folder.path()) {
            // It may end by itself.
            let _ = kill9(pid);
        }
    }
}

/// The console of a clone.
fn console(clone: &Value) -> Serial {
    Serial::connect(&folder(clone).join("serial")).unwrap()
}

/// The folder of a clone.
fn folder(clone: &Value) -> &Path {
    Path::new(clone["dir"].as_str().unwrap())
}

/// A guest with an agent.
fn with_agent() -> LinuxGuest {
    LinuxGuest { agent: true, ..LinuxGuest::default() }
}

/// The port of the agent, whose socket is in this folder.
fn agent_port(folder: &str) -> Vec<String> {
    let chardev = format!("socket,id=qga,path={folder}/qga,server=on,wait=off");
    let port = "virtserialport,chardev=qga,name=org.qemu.guest_agent.0";
    ["-device", "virtio-serial-pci", "-chardev", &chardev, "-device", port].map(str::to_owned).into()
}

/// Waits until the agent has opened its port.
fn wait_agent(vm: &Vm) {
    wait_for("the guest agent", || {
        let chardevs = vm.execute("query-chardev", json!({})).unwrap();
        let is_open = |chardev: &Value| chardev["label"] == "qga" && chardev["frontend-open"] == true;
        chardevs.as_array().unwrap().iter().any(is_open).then_some(())
    });
}
