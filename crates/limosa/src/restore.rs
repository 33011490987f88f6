//! `limosa restore`.

use limosa_console::quantity;
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use limosa_control::JobKind;
use limosa_migrate::MigrateError;
use limosa_qemu::monitor::Monitor;
use limosa_qemu::qmp::QmpError;
use limosa_qemu::{
    JobError, LazyReport, MappedVm, RestoreChannels, RestoreMode, RestoreObserver, RestoreOptions, RestoreReport,
    RestoreRequest, Watchdog, recover, restore,
};
use limosa_snapshot::{Snapshot, SnapshotError};
use serde_json::{Value, json};

use crate::args::{HowArgs, MemoryArg, ReadAheadArg, RestoreArgs, SetClockArg, ZeroPageDetectionArg};
use crate::clock::{self, ClockOutcome, RestoredClock};
use crate::detach::{self, Reporter};
use crate::import::Stored;
use crate::job::{self, JobHandles};
use crate::packed;
use crate::remedy;
use crate::remote;
use crate::report;
use crate::usage::misused;
use crate::working_set::{Recorded, Recording, StopSignals, WorkingSetUse, read_ahead_object, tell_read_ahead};
use limosa_console::{error_line, print_out, say};

pub(crate) fn run(args: RestoreArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.key)?;
    job::check_listen(args.how.listen.as_ref())?;
    check_clock(&args);
    check_recording(&args.how);
    if args.detach {
        return detach::run(&args);
    }
    if args.pager {
        detach::leave_session();
    }
    let reporter = Reporter::new(args.pager);
    let result = work(&args, &reporter);
    if let Err(error) = &result
        && reporter.failed(&format!("{}{}", limosa_console::anyhow_error_line(error), remedy::of_cause(error)))
    {
        return Ok(ExitCode::FAILURE);
    }
    result.map(|()| ExitCode::SUCCESS)
}

/// The reason why a guest that does not run is not recorded.
pub(crate) const PAUSED: &str = "--record-working-set cannot be used with --paused: the guest touches nothing";

/// Refuses to record a guest that does not run, and that of an eager restore, where nothing shows what it touches.
pub(crate) fn check_recording(how: &HowArgs) {
    let is_eager = how.memory == MemoryArg::Eager || how.channels.channels.is_some();
    if how.working_set.record_working_set.is_some() && is_eager {
        misused("--record-working-set cannot be used with an eager restore: nothing shows what its guest touches");
    }
    if how.working_set.record_working_set.is_some() && how.state.paused {
        misused(PAUSED);
    }
}

/// Refuses options with which a clock that must be set could not be set, or a failure would not be reported.
fn check_clock(args: &RestoreArgs) {
    let against = [(args.detach, "--detach"), (args.recover, "--recover"), (args.how.state.paused, "--paused")];
    if let Some((_, option)) = against.into_iter().find(|(given, _)| *given && args.how.set_clock == SetClockArg::On) {
        misused(format!("--set-clock on cannot be used with {option}"));
    }
}

fn work(args: &RestoreArgs, reporter: &Reporter) -> anyhow::Result<()> {
    let stored = Stored::open(&args.snapshot)?;
    let converted = stored.is_foreign();
    if converted && (args.recover || matches!(args.how.memory, MemoryArg::Lazy | MemoryArg::Mapped)) {
        bail!(
            "{}: not a snapshot; lazy and mapped restore and --recover need one: convert it with limosa import",
            args.snapshot.display()
        );
    }
    let monitor = job::connect(&args.job.qmp)?;
    let snapshot = stored.snapshot("and restoring it eagerly", args.pager)?;
    let notice = |line: &str| say!("limosa: {line}");
    let working_set = working_set(args, &snapshot, converted, &notice)?;
    let options = options(&args.how, converted, &working_set);
    let handles = JobHandles::new(&args.job, JobKind::Restore, "restoring", args.pager)?;
    // A recovered guest has run before.
    let wish = if args.recover { SetClockArg::Off } else { args.how.set_clock };
    let clock = RestoredClock::new(&monitor, wish);
    let observer = Observer::new(reporter, args.pager, args.how.state.paused, clock);
    let go = if args.recover { recover } else { restore };
    // A detached pager must not hold its caller's terminal open, and neither must its watchdog.
    let stderr = || if args.pager { Stdio::null() } else { Stdio::inherit() };
    let watchdog = || {
        Ok(Some(Watchdog::spawn_without_waiting(
            job::THIS_PROGRAM.as_ref(),
            ["watchdog", "--"],
            monitor.qmp(),
            stderr(),
        )?))
    };
    // Before the guest is said to run: from then on a signal ends the recording.
    let signals = StopSignals::register(&working_set)?;
    let done = go(RestoreRequest {
        monitor: &monitor,
        snapshot: &snapshot,
        path: snapshot.path(),
        options: &options,
        watch: handles.watch(),
        observer: &observer,
        start_watchdog: &watchdog,
    });
    let phase = handles.engine.progress.read().phase;
    drop(handles);
    let mut report = match done {
        Ok(report) => report,
        Err(error) => {
            // Everything may have been sent to a QEMU that could not load the devices, so the phase alone proves
            // nothing.
            let recovered = args.recover && phase >= limosa_migrate::control::Phase::PostcopyActive;
            let guest_runs = recovered || observer.has_lazy_guest();
            return Err(with_advice(error, args, guest_runs));
        }
    };
    let recording = begin_recording(working_set, &mut report, &monitor, &snapshot);
    let mut outcome = None;
    if !args.pager {
        tell(&report);
        outcome = observer.clock.outcome();
        if clock::failure(&outcome, wish).is_none() {
            clock::tell(&outcome, "");
        }
    }
    drop(observer);
    // The guest runs, and other programs may want its monitor.
    drop(monitor);
    let recorded =
        recording.and_then(|recording| recording.map(|recording| recording.finish_or_signal(&signals)).transpose());
    let read_ahead = report.read_ahead.take().map(|read_ahead| signals.finish(read_ahead));
    if args.pager {
        return Ok(());
    }
    recorded.iter().flatten().for_each(Recorded::tell);
    read_ahead.iter().for_each(tell_read_ahead);
    remote::tell_cost();
    if args.job.json && recorded.is_ok() && clock::failure(&outcome, wish).is_none() {
        let mut object = object(&report, &outcome);
        object["recorded_working_set"] = recorded.iter().flatten().next().map_or(Value::Null, Recorded::object);
        object["read_ahead"] = read_ahead.as_ref().map_or(Value::Null, read_ahead_object);
        remote::add_cost(&mut object);
        print_out!("{object}");
    }
    if let Some(why) = clock::failure(&outcome, wish) {
        bail!("the VM is restored, but {why}");
    }
    recorded.map(drop).context("the VM is restored, but its working set is not recorded")
}

/// The part that working sets have in a restore. A file that was converted has none.
fn working_set(
    args: &RestoreArgs,
    snapshot: &Snapshot,
    converted: bool,
    notice: &dyn Fn(&str),
) -> anyhow::Result<WorkingSetUse> {
    let wanted = &args.how.working_set;
    if !converted {
        return WorkingSetUse::prepare(wanted, snapshot, notice);
    }
    if wanted.record_working_set.is_some() || wanted.read_ahead == ReadAheadArg::On {
        bail!(
            "{}: not a snapshot, and only snapshots have working sets: convert it with limosa import",
            args.snapshot.display()
        );
    }
    Ok(WorkingSetUse::none())
}

/// Begins to record a restored guest, if that was asked for.
pub(crate) fn begin_recording(
    working_set: WorkingSetUse,
    report: &mut RestoreReport,
    monitor: &Monitor,
    snapshot: &Snapshot,
) -> anyhow::Result<Option<Recording>> {
    if working_set.record_for().is_some() && report.mode == RestoreMode::Eager {
        bail!("nothing shows what the guest of an eager restore touches; use --memory mapped or lazy");
    }
    if working_set.record_for().is_some() && report.vm_state != "running" {
        bail!("the guest does not run: it was saved paused (use --run)");
    }
    let requested = report.recorded.take();
    working_set.begin(snapshot, requested, || Ok(MappedVm::of_monitor(monitor, snapshot)?))
}

/// The remedy after a failure depends on whether the guest had been started.
fn with_advice(error: JobError, args: &RestoreArgs, guest_runs: bool) -> anyhow::Error {
    let refused = matches!(error, JobError::Refused { .. } | JobError::Snapshot(_));
    if guest_runs {
        let how = format!("limosa restore --recover {} --qmp {}", args.snapshot.display(), args.job.qmp);
        let what = if matches!(error, JobError::Migrate(MigrateError::Paused)) {
            "the rest of the guest's memory is missing; the guest stalls where it accesses it"
        } else {
            "the guest stalls where it accesses missing memory"
        };
        return anyhow::anyhow!("{}; {what}; recover with: {how}", error_line(&error));
    }
    if refused || args.recover {
        return error.into();
    }
    let remedy = remedy_before_the_guest(&error, args);
    let is_damaged = causes(&error).any(|cause| cause.is::<SnapshotError>());
    let unchanged = if is_damaged { "" } else { "; the snapshot is unchanged" };
    let line = format!("not restored{unchanged}: {}{remedy}", error_line(&error));
    // The library's remedies are found in the chain, and follow this line.
    anyhow::Error::from(error).context(line)
}

/// Returns the remedy for a QEMU that has not got its VM.
fn remedy_before_the_guest(error: &JobError, args: &RestoreArgs) -> String {
    if matches!(error, JobError::Qmp(QmpError::Command { command, .. }) if command == "migrate-incoming")
        && let Some(address) = &args.how.listen
    {
        return format!(
            "; QEMU cannot listen on {address}: choose another --listen, for a new QEMU in place of this one"
        );
    }
    let compare = format!(
        "; limosa inspect {} --against-qmp SOCK says what it lacks, if it lacks anything",
        args.snapshot.display()
    );
    match error {
        JobError::Migrate(MigrateError::Cancelled) => "; end this QEMU, and start a new one for another restore".into(),
        JobError::QemuEnded => format!("; start a new one{compare}"),
        JobError::QemuHangs { .. } => format!("; end this QEMU with kill -9, and start a new one{compare}"),
        _ if causes(error).any(|cause| cause.is::<SnapshotError>()) => {
            "; end this QEMU, start a new one, and restore another copy of the snapshot into it".into()
        }
        _ => format!("; end this QEMU and start a new one{compare}"),
    }
}

/// The error and its causes.
fn causes(error: &JobError) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source())
}

pub(crate) fn options(args: &HowArgs, converted: bool, working_set: &WorkingSetUse) -> RestoreOptions {
    let mut options = RestoreOptions::default();
    options.mode = match args.memory {
        // The converted file is gone with this process, so no other could continue from it.
        _ if converted => RestoreMode::Eager,
        MemoryArg::Auto => RestoreMode::Auto,
        MemoryArg::Mapped => RestoreMode::Mapped,
        MemoryArg::Lazy => RestoreMode::Lazy,
        MemoryArg::Eager => RestoreMode::Eager,
    };
    options.transport = args.via.into();
    options.listen = args.listen.clone();
    options.channels = args.channels.channels.map(|count| {
        let mut channels = RestoreChannels::new(count);
        channels.compression = args.channels.compression;
        channels.detect_zero = args.zero_page_detection == ZeroPageDetectionArg::Multifd;
        channels.zero_copy = args.zero_copy;
        channels
    });
    options.preempt = args.preempt;
    options.run = args.state.choice();
    options.disks = args.disks.into();
    options.disk_servers.clone_from(&args.disk_server);
    options.working_set = working_set.set.clone();
    options.read_ahead = working_set.reads_ahead;
    options.record_for = working_set.record_for();
    options
}

/// Reports when the guest runs.
pub(crate) struct Observer<'a> {
    reporter: &'a Reporter,
    quiet: bool,
    paused: bool,
    /// Whether there is a guest whose memory is still to come.
    lazy_guest: AtomicBool,
    /// Whether QEMU has all of the VM.
    loaded: AtomicBool,
    /// The guest's clock.
    pub(crate) clock: RestoredClock<'a>,
}

impl<'a> Observer<'a> {
    pub(crate) fn new(reporter: &'a Reporter, quiet: bool, paused: bool, clock: RestoredClock<'a>) -> Self {
        let (lazy_guest, loaded) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { reporter, quiet, paused, lazy_guest, loaded, clock }
    }

    /// Whether there is a guest whose memory is still to come.
    pub(crate) fn has_lazy_guest(&self) -> bool {
        self.lazy_guest.load(Ordering::Acquire)
    }

    /// Whether QEMU has all of the VM.
    pub(crate) fn has_loaded(&self) -> bool {
        self.loaded.load(Ordering::Acquire)
    }
}

impl RestoreObserver for Observer<'_> {
    fn guest_ready(&self, after: Duration, mode: RestoreMode) {
        self.lazy_guest.store(mode == RestoreMode::Lazy, Ordering::Release);
        self.reporter.guest_ready(after, mode.name());
        if !self.quiet && mode == RestoreMode::Lazy {
            let what = if self.paused { "the guest is loaded, paused," } else { "the guest runs" };
            say!("{what} after {}; its memory follows", quantity::time(after));
        }
        self.clock.guest_ready();
    }

    fn loaded(&self) {
        self.loaded.store(true, Ordering::Release);
    }
}

pub(crate) fn tell(report: &RestoreReport) {
    if let Some(lazy) = &report.lazy {
        say!("restored: all memory after {}; the VM is {}", quantity::time(report.time_to_resident), report.vm_state);
        tell_requests(lazy);
    } else {
        say!("restored after {}; the VM is {}", quantity::time(report.time_to_guest), report.vm_state);
    }
    if !report.mapped_blocks.is_empty() {
        say!("  mapped from the snapshot, and shared with every VM that maps it: {}", report.mapped_blocks.join(", "));
    }
    if let (Some(normal), Some(zero)) = (report.normal_pages, report.zero_pages) {
        let moved = normal.saturating_mul(limosa_page::PAGE_SIZE);
        say!(
            "  pages: {} with contents, {} zero; {} at {:.2} GiB/s",
            quantity::count(normal),
            quantity::count(zero),
            quantity::bytes(moved),
            quantity::rate(moved, report.time_to_resident)
        );
    }
}

/// Describes how long a guest waited for pages that it requested.
pub(crate) fn tell_requests(lazy: &LazyReport) {
    let latency = &lazy.request_latency;
    let at = |quantile: f64| quantity::time(Duration::from_nanos(latency.value_at_quantile(quantile)));
    if latency.is_empty() {
        say!("  no page had to be requested");
    } else {
        say!(
            "  {} {} requested; answered within {} (median), {} (99%), {} (maximum)",
            quantity::count(latency.len()),
            if latency.len() == 1 { "page was" } else { "pages were" },
            at(0.5),
            at(0.99),
            quantity::time(Duration::from_nanos(latency.max()))
        );
    }
}

/// The same, for programs.
pub(crate) fn lazy_object(lazy: &LazyReport) -> Value {
    let at = |quantile: f64| millis(lazy.request_latency.value_at_quantile(quantile));
    json!({
        "requests": lazy.request_latency.len(),
        "request_latency_ms": { "p50": at(0.5), "p99": at(0.99), "max": millis(lazy.request_latency.max()) },
        "main": report::counters(&lazy.main),
        "preempt": lazy.preempt.as_ref().map(report::counters),
    })
}

fn object(report: &RestoreReport, clock: &ClockOutcome) -> Value {
    json!({
        "mode": report.mode.name(),
        "mapped_blocks": report.mapped_blocks,
        "vm_state": report.vm_state,
        "to_guest_ms": quantity::millis(report.time_to_guest),
        "to_resident_ms": quantity::millis(report.time_to_resident),
        "pages": { "normal": report.normal_pages, "zero": report.zero_pages },
        "clock": clock::object(clock),
        "lazy": report.lazy.as_ref().map(lazy_object),
        "channel": report.channel.as_ref().map(report::counters),
    })
}

fn millis(nanos: u64) -> f64 {
    quantity::millis(Duration::from_nanos(nanos))
}
