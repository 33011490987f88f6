//! `limosa protect` and `limosa keep`.

mod failover;
mod fence;
mod figures;
mod gate;
mod keeper;
mod line;
mod merge;
mod metrics;

use std::io;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use limosa_channel::{ChannelError, Uri};
use limosa_console::{error_line, print_out, quantity, say};
use limosa_control::JobKind;
use limosa_migrate::output::{OutputCounters, OutputGate};
use limosa_protect::gate::GateKeeper;
use limosa_protect::{
    CheckpointMethod, CheckpointTarget, KeeperAddress, OnLoss, Percentiles, ProtectDisks, ProtectEnd, ProtectError,
    ProtectOptions, ProtectReport, ProtectRequest, protect,
};
use limosa_qemu::Watchdog;
use limosa_qemu::monitor::Monitor;
use limosa_snapshot::Durability;
use limosa_socket::SocketAccess;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::args::{
    DurableArg, KeepArgs, MethodArg, OnLossArg, OutputArg, ProtectArgs, ProtectCommand, ProtectDisksArg,
};
use crate::job::{self, JobHandles};
use crate::metrics::{self as server, Metrics};
use crate::usage::misused;
use figures::Figures;
use line::StatusLine;

pub(crate) fn run(args: ProtectArgs, verbose: u8) -> anyhow::Result<ExitCode> {
    match (args.command, args.keep) {
        (Some(ProtectCommand::Failover(args)), _) => failover::run(*args, verbose),
        (Some(ProtectCommand::Gate(args)), _) => gate::run(&args),
        (Some(ProtectCommand::Merge(args)), _) => merge::run(&args),
        (None, Some(args)) => protect_vm(&args),
        (None, None) => bail!("nothing to protect: see limosa protect --help"),
    }
}

pub(crate) use keeper::run as keep;

fn protect_vm(args: &KeepArgs) -> anyhow::Result<ExitCode> {
    if let Some(why) = args.contradiction() {
        misused(why);
    }
    let keeper = args.to.clone().map(|uri| Ok::<_, ChannelError>(KeeperAddress { uri, tls: args.tls().read()? }));
    let keeper = keeper.transpose()?;
    let to = match (&keeper, &args.directory) {
        (Some(keeper), _) => CheckpointTarget::Keeper(keeper),
        (None, Some(directory)) => CheckpointTarget::Directory(directory),
        (None, None) => bail!("no place for the checkpoints: see limosa protect --help"),
    };
    if args.every.is_by_output() && args.gate.is_empty() {
        misused("--every event needs --gate: nothing else says when output wants to leave");
    }
    job::check_listen(args.listen.as_ref())?;
    let monitor = job::connect(&args.qmp)?;
    let mut options = options(args)?;
    let protection = *options.id.get_or_insert_with(Uuid::new_v4);
    let clients = gate::connect(&args.gate, GateKeeper { protection, vm: monitor.qmp().process() })?;
    let gates: Vec<&dyn OutputGate> = clients.iter().map(|gate| gate as &dyn OutputGate).collect();
    if gates.is_empty() && args.output.is_none() {
        warn_of_free_output(&monitor)?;
    }
    let filters = args.output == Some(OutputArg::Filter);
    let place = args.directory.clone().or_else(|| Some(keeper.as_ref()?.uri.to_string().into())).unwrap_or_default();
    let figures = Figures::new(place, filters)?;
    // The VM stays QEMU's, and the job can be cancelled at any moment, as a save can.
    let commands = Arc::clone(&figures);
    let handles = JobHandles::with_commands(args.control.as_deref(), JobKind::Save, commands)?;
    let _metrics = args.metrics.as_ref().map(|uri| serve_metrics(uri, &figures)).transpose()?;
    let line = StatusLine::show(args.every.longest());
    let report = protect(ProtectRequest {
        monitor: &monitor,
        to,
        options: &options,
        watch: handles.watch(),
        gates: &gates,
        began: &|base| {
            figures.began();
            line.begin(base);
            gate::warn_of_idle(&args.gate, &clients);
            if args.events {
                print_out!("{}", figures::base(base));
            }
        },
        kept: &|kept| {
            figures.kept(kept);
            line.update(kept);
            if args.events {
                print_out!("{}", figures.checkpoint(kept));
            }
        },
        start_watchdog: &|| Ok(Some(Watchdog::spawn(job::THIS_PROGRAM.as_ref(), ["watchdog", "--"], monitor.qmp())?)),
    });
    drop(line);
    let report = report.context("not protected")?;
    tell(&report, args.output);
    if args.json || args.events {
        let mut ended = object(&report, &figures);
        if let (true, Some(ended)) = (args.events, ended.as_object_mut()) {
            ended.insert("event".into(), "ended".into());
        }
        print_out!("{ended}");
    }
    match report.end {
        ProtectEnd::Failed(error) => {
            let mut kept = match &args.directory {
                Some(_) => {
                    format!("protection ended; checkpoint {} in {}", report.checkpoints, report.newest.display())
                }
                None => format!("protection ended after {} checkpoints", report.checkpoints),
            };
            match (&args.directory, &error) {
                (Some(directory), _) if report.stands_still && !args.disk_server.is_empty() => kept.push_str(&format!(
                    "; the VM stands still without its disks: end its QEMU, start their server with --fenced --epoch {}, \
                     and give that to limosa protect failover {}",
                    report.checkpoints,
                    directory.display()
                )),
                // It has been stopped since the line was lost, and must not be continued.
                (_, ProtectError::TakenOver { .. }) if report.stands_still => {
                    kept.push_str("; the VM stands still here, and continues elsewhere: end its QEMU");
                }
                _ if report.stands_still => kept.push_str("; the VM stands still (limosa resume continues it)"),
                (Some(directory), ProtectError::QemuEnded) => kept.push_str(&format!(
                    " (limosa protect failover {} -- QEMU... continues the VM from it)",
                    directory.display()
                )),
                _ => {}
            }
            Err(anyhow::Error::from(error).context(kept))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Says which networks of a VM are not held back, before anything is changed.
fn warn_of_free_output(monitor: &Monitor) -> anyhow::Result<()> {
    let networks: Vec<String> = monitor.network_backends()?.into_iter().map(|network| network.id).collect();
    if !networks.is_empty() {
        say!(
            "limosa: output of the VM's networks ({}) is not held back: after a failover others may have seen what the VM \
             does not know; hold it with --gate, or say --output free",
            networks.join(", ")
        );
    }
    Ok(())
}

/// Serves the figures to Prometheus.
fn serve_metrics(uri: &Uri, figures: &Arc<Figures>) -> anyhow::Result<Metrics> {
    let listener = server::bind(uri, SocketAccess::default())?;
    say!("limosa: metrics at {}", listener.local_uri());
    let figures = Arc::clone(figures);
    Metrics::serve(listener, move || metrics::page(&figures))
}

fn options(args: &KeepArgs) -> anyhow::Result<ProtectOptions> {
    let mut options = ProtectOptions::default();
    options.listen.clone_from(&args.listen);
    options.filters = args.output == Some(OutputArg::Filter);
    options.method = match args.via {
        MethodArg::Colo => CheckpointMethod::Colo,
        MethodArg::Background => CheckpointMethod::Background,
    };
    options.every = args.every;
    options.channels = args.channels;
    options.stall_timeout = args.stall_timeout;
    options.lost_after = args.lost_after;
    options.on_loss = match args.on_loss {
        OnLossArg::Continue => OnLoss::Continue,
        OnLossArg::Pause => OnLoss::Pause,
    };
    options.disks = match args.disks {
        ProtectDisksArg::Refuse => ProtectDisks::Served(args.disk_server.clone()),
        ProtectDisksArg::Overlays => ProtectDisks::Overlays(args.disk_server.clone()),
        ProtectDisksArg::Ignore => ProtectDisks::Ignore,
    };
    options.gates = args.gate.iter().map(std::path::absolute).collect::<io::Result<_>>().context("--gate")?;
    options.store.durability = durability(args.durable);
    Ok(options)
}

fn durability(arg: DurableArg) -> Durability {
    match arg {
        DurableArg::Process => Durability::Unsynced,
        DurableArg::Disk => Durability::Synced,
    }
}

/// Prints what was held back.
fn tell_output(output: Option<&OutputCounters>, treatment: Option<OutputArg>) {
    let output = match (output, treatment) {
        (_, Some(OutputArg::Filter)) => return say!("  output: held by filters in QEMU, which do not count it"),
        (None, Some(OutputArg::Free)) => return say!("  output: free"),
        (None, None) => {
            return say!("  output: free: others may have seen what a failover does not know (use --gate)");
        }
        (Some(output), _) => output,
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

/// Prints the pages that came for checkpoints: those with contents, those of them that had not changed, those of zeros.
fn tell_pages((contents, equal, zero): (u64, u64, u64), bytes: u64) {
    say!(
        "  pages: {} with contents, {} of them unchanged; {} zero; {} received",
        quantity::count(contents),
        quantity::count(equal),
        quantity::count(zero),
        quantity::bytes(bytes),
    );
}

/// Prints the counters.
fn tell(report: &ProtectReport, treatment: Option<OutputArg>) {
    let ended = match &report.end {
        ProtectEnd::Asked => "ended when asked to".to_owned(),
        ProtectEnd::VmEnded => "ended with the VM".to_owned(),
        ProtectEnd::Failed(error) => format!("failed: {}", error_line(error)),
        other => format!("ended: {other:?}"),
    };
    say!(
        "kept {} checkpoints in {}, {ended}; the VM is {}",
        quantity::count(report.checkpoints),
        quantity::time(report.elapsed),
        report.vm_state
    );
    tell_output(report.output.as_ref(), treatment);
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
    tell_pages((report.pages, report.equal_pages, report.zero_pages), report.bytes);
}

fn object(report: &ProtectReport, figures: &Figures) -> Value {
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
        "bases": report.bases,
        "checkpoints": report.checkpoints,
        "end": end,
        "error": error,
        "vm_state": report.vm_state,
        "elapsed_ms": quantity::millis(report.elapsed),
        "pause": times(report.pauses),
        "period": times(report.periods),
        "pages": { "contents": report.pages, "unchanged": report.equal_pages, "zero": report.zero_pages },
        "written_bytes": figures::written(report.pages, report.equal_pages),
        "received_bytes": report.bytes,
        "output": figures.output(report.output.as_ref()),
    })
}
