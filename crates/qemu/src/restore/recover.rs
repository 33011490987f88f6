//! Finishing a lazy restore that was interrupted.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_migrate::PostcopySource;
use limosa_snapshot::Snapshot;

use super::incoming::Rendezvous;
use super::{Restore, RestoreJob, RestoreReport, identity, lazy, preflight};
use crate::job::JobError;
use crate::marker::{JobKind, JobMarker, MarkerError};
use crate::monitor::{MigrationStatus, Monitor};
use crate::process::ProcessIdentity;
use crate::remedy::Remedy;

/// How long QEMU may take to notice that its channel is gone.
const PAUSED_WITHIN: Duration = Duration::from_secs(10);

/// Goes on with a lazy restore whose limosa was killed, or was told to leave the guest paused.
///
/// # Errors
/// If this QEMU does not stand on this snapshot, or is not in need. After a failure it can be tried again.
pub fn recover(restore: Restore<'_>) -> Result<RestoreReport, JobError> {
    let Restore { monitor, snapshot, path, options, watch, observer, guarded } = restore;
    let begun = Instant::now();
    let mut marker = own_marker(monitor, snapshot)?;
    match marker.claim(monitor) {
        // The process that served this VM cannot be seen from here, for example because it was in a container that is
        // gone. But a paused QEMU says itself that it is not served.
        Err(MarkerError::Elsewhere(_)) if monitor.migration()?.status == MigrationStatus::PostcopyPaused => {
            marker.process = ProcessIdentity::own();
            marker.update(monitor)?;
        }
        claimed => claimed?,
    }
    snapshot.lock_serving()?;
    let runs = marker.was_running;
    // Those that it was started with: a running QEMU's memory does not change its pages.
    let page_sizes = preflight::page_sizes(snapshot, &monitor.ram_blocks()?);
    let job = RestoreJob { monitor, snapshot, path, options, watch, observer, guarded, begun, runs, page_sizes };
    if wait_paused(monitor)? == MigrationStatus::Completed {
        (watch.notice)("every page had been sent before the interruption");
        lazy::complete(monitor, &marker)?;
        return Ok(lazy::report(&job, None, begun.elapsed()));
    }
    let preempt = monitor.settings()?.capabilities.get("postcopy-preempt").copied().unwrap_or(false);
    let guard = lazy::Guarded::start(&job, &marker, preempt);
    let rendezvous = Rendezvous::lazy(monitor, options.listen.as_ref(), preempt)?;
    let recovered = monitor
        .migrate_recover(&rendezvous.uri())
        .map_err(JobError::from)
        .and_then(|()| go_on(&job, &marker, preempt, rendezvous));
    guard.dismiss();
    recovered
}

/// Brings the rest of the memory to a QEMU that has been told to expect it.
pub(super) fn go_on(
    job: &RestoreJob<'_>,
    marker: &JobMarker,
    preempt: bool,
    rendezvous: Rendezvous<'_>,
) -> Result<RestoreReport, JobError> {
    let channel = rendezvous.connect()?;
    let ends = Arc::new(lazy::KeptChannels::new(&channel)?);
    let source = PostcopySource::new(job.snapshot, channel, job.watch.control, job.watch.progress)
        .with_options(job.postcopy_options());
    let served = lazy::serve(
        job,
        lazy::with_preempt_channel(source, rendezvous, preempt, &ends),
        &ends,
        lazy::Beginning::Recover,
        false,
    );
    let (stats, to_guest) = match served {
        Ok(served) => served,
        Err(unserved) => {
            lazy::note_failure(job.monitor, marker.clone(), &unserved.error);
            return Err(unserved.error);
        }
    };
    lazy::complete(job.monitor, marker)?;
    Ok(lazy::report(job, Some(stats), to_guest))
}

/// The record of the interrupted job, if it is one of this snapshot.
fn own_marker(monitor: &Monitor, snapshot: &Snapshot) -> Result<JobMarker, JobError> {
    let Some(marker) = JobMarker::read(monitor)? else {
        return Err(JobError::refused("no lazy restore by limosa was interrupted in this QEMU", Remedy::Restore));
    };
    if marker.job != JobKind::Restore {
        return Err(JobError::refused("the job that was interrupted in this QEMU is a save", Remedy::Resume));
    }
    if marker.snapshot != identity(snapshot) {
        return Err(JobError::refused(
            format!("this VM stands on another snapshot, {} ({})", marker.path, marker.snapshot),
            "recover from that file: any other would mix two memories",
        ));
    }
    Ok(marker)
}

/// Waits until QEMU has noticed that it is not served, and tells it if it does not.
fn wait_paused(monitor: &Monitor) -> Result<MigrationStatus, JobError> {
    let limit = Instant::now() + PAUSED_WITHIN;
    let mut told = false;
    loop {
        match monitor.migration()?.status {
            found @ (MigrationStatus::PostcopyPaused | MigrationStatus::Completed) => return Ok(found),
            MigrationStatus::PostcopyActive
            | MigrationStatus::PostcopyRecover
            | MigrationStatus::PostcopyRecoverSetup => {
                // A channel whose other end is gone without a word (a dead host) looks alive from here.
                if !told && Instant::now() + PAUSED_WITHIN / 2 > limit {
                    told = true;
                    monitor.migrate_pause()?;
                }
            }
            other => {
                return Err(JobError::refused(
                    format!("this QEMU is not in the middle of a lazy restore ({other})"),
                    Remedy::NewQemuAndRestore,
                ));
            }
        }
        if Instant::now() > limit {
            return Err(JobError::refused("QEMU still considers its restore served", Remedy::EndServer));
        }
        thread::sleep(Duration::from_millis(10));
    }
}
