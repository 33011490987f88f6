//! The end of the demo: eight VMs of the one snapshot, and what they take together.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use limosa_testkit::{Machine, Serial, scratch};
use serde_json::Value;

use super::{SUM, allocated, command_line, say, seconds};

const COUNT: usize = 8;

/// Starts the clones, has each prove its data, and says how much memory they take.
pub(super) fn run(limosa: &Path, machine: &Machine, snapshot: &Path, digest: &[String]) -> Result<()> {
    let folder = scratch()?;
    let clones = folder.path().join("clones");
    let mut line = machine.command_line(folder.path())?;
    for word in line.iter_mut().filter(|word| *word == "stdio") {
        *word = "unix:{dir}/serial,server=on,wait=off".to_owned();
    }
    let count = COUNT.to_string();
    command_line(&["limosa clone linux.limosa --count", &count, "--dir clones -- qemu-system-x86_64 ..."]);
    let _remover = Remover::start(limosa, &clones)?;
    let started = Instant::now();
    let found = start(limosa, snapshot, &clones, &line)?;
    let running = started.elapsed();
    prove(&found, digest)?;
    say(&format!("All {COUNT} ran after {}, and each finds its data unchanged.", seconds(running)));

    let pids = found.iter().map(|clone| clone["pid"].as_u64().context("a clone's process"));
    let together: u64 = pids.map(|pid| pss_kib(pid?)).sum::<Result<u64>>()?;
    let contents = allocated(snapshot)? >> 20;
    let copies = contents * COUNT as u64;
    say(&format!("Together they take {} MiB (PSS): QEMU itself, and what they have touched so far.", together >> 10));
    say(&format!("The snapshot's {contents} MiB are in memory once; a copy for each would be {copies} MiB."));
    Ok(())
}

/// Runs `limosa clone`; returns its report of each clone.
fn start(limosa: &Path, snapshot: &Path, clones: &Path, line: &[String]) -> Result<Vec<Value>> {
    let mut command = Command::new(limosa);
    command.args(["clone", "--json", "--count", &COUNT.to_string(), "--dir"]).arg(clones);
    command.arg(snapshot).arg("--").args(line).stderr(Stdio::inherit());
    let output = command.output().context("limosa clone")?;
    ensure!(output.status.success(), "limosa clone failed: {}", output.status);
    let found: Value = serde_json::from_slice(&output.stdout).context("limosa clone --json")?;
    let found = found["clones"].as_array().context("the clones in limosa's report")?;
    ensure!(found.len() == COUNT, "{} clones instead of {COUNT}", found.len());
    let maps = |clone: &Value| clone["mapped_blocks"].as_array().is_some_and(|blocks| !blocks.is_empty());
    ensure!(found.iter().all(maps), "not all clones map the snapshot");
    Ok(found.clone())
}

/// Each clone's guest sums up its data, and continues to count.
fn prove(clones: &[Value], digest: &[String]) -> Result<()> {
    for clone in clones {
        let name = clone["name"].as_str().context("a clone's name")?;
        let folder = clone["dir"].as_str().context("a clone's directory")?;
        let serial = Serial::connect(&Path::new(folder).join("serial"))?;
        let now = serial.shell(SUM).with_context(|| format!("clone {name}"))?;
        if now != digest {
            bail!("the data of clone {name} has changed: md5sum was {digest:?} and is {now:?}");
        }
        let count = serial.wait_counts(1)?;
        let sum = now.join(" ");
        say(&format!("clone {name}: md5sum {}, count {count}", sum.trim_end_matches('-').trim()));
    }
    Ok(())
}

/// Removes the clones when this process is done with them, and also if it is killed: the pipe that it waits on closes
/// either way.
struct Remover(Child);

impl Remover {
    fn start(limosa: &Path, clones: &Path) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", "read -r line; exec \"$0\" clone rm --force \"$1\" 2>/dev/null"]).arg(limosa).arg(clones);
        // An interrupt from the terminal is for the others.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        Ok(Self(command.spawn().context("sh")?))
    }
}

impl Drop for Remover {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A process's memory in KiB; what it shares with others counts in equal parts (its PSS).
fn pss_kib(pid: u64) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let value = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let value = value.and_then(|value| value.split_ascii_whitespace().next()?.parse().ok());
    value.with_context(|| format!("{path}: no line Pss"))
}
