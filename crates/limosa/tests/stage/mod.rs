//! Steps of every black-box test here: run the real limosa with a stock QEMU, and check the state that it left.
//!
//! Law: nothing is believed that limosa says of itself. QEMU is asked over the testkit's own monitor, files are loaded
//! by QEMU, and the guest's memory is proven by the testkit.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod channels;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub(crate) use limosa_testkit::{Ended, Program, wait_for, wait_gone};
use limosa_testkit::{HeartbeatGuest, Machine, Qmp, Vm, kill9, scratch};
use serde_json::{Value, json};
use tempfile::TempDir;

/// For what should take moments on any machine: a limit for the stuck, not a measure.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// Returns from the test if QEMU tests are switched off.
#[macro_export]
macro_rules! needs_qemu {
    () => {
        if limosa_testkit::qemu_skipped() {
            return;
        }
    };
}

/// The number that a variable of the environment holds.
pub(crate) fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Starts limosa with these arguments.
pub(crate) fn start<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Program {
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command.args(arguments);
    start_command(command)
}

/// Starts a command that becomes limosa (`setpriv ... limosa ...`).
pub(crate) fn start_command(command: Command) -> Program {
    Program::start("limosa", command)
}

/// Runs limosa to its end.
pub(crate) fn limosa<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ended {
    start(arguments).wait()
}

/// The watchdog that this limosa has started, once there is one; `None` if limosa ended before.
pub(crate) fn watchdog(limosa: &Program) -> Option<u32> {
    wait_for("the watchdog of limosa", || match watchdog_of(limosa.pid()) {
        Some(pid) => Some(Some(pid)),
        None if limosa.is_running() => None,
        None => Some(None),
    })
}

/// The arguments of a save of this VM: `more` comes before the file.
pub(crate) fn save_arguments(vm: &Vm, snapshot: &Path, more: &[&str]) -> Vec<String> {
    let mut arguments = vec!["save".to_owned(), "--qmp".to_owned(), vm.qmp_socket().display().to_string()];
    arguments.extend(more.iter().map(|&word| word.to_owned()));
    arguments.push(snapshot.display().to_string());
    arguments
}

/// Saves this VM, and expects that it works; returns what `--json` printed.
pub(crate) fn save(vm: &Vm, snapshot: &Path, more: &[&str]) -> Value {
    let more: Vec<&str> = ["--json"].iter().chain(more).copied().collect();
    limosa(save_arguments(vm, snapshot, &more)).json()
}

/// The watchdog that this limosa has started, whether limosa still lives or not: its last word is limosa's process id.
pub(crate) fn watchdog_of(limosa: u32) -> Option<u32> {
    let limosa = limosa.to_string();
    let processes =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes.into_iter().find(|pid: &u32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<_> = words.strip_suffix(b"\0").unwrap_or(&words).split(|&byte| byte == 0).collect();
        words.get(1) == Some(&&b"watchdog"[..]) && words.last() == Some(&limosa.as_bytes())
    })
}

/// The watchdog of a limosa that was killed. One that was just being started is seen within moments.
pub(crate) fn watchdog_left_by(limosa: u32) -> Option<u32> {
    (0..20).find_map(|_| {
        std::thread::sleep(Duration::from_millis(5));
        watchdog_of(limosa)
    })
}

/// Kills the watchdog of a limosa that was killed.
pub(crate) fn kill_watchdog_left_by(limosa: u32) {
    while let Some(watchdog) = watchdog_left_by(limosa) {
        // It may end by itself meanwhile.
        let _ = kill9(watchdog);
        wait_gone(watchdog);
    }
}

/// QEMU as a job found it: what has to be the same afterwards.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    run_state: String,
    capabilities: Value,
    parameters: Value,
    objects: BTreeSet<String>,
    descriptor_sets: Value,
}

impl Found {
    pub(crate) fn of(vm: &Vm) -> Self {
        let ask = |command: &str, arguments: Value| vm.execute(command, arguments).unwrap();
        let objects = ask("qom-list", json!({ "path": "/objects" }));
        let name = |object: &Value| object["name"].as_str().unwrap().to_owned();
        Self {
            run_state: vm.run_state().unwrap(),
            capabilities: ask("query-migrate-capabilities", json!({})),
            parameters: ask("query-migrate-parameters", json!({})),
            objects: objects.as_array().unwrap().iter().map(name).collect(),
            descriptor_sets: ask("query-fdsets", json!({})),
        }
    }

    /// Expects that all is as it was found.
    #[track_caller]
    pub(crate) fn assert_same(&self, vm: &Vm) {
        self.assert_same_but(vm, &self.run_state);
    }

    /// Expects that all but the run state is as it was found, and that this is the run state.
    #[track_caller]
    pub(crate) fn assert_same_but(&self, vm: &Vm, run_state: &str) {
        let now = Self::of(vm);
        assert_eq!(now.run_state, run_state);
        assert_eq!(now.objects, self.objects, "QEMU's objects");
        assert_eq!(now.descriptor_sets, self.descriptor_sets, "QEMU's descriptor sets");
        assert_eq!(now.parameters, self.parameters, "QEMU's migration parameters");
        assert_eq!(now.capabilities, self.capabilities, "QEMU's migration capabilities");
        assert_no_descriptor(vm);
    }
}

/// Expects that QEMU keeps no end of limosa's socket pair.
#[track_caller]
fn assert_no_descriptor(vm: &Vm) {
    let error = vm.execute("closefd", json!({ "fdname": "limosa-save" })).expect_err("a descriptor was left in QEMU");
    assert!(format!("{error:#}").contains("limosa-save"), "{error:#}");
}

/// Waits until a migration out of this VM moves memory.
#[track_caller]
pub(crate) fn wait_moving(vm: &Vm) {
    wait_for("memory to move", || moves(vm).then_some(()));
}

fn moves(vm: &Vm) -> bool {
    let info = vm.execute("query-migrate", json!({})).unwrap();
    info["ram"]["transferred"].as_u64() > Some(100_000)
}

/// As [`wait_moving`], for a save that may be over before that is seen.
#[track_caller]
pub(crate) fn wait_moving_or_end(vm: &Vm, saving: &Program) {
    wait_for("memory to move", || (moves(vm) || !saving.is_running()).then_some(()));
}

/// Expects that the guest beats on and that its memory is of one instant.
#[track_caller]
pub(crate) fn assert_beats(vm: &Vm) {
    vm.wait_heartbeats(2).unwrap();
    vm.check_heartbeat().unwrap();
}

/// Stops a guest, and expects its memory and its CPU to be of one instant. `picture` is a file for its memory.
#[track_caller]
pub(crate) fn stop_and_check(qmp: &mut Qmp, guest: &HeartbeatGuest, picture: &Path) {
    qmp.execute("stop", json!({})).unwrap();
    let read = |range: std::ops::Range<u64>| {
        let size = range.end - range.start;
        qmp.execute("pmemsave", json!({ "val": range.start, "size": size, "filename": picture }))?;
        Ok(std::fs::read(picture)?)
    };
    guest.check(read).unwrap();
}

/// The names in a folder.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Loads the file in a second stock QEMU by QEMU's own means, and expects the beat to go on there.
#[track_caller]
pub(crate) fn load_in_stock_qemu(machine: &Machine, snapshot: &Path, multifd_channels: u8) -> Vm {
    let vm = machine.start_incoming().unwrap();
    vm.load_file(snapshot, multifd_channels).unwrap();
    vm.wait_run_state("running", SOON).unwrap();
    assert_beats(&vm);
    vm
}

/// A VM with a small beat guest.
pub(crate) fn small() -> Machine {
    Machine::heartbeat(HeartbeatGuest::over(8 << 20))
}

/// A folder and a file in it that is not there yet.
pub(crate) fn place() -> (TempDir, PathBuf) {
    let folder = scratch().unwrap();
    let file = folder.path().join("vm.snapshot");
    (folder, file)
}

/// A small file system in memory, unmounted when dropped.
pub(crate) struct Mounted(TempDir);

impl Mounted {
    pub(crate) fn new(size: &str) -> Self {
        let folder = scratch().unwrap();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &format!("size={size},mode=0700"), "tmpfs"]).arg(folder.path());
        assert!(command.status().unwrap().success(), "cannot mount a tmpfs");
        Self(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily, so that a failed test's limosa does not hold it up.
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// A QEMU with the options of one before 8.2: it refuses `rom` and does not list it.
const OLD_QEMU: &str = r#"#!/bin/sh
for word; do
    case "$word" in
    memory-backend-file,help) qemu-system-x86_64 -object memory-backend-file,help | grep -v rom=; exit 0 ;;
    *'"rom"'*) echo "qemu-old: Property 'memory-backend-file.rom' not found" >&2; exit 1 ;;
    esac
done
shift 0
exec qemu-system-x86_64 "$@"
"#;

/// Makes [`OLD_QEMU`]; its path.
pub(crate) fn old_qemu(path: &Path) -> PathBuf {
    std::fs::write(path, OLD_QEMU).unwrap();
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    path.to_owned()
}
