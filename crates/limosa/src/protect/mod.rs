//! `limosa protect`.

mod failover;
mod gate;
mod line;

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use limosa_console::{error_line, print_out, quantity, say};
use limosa_control::JobKind;
use limosa_migrate::output::{OutputCounters, OutputGate};
use limosa_page::PAGE_SIZE;
use limosa_protect::{Percentiles, ProtectDisks, ProtectEnd, ProtectOptions, ProtectReport, ProtectRequest, protect};
use limosa_qemu::Watchdog;
use limosa_snapshot::Durability;
use serde_json::{Value, json};

use crate::args::{DurableArg, KeepArgs, ProtectArgs, ProtectCommand, ProtectDisksArg};
use crate::job::{self, JobHandles};
use crate::usage::misused;
use line::StatusLine;

pub(crate) fn run(args: ProtectArgs, verbose: u8) -> anyhow::Result<ExitCode> {
    match (args.command, args.keep) {
        (Some(ProtectCommand::Failover(args)), _) => failover::run(*args, verbose),
        (Some(ProtectCommand::Gate(args)), _) => gate::run(&args),
        (None, Some(args)) => keep(&args),
        (None, None) => bail!("nothing to protect: see limosa protect --help"),
    }
}

fn keep(args: &KeepArgs) -> anyhow::Result<ExitCode> {
    let gates = gate::connect(&args.gate)?;
    let gates: Vec<&dyn OutputGate> = gates.iter().map(|gate| gate as &dyn OutputGate).collect();
    if args.every.is_by_output() && gates.is_empty() {
        misused("--every event needs --gate: nothing else says when output wants to leave");
    }
    let monitor = job::connect(&args.qmp)?;
    // The VM stays QEMU's, and the job can be cancelled at any moment, as a save can.
    let handles = JobHandles::with_socket(args.control.as_deref(), JobKind::Save, "protecting", true)?;
    let line = StatusLine::show(args.every.longest());
    let report = protect(ProtectRequest {
        monitor: &monitor,
        directory: &args.directory,
        options: &options(args),
        watch: handles.watch(),
        gates: &gates,
        kept: &|kept| line.update(kept),
        start_watchdog: &|| Ok(Some(Watchdog::spawn(job::THIS_PROGRAM.as_ref(), ["watchdog", "--"], monitor.qmp())?)),
    });
    drop(line);
    let report = report.context("not protected")?;
    tell(&report, args.output.is_some());
    if args.json {
        print_out!("{}", object(&report));
    }
    match report.end {
        ProtectEnd::Failed(error) => {
            let kept = format!("protection ended; checkpoint {} in {}", report.checkpoints, report.newest.display());
            Err(anyhow::Error::from(error).context(kept))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn options(args: &KeepArgs) -> ProtectOptions {
    let mut options = ProtectOptions::default();
    options.every = args.every;
    options.stall_timeout = args.stall_timeout;
    options.disks = match args.disks {
        ProtectDisksArg::Refuse => ProtectDisks::Served(args.disk_server.clone()),
        ProtectDisksArg::Ignore => ProtectDisks::Ignore,
    };
    options.store.durability = match args.durable {
        DurableArg::Process => Durability::Unsynced,
        DurableArg::Disk => Durability::Synced,
    };
    options
}

/// Prints what was held back.
fn tell_output(output: Option<&OutputCounters>, free: bool) {
    let Some(output) = output else {
        let advice = if free { "" } else { ": others may have seen what a failover does not know (use --gate)" };
        say!("  output: free{advice}");
        return;
    };
    let lost = [
        (output.aborted_packets, "without a checkpoint"),
        (output.overflow_packets, "beyond the limit"),
        (output.undelivered_packets, "not taken by the network"),
    ];
    let lost: Vec<String> = lost
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, why)| format!("; {} dropped, {why}", quantity::count(*count)))
        .collect();
    say!(
        "  output: held {} frames, {}, for {} median, {} at most{}",
        quantity::count(output.held_packets),
        quantity::bytes(output.held_bytes),
        quantity::time(output.median_hold),
        quantity::time(output.longest_hold),
        lost.concat()
    );
}

/// Prints the counters. `free`: output was to be free.
fn tell(report: &ProtectReport, free: bool) {
    let ended = match &report.end {
        ProtectEnd::Asked => "as was asked".to_owned(),
        ProtectEnd::VmEnded => "with the VM".to_owned(),
        ProtectEnd::Failed(error) => error_line(error),
        other => format!("{other:?}"),
    };
    say!(
        "kept {} checkpoints in {}, ended {ended}; the VM is {}",
        quantity::count(report.checkpoints),
        quantity::time(report.elapsed),
        report.vm_state
    );
    tell_output(report.output.as_ref(), free);
    if report.checkpoints == 0 {
        return;
    }
    say!(
        "  pause: {} median, {} for 95 of 100, {} at most; every {}",
        quantity::time(report.pauses.median),
        quantity::time(report.pauses.p95),
        quantity::time(report.pauses.max),
        quantity::time(report.periods.median),
    );
    say!(
        "  pages: {} with contents, {} of them unchanged; {} zero; {} received",
        quantity::count(report.pages),
        quantity::count(report.equal_pages),
        quantity::count(report.zero_pages),
        quantity::bytes(report.bytes),
    );
}

fn object(report: &ProtectReport) -> Value {
    let times = |times: Percentiles| {
        json!({
            "median_ms": quantity::millis(times.median),
            "p95_ms": quantity::millis(times.p95),
            "max_ms": quantity::millis(times.max),
        })
    };
    let (end, error) = match &report.end {
        ProtectEnd::Asked => ("asked", None),
        ProtectEnd::VmEnded => ("vm-ended", None),
        ProtectEnd::Failed(error) => ("failed", Some(error_line(error))),
        _ => ("unknown", None),
    };
    json!({
        "newest": report.newest.to_string_lossy(),
        "checkpoints": report.checkpoints,
        "end": end,
        "error": error,
        "vm_state": report.vm_state,
        "elapsed_ms": quantity::millis(report.elapsed),
        "pause": times(report.pauses),
        "period": times(report.periods),
        "pages": { "contents": report.pages, "unchanged": report.equal_pages, "zero": report.zero_pages },
        "written_bytes": (report.pages - report.equal_pages.min(report.pages)).saturating_mul(PAGE_SIZE),
        "received_bytes": report.bytes,
        "output": report.output.as_ref().map_or_else(|| json!("free"), gate::held),
    })
}
