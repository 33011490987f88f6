//! The lazy restore: limosa as a postcopy source, started with all RAM missing.

use std::sync::Arc;

use limosa_channel::Channel;
use limosa_migrate::stored::PostcopySource;
use limosa_page::error_with_causes;

use super::incoming::Rendezvous;
use super::job::{RestoreJob, RestoreReport};
use super::preflight::NotLazy;
use super::serve::{
    Beginning, KeptChannels, Unserved, complete_postcopy, note_failure, report, serve, with_preempt_channel,
};
use super::unfinished::UnfinishedRestore;
use crate::job::{JobContext, JobError};
use crate::job_record::JobRecord;
use crate::monitor::{Monitor, Settings, WaitingQemu};
use crate::qmp::Version;
use crate::watchdog::{Watchdog, WatchdogError};

/// The first QEMU that answers before it has the preempt channel (7.2.22 does not, and 7.0 does not know one).
const PREEMPT_SINCE: Version = Version::new(8, 0, 0);

/// How QEMU must be set, except for the preempt channel.
pub(super) fn settings(preempt: bool) -> Settings {
    let mut wish = Settings::new().capability("postcopy-ram", true).capability("postcopy-preempt", preempt);
    for other in ["multifd", "mapped-ram", "x-ignore-shared", "xbzrle", "x-colo", "release-ram", "switchover-ack"] {
        wish = wish.capability(other, false);
    }
    wish
}

/// The outcome of trying to restore lazily.
pub(super) enum Tried {
    /// The VM is there.
    Restored(Box<RestoreReport>),
    /// QEMU refuses the settings that it needs, and is as it was.
    Refused(NotLazy),
}

pub(super) fn run(job: &RestoreJob<'_>, qemu: &WaitingQemu) -> Result<Tried, JobError> {
    let monitor = job.monitor;
    job.snapshot.lock_serving()?;
    let preempt = job.options.preempt && monitor.version() >= PREEMPT_SINCE;
    if job.options.preempt && !preempt {
        let (version, since) = (monitor.version(), PREEMPT_SINCE);
        (job.watch.notice)(&format!(
            "QEMU {version} has no separate channel for requests that can be used; {since} has"
        ));
    }
    let change = qemu.settings.change_to(&settings(preempt));
    let record = job.record(change.undo);
    // It starts while QEMU takes the record.
    let mut watchdog = OptionalWatchdog::start(job);
    if let Err(error) = record.create(monitor) {
        watchdog.dismiss();
        return Err(error.into());
    }
    watchdog.remember(&UnfinishedRestore::new(job, &record, preempt));
    let tried = match monitor.apply_settings(&change.set) {
        Ok(()) => match Rendezvous::lazy(monitor, job.options.listen.as_ref(), preempt) {
            Ok(rendezvous) => {
                transfer(job, rendezvous, preempt, record).map(|report| Tried::Restored(Box::new(report)))
            }
            Err(error) => undo(monitor, &record).and(Err(error)),
        },
        // QEMU looks whether it may use userfaultfd when the capability is set.
        Err(refusal) if refusal.is_refusal() => undo(monitor, &record).map(|()| Tried::Refused(NotLazy::of(&refusal))),
        Err(error) => Err(job.give_up(&record, error.into())),
    };
    watchdog.dismiss();
    tried
}

/// Puts QEMU back as it was before it was given anything.
fn undo(monitor: &Monitor, record: &JobRecord) -> Result<(), JobError> {
    monitor.restore_settings(&record.undo)?;
    Ok(JobRecord::remove(monitor)?)
}

/// Has QEMU listen, and brings it everything.
fn transfer(
    job: &RestoreJob<'_>,
    rendezvous: Rendezvous<'_>,
    preempt: bool,
    record: JobRecord,
) -> Result<RestoreReport, JobError> {
    let channel = listen(job, &rendezvous).map_err(|error| job.give_up(&record, error))?;
    let ends = Arc::new(KeptChannels::new(&channel)?);
    let source = PostcopySource::new(job.snapshot, channel, job.watch.handle).options(job.postcopy_options());
    let served =
        serve(job, with_preempt_channel(source, rendezvous, preempt, &ends), &ends, Beginning::Start, job.runs);
    match served {
        Ok((stats, to_guest)) => {
            let to_resident = job.begun.elapsed();
            complete_postcopy(job.monitor, &record)?;
            job.check_started()?;
            Ok(report(job, Some(stats), to_guest, to_resident))
        }
        Err(Unserved { error, guest_runs: true }) => {
            note_failure(job.monitor, record, &error);
            Err(error)
        }
        Err(Unserved { error, guest_runs: false }) => Err(job.give_up(&record, error)),
    }
}

/// The process that continues if this one is killed, if there is one.
pub(super) struct OptionalWatchdog<'a> {
    watchdog: Option<Watchdog>,
    watch: JobContext<'a>,
}

impl<'a> OptionalWatchdog<'a> {
    /// Starts it. Nothing waits until it has started: what it is sent waits for it.
    pub(super) fn start(job: &RestoreJob<'a>) -> Self {
        let watch = job.watch;
        let watchdog = (job.start_watchdog)().unwrap_or_else(|error| {
            tell_missing(watch, &error);
            None
        });
        Self { watchdog, watch }
    }

    /// Sends it all that it has to know to continue.
    pub(super) fn remember(&mut self, unfinished: &UnfinishedRestore) {
        let Some(watchdog) = &mut self.watchdog else { return };
        if let Err(error) = watchdog.remember(unfinished) {
            tell_missing(self.watch, &WatchdogError::Spawn(error).into());
            self.watchdog = None;
        }
    }

    /// Tells it that it is not needed: all is done, or a person is to decide.
    pub(super) fn dismiss(self) {
        if let Some(watchdog) = self.watchdog {
            watchdog.dismiss(self.watch.notice);
        }
    }
}

/// Says that no process continues if this one is killed.
fn tell_missing(watch: JobContext<'_>, error: &JobError) {
    (watch.notice)(&format!(
        "{}; if this process is killed, the restore has to be recovered",
        error_with_causes(error)
    ));
}

/// Makes QEMU listen for the stream, and connects.
fn listen(job: &RestoreJob<'_>, rendezvous: &Rendezvous<'_>) -> Result<Channel, JobError> {
    job.choose_autostart()?;
    job.monitor.migrate_incoming(&rendezvous.uri())?;
    Ok(rendezvous.connect()?)
}
