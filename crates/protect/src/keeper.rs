//! A protection from its first command to its end.

use std::fmt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Listener, Options};
use limosa_migrate::MigrateError;
use limosa_migrate::output::{OutputGate, OutputGates, OutputSignal};
use limosa_qemu::monitor::{MigrationStatus, Monitor};
use limosa_qemu::takeover::{Actor, take_over};
use limosa_qemu::{
    Heartbeat, JobContext, JobKind, JobRecord, JobRecordError, SocketDirectory, StartWatchdog, WatchdogEnd,
};
use limosa_snapshot::{CheckpointBase, CheckpointDirectory, Manifest};

use crate::background::Background;
use crate::error::ProtectError;
use crate::filters::FilteredOutput;
use crate::guard::{Guard, Pulse, Seen};
use crate::options::{CheckpointMethod, ProtectOptions};
use crate::preflight::Preflight;
use crate::report::{KeptBase, KeptCheckpoint, ProtectEnd, ProtectReport};
use crate::series::{Kept, Series};

/// How long undoing may take: COLO, or a migration, has to end first.
const UNDO_WITHIN: Duration = Duration::from_secs(60);
/// How long this process may be stopped, beyond the limit for a checkpoint: its watchdog ends it then.
const HANGS_AFTER: Duration = Duration::from_secs(2);
/// How long QEMU may take to connect.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);
/// How long it is waited for at a stretch.
const ACCEPT_TICK: Duration = Duration::from_millis(50);

/// A VM to protect, and how.
#[derive(Clone, Copy)]
pub struct ProtectRequest<'a> {
    /// The VM's QEMU.
    pub monitor: &'a Monitor,
    /// The directory of the checkpoints; it is made if it is missing.
    pub directory: &'a Path,
    /// The options.
    pub options: &'a ProtectOptions,
    /// The handles by which the job is watched and stopped.
    pub watch: JobContext<'a>,
    /// The gates that hold the VM's output back. Without any it leaves before the checkpoint that knows of it.
    pub gates: &'a [&'a dyn OutputGate],
    /// Called when the base counts, on the thread that receives.
    pub began: &'a (dyn Fn(&KeptBase) + Sync),
    /// Called after each checkpoint, on the thread that receives: the next one waits for it.
    pub kept: &'a (dyn Fn(&KeptCheckpoint) + Sync),
    /// Starts the watchdog of the job, and may decline; without one a keeper that is killed may leave the VM standing
    /// still.
    pub start_watchdog: &'a StartWatchdog<'a>,
}

impl fmt::Debug for ProtectRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectRequest")
            .field("directory", &self.directory)
            .field("options", &self.options)
            .field("gates", &self.gates.len())
            .finish_non_exhaustive()
    }
}

/// Keeps checkpoints of a VM until it is told to stop, the VM ends or something fails.
///
/// # Errors
/// Not even a base was kept; then the directory has the checkpoint that it had before, if it had one. In every case the
/// VM runs and QEMU is as it was found, unless QEMU does not answer: the record stays in it then, and `limosa resume`
/// finishes.
pub fn protect(request: ProtectRequest<'_>) -> Result<ProtectReport, ProtectError> {
    let ProtectRequest { monitor, directory, options, watch, gates, began, kept, start_watchdog } = request;
    let begun = Instant::now();
    JobRecord::expect_none(monitor)?;
    let vm = Preflight::check(monitor, options, gates.len())?;
    let filters = options.filters.then(|| FilteredOutput::plan(monitor)).transpose()?;
    let filtered: Vec<&dyn OutputGate> = filters.iter().map(|filters| filters as &dyn OutputGate).collect();
    let gates = if filters.is_some() { filtered.as_slice() } else { gates };
    let signal = OutputSignal::new();
    let outputs = OutputGates::new(gates, &signal);
    let change = monitor.plan_settings(&vm.settings(options, options.paces(outputs)))?;
    options.method.check_known(&change)?;
    let base = CheckpointDirectory::open(directory)?.receive_base(options.store)?;
    let mut watchdog = start_watchdog()?;
    for server in options.disks.servers() {
        if let Some(watchdog) = &mut watchdog {
            // One that has died already is noticed at the end.
            let _ = watchdog.add_disk_server(server);
        }
    }
    let record = JobRecord::new(JobKind::Protect, vm.manifest.id, directory, true, change.undo.clone());
    let filter_ids = filters.as_ref().map(FilteredOutput::ids).unwrap_or_default();
    let record = record.with_epochs(vm.disks.records()).with_filters(filter_ids);
    if let Err(error) = record.create(monitor) {
        if let Some(watchdog) = watchdog {
            let _ = watchdog.finish();
        }
        return Err(error.into());
    }
    tracing::info!("QEMU's settings that change: {}", change.set);
    let pulse = Pulse::new();
    let (handle, notice) = (watch.handle, watch.notice);
    let Preflight { manifest, disks, .. } = vm;
    let series = Series { monitor, options, handle, notice, began, kept, pulse: &pulse, outputs, disks: &disks };
    let watched = outputs.watch().map_err(ProtectError::Gate);
    let set = watched.and_then(|()| options.method.apply(monitor, &change));
    let hang = options.stall_timeout.saturating_add(HANGS_AFTER);
    let heartbeat = || watchdog.as_mut().and_then(|watchdog| watchdog.heartbeat(hang).ok());
    let done = set.and_then(|()| Ok(disks.flush()?)).and_then(|()| run(series, base, manifest, heartbeat));
    let (vm_state, tidied) = end(monitor, &record, options, notice);
    // QEMU cannot say it any more, and what the VM has written is all that there is: its disks have it.
    if let Ok((_, Seen { shutdown: true, .. })) = &done
        && let Err(error) = disks.end()
    {
        notice(&format!("what the VM has written stays in a log: {error}"));
    }
    match watchdog {
        Some(watchdog) if tidied => match watchdog.finish() {
            Ok(WatchdogEnd::Dismissed) => {}
            Ok(WatchdogEnd::Died(status)) => notice(&format!("the watchdog process had died ({status})")),
            Err(error) => notice(&format!("the watchdog process cannot be waited for: {error}")),
        },
        Some(watchdog) => {
            notice(&format!(
                "QEMU's settings are not restored yet; the watchdog (pid {}) keeps retrying",
                watchdog.pid()
            ));
            watchdog.hand_over();
        }
        None => {}
    }
    let (Kept { tally, newest, end: series_end }, seen) = done?;
    let end = why(series_end, &seen, options);
    match (newest, end) {
        (Some(newest), end) => Ok(ProtectReport {
            end,
            newest,
            checkpoints: tally.checkpoints,
            pauses: tally.pauses(),
            periods: tally.periods(),
            pages: tally.pages,
            equal_pages: tally.equal_pages,
            zero_pages: tally.zero_pages,
            bytes: tally.bytes,
            output: tally.output,
            vm_state,
            elapsed: begun.elapsed(),
        }),
        (None, ProtectEnd::Failed(error)) => Err(error),
        (None, ProtectEnd::Asked) => Err(MigrateError::Cancelled.into()),
        (None, ProtectEnd::VmEnded) => Err(ProtectError::QemuEnded),
    }
}

/// Has QEMU send its checkpoints here, and keeps them until they end.
fn run(
    series: Series<'_>,
    base: CheckpointBase,
    manifest: Manifest,
    heartbeat: impl FnOnce() -> Option<Heartbeat>,
) -> Result<(Kept, Seen), ProtectError> {
    let Series { monitor, options, handle, pulse, outputs, .. } = series;
    let (_directory, listener) = match &options.listen {
        None => {
            let (directory, listener) = SocketDirectory::with_listener(monitor, "protect", &Options::default())?;
            (Some(directory), listener)
        }
        Some(uri) => (None, Listener::bind(uri, &Options::default())?),
    };
    if options.method == CheckpointMethod::Background {
        return Ok(Background::new(series, &listener).keep(base, manifest));
    }
    monitor.qmp().take_events()?;
    monitor.migrate(&listener.local_uri().to_string(), false)?;
    let channel = accept(monitor, handle, &listener)?;
    let guard = Guard::new(monitor, handle, pulse, outputs.signal(), (options.stall_timeout, heartbeat()));
    thread::scope(|scope| {
        let keeping = thread::Builder::new().name("checkpoints".into());
        let keeping = keeping.spawn_scoped(scope, move || series.keep(channel, base, manifest));
        let keeping = keeping.map_err(ProtectError::Thread)?;
        let mut seen = guard.watch(|| keeping.is_finished());
        let kept = keeping.join().map_err(|_| {
            ProtectError::Migrate(MigrateError::Protocol("the thread of the checkpoints panicked".into()))
        })?;
        Guard::note_rest(monitor, &mut seen);
        if let Err(ProtectError::Ended { .. }) | Ok(()) = &kept.end
            && seen.exit_reason.is_none()
            && let Ok(info) = monitor.migration()
        {
            seen.exit_reason = Some(info.error.unwrap_or_else(|| format!("migration: {}", info.status)));
        }
        Ok((kept, seen))
    })
}

/// Waits until QEMU has connected.
pub(crate) fn accept(
    monitor: &Monitor,
    handle: &limosa_migrate::Handle,
    listener: &Listener,
) -> Result<Channel, ProtectError> {
    let begun = Instant::now();
    loop {
        match listener.accept(Some(ACCEPT_TICK)) {
            Err(error) if error.is_timeout() && begun.elapsed() < CONNECT_WITHIN => {}
            other => return Ok(other?),
        }
        handle.control.check()?;
        let info = monitor.migration()?;
        if info.status == MigrationStatus::Failed {
            let reason = info.error.unwrap_or_else(|| "it does not say why; its own log does".into());
            return Err(ProtectError::Failed { reason });
        }
    }
}

/// Ends COLO if it has not ended, restores QEMU's settings and removes the record. Returns the VM's state, and whether
/// nothing is left to be done.
fn end(
    monitor: &Monitor,
    record: &JobRecord,
    options: &ProtectOptions,
    notice: &(dyn Fn(&str) + Sync),
) -> (String, bool) {
    match take_over(monitor, record, Actor::Watchdog, (options.disks.servers(), UNDO_WITHIN)) {
        Ok(done) => {
            done.remarks.iter().for_each(|remark| tracing::info!("{remark}"));
            done.notices.iter().for_each(|line| notice(line));
            (done.run.to_string(), done.outcome.ends_job())
        }
        // All changes went with QEMU.
        Err(JobRecordError::Qmp(gone)) if gone.is_gone() => ("ended".into(), true),
        Err(error) => {
            tracing::info!("{error}");
            ("unknown".into(), false)
        }
    }
}

/// Decides why the series ended, by what both threads have seen.
fn why(end: Result<(), ProtectError>, seen: &Seen, options: &ProtectOptions) -> ProtectEnd {
    let cut = match &end {
        Ok(()) | Err(ProtectError::Ended { .. }) => true,
        Err(ProtectError::Migrate(error)) => is_cut(error),
        Err(ProtectError::Qmp(error)) => error.is_gone(),
        Err(_) => false,
    };
    match end {
        // The store's own failure comes before what it led to.
        Err(error) if !cut => ProtectEnd::Failed(error),
        _ if seen.stalled => ProtectEnd::Failed(ProtectError::Stalled { after: options.stall_timeout }),
        _ if seen.asked => ProtectEnd::Asked,
        _ if seen.shutdown => ProtectEnd::VmEnded,
        _ if seen.gone => ProtectEnd::Failed(ProtectError::QemuEnded),
        Ok(()) | Err(ProtectError::Ended { .. }) => {
            let reason = seen.exit_reason.clone().unwrap_or_else(|| "it does not say why; its own log does".into());
            ProtectEnd::Failed(ProtectError::Ended { reason })
        }
        Err(error) => ProtectEnd::Failed(error),
    }
}

/// Whether the channel was cut, by this side or the other.
pub(crate) fn is_cut(error: &MigrateError) -> bool {
    match error {
        MigrateError::Channel(error) => error.is_closed() || error.is_timeout(),
        MigrateError::Stream(error) => matches!(error.kind(), limosa_stream::ErrorKind::Truncated { .. }),
        MigrateError::Cancelled => true,
        _ => false,
    }
}
