//! A VM that runs, booted or failed over, and its gate.

use std::path::PathBuf;

use limosa_testkit::{Program, Vm, kill9, listens, wait_gone};
use rustix::process::{Pid, Signal, kill_process};

use crate::network::{Namespace, TAP};
use crate::scene::{Scene, text};
use crate::stage::{start_command, wait_for};

/// A VM that runs.
pub(crate) struct Running {
    pub(crate) pid: u32,
    pub(crate) qmp: PathBuf,
    held: Held,
}

/// The value that ends with it.
enum Held {
    First(Box<Vm>),
    Survivor(Program),
}

impl Running {
    /// The VM that was booted.
    pub(crate) fn first(vm: Vm) -> Self {
        Self { pid: vm.pid(), qmp: vm.qmp_socket(), held: Held::First(Box::new(vm)) }
    }

    /// The VM that this limosa has continued, with this monitor.
    pub(crate) fn survivor(limosa: Program, qmp: PathBuf) -> Self {
        let pid = wait_for("the QEMU that continues the VM", || qemu_below(limosa.pid()));
        Self { pid, qmp, held: Held::Survivor(limosa) }
    }

    /// Kills it, if it has not been. What has started it ends then.
    pub(crate) fn kill(self) {
        let _ = kill9(self.pid);
        match self.held {
            Held::First(vm) => drop(vm),
            Held::Survivor(limosa) => drop(limosa.wait()),
        }
        wait_gone(self.pid);
    }
}

/// Sends a signal to a process.
pub(crate) fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

/// The QEMU that this process has started, or one of its children.
pub(crate) fn qemu_below(parent: u32) -> Option<u32> {
    let is_child = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains(&format!("\nPPid:\t{parent}\n"))
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    let children = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter(is_child);
    children.into_iter().find_map(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if line.split(|byte| *byte == 0).any(|word| word == b"-incoming") { Some(pid) } else { qemu_below(pid) }
    })
}

/// `limosa protect gate` between the scene's VM and the tap device of this namespace, once it listens.
pub(crate) fn open_gate(scene: &Scene, network: &Namespace, more: &[&str]) -> Program {
    let [socket, listen] = ["gate", "vm.net"].map(|name| scene.path(name));
    for left in [&socket, &listen] {
        let _ = std::fs::remove_file(left);
    }
    let mut command = network.command(env!("CARGO_BIN_EXE_limosa"));
    command.args(["protect", "gate", text(&socket), "--listen", text(&listen), "--net", &format!("tap:{TAP}")]);
    command.args(more);
    let gate = start_command(command);
    wait_for("the gate", || {
        assert!(gate.is_running(), "limosa ended: {}", gate.stderr());
        listens(gate.pid(), &socket).then_some(())
    });
    gate
}
