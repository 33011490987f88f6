//! QEMU sends its migration stream, and limosa writes the file as it comes.

use std::os::fd::BorrowedFd;
use std::thread;
use std::time::{Duration, Instant};

use limosa_migrate::MigrateError;
use limosa_migrate::multifd::{MultifdChannels, MultifdOptions};
use limosa_migrate::stored::{Destination, DestinationOptions, ReceivedStream};
use limosa_snapshot::{SnapshotWriter, Transport, UnnamedFile};
use limosa_stream::ErrorKind;

use super::connection::connect;
use super::job::{SaveJob, SaveReport, Saved, afterwards};
use super::preflight::record_disks_again;
use super::unseen_writes;
use super::watcher::Watcher;
use crate::job::JobError;
use crate::job_record::{JobPhase, JobRecord};
use crate::monitor::{MigrationStatus, RunState};

/// How long the receiver may take to notice that QEMU has gone.
const NOTICE_WITHIN: Duration = Duration::from_secs(2);
/// How long nothing may come behind the end of a stream whose VM stays stopped.
const STOPPED_AFTER_THE_END: Duration = Duration::from_millis(100);

pub(super) fn run(
    job: &SaveJob<'_>,
    pending: UnnamedFile,
    record: &mut JobRecord,
    hold: &mut dyn FnMut(BorrowedFd<'_>),
) -> Result<SaveReport, JobError> {
    let mut writer = SnapshotWriter::new(pending, job.write_options())?;
    let mut watcher = Watcher::new(job, false)?;
    let was_stopped =
        job.before.stands_still && unseen_writes::stop(job.monitor, job.before.was_running, job.watch.notice)?;
    let channels = connect(job, &mut watcher, hold)?;
    let mut incoming = thread::scope(|scope| {
        let receiving =
            thread::Builder::new().name("receive".into()).spawn_scoped(scope, || receive(job, channels, &mut writer));
        let receiving = receiving.map_err(|source| JobError::Io {
            what: "start a thread for",
            path: job.before.manifest.id.to_string().into(),
            source,
        })?;
        // Both ends can find out first that something went wrong; the receiver's reason is the better one, unless it
        // only saw QEMU close the connection.
        let watched = loop {
            match watcher.look() {
                Err(error) => break Err(error),
                Ok(_) if receiving.is_finished() => break Ok(()),
                Ok(_) => {}
            }
        };
        let is_stopped = job.watch.handle.control.stop_requested().is_some();
        if let Err(error) = &watched {
            // QEMU has given up: it waits for no channel any more.
            watcher.channels_end();
            // A QEMU that has given up has closed its end: the receiver is about to notice, or has a reason of its own.
            let limit = Instant::now() + NOTICE_WITHIN;
            while matches!(error, JobError::Failed { .. }) && !receiving.is_finished() && Instant::now() < limit {
                thread::sleep(Duration::from_millis(1));
            }
            job.watch.handle.control.stop(limosa_migrate::control::Stop::Cancel);
        }
        let received = receiving.join().unwrap_or_else(|_| Err(MigrateError::Protocol("the receiver panicked".into())));
        // A stop that came meanwhile counts from here on.
        watcher.channels_end();
        match (watched, received) {
            (Ok(()), Ok(incoming)) => Ok(incoming),
            (Ok(()), Err(error)) => Err(broken_off(&mut watcher, error)),
            (Err(JobError::Failed { .. }), Err(error)) if !is_consequence(&error) => Err(error.into()),
            // A receiver that fails has QEMU's migration cancelled.
            (Err(JobError::Migrate(MigrateError::Cancelled)), Err(error)) if !is_stopped && !is_consequence(&error) => {
                Err(error.into())
            }
            (Err(error), _) => Err(error),
        }
    })?;
    watcher.expect_still()?;
    let mut manifest = job.before.manifest.clone();
    manifest.transport = Some(Transport::Socket);
    let state = match watcher.end() {
        Some(end) if was_stopped => end.clone(),
        None if was_stopped => unseen_writes::put_running(&mut incoming)?,
        _ => {
            let recorded = incoming.devices.global_state(&incoming.tail).ok().flatten();
            recorded.map_or_else(|| watcher.state().clone(), |state| RunState::from(state.run_state.as_str()))
        }
    };
    manifest.run_state = Some(state.to_string());
    manifest.pages.resent = incoming.stats.resent_pages;
    record_disks_again(&mut manifest)?;
    let counters = (writer.counters(), incoming.stats.channel);
    let finish = |writer: SnapshotWriter, manifest| writer.finish(&incoming.tail, manifest);
    let (published, saved) = if job.options.stop {
        job.watch.handle.control.check()?;
        let published = finish(writer, manifest.clone())?;
        watcher.commit();
        job.published(record, &published)?;
        let ended = incoming.acknowledge().map_err(JobError::from).and_then(|()| watcher.wait_completed());
        ended.map_err(|error| afterwards(&published, error))?;
        if let Err(error @ MigrateError::Protocol(_)) = incoming.confirm_end() {
            // Not whole after all, and its VM is still here: it runs on.
            let _ = std::fs::remove_file(&published.path);
            record.phase = JobPhase::Working;
            // For the watchdog alone; this process undoes by what it has, and the first error is the one to report.
            let _ = record.update(job.monitor);
            return Err(error.into());
        }
        let rounds = watcher.totals().ok().flatten().map(|ram| ram.dirty_sync_count);
        let saved = Saved { manifest, downtime: None, rounds, to_vm_running: job.begun.elapsed() };
        (published, saved)
    } else {
        watcher.wait_completed()?;
        let (downtime, to_vm_running) = if job.options.background {
            watcher.freeze()?
        } else {
            let downtime = if job.runs_again(&state, record)? { watcher.continue_vm()? } else { None };
            (downtime, job.begun.elapsed())
        };
        let rounds = watcher.totals()?.map(|ram| ram.dirty_sync_count);
        incoming.confirm_end()?;
        job.publishing(record)?;
        let published = finish(writer, manifest.clone())?;
        (published, Saved { manifest, downtime, rounds, to_vm_running })
    };
    let mut report = job.report(published, Transport::Socket, saved);
    report.file = Some(counters.0);
    report.channel = Some(counters.1);
    Ok(report)
}

/// Receives the stream; if the VM continues, answers at once, because it stands still until then.
fn receive(
    job: &SaveJob<'_>,
    channels: MultifdChannels,
    writer: &mut SnapshotWriter,
) -> Result<ReceivedStream, MigrateError> {
    let mut options = DestinationOptions::default();
    if job.options.stop {
        // No destination waits for this VM, and the file gets its name before the end of the stream is certain.
        options.end_of_stream_timeout = STOPPED_AFTER_THE_END;
    }
    let multifd = MultifdOptions { compression: job.options.compression };
    let destination =
        Destination::new(writer, channels.main, job.watch.handle).options(options).channels(channels.multifd, multifd);
    let incoming = destination.run()?;
    if !job.options.stop {
        incoming.acknowledge()?;
    }
    Ok(incoming)
}

/// The reason for a stream that ended early: QEMU's, or why it was cancelled, if the receiver only saw a closed
/// connection.
fn broken_off(watcher: &mut Watcher<'_>, error: MigrateError) -> JobError {
    if is_consequence(&error) {
        for _ in 0..20 {
            match watcher.look() {
                Err(reason) => return reason,
                Ok(MigrationStatus::Completed) => break,
                Ok(_) => {}
            }
        }
    }
    error.into()
}

/// Whether the receiver only saw that the other side went away, or was asked to stop.
fn is_consequence(error: &MigrateError) -> bool {
    match error {
        MigrateError::Channel(closed) => closed.is_closed(),
        MigrateError::Stream(wrong) => matches!(wrong.kind(), ErrorKind::Truncated { .. }),
        MigrateError::Multifd { source, .. } => is_consequence(source),
        MigrateError::Cancelled => true,
        _ => false,
    }
}
