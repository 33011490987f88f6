//! The end of the demo: a VM with a checkpoint ten times a second is killed, and continues from the newest.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use limosa_testkit::{LinuxGuest, Machine, Process, Serial, Series, kill9, scratch};

use super::{command_line, say, seconds, start};

/// For what should take moments on any machine.
const SOON: Duration = Duration::from_secs(120);
/// The least number of checkpoints before the VM is killed.
const CHECKPOINTS: u64 = 10;

/// Kills a protected VM, and has it continue.
pub(super) fn run(limosa: &Path) -> Result<()> {
    if Series::Newest.program().is_err() {
        say("\n(limosa protect is not shown: it needs QEMU 11.1 under TCG, see cargo xtask setup.)");
        return Ok(());
    }
    let folder = scratch()?;
    let directory = folder.path().join("vm");
    let machine = Machine::linux(LinuxGuest::default()).series(Series::Newest);
    say("\nAnother guest, with a checkpoint ten times a second:");
    let begun = Instant::now();
    let vm = machine.start()?;
    vm.wait_counts(2)?;
    command_line(&["limosa", "protect", "--qmp", "QMP", "vm", "--every", "100ms"]);
    let (monitor, options) = (vm.qmp_socket(), ["protect", "--every", "100ms", "--output", "free", "--qmp"]);
    let options = options.iter().map(Path::new);
    let words: Vec<&Path> = options.chain([monitor.as_path(), directory.as_path()]).collect();
    let keeper = start(limosa, &words)?;
    wait_checkpoints(limosa, &directory)?;
    let last = vm.wait_counts(1)?;
    say("Its QEMU is killed.");
    kill9(vm.pid())?;
    let killed = Instant::now();
    // Its VM is lost, and its exit status says so.
    keeper.wait(SOON)?;
    command_line(&["limosa", "protect", "failover", "vm", "--fenced", "--", "qemu-system-x86_64", "..."]);
    let (failover, serial) = fail_over(limosa, &machine, (folder.path(), &directory))?;
    let next = serial.wait_counts(1)?;
    let took = seconds(killed.elapsed());
    say(&format!("The guest had counted to {last}, and continues with {next}, {took} after it was killed."));
    say(&format!("All of that took {}, most of it for the guest to boot.", seconds(begun.elapsed())));
    ensure!((last..=last + 2).contains(&next), "the guest counted {next} after {last}");
    // QEMU has -no-reboot.
    serial.send("reboot -f")?;
    failover.wait(SOON).map(drop)
}

/// Waits until some checkpoints count.
fn wait_checkpoints(limosa: &Path, directory: &Path) -> Result<()> {
    let begun = Instant::now();
    loop {
        let output =
            Command::new(limosa).args(["inspect", "--json"]).arg(directory).output().context("limosa inspect")?;
        let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if shown["checkpoint"].as_u64() >= Some(CHECKPOINTS) {
            return Ok(());
        }
        ensure!(begun.elapsed() < SOON, "no checkpoints: {}", String::from_utf8_lossy(&output.stderr));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Has limosa start the VM from its newest checkpoint.
fn fail_over(limosa: &Path, machine: &Machine, (folder, kept): (&Path, &Path)) -> Result<(Process, Serial)> {
    let socket = folder.join("serial");
    let mut line = machine.command_line(folder)?;
    for word in line.iter_mut().filter(|word| *word == "stdio") {
        *word = format!("unix:{},server=on,wait=off", socket.display());
    }
    let mut command = Command::new(limosa);
    command.args(["protect", "failover", "--fenced"]).arg(kept).arg("--").args(&line).stdin(Stdio::null());
    let failover = Process::spawn("limosa", command)?;
    let begun = Instant::now();
    loop {
        // The socket is there a moment before QEMU listens.
        match Serial::connect(&socket) {
            Ok(serial) => return Ok((failover, serial)),
            Err(error) => ensure!(begun.elapsed() < SOON, "QEMU does not start: {error:#}"),
        }
        ensure!(failover.try_wait()?.is_none(), "limosa protect failover has ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}
