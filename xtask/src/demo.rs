//! `cargo xtask demo`: a real Linux guest in stock QEMU is saved while it counts, and restored lazily into a second QEMU,
//! beside QEMU's own restore of the same file.
//!
//! Law: no input, nothing left behind, and no claim without its evidence: the guest's own count goes on, and the guest
//! itself finds its data unchanged.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail};
use limosa_testkit::{LinuxGuest, Machine, Process, Vm, scratch};
use serde_json::{Value, json};

use crate::{program, setup};

/// The guest's RAM, and how much of it the guest fills.
const MEMORY: u64 = 1 << 30;
const FILLED_MIB: u64 = 384;

/// Runs the demo.
pub(crate) fn run() -> Result<()> {
    setup::run()?;
    let limosa = program::build()?;
    let folder = scratch()?;
    let snapshot = folder.path().join("linux.limosa");
    let machine = Machine::linux(LinuxGuest::default()).memory(MEMORY);

    say("Booting Linux in stock QEMU (TCG): 1 GiB of RAM, 384 MiB of it filled by the guest, counting all the while.");
    let source = machine.start()?;
    source.wait_counts(3)?;
    source.shell(&format!("dd if=/dev/zero bs=1M count={FILLED_MIB} 2>/dev/null | tr '\\0' x > /tmp/data"))?;
    let digest = source.shell("md5sum < /tmp/data")?;
    let before = source.wait_counts(1)?;

    command_line(&["limosa", "save", "--qmp", "QMP", "linux.limosa", "--json"]);
    let saved = save(&limosa, &source, &snapshot)?;
    let size = std::fs::metadata(&snapshot).context("the snapshot")?;
    let allocated = size.blocks() / 2048;
    say(&format!("Saved in {} while the guest counted; the file takes {allocated} MiB.", seconds(saved.wall)));
    if let Some(downtime) = saved.number("downtime_ms") {
        say(&format!("The guest stood still for {downtime:.0} ms of that."));
    }
    let after = source.wait_counts(2)?;
    say(&format!("The guest counted {before} before the save and goes on: {after}. Now it is ended."));
    drop(source);

    say("The same file, restored by QEMU itself (-incoming defer, mapped-ram):");
    let eager = restore_by_qemu(&machine, &snapshot)?;
    report("QEMU", &eager, &digest)?;

    command_line(&["limosa", "restore", "linux.limosa", "--qmp", "QMP", "--json"]);
    let lazy = restore_by_limosa(&limosa, &machine, &snapshot)?;
    report("limosa", &lazy, &digest)?;

    let lazily = &lazy.report["lazy"];
    if let (Some(requests), Some(median)) = (lazily["requests"].as_u64(), lazily["request_latency_ms"]["p50"].as_f64())
    {
        say(&format!(
            "The guest touched {requests} pages before they came; half of them took less than {median:.1} ms."
        ));
    }
    println!();
    println!("                              QEMU      limosa");
    row("guest runs after", eager.running, lazy.running);
    row("first line on its console", eager.first_count, lazy.first_count);
    row("all of its memory there", eager.resident, lazy.resident);
    let factor = eager.running.as_secs_f64() / lazy.running.as_secs_f64().max(1e-6);
    println!("\nThe guest was back {factor:.0} times sooner.");
    Ok(())
}

fn say(text: &str) {
    println!("{text}");
}

fn command_line(words: &[&str]) {
    println!("\n$ {}", words.join(" "));
}

fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{} ms", time.as_millis())
    } else {
        format!("{:.2} s", time.as_secs_f64())
    }
}

fn row(name: &str, qemu: Duration, limosa: Duration) {
    println!("  {name:<26} {:>8}  {:>8}", seconds(qemu), seconds(limosa));
}

/// What a run of limosa has given.
struct Done {
    wall: Duration,
    report: Value,
}

impl Done {
    fn number(&self, name: &str) -> Option<f64> {
        self.report.get(name)?.as_f64()
    }
}

/// Starts limosa with its standard output kept in a file of `folder`.
fn start(limosa: &Path, arguments: &[&Path], folder: &Path) -> Result<Process> {
    let out = std::fs::File::create(folder.join("limosa.json")).context("the report of limosa")?;
    let mut command = Command::new(limosa);
    command.args(arguments).stdin(Stdio::null()).stdout(out);
    Process::spawn("limosa", command)
}

fn finish(process: &Process, folder: &Path, started: Instant) -> Result<Done> {
    let status = process.wait(Duration::from_secs(600))?;
    let wall = started.elapsed();
    if !status.success() {
        bail!("limosa failed: {status}");
    }
    let text = std::fs::read_to_string(folder.join("limosa.json")).context("the report of limosa")?;
    Ok(Done { wall, report: serde_json::from_str(&text).context("the report of limosa")? })
}

fn save(limosa: &Path, source: &Vm, snapshot: &Path) -> Result<Done> {
    let started = Instant::now();
    let monitor = source.qmp_socket();
    let arguments = ["save".as_ref(), "--qmp".as_ref(), monitor.as_path(), snapshot, "--json".as_ref()];
    let process = start(limosa, &arguments, source.folder())?;
    finish(&process, source.folder(), started)
}

/// A guest that is back, and how long it took from the command on.
struct Restored {
    vm: Vm,
    running: Duration,
    first_count: Duration,
    resident: Duration,
    count: u64,
    /// What limosa printed; nothing for QEMU.
    report: Value,
}

fn restore_by_qemu(machine: &Machine, snapshot: &Path) -> Result<Restored> {
    let vm = machine.start_incoming()?;
    let (started, clock) = (Instant::now(), SystemTime::now());
    vm.load_file(snapshot, 0)?;
    restored(vm, started, clock, None)
}

fn restore_by_limosa(limosa: &Path, machine: &Machine, snapshot: &Path) -> Result<Restored> {
    let vm = machine.start_incoming()?;
    let (started, clock) = (Instant::now(), SystemTime::now());
    let monitor = vm.qmp_socket();
    let arguments = ["restore".as_ref(), snapshot, "--qmp".as_ref(), monitor.as_path(), "--json".as_ref()];
    let process = start(limosa, &arguments, vm.folder())?;
    restored(vm, started, clock, Some(process))
}

/// Waits for the guest to run, to count, and to have all of its memory. `pager` is the process that brings the memory.
fn restored(vm: Vm, started: Instant, clock: SystemTime, pager: Option<Process>) -> Result<Restored> {
    // The pager may end before the guest prints anything, so it is waited for beside that.
    let (guest, paged) = std::thread::scope(|scope| {
        let paged = pager.as_ref().map(|process| scope.spawn(|| finish(process, vm.folder(), started)));
        let guest = guest_is_back(&vm, started, clock);
        (
            guest,
            paged.map(|thread| thread.join().unwrap_or_else(|_| bail!("the thread that waits for limosa panicked"))),
        )
    });
    // If limosa failed, that says more than a guest that did not come.
    let paged = paged.transpose()?;
    let (running, first_count, count) = guest?;
    let (resident, report) = paged.map_or((running, Value::Null), |done| (done.wall, done.report));
    Ok(Restored { vm, running, first_count, resident, count, report })
}

/// When the guest ran, when it counted, and what.
fn guest_is_back(vm: &Vm, started: Instant, clock: SystemTime) -> Result<(Duration, Duration, u64)> {
    let resumed = vm.qmp().wait_event("RESUME", Duration::from_secs(120))?;
    let running = event_time(&resumed)?.duration_since(clock).context("the clock was set back")?;
    let number = |text: &str| text.strip_prefix("count ").and_then(|number| number.parse::<u64>().ok());
    let (_, line) = vm.serial().wait_from(0, Duration::from_secs(120), |text| number(text).is_some())?;
    Ok((running, line.at.duration_since(started), number(&line.text).context("the count")?))
}

/// QEMU stamps its events with the wall clock (QEMU docs: interop/qmp-spec).
fn event_time(event: &Value) -> Result<SystemTime> {
    let field = |name: &str| event["timestamp"][name].as_u64().with_context(|| format!("an event without {name}"));
    Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(field("seconds")?) + Duration::from_micros(field("microseconds")?))
}

/// Says how the guest is, and ends it.
fn report(name: &str, restored: &Restored, digest: &[String]) -> Result<()> {
    let last = restored.vm.wait_counts(3)?;
    say(&format!(
        "Restored by {name}: running after {}, first count {} after {}, and on to {last}.",
        seconds(restored.running),
        restored.count,
        seconds(restored.first_count)
    ));
    let now = restored.vm.shell("md5sum < /tmp/data")?;
    if now != digest {
        bail!("the guest's data has changed: md5sum was {digest:?} and is {now:?}");
    }
    say(&format!("The guest's 384 MiB are unchanged: md5sum {}", now.join(" ").trim_end_matches('-').trim()));
    restored.vm.execute("quit", json!({})).map(drop)
}
