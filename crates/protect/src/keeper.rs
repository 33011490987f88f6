//! A protection from its first command to its end.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use std::{fmt, io};

use limosa_channel::{Listener, Options};
use limosa_migrate::control::Stop;
use limosa_migrate::multifd::{MultifdAccept, MultifdAcceptOptions, MultifdChannels};
use limosa_migrate::output::{OutputGate, OutputGates, OutputSignal};
use limosa_migrate::{Handle, MigrateError};
use limosa_qemu::monitor::{MigrationStatus, Monitor, Settings};
use limosa_qemu::takeover::{Actor, Outcome, take_over};
use limosa_qemu::{
    EpochDisks, Heartbeat, JobContext, JobError, JobKind, JobPhase, JobRecord, JobRecordError, SocketDirectory,
    StartWatchdog, Watchdog, WatchdogEnd,
};
use limosa_snapshot::{CheckpointBase, CheckpointDirectory};
use serde_json::Value;
use uuid::Uuid;

use crate::background::Background;
use crate::convergence::{BasePause, DOWNTIME_LIMIT};
use crate::error::{ProtectError, unsaid};
use crate::filters::FilteredOutput;
use crate::guard::{Guard, Pulse, Seen};
use crate::options::{CheckpointMethod, ProtectDisks, ProtectOptions};
use crate::preflight::Preflight;
use crate::primary::LocalVm;
use crate::remote::{Greeted, KeeperAddress, Recovery, Relay, Unprotected, cut, refuse_other_vm};
use crate::report::{KeptBase, KeptCheckpoint, ProtectEnd, ProtectReport};
use crate::series::{Incoming, Kept, Series, Silence};

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
    /// The place for its checkpoints.
    pub to: CheckpointTarget<'a>,
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

/// The place for the checkpoints of a VM.
#[derive(Debug, Clone, Copy)]
pub enum CheckpointTarget<'a> {
    /// A directory; it is made if it is missing.
    Directory(&'a Path),
    /// A keeper on another host.
    Keeper(&'a KeeperAddress),
}

impl CheckpointTarget<'_> {
    /// Refuses what a keeper on another host cannot keep.
    fn check(self, options: &ProtectOptions) -> Result<(), ProtectError> {
        match self {
            Self::Directory(_) => Ok(()),
            Self::Keeper(_) if matches!(options.disks, ProtectDisks::Overlays(_)) => {
                let why = "overlays are files of this host, which a keeper on another host does not have";
                Err(ProtectError::Refused(why.into()))
            }
            Self::Keeper(_) if options.channels.is_some() => {
                Err(ProtectError::Refused("a keeper on another host takes one channel".into()))
            }
            Self::Keeper(_) => Ok(()),
        }
    }

    /// The record of a job that has its checkpoints there.
    fn record(self, id: Uuid, undo: Settings) -> JobRecord {
        let record = |path| JobRecord::new(JobKind::Protect, id, path, true, undo);
        match self {
            Self::Directory(path) => record(path),
            Self::Keeper(keeper) => record(Path::new("")).at_address(&keeper.uri.to_string()),
        }
    }
}

impl fmt::Debug for ProtectRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectRequest")
            .field("to", &self.to)
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
    let ProtectRequest { monitor, to, options, watch, gates, began, kept, start_watchdog } = request;
    let begun = Instant::now();
    JobRecord::expect_none(monitor)?;
    let vm = Preflight::check(monitor, options, gates.len())?;
    to.check(options)?;
    let filters = options.filters.then(|| FilteredOutput::plan(monitor)).transpose()?;
    let filtered: Vec<&dyn OutputGate> = filters.iter().map(|filters| filters as &dyn OutputGate).collect();
    let gates = if filters.is_some() { filtered.as_slice() } else { gates };
    let signal = OutputSignal::new();
    let outputs = OutputGates::new(gates, &signal);
    // A keeper elsewhere answers when it can, so the time between checkpoints is kept here.
    let paced_here = options.paces(outputs) || matches!(to, CheckpointTarget::Keeper(_));
    let current = monitor.settings()?;
    let change = current.change_to(&vm.settings(options, paced_here, &current));
    options.method.check_known(&change)?;
    let place = Place::open(to, options, &vm)?;
    let mut watchdog = start_watchdog()?;
    for server in options.disks.servers() {
        if let Some(watchdog) = &mut watchdog {
            // One that has died already is noticed at the end.
            let _ = watchdog.add_disk_server(server);
        }
    }
    let record = to.record(vm.manifest.id, change.undo.clone());
    let filter_ids = filters.as_ref().map(FilteredOutput::ids).unwrap_or_default();
    let record = record.with_epochs(vm.disks.records()).with_chains(vm.overlays.records());
    let mut record = record.with_filters(filter_ids);
    if let Err(error) = record.create(monitor) {
        if let Some(watchdog) = watchdog {
            let _ = watchdog.finish();
        }
        return Err(error.into());
    }
    tracing::info!("QEMU's settings that change: {}", change.set);
    let (handle, notice) = (watch.handle, watch.notice);
    let disks = &vm.disks;
    let base_pause = change.undo.parameters.get(DOWNTIME_LIMIT).and_then(Value::as_u64).map(BasePause::new);
    let protection = Protection { monitor, options, handle, notice, gates, outputs, began, kept, disks, base_pause };
    let mut unprotected = Unprotected::Runs;
    if !vm.overlays.is_empty() {
        let devices: Vec<&str> = vm.overlays.devices().collect();
        notice(&format!("each pause has an fsync of the disks that QEMU opens itself ({})", devices.join(", ")));
    }
    let done = options.method.apply(monitor, &change).and_then(|()| Ok(disks.flush()?));
    let done = done.and_then(|()| Ok(vm.overlays.prepare(monitor)?));
    let mut done = done.and_then(|()| protection.run((to, place), &vm, watchdog.as_mut(), &mut unprotected));
    // A stop continues it, and a QEMU that has ended leaves nothing to be done.
    let is_released = matches!(&done, Ok(Ended { seen: Seen { asked: true, .. } | Seen { gone: true, .. }, .. }));
    let left_standing = unprotected == Unprotected::StandsStill && !is_released;
    let is_failed_over =
        matches!(&done, Ok(Ended { kept: Kept { end: Err(error), .. }, .. }) if error.is_failed_over());
    let Left { vm_state, tidied, stands_still } = if left_standing {
        // It is its user's to continue: the record stays for that, and says if it runs elsewhere.
        if is_failed_over {
            record.phase = JobPhase::Undecided;
            if let Err(error) = record.update(monitor) {
                notice(&format!("QEMU does not know that its VM continues elsewhere ({error}): do not resume it"));
            }
        }
        let vm_state = monitor.status().map_or_else(|_| "unknown".into(), |status| status.state.to_string());
        Left { vm_state, tidied: true, stands_still: true }
    } else {
        if is_failed_over {
            stop_for_good(monitor, &mut record, notice);
        }
        end(monitor, &record, options, notice)
    };
    if let Ok(Ended { kept, held, .. }) = &mut done {
        let_out(kept, held, outputs);
    }
    // QEMU cannot say it any more, and what the VM has written is all that there is: its disks have it.
    if let Ok(Ended { seen: Seen { shutdown: true, .. }, .. }) = &done {
        if let Err(error) = disks.end() {
            notice(&format!("what the VM has written stays in a log: {error}"));
        }
        if let Err(error) = vm.overlays.end() {
            notice(&error.to_string());
        }
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
    let Ended { kept: Kept { tally, newest, end: series_end }, seen, bases, .. } = done?;
    let end = why(series_end, &seen, options);
    match (newest, end) {
        (Some(newest), end) => Ok(ProtectReport {
            end,
            newest,
            bases,
            checkpoints: tally.checkpoints,
            pauses: tally.pauses(),
            periods: tally.periods(),
            pages: tally.pages,
            equal_pages: tally.equal_pages,
            zero_pages: tally.zero_pages,
            bytes: tally.bytes,
            output: tally.output,
            stands_still,
            vm_state,
            elapsed: begun.elapsed(),
        }),
        (None, ProtectEnd::Failed(error)) => Err(error),
        (None, ProtectEnd::Asked) => Err(MigrateError::Cancelled.into()),
        (None, ProtectEnd::VmEnded) => Err(ProtectError::QemuEnded),
    }
}

/// A place that is ready for a base.
enum Place {
    /// A directory.
    Here(Box<CheckpointBase>),
    /// A keeper that has been greeted.
    There(Greeted),
}

impl Place {
    fn open(target: CheckpointTarget<'_>, options: &ProtectOptions, found: &Preflight) -> Result<Self, ProtectError> {
        Ok(match target {
            CheckpointTarget::Directory(path) => {
                let directory = CheckpointDirectory::open(path)?;
                refuse_other_vm(path, &found.manifest).map_err(ProtectError::Refused)?;
                Self::Here(Box::new(directory.receive_base(options.store)?))
            }
            CheckpointTarget::Keeper(keeper) => Self::There(keeper.greet(&found.series(), options.lost_after)?),
        })
    }
}

/// A protection that has ended.
struct Ended {
    kept: Kept,
    seen: Seen,
    /// Bases that counted.
    bases: u64,
    /// The epoch from which on output is held that no checkpoint will count for.
    held: Option<u64>,
}

/// A protection under way.
#[derive(Clone, Copy)]
struct Protection<'a> {
    monitor: &'a Monitor,
    options: &'a ProtectOptions,
    handle: &'a Handle,
    notice: &'a (dyn Fn(&str) + Sync),
    gates: &'a [&'a dyn OutputGate],
    /// The same, to end their series.
    outputs: OutputGates<'a>,
    began: &'a (dyn Fn(&KeptBase) + Sync),
    kept: &'a (dyn Fn(&KeptCheckpoint) + Sync),
    disks: &'a EpochDisks,
    base_pause: Option<BasePause>,
}

impl Protection<'_> {
    /// Has checkpoints kept until they end, and, if they are sent elsewhere, again each time that the keeper is back.
    fn run(
        self,
        (to, place): (CheckpointTarget<'_>, Place),
        found: &Preflight,
        mut watchdog: Option<&mut Watchdog>,
        unprotected: &mut Unprotected,
    ) -> Result<Ended, ProtectError> {
        let mut ended = Ended { kept: Kept::nothing(), seen: Seen::default(), bases: 0, held: None };
        let mut place = place;
        let hang = self.options.stall_timeout.saturating_add(HANGS_AFTER);
        let mut heartbeat = || watchdog.as_mut().and_then(|watchdog| watchdog.heartbeat(hang).ok());
        let CheckpointTarget::Keeper(keeper) = to else {
            self.series(place, found, &mut heartbeat, &mut ended)?;
            return Ok(ended);
        };
        let watch = (self.handle, self.notice);
        let mut recovery = Recovery::new(self.monitor, self.options, watch, keeper, found);
        loop {
            let before = ended.bases;
            self.series(place, found, &mut heartbeat, &mut ended)?;
            let Some(why) = ended.loss(self.options) else { return Ok(ended) };
            // One that was never there is a mistake of its user's.
            if ended.bases == 0 {
                ended.kept.end = Err(why);
                return Ok(ended);
            }
            if ended.bases > before {
                recovery.reset();
            }
            ended.seen = Seen::default();
            let Ended { kept, seen, held, .. } = &mut ended;
            let mut released = || let_out(kept, held, self.outputs);
            let back = recovery.lose(&why, &mut released).and_then(|vm| {
                *unprotected = vm;
                recovery.wait(unprotected, seen, &mut released)
            });
            match back {
                Ok(greeted) => place = Place::There(greeted),
                Err(error) => {
                    ended.kept.end = Err(error);
                    return Ok(ended);
                }
            }
        }
    }

    /// Has QEMU send its checkpoints, and has them kept until they end.
    fn series(
        self,
        place: Place,
        found: &Preflight,
        heartbeat: &mut dyn FnMut() -> Option<Heartbeat>,
        ended: &mut Ended,
    ) -> Result<(), ProtectError> {
        let Self { monitor, options, handle, notice, gates, began, kept, disks, base_pause, .. } = self;
        let (signal, pulse) = (OutputSignal::new(), Pulse::new());
        let outputs = OutputGates::new(gates, &signal);
        outputs.watch().map_err(ProtectError::Gate)?;
        let (overlays, writable) = (&found.overlays, &found.writable);
        let pulse = &pulse;
        let vm = LocalVm { monitor, options, handle, notice, pulse, outputs, disks, overlays, writable, base_pause };
        let (_directory, listener) = match &options.listen {
            None => {
                let (directory, listener) = SocketDirectory::with_listener(monitor, "protect", &Options::default())?;
                (Some(directory), listener)
            }
            Some(uri) => (None, Listener::bind(uri, &Options::default())?),
        };
        let connect = || {
            monitor.qmp().take_events()?;
            monitor.migrate(&listener.local_uri().to_string(), false)?;
            let channels = accept(monitor, handle, &listener, options.channels.unwrap_or(0))?;
            found.expect_same_devices(monitor)?;
            Ok::<_, ProtectError>(channels)
        };
        let (mut kept, mut seen) = match place {
            place if options.method == CheckpointMethod::Background => {
                let snapshots = Background::new(vm, found, &listener, (began, kept));
                match place {
                    Place::Here(base) => snapshots.keep(*base, found.series()),
                    Place::There(keeper) => snapshots.send(keeper),
                }
            }
            Place::Here(base) => {
                let MultifdChannels { main: channel, multifd } = connect()?;
                let silence = Silence { reply: Some(options.stall_timeout), ..Silence::default() };
                let (buffer, stall_timeout) = (options.buffer, options.stall_timeout);
                let series = Series { primary: &vm, handle, began, kept, buffer, stall_timeout, silence };
                let incoming = Incoming { channel, multifd, first_bytes: Vec::new(), manifest: found.series() };
                let let_go = || handle.control.stop(Stop::Cancel);
                let guard = Guard::new(&vm, Duration::ZERO, &let_go, heartbeat());
                beside(guard, move || series.keep(incoming, *base))?
            }
            Place::There(Greeted { channel: keeper, disks }) => {
                let channel = connect()?.main;
                let (return_path, lost_after) = (found.return_path, options.lost_after);
                let (qemu, keeper, disks) = (&channel, &keeper, disks.as_slice());
                let relay = Relay { vm, qemu, keeper, disks, return_path, lost_after, began, kept };
                let let_go = || cut(qemu, keeper);
                let guard = Guard::new(&vm, options.stall_timeout, &let_go, heartbeat());
                beside(guard, || relay.run())?
            }
        };
        ended.held = Some(kept.tally.checkpoints + 1);
        // With disks output is held until they have all of the VM's writes, or the VM has been stopped.
        if disks.is_empty() {
            let_out(&mut kept, &mut ended.held, outputs);
        }
        if options.method == CheckpointMethod::Colo {
            Guard::note_rest(monitor, &mut seen);
        }
        if let Err(ProtectError::Ended { .. }) | Ok(()) = &kept.end
            && seen.exit_reason.is_none()
            && let Ok(info) = monitor.migration()
        {
            seen.exit_reason = Some(info.error.unwrap_or_else(|| format!("migration: {}", info.status)));
        }
        ended.kept.tally.add_all(&kept.tally);
        ended.bases += u64::from(kept.newest.is_some());
        ended.kept.newest = kept.newest.or(ended.kept.newest.take());
        (ended.kept.end, ended.seen) = (kept.end, seen);
        Ok(())
    }
}

/// Ends the series of the gates, if that was not done: output that no checkpoint counts for is dropped, and later
/// output leaves. A failure is the end, if there was no other.
fn let_out(kept: &mut Kept, held: &mut Option<u64>, outputs: OutputGates<'_>) {
    let Some(epoch) = held.take() else { return };
    let aborted = outputs.abort(epoch).map_err(ProtectError::Gate);
    if let Some(counters) = outputs.counters() {
        kept.tally.output.get_or_insert_default().add(&counters);
    }
    match aborted {
        Ok(()) => {}
        Err(error) if kept.end.is_ok() => kept.end = Err(error),
        Err(error) => tracing::info!("{error}"),
    }
}

impl Ended {
    /// Takes the failure out by which a keeper elsewhere was lost, if the VM is there and its protection is wanted.
    fn loss(&mut self, options: &ProtectOptions) -> Option<ProtectError> {
        let Seen { asked, stalled, shutdown, gone, .. } = self.seen;
        if asked || shutdown || gone {
            return None;
        }
        match std::mem::replace(&mut self.kept.end, Ok(())) {
            _ if stalled => Some(ProtectError::Stalled { after: options.stall_timeout }),
            Err(error @ ProtectError::LineLost { .. }) => Some(error),
            other => {
                self.kept.end = other;
                None
            }
        }
    }
}

/// Stops a VM that was failed over: it must not run here. The record says so to everybody who undoes the job.
fn stop_for_good(monitor: &Monitor, record: &mut JobRecord, notice: &(dyn Fn(&str) + Sync)) {
    record.was_running = false;
    let stopped = record.update(monitor).and_then(|()| Ok(monitor.stop()?));
    match stopped {
        Ok(()) => notice("the VM continues elsewhere, and was stopped here: end it"),
        Err(error) => notice(&format!("the VM continues elsewhere, and may still run here: end it ({error})")),
    }
}

/// Runs a series on a thread of its own, and its guard on this one.
fn beside(guard: Guard<'_>, series: impl FnOnce() -> Kept + Send) -> Result<(Kept, Seen), ProtectError> {
    thread::scope(|scope| {
        let keeping = thread::Builder::new().name("checkpoints".into());
        let keeping = keeping.spawn_scoped(scope, series).map_err(ProtectError::Thread)?;
        let seen = guard.watch(|| keeping.is_finished());
        let kept = keeping.join().map_err(|_| {
            ProtectError::Migrate(MigrateError::Protocol("the thread of the checkpoints panicked".into()))
        })?;
        Ok((kept, seen))
    })
}

/// Waits until QEMU has connected, with this number of multifd channels.
pub(crate) fn accept(
    monitor: &Monitor,
    handle: &Handle,
    listener: &Listener,
    channels: u8,
) -> Result<MultifdChannels, ProtectError> {
    // One channel needs no distinction.
    let options = MultifdAcceptOptions { channels, timeout: CONNECT_WITHIN, main_first: channels == 0 };
    let mut accepting = MultifdAccept::new(listener, options);
    loop {
        if let Some(all) = accepting.poll(ACCEPT_TICK)? {
            return Ok(all);
        }
        handle.control.check()?;
        let info = monitor.migration()?;
        if info.status == MigrationStatus::Failed {
            return Err(ProtectError::gave_up(info.error));
        }
    }
}

/// The VM after a protection.
struct Left {
    vm_state: String,
    /// Nothing is left to be done.
    tidied: bool,
    /// It was left standing still; the record is in QEMU.
    stands_still: bool,
}

/// Ends COLO if it has not ended, restores QEMU's settings and removes the record. A VM that has lost a disk is left
/// standing still.
fn end(monitor: &Monitor, record: &JobRecord, options: &ProtectOptions, notice: &(dyn Fn(&str) + Sync)) -> Left {
    match take_over(monitor, record, Actor::Watchdog, (options.disks.servers(), UNDO_WITHIN)) {
        Ok(done) => {
            done.remarks.iter().for_each(|remark| tracing::info!("{remark}"));
            done.notices.iter().for_each(|line| notice(line));
            let stands_still = done.outcome == Outcome::DiskLost;
            Left { vm_state: done.run.to_string(), tidied: stands_still || done.outcome.ends_job(), stands_still }
        }
        // All changes went with QEMU.
        Err(JobRecordError::Qmp(gone)) if gone.is_gone() => {
            Left { vm_state: "ended".into(), tidied: true, stands_still: false }
        }
        Err(error) => {
            tracing::info!("{error}");
            Left { vm_state: "unknown".into(), tidied: false, stands_still: false }
        }
    }
}

/// Decides why the series ended, by what both threads have seen.
fn why(end: Result<(), ProtectError>, seen: &Seen, options: &ProtectOptions) -> ProtectEnd {
    let cut = match &end {
        Ok(()) | Err(ProtectError::Ended { .. } | ProtectError::LineLost { .. } | ProtectError::QemuEnded) => true,
        Err(ProtectError::Channel(error)) => error.is_closed() || error.is_shut_down(),
        Err(ProtectError::Migrate(error)) => is_cut(error),
        Err(ProtectError::Qmp(error) | ProtectError::Job(JobError::Qmp(error))) => error.is_gone(),
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
            let reason = seen.exit_reason.clone().unwrap_or_else(unsaid);
            ProtectEnd::Failed(ProtectError::Ended { reason })
        }
        Err(error) => ProtectEnd::Failed(error),
    }
}

/// Whether the kernel has given a connection up: its probes were not answered, or the way to the peer is gone.
const fn is_given_up(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    matches!(kind, TimedOut | HostUnreachable | NetworkUnreachable | NetworkDown)
}

/// Whether the channel was cut, by this side or the other.
pub(crate) fn is_cut(error: &MigrateError) -> bool {
    match error {
        MigrateError::Channel(error) => {
            error.is_closed() || error.is_timeout() || error.io_kind().is_some_and(is_given_up)
        }
        MigrateError::Stream(error) => matches!(error.kind(), limosa_stream::ErrorKind::Truncated { .. }),
        MigrateError::Cancelled | MigrateError::MainEnded { .. } => true,
        MigrateError::Multifd { source, .. } => is_cut(source),
        _ => false,
    }
}
