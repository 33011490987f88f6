//! `limosa clone`: many VMs of one snapshot.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use limosa_clone::{
    Backing, CloneError, CommandTemplate, Failure, Fleet, FleetOptions, FleetReport, Listed, Started, State,
    StopOptions, list, remove, stop,
};
use limosa_console::{all_printed, error_line, print_out, quantity, say};
use limosa_qemu::check_command_line;
use limosa_snapshot::Snapshot;
use serde_json::{Value, json};

use crate::args::{
    BackingArg, CloneArgs, CloneCommand, CloneMemoryArg, ListClonesArgs, MakeClonesArgs, RemoveClonesArgs,
    StopClonesArgs,
};

pub(crate) fn run(args: &CloneArgs) -> anyhow::Result<ExitCode> {
    match (&args.command, &args.make) {
        (Some(CloneCommand::List(args)), _) => list_clones(args),
        (Some(CloneCommand::Stop(args)), _) => stop_clones(args),
        (Some(CloneCommand::Rm(args)), _) => remove_clones(args),
        (None, Some(args)) => make(args),
        (None, None) => bail!("nothing to clone: see limosa clone --help"),
    }
}

fn make(args: &MakeClonesArgs) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    check_command_line(&args.command)?;
    let snapshot = Snapshot::open(&args.snapshot)?;
    snapshot.warnings().iter().for_each(|warning| say!("limosa: {warning}"));
    snapshot.lock_serving()?;
    let mut options = FleetOptions::default();
    options.jobs = args.jobs;
    options.backing = match args.backing {
        BackingArg::Absolute => Backing::Absolute,
        BackingArg::Relative => Backing::Relative,
    };
    options.must_map = args.memory == CloneMemoryArg::Mapped;
    let fleet = Fleet::new(&snapshot, &args.dir, CommandTemplate::new(args.command.clone()), options)?;
    fleet.notices().iter().for_each(|notice| say!("limosa: {notice}"));
    if !snapshot.is_mappable() {
        say!(
            "limosa: to share its memory, make the snapshot mappable: limosa snapshot seal {}",
            args.snapshot.display()
        );
    }
    let count = args.count.get();
    tell_estimate(&fleet, count);
    let on_result = |done: &Result<Started, Failure>| {
        if let Err(failure) = done {
            say!("limosa: clone {:03} was not started: {}", failure.number, error_line(&failure.error));
        }
    };
    let report = fleet.start(count, &on_result);
    if args.json {
        print_out!("{}", object(&report));
    }
    all_printed()?;
    if let (Some(first), Some(last)) = (report.started.first(), report.started.last()) {
        let how = if first.mapped_blocks.is_empty() { "each with a copy of the memory" } else { "sharing its memory" };
        say!(
            "{} {} of {} after {}, {how}; {} to {} in {}",
            report.started.len(),
            if report.started.len() == 1 { "clone runs" } else { "clones run" },
            args.snapshot.display(),
            quantity::time(begun.elapsed()),
            first.record.name,
            last.record.name,
            args.dir.display()
        );
    }
    if report.failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let names: Vec<_> = report.failed.iter().map(|failure| format!("{:03}", failure.number)).collect();
    let rest =
        if report.not_tried > 0 { format!(" ({} more were not tried)", report.not_tried) } else { String::new() };
    bail!("not started: {}{rest}; nothing is left of them", names.join(", "))
}

/// Warns before anything is started if the host's memory may be too small.
fn tell_estimate(fleet: &Fleet<'_>, count: u64) {
    let needed = fleet.estimate(count);
    if let Some(available) = available_memory()
        && needed > available
    {
        say!(
            "limosa: {count} clones may need {} before their guests write anything, and {} of memory are available",
            quantity::bytes(needed),
            quantity::bytes(available)
        );
    }
}

/// Memory that the kernel can give without swapping (`/proc/meminfo`), in bytes.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

fn object(report: &FleetReport) -> Value {
    let started = report.started.iter().map(|started| {
        let record = &started.record;
        json!({
            "name": record.name,
            "number": record.number,
            "pid": record.process.as_ref().map(|process| process.pid),
            "dir": record.monitor.parent(),
            "monitor": record.monitor,
            "log": record.log,
            "overlays": record.overlays,
            "mapped_blocks": started.mapped_blocks,
            "sent_pages": started.sent_pages,
            "vm_state": started.state,
            "loaded_ms": quantity::millis(started.loaded),
            "running_ms": quantity::millis(started.running),
        })
    });
    let failed =
        report.failed.iter().map(|failure| json!({ "number": failure.number, "error": error_line(&failure.error) }));
    json!({
        "clones": started.collect::<Vec<_>>(),
        "failed": failed.collect::<Vec<_>>(),
        "not_tried": report.not_tried,
    })
}

fn list_clones(args: &ListClonesArgs) -> anyhow::Result<ExitCode> {
    let clones = list(&args.dir)?;
    if args.json {
        print_out!("{}", json!({ "clones": clones }));
    } else {
        for Listed { state, record, .. } in &clones {
            let state = match (state, &record.process) {
                (State::Running, Some(process)) => format!("running  pid {}", process.pid),
                (State::Running, None) => "running".to_owned(),
                (State::Starting, _) => "starting".to_owned(),
                (State::Ended, _) => "ended".to_owned(),
                (State::Unfinished, _) => "never started; remove it with limosa clone rm".to_owned(),
            };
            print_out!("{}  {state}  {}", record.name, record.monitor.display());
        }
    }
    all_printed()?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the named clones, or all.
fn names(dir: &Path, named: &[String]) -> Result<Vec<String>, CloneError> {
    if !named.is_empty() {
        return Ok(named.to_vec());
    }
    // The directory's name is what finds it again, even if the record says otherwise.
    let own = |clone: &Listed| clone.folder.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(list(dir)?.iter().filter_map(own).collect())
}

fn stop_clones(args: &StopClonesArgs) -> anyhow::Result<ExitCode> {
    let mut options = StopOptions::default();
    options.power_down = args.power_down;
    let names = names(&args.dir, &args.names)?;
    let mut ended = 0;
    for name in &names {
        ended += u64::from(stop(&args.dir, name, options)?);
    }
    say!("{} ended, {} had ended before", quantity::count(ended), quantity::count(names.len() as u64 - ended));
    Ok(ExitCode::SUCCESS)
}

fn remove_clones(args: &RemoveClonesArgs) -> anyhow::Result<ExitCode> {
    let names = names(&args.dir, &args.names)?;
    for name in &names {
        if args.force {
            stop(&args.dir, name, StopOptions::default())?;
        }
        let removed = remove(&args.dir, name)?;
        for kept in &removed.kept {
            say!("limosa: {} was not made by limosa clone, and stays", kept.display());
        }
    }
    say!("{} removed", quantity::count(names.len() as u64));
    Ok(ExitCode::SUCCESS)
}
