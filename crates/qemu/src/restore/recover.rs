//! Finishing a lazy restore that was interrupted.

use std::thread;
use std::time::{Duration, Instant};

use limosa_snapshot::Snapshot;

use super::incoming::Rendezvous;
use super::job::{RestoreJob, RestoreReport, RestoreRequest};
use super::lazy::OptionalWatchdog;
use super::unfinished::UnfinishedRestore;
use super::{preflight, serve};
use crate::conflict::{Conflict, StateConflict};
use crate::job::JobError;
use crate::job_record::{JobKind, JobRecord, JobRecordError};
use crate::monitor::{MigrationStatus, Monitor};
use crate::process::ProcessIdentity;

/// How long QEMU may take to notice that its channel is gone.
const PAUSED_WITHIN: Duration = Duration::from_secs(10);

/// Continues a lazy restore whose limosa was killed, or was asked to leave the guest paused.
///
/// # Errors
/// If this QEMU does not stand on this snapshot, or is not in need. After a failure it can be tried again.
pub fn recover(restore: RestoreRequest<'_>) -> Result<RestoreReport, JobError> {
    let RestoreRequest { monitor, snapshot, path, options, watch, observer, start_watchdog } = restore;
    let begun = Instant::now();
    let mut record = own_record(monitor, snapshot)?;
    match record.claim(monitor) {
        // The process that served this VM cannot be seen from here, for example because it was in a container that is
        // gone. But a paused QEMU says itself that it is not served.
        Err(JobRecordError::Elsewhere(_)) if monitor.migration()?.status == MigrationStatus::PostcopyPaused => {
            record.process = ProcessIdentity::own();
            record.update(monitor)?;
        }
        claimed => claimed?,
    }
    snapshot.lock_serving()?;
    let runs = record.was_running;
    // Those that it was started with: a running QEMU's memory does not change its pages.
    let page_sizes = preflight::page_sizes(snapshot, &monitor.ram_blocks()?);
    let job = RestoreJob { monitor, snapshot, path, options, watch, observer, start_watchdog, begun, runs, page_sizes };
    if wait_paused(monitor)? == MigrationStatus::Completed {
        (watch.notice)("every page had been sent before the interruption");
        serve::complete(monitor, &record)?;
        return Ok(serve::report(&job, None, begun.elapsed(), begun.elapsed()));
    }
    let preempt = monitor.settings()?.capabilities.get("postcopy-preempt").copied().unwrap_or(false);
    let mut watchdog = OptionalWatchdog::start(&job);
    watchdog.remember(&UnfinishedRestore::new(&job, &record, preempt));
    let rendezvous = Rendezvous::lazy(monitor, options.listen.as_ref(), preempt)?;
    let recovered = monitor
        .migrate_recover(&rendezvous.uri())
        .map_err(JobError::from)
        .and_then(|()| serve::serve_rest(&job, &record, preempt, rendezvous));
    watchdog.dismiss();
    recovered
}

/// The record of the interrupted job, if it is one of this snapshot.
fn own_record(monitor: &Monitor, snapshot: &Snapshot) -> Result<JobRecord, JobError> {
    let Some(record) = JobRecord::read(monitor)? else {
        return Err(JobError::conflict(
            "no lazy restore by limosa was interrupted in this QEMU",
            Conflict::State(StateConflict::NothingToRecover),
        ));
    };
    if record.job != JobKind::Restore {
        return Err(JobError::conflict(
            "the job that was interrupted in this QEMU is a save",
            Conflict::State(StateConflict::SaveInterrupted),
        ));
    }
    if record.snapshot != snapshot.id() {
        return Err(JobError::refused(format!(
            "this VM stands on another snapshot, {} ({}); recover from that file: any other would mix two memories",
            record.path, record.snapshot
        )));
    }
    Ok(record)
}

/// Waits until QEMU has noticed that it is not served, and tells it if it does not.
fn wait_paused(monitor: &Monitor) -> Result<MigrationStatus, JobError> {
    let limit = Instant::now() + PAUSED_WITHIN;
    let mut pause_sent = false;
    loop {
        match monitor.migration()?.status {
            found @ (MigrationStatus::PostcopyPaused | MigrationStatus::Completed) => return Ok(found),
            MigrationStatus::PostcopyDevice
            | MigrationStatus::PostcopyActive
            | MigrationStatus::PostcopyRecover
            | MigrationStatus::PostcopyRecoverSetup => {
                // A channel whose other end is gone without a word (a dead host) looks alive from here.
                if !pause_sent && Instant::now() + PAUSED_WITHIN / 2 > limit {
                    pause_sent = true;
                    monitor.migrate_pause()?;
                }
            }
            other => {
                return Err(JobError::conflict(
                    format!("this QEMU is not in the middle of a lazy restore ({other})"),
                    Conflict::State(StateConflict::NothingToRecover),
                ));
            }
        }
        if Instant::now() > limit {
            return Err(JobError::conflict(
                "QEMU still considers its restore served",
                Conflict::State(StateConflict::AlreadyServed),
            ));
        }
        thread::sleep(Duration::from_millis(10));
    }
}
