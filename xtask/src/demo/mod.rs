//! `cargo xtask demo`: a real Linux guest in stock QEMU is saved while it counts, and brought back: by QEMU itself,
//! mapped and lazily by limosa, and then eight times at once. At the end a protected guest is killed, and continues.
//!
//! Law: no input, nothing left behind, and no claim without its evidence: the guest's own count continues, and the
//! guest itself finds its data unchanged.

mod clones;
pub(crate) mod disk;
mod protect;

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail};
use limosa_testkit::{LinuxGuest, Machine, Process, Vm, scratch};
use serde_json::{Value, json};

use crate::{program, setup};

/// The guest's RAM.
const MEMORY: u64 = 2 << 30;

/// The guest's script before the save: fills 1.5 GiB, and 32 MiB with random bytes. A translated CPU is slow, so
/// most of it are copies of one block, and only the random bytes are summed up to be compared later.
const FILL: &str = "\
    mkdir /data && mount -t tmpfs -o size=95% data /data && \
    head -c 16777216 /dev/zero | tr '\\0' x > /data/block && \
    for i in $(seq 94); do cat /data/block; done > /data/copies && \
    head -c 33554432 /dev/urandom > /data/random";
const SUM: &str = "md5sum < /data/random";

/// Runs the demo.
pub(crate) fn run() -> Result<()> {
    setup::run()?;
    let limosa = program::build()?;
    let folder = scratch()?;
    let snapshot = folder.path().join("linux.limosa");
    let machine = Machine::linux(LinuxGuest::default()).memory(MEMORY);

    say("Booting Linux in stock QEMU, translated: 2 GiB of RAM, 1.5 GiB of it filled, counting all the while ...");
    let source = machine.start()?;
    source.wait_counts(3)?;
    source.shell(FILL)?;
    let digest = source.shell(SUM)?;
    let before = source.wait_counts(1)?;

    command_line(&["limosa", "save", "--qmp", "QMP", "linux.limosa"]);
    let saved = save(&limosa, &source, &snapshot)?;
    let takes = allocated(&snapshot)? >> 20;
    say(&format!("Saved in {} while the guest counted; the file takes {takes} MiB.", seconds(saved)));
    let after = source.wait_counts(2)?;
    say(&format!("The guest counted {before} before the save and continues: {after}. Now it is ended."));
    drop(source);

    say("The same file, restored by QEMU itself (-incoming defer, mapped-ram):");
    let eager = restore_by_qemu(&machine, &snapshot)?;
    report("QEMU", &eager, &digest)?;

    command_line(&["limosa", "inspect", "linux.limosa", "--qemu-args"]);
    let object = mapped_object(&limosa, &snapshot)?;
    say(&format!("-object {object}"));
    say("A QEMU that was started with this has the file as its memory:");
    command_line(&["limosa", "restore", "linux.limosa", "--memory", "mapped", "--qmp", "QMP"]);
    let mapped = restore_by_limosa(&limosa, &machine.clone().memory_object(&object), &snapshot, "mapped")?;
    report("limosa", &mapped, &digest)?;

    say("And one with memory of its own:");
    command_line(&["limosa", "restore", "linux.limosa", "--memory", "lazy", "--qmp", "QMP"]);
    let lazy = restore_by_limosa(&limosa, &machine, &snapshot, "lazy")?;
    report("limosa", &lazy, &digest)?;

    println!();
    println!("                              {:>8}  {:>8}  {:>8}", "QEMU", "mapped", "lazy");
    let row = |name: &str, time: &dyn Fn(&Restored) -> Duration| {
        let [eager, mapped, lazy] = [&eager, &mapped, &lazy].map(|restored| seconds(time(restored)));
        println!("  {name:<26}  {eager:>8}  {mapped:>8}  {lazy:>8}");
    };
    row("guest runs after", &|restored| restored.running);
    row("first line on its console", &|restored| restored.first_count);
    row("all of its memory there", &|restored| restored.resident);
    drop([eager, mapped, lazy]);

    clones::run(&limosa, &machine, &snapshot, &digest)?;
    protect::run(&limosa)
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

/// Starts limosa; what it says goes where our own words go.
fn start(limosa: &Path, arguments: &[&Path]) -> Result<Process> {
    let mut command = Command::new(limosa);
    command.args(arguments).stdin(Stdio::null());
    Process::spawn("limosa", command)
}

/// Waits for limosa to end well; says how long it took.
fn finish(process: &Process, started: Instant) -> Result<Duration> {
    let status = process.wait(Duration::from_secs(600))?;
    if !status.success() {
        bail!("limosa failed: {status}");
    }
    Ok(started.elapsed())
}

/// Bytes of the disk that the file takes.
fn allocated(snapshot: &Path) -> Result<u64> {
    Ok(std::fs::metadata(snapshot).context("the snapshot")?.blocks() * 512)
}

fn save(limosa: &Path, source: &Vm, snapshot: &Path) -> Result<Duration> {
    let started = Instant::now();
    let monitor = source.qmp_socket();
    let process = start(limosa, &["save".as_ref(), "--qmp".as_ref(), monitor.as_path(), snapshot])?;
    finish(&process, started)
}

/// A guest that is back, and how long it took from the command on.
struct Restored {
    vm: Vm,
    running: Duration,
    first_count: Duration,
    resident: Duration,
    count: u64,
}

fn restore_by_qemu(machine: &Machine, snapshot: &Path) -> Result<Restored> {
    let vm = machine.start_incoming()?;
    let (started, clock) = (Instant::now(), SystemTime::now());
    vm.load_file(snapshot, 0)?;
    restored(vm, started, clock, None)
}

/// Restores into a new QEMU of this machine; `memory` is how.
fn restore_by_limosa(limosa: &Path, machine: &Machine, snapshot: &Path, memory: &str) -> Result<Restored> {
    let vm = machine.start_incoming()?;
    let (started, clock) = (Instant::now(), SystemTime::now());
    let monitor = vm.qmp_socket();
    let words = ["restore".as_ref(), snapshot, "--memory".as_ref(), memory.as_ref(), "--qmp".as_ref()];
    let process = start(limosa, &[&words[..], &[monitor.as_path()]].concat())?;
    restored(vm, started, clock, Some(process))
}

/// The value of `-object` for a QEMU that is to map the snapshot.
fn mapped_object(limosa: &Path, snapshot: &Path) -> Result<String> {
    let output = Command::new(limosa).args(["inspect", "--qemu-args"]).arg(snapshot).output().context("limosa")?;
    let text = String::from_utf8(output.stdout).context("what limosa inspect printed")?;
    let object = text.lines().find_map(|line| line.strip_prefix("-object "));
    object.map(str::to_owned).with_context(|| format!("no -object in what limosa inspect printed: {text:?}"))
}

/// Waits for the guest to run, to count, and to have all of its memory. `pager` is the process that brings the memory.
fn restored(vm: Vm, started: Instant, clock: SystemTime, pager: Option<Process>) -> Result<Restored> {
    // The pager may end before the guest prints anything, so it is waited for beside that.
    let (guest, paged) = std::thread::scope(|scope| {
        let paged = pager.as_ref().map(|process| scope.spawn(|| finish(process, started)));
        let guest = guest_is_back(&vm, started, clock);
        (
            guest,
            paged.map(|thread| thread.join().unwrap_or_else(|_| bail!("the thread that waits for limosa panicked"))),
        )
    });
    // If limosa failed, that says more than a guest that did not come.
    let paged = paged.transpose()?;
    let (running, first_count, count) = guest?;
    Ok(Restored { vm, running, first_count, resident: paged.unwrap_or(running), count })
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
    let now = restored.vm.shell(SUM)?;
    if now != digest {
        bail!("the guest's data has changed: md5sum was {digest:?} and is {now:?}");
    }
    say(&format!("The guest finds its data unchanged: md5sum {}", now.join(" ").trim_end_matches('-').trim()));
    restored.vm.execute("quit", json!({})).map(drop)
}
