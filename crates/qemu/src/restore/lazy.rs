//! The lazy restore: limosa as a postcopy source, started with all RAM missing.

use std::sync::Arc;

use limosa_channel::Channel;
use limosa_migrate::stored::PostcopySource;
use limosa_page::error_with_causes;

use super::incoming::Rendezvous;
use super::job::{RestoreJob, RestoreReport};
use super::serve::{Beginning, KeptChannels, Unserved, complete, note_failure, report, serve, with_preempt_channel};
use super::unfinished::UnfinishedRestore;
use crate::job::{JobContext, JobError};
use crate::job_record::JobRecord;
use crate::monitor::Settings;
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

pub(super) fn run(job: &RestoreJob<'_>) -> Result<RestoreReport, JobError> {
    let monitor = job.monitor;
    job.snapshot.lock_serving()?;
    let preempt = job.options.preempt && monitor.version() >= PREEMPT_SINCE;
    if job.options.preempt && !preempt {
        let (version, since) = (monitor.version(), PREEMPT_SINCE);
        (job.watch.notice)(&format!(
            "QEMU {version} has no separate channel for requests that can be used; {since} has"
        ));
    }
    let change = monitor.plan_settings(&settings(preempt))?;
    let rendezvous = Rendezvous::lazy(monitor, job.options.listen.as_ref(), preempt)?;
    let record = job.record(change.undo);
    record.create(monitor)?;
    let watchdog = OptionalWatchdog::start(job, &record, preempt);
    let restored = transfer(job, &change.set, rendezvous, preempt, record);
    watchdog.dismiss();
    restored
}

/// Has QEMU listen, and brings it everything.
fn transfer(
    job: &RestoreJob<'_>,
    settings: &Settings,
    rendezvous: Rendezvous<'_>,
    preempt: bool,
    record: JobRecord,
) -> Result<RestoreReport, JobError> {
    let channel = listen(job, settings, &rendezvous).map_err(|error| job.give_up(&record, error))?;
    let ends = Arc::new(KeptChannels::new(&channel)?);
    let source = PostcopySource::new(job.snapshot, channel, job.watch.handle).options(job.postcopy_options());
    let served =
        serve(job, with_preempt_channel(source, rendezvous, preempt, &ends), &ends, Beginning::Start, job.runs);
    match served {
        Ok((stats, to_guest)) => {
            complete(job.monitor, &record)?;
            job.check_started()?;
            Ok(report(job, Some(stats), to_guest))
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
    /// Starts it and sends it all it has to know. Nothing waits until it has started: what it is sent waits for it.
    pub(super) fn start(job: &RestoreJob<'a>, record: &JobRecord, preempt: bool) -> Self {
        let watch = job.watch;
        let started = (job.start_watchdog)().and_then(|watchdog| {
            let Some(mut watchdog) = watchdog else { return Ok(None) };
            match watchdog.remember(&UnfinishedRestore::new(job, record, preempt)) {
                Ok(()) => Ok(Some(watchdog)),
                Err(error) => Err(WatchdogError::Spawn(error).into()),
            }
        });
        let watchdog = started.unwrap_or_else(|error| {
            (watch.notice)(&format!(
                "{}; if this process is killed, the restore has to be recovered",
                error_with_causes(&error)
            ));
            None
        });
        Self { watchdog, watch }
    }

    /// Tells it that it is not needed: all is done, or a person is to decide.
    pub(super) fn dismiss(self) {
        if let Some(watchdog) = self.watchdog {
            watchdog.dismiss(self.watch.notice);
        }
    }
}

/// Makes QEMU listen for the stream, and connects.
fn listen(job: &RestoreJob<'_>, settings: &Settings, rendezvous: &Rendezvous<'_>) -> Result<Channel, JobError> {
    job.monitor.apply_settings(settings)?;
    job.choose_autostart()?;
    job.monitor.migrate_incoming(&rendezvous.uri())?;
    Ok(rendezvous.connect()?)
}
