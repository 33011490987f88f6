//! Serving the pages of a lazy restore: the engine, the monitor beside it, and the end.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Shutdown};
use limosa_migrate::MigrateError;
use limosa_migrate::stats::PostcopyStats;
use limosa_migrate::stored::{Milestone, PostcopySource};
use limosa_page::error_with_causes;
use limosa_snapshot::{RecordedMode, Snapshot, WorkingSet, WorkingSetRecorder};
use parking_lot::Mutex;

use super::incoming::Rendezvous;
use super::job::{LazyReport, RestoreJob, RestoreReport};
use super::options::RestoreMode;
use crate::job::JobError;
use crate::job_record::JobRecord;
use crate::monitor::{MigrationStatus, Monitor};

/// How long QEMU may take to say that it has completed, once it has said so on the stream.
const COMPLETED_WITHIN: Duration = Duration::from_secs(30);

/// How long QEMU is left alone before it is asked whether a postcopy has ended.
const QUIET: Duration = Duration::from_millis(50);

/// How often QEMU is asked whether it still loads the devices.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// Brings the rest of the memory to a QEMU that expects it.
pub(super) fn serve_rest(
    job: &RestoreJob<'_>,
    record: &JobRecord,
    preempt: bool,
    rendezvous: Rendezvous<'_>,
) -> Result<RestoreReport, JobError> {
    let channel = rendezvous.connect()?;
    let ends = Arc::new(KeptChannels::new(&channel)?);
    let source = PostcopySource::new(job.snapshot, channel, job.watch.handle).options(job.postcopy_options());
    let served = serve(job, with_preempt_channel(source, rendezvous, preempt, &ends), &ends, Beginning::Recover, false);
    let (stats, to_guest) = match served {
        Ok(served) => served,
        Err(unserved) => {
            note_failure(job.monitor, record.clone(), &unserved.error);
            return Err(unserved.error);
        }
    };
    let to_resident = job.begun.elapsed();
    complete_postcopy(job.monitor, record)?;
    Ok(report(job, Some(stats), to_guest, to_resident))
}

/// Adds a preempt channel to the source, if one is wanted; the place of the rendezvous is left as soon as all have met
/// there.
pub(super) fn with_preempt_channel<'a>(
    source: PostcopySource<'a, Snapshot>,
    rendezvous: Rendezvous<'a>,
    preempt: bool,
    ends: &Arc<KeptChannels>,
) -> PostcopySource<'a, Snapshot> {
    if !preempt {
        rendezvous.leave();
        return source;
    }
    let ends = Arc::clone(ends);
    source.preempt(Box::new(move || {
        let channel = rendezvous.connect_preempt();
        rendezvous.leave();
        let channel = channel?;
        *ends.preempt.lock() = Some(channel.try_clone()?);
        Ok(channel)
    }))
}

/// Limosa's ends of the channels, for QEMU to keep open when the stream ends.
pub(super) struct KeptChannels {
    main: Channel,
    preempt: Mutex<Option<Channel>>,
}

impl KeptChannels {
    pub(super) fn new(main: &Channel) -> Result<Self, JobError> {
        Ok(Self { main: main.try_clone()?, preempt: Mutex::new(None) })
    }
}

/// A transfer that was broken off.
pub(super) struct Unserved {
    pub(super) error: JobError,
    /// Whether the guest was started before.
    pub(super) guest_runs: bool,
}

/// The two ways in which the engine starts.
#[derive(Debug, Clone, Copy)]
pub(super) enum Beginning {
    Start,
    Recover,
}

/// Runs the engine, and tells the observer when the guest runs.
///
/// The engine has a thread of its own; this one listens to the monitor, because the guest runs when QEMU says so.
pub(super) fn serve(
    job: &RestoreJob<'_>,
    source: PostcopySource<'_, Snapshot>,
    ends: &KeptChannels,
    beginning: Beginning,
    resumes: bool,
) -> Result<(PostcopyStats, Duration), Unserved> {
    let loaded = AtomicBool::new(false);
    let kept = AtomicBool::new(false);
    let (say, heard) = mpsc::channel();
    thread::scope(|scope| {
        let flag = &loaded;
        let gate = &kept;
        let source = source
            .on_milestone(move |milestone| {
                if milestone == Milestone::DevicesLoaded {
                    flag.store(true, Ordering::Release);
                }
                let _ = say.send(milestone);
            })
            .end_condition(move || gate.load(Ordering::Acquire));
        let engine = thread::Builder::new().name("push".into()).spawn_scoped(scope, move || match beginning {
            Beginning::Start => source.run(),
            Beginning::Recover => source.recover(),
        });
        let engine = engine.map_err(|source| Unserved {
            error: JobError::Io { what: "start a thread to serve", path: job.path.to_owned(), source },
            guest_runs: false,
        })?;
        let gate = EndGate { ends, open: &kept };
        let mut beside = Beside { gate, devices: DeviceLoad::new(job.monitor), resumes };
        let to_guest = attend(job, &heard, &mut beside, || engine.is_finished());
        let result = engine.join().unwrap_or_else(|_| Err(MigrateError::Protocol("the sender panicked".into())));
        match result {
            Ok(stats) => Ok((stats, to_guest.unwrap_or_else(|| job.begun.elapsed()))),
            Err(_) if beside.devices.has_failed => {
                Err(Unserved { error: JobError::DevicesNotLoaded, guest_runs: false })
            }
            Err(error) => Err(Unserved { error: error.into(), guest_runs: loaded.load(Ordering::Acquire) }),
        }
    })
}

/// The gate before the end of the stream, which opens when QEMU has duplicates of limosa's ends of the channels.
struct EndGate<'a> {
    ends: &'a KeptChannels,
    open: &'a AtomicBool,
}

/// Whether QEMU can load the devices. From 11.1 on one that cannot says nothing until its source is gone.
struct DeviceLoad<'a> {
    monitor: &'a Monitor,
    ask_at: Instant,
    /// The last answer was given in the middle of loading.
    answered_within: bool,
    has_failed: bool,
}

impl<'a> DeviceLoad<'a> {
    fn new(monitor: &'a Monitor) -> Self {
        Self { monitor, ask_at: Instant::now() + ASK_EVERY, answered_within: false, has_failed: false }
    }

    /// Asks, now and then. True once it has failed.
    ///
    /// QEMU answers nothing while it loads the devices. So one that answers twice in that state does not load them.
    fn fails(&mut self) -> bool {
        if self.has_failed || Instant::now() < self.ask_at {
            return false;
        }
        let within = self.monitor.migration().is_ok_and(|info| info.status == MigrationStatus::PostcopyDevice);
        self.has_failed = within && self.answered_within;
        self.answered_within = within;
        self.ask_at = Instant::now() + ASK_EVERY;
        self.has_failed
    }
}

/// Things to look after while the engine runs.
struct Beside<'a> {
    gate: EndGate<'a>,
    devices: DeviceLoad<'a>,
    /// The guest is to run.
    resumes: bool,
}

/// Looks after the monitor while the engine runs: tells when the guest is there, and opens the gate to the stream's
/// end.
///
/// The guest is there when the devices are loaded and, if it is to run, QEMU says that it does. `None` if the engine
/// ended before the devices were loaded.
fn attend(
    job: &RestoreJob<'_>,
    heard: &mpsc::Receiver<Milestone>,
    beside: &mut Beside<'_>,
    over: impl Fn() -> bool,
) -> Option<Duration> {
    let tick = Duration::from_millis(20);
    let Beside { gate, devices, resumes } = beside;
    let (mut loaded, mut to_guest) = (false, None);
    loop {
        // Before the look at the messages: what the engine said last is heard all the same.
        let ended = over();
        let waits_for_guest = loaded && to_guest.is_none();
        let message = if waits_for_guest { heard.try_recv().ok() } else { heard.recv_timeout(tick).ok() };
        match message {
            Some(Milestone::DevicesLoaded) => loaded = true,
            Some(Milestone::AllPlaced) => {
                keep_open(job.monitor, gate.ends);
                gate.open.store(true, Ordering::Release);
            }
            None if ended && (!waits_for_guest || job.is_unloaded()) => return to_guest,
            None if !loaded && devices.fails() => {
                // The engine ends when its channel does. One that cannot be shut down has ended already.
                let _ = gate.ends.main.shutdown(Shutdown::Both);
            }
            None => {}
        }
        if loaded && to_guest.is_none() {
            let runs = !*resumes
                || job
                    .monitor
                    .qmp()
                    .wait_event(&["RESUME"], tick)
                    .unwrap_or_else(|_| {
                        // Without a monitor nothing can be heard; the engine will end too.
                        thread::sleep(tick);
                        None
                    })
                    .is_some();
            // A guest that sleeps, for one, does not say that it runs; but one that is still to be loaded is not there.
            if runs || (ended && !job.is_unloaded()) {
                let after = job.begun.elapsed();
                to_guest = Some(after);
                job.observer.guest_ready(after, RestoreMode::Lazy);
            }
        }
    }
}

/// The names under which QEMU keeps limosa's ends of the channels.
const KEPT: [&str; 2] = ["limosa-restore", "limosa-restore-preempt"];

/// Gives QEMU a duplicate of limosa's end of the channel, just before the stream ends.
///
/// A QEMU that has every page and has read the end still wants to tell its source so. If that is gone, QEMU waits for a
/// recovery that can never come, because it has left the state in which it could take one (found with QEMU 10.0.2).
/// With a duplicate of its own it talks to itself and completes. Before the last page is placed this would be wrong: a
/// pager that dies must be noticed. Without descriptors (a monitor over tcp) that window stays.
fn keep_open(monitor: &Monitor, ends: &KeptChannels) {
    if !monitor.qmp().passes_descriptors() {
        return;
    }
    let preempt = ends.preempt.lock();
    for (name, end) in KEPT.into_iter().zip([Some(&ends.main), preempt.as_ref()]) {
        if let Some(end) = end {
            let _ = monitor.getfd(name, end.as_fd());
        }
    }
}

/// Writes down why the transfer broke off, for the process that recovers it: a detached pager cannot print it.
pub(super) fn note_failure(monitor: &Monitor, mut record: JobRecord, error: &JobError) {
    record.failure = Some(error_with_causes(error));
    let _ = record.update(monitor);
}

/// As [`complete`], after the last page of a guest that runs.
///
/// QEMU is left alone for a moment before each question. A thread of its own ends the transfer: it says so, and then
/// frees the addresses that it has listened at, while its main loop copies them for each answer to `query-migrate`. A
/// question in that moment ends QEMU, and the guest with it (QEMU 7.2.22, `migrate_set_state` and
/// `migration_incoming_state_destroy` in the listening thread; it crashed in that moment once).
pub(super) fn complete_postcopy(monitor: &Monitor, record: &JobRecord) -> Result<(), JobError> {
    thread::sleep(QUIET);
    complete_asking(monitor, record, QUIET)
}

/// After the last page: waits for QEMU to see it so, then puts its settings back.
pub(super) fn complete(monitor: &Monitor, record: &JobRecord) -> Result<(), JobError> {
    complete_asking(monitor, record, Duration::from_millis(2))
}

fn complete_asking(monitor: &Monitor, record: &JobRecord, pause: Duration) -> Result<(), JobError> {
    let limit = Instant::now() + COMPLETED_WITHIN;
    loop {
        match monitor.migration()?.status {
            MigrationStatus::Completed => break,
            status if Instant::now() > limit => {
                return Err(JobError::Failed { reason: format!("every page was sent, but QEMU still says {status}") });
            }
            _ => thread::sleep(pause),
        }
    }
    for name in KEPT {
        monitor.closefd(name)?;
    }
    monitor.restore_settings(&record.undo)?;
    JobRecord::remove(monitor)?;
    Ok(())
}

/// `stats` are those of the transfer, if there was anything left to transfer.
pub(super) fn report(
    job: &RestoreJob<'_>,
    stats: Option<PostcopyStats>,
    to_guest: Duration,
    to_resident: Duration,
) -> RestoreReport {
    RestoreReport {
        mode: RestoreMode::Lazy,
        mapped_blocks: Vec::new(),
        time_to_guest: to_guest,
        time_to_resident: to_resident,
        normal_pages: Some(stats.as_ref().map_or(0, |stats| stats.normal_pages)),
        zero_pages: Some(stats.as_ref().map_or(0, |stats| stats.zero_pages)),
        recorded: stats.as_ref().and_then(|stats| recorded(job, stats)),
        read_ahead: None,
        lazy: stats.map(|stats| LazyReport {
            request_latency: stats.request_latency,
            main: stats.main,
            preempt: stats.preempt,
        }),
        channel: None,
        vm_state: job.vm_state(),
    }
}

/// Returns the working set that the guest's requests are, if they were to be recorded.
fn recorded(job: &RestoreJob<'_>, stats: &PostcopyStats) -> Option<WorkingSet> {
    job.options.record_for?;
    let mut recorder = WorkingSetRecorder::new(job.snapshot, RecordedMode::Lazy);
    stats.recorded.iter().for_each(|request| recorder.note(*request));
    let mut set = recorder.finish();
    set.begun = set.begun.saturating_sub(job.begun.elapsed().as_secs());
    set.duration = stats.recorded_for;
    Some(set)
}
