//! A restore in progress: its arguments, its state, its report.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use limosa_channel::Counters;
use limosa_migrate::control::Phase;
use limosa_migrate::stored::PostcopyOptions;
use limosa_page::error_with_causes;
use limosa_snapshot::{ReadAhead, Snapshot, WorkingSet};
use serde_json::Value;

use super::options::{RestoreMode, RestoreOptions};
use crate::job::{JobContext, JobError};
use crate::job_record::{JobKind, JobRecord, JobRecordError};
use crate::load::not_startable;
use crate::monitor::{Monitor, RunState, Settings};
use crate::qmp::QmpError;
use crate::takeover::{Actor, Outcome, take_over};
use crate::watchdog::Watchdog;

/// Observes a restore while it runs.
pub trait RestoreObserver: Sync {
    /// Called when the guest runs, or is ready to and stays paused. `after` counts from the call of
    /// [`restore`](fn@crate::restore).
    fn guest_ready(&self, after: Duration, mode: RestoreMode);

    /// Called when QEMU has all of the VM, which is in its run state. From here on an end of QEMU is the guest's doing,
    /// and not a failure of the restore.
    fn loaded(&self) {}
}

/// Starts the process that continues with a lazy restore if this one is killed ([`Watchdog::spawn_without_waiting`]),
/// or declines.
pub type StartWatchdog<'a> = dyn Fn() -> Result<Option<Watchdog>, JobError> + Sync + 'a;

/// Counters of a lazy restore.
#[derive(Debug, Clone)]
pub struct LazyReport {
    /// From the arrival of a page request to its answer, nanoseconds.
    pub request_latency: Histogram<u64>,
    /// Of the main channel.
    pub main: Counters,
    /// Of the preempt channel.
    pub preempt: Option<Counters>,
}

/// The result of a restore.
#[derive(Debug)]
#[non_exhaustive]
pub struct RestoreReport {
    /// Mapped, lazy or eager.
    pub mode: RestoreMode,
    /// RAM blocks that the destination maps from the snapshot.
    pub mapped_blocks: Vec<String>,
    /// From the call to the guest running, or being ready to.
    pub time_to_guest: Duration,
    /// From the call to every page being there.
    pub time_to_resident: Duration,
    /// Pages sent with contents; `None` where QEMU read them itself.
    pub normal_pages: Option<u64>,
    /// Pages sent as zero.
    pub zero_pages: Option<u64>,
    /// Of a lazy restore.
    pub lazy: Option<LazyReport>,
    /// Of the channel of an eager restore through the socket.
    pub channel: Option<Counters>,
    /// The state that the VM is in now.
    pub vm_state: String,
    /// The working set that is still being read ahead, if the memory is mapped. Dropping it ends that.
    pub read_ahead: Option<ReadAhead>,
    /// The working set that was recorded of a lazy guest.
    pub recorded: Option<WorkingSet>,
}

/// The arguments of [`restore`](fn@crate::restore).
#[derive(Clone, Copy)]
pub struct RestoreRequest<'a> {
    /// The QEMU that takes the VM.
    pub monitor: &'a Monitor,
    /// The VM.
    pub snapshot: &'a Snapshot,
    /// Where the snapshot was opened.
    pub path: &'a Path,
    /// How to restore it.
    pub options: &'a RestoreOptions,
    /// Steers and observes the transfer.
    pub watch: JobContext<'a>,
    /// Learns when the guest runs.
    pub observer: &'a dyn RestoreObserver,
    /// Starts the process that brings the rest of a lazy restore if this one is killed.
    pub start_watchdog: &'a StartWatchdog<'a>,
}

impl std::fmt::Debug for RestoreRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RestoreRequest")
            .field("path", &self.path)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// The failure with QEMU's own reason, and with what limosa saw of it if that is anything else.
fn with_reason(reason: &str, error: &JobError) -> JobError {
    let seen = error_with_causes(error);
    let seen = if seen.contains(reason) { String::new() } else { format!("; limosa saw: {seen}") };
    JobError::Failed { reason: format!("{reason} (its own log may say more){seen}") }
}

/// How long QEMU may take to come to the end of a load that failed.
const FAIL_WITHIN: Duration = Duration::from_secs(5);

/// How long one that has answered once may take for its next answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(20);

/// State shared by all ways of restoring.
pub(super) struct RestoreJob<'a> {
    pub(super) monitor: &'a Monitor,
    pub(super) snapshot: &'a Snapshot,
    pub(super) path: &'a Path,
    pub(super) options: &'a RestoreOptions,
    pub(super) watch: JobContext<'a>,
    pub(super) observer: &'a dyn RestoreObserver,
    pub(super) start_watchdog: &'a StartWatchdog<'a>,
    pub(super) begun: Instant,
    /// Whether the guest is to run.
    pub(super) runs: bool,
    /// Bytes of a page of the destination's memory, by RAM block, where they are more than 4096.
    pub(super) page_sizes: BTreeMap<String, u64>,
}

impl RestoreJob<'_> {
    /// Before the incoming migration of a lazy restore: makes QEMU start, or not start, the guest by itself as soon as
    /// it has the devices. In a QEMU that waits for an incoming VM, `cont` and `stop` set just that.
    pub(super) fn choose_autostart(&self) -> Result<(), JobError> {
        Ok(if self.runs { self.monitor.cont() } else { self.monitor.stop() }?)
    }

    /// How the engine is to send lazily.
    pub(super) fn postcopy_options(&self) -> PostcopyOptions {
        PostcopyOptions {
            page_sizes: self.page_sizes.clone(),
            first: self.options.working_set.as_ref().map_or_else(Vec::new, |set| set.ranges.clone()),
            record_for: self.options.record_for,
            ..PostcopyOptions::default()
        }
    }

    /// The record of this job for QEMU.
    pub(super) fn record(&self, undo: Settings) -> JobRecord {
        JobRecord::new(JobKind::Restore, self.snapshot.id(), self.path, self.runs, undo)
    }

    /// After a failure before the guest ran: puts QEMU's settings back and finds the best reason, QEMU's own if it has
    /// one.
    pub(super) fn give_up(&self, record: &JobRecord, error: JobError) -> JobError {
        // A QEMU that lost its source while it loaded the devices, with a channel for requests, waits for ever for the
        // page that it has asked for there, and answers nothing (found with QEMU 10.0.2).
        let answer = self.monitor.qmp().execute_within("query-migrate", Value::Null, FAIL_WITHIN);
        match answer {
            Err(QmpError::NoReply { .. }) => return JobError::QemuHangs { source: Box::new(error) },
            Err(gone) if gone.is_gone() && error.is_lost_connection() => return JobError::QemuEnded,
            _ => {}
        }
        // It may have answered that one before it noticed.
        self.monitor.qmp().limit_replies(ANSWERS_WITHIN);
        // The QEMU is lost anyway; what it refuses now changes nothing.
        let left = take_over(self.monitor, record, Actor::Watchdog, (&[], FAIL_WITHIN));
        if let Err(JobRecordError::Qmp(QmpError::NoReply { .. })) = left {
            return JobError::QemuHangs { source: Box::new(error) };
        }
        if left.is_ok_and(|left| left.outcome == Outcome::NeedsRecovery) {
            // The answer to the package was lost, not the package: the guest runs, on the pages that it has.
            self.watch.handle.progress.set_phase(Phase::PostcopyActive);
        }
        // Asked when QEMU has come to the end of its failure: before that it may not know yet.
        match self.monitor.migration().ok().and_then(|info| info.error) {
            Some(reason) => with_reason(&reason, &error),
            None if error.is_lost_connection() && self.monitor.qmp().execute("query-status", Value::Null).is_err() => {
                JobError::QemuEnded
            }
            None => error,
        }
    }

    /// Whether QEMU says that it still waits for its VM.
    pub(super) fn is_unloaded(&self) -> bool {
        self.monitor.status().is_ok_and(|status| status.state == RunState::Inmigrate)
    }

    /// After everything has been handed over lazily: QEMU takes the VM's disks then, and may fail to without a word on
    /// the stream.
    pub(super) fn check_started(&self) -> Result<(), JobError> {
        if self.runs && self.is_unloaded() {
            return Err(not_startable("its own log says why"));
        }
        Ok(())
    }

    /// The VM's state, for people and programs.
    pub(super) fn vm_state(&self) -> String {
        self.monitor.status().map_or_else(|_| "unknown".into(), |status| status.state.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemus_reason_is_given_once() {
        let failed = JobError::Failed { reason: "no such device".into() };
        let said = with_reason("no such device", &failed).to_string();
        assert_eq!(said, "QEMU gave up: no such device (its own log may say more)");
        let other = JobError::refused("the file is cut");
        let said = with_reason("no such device", &other).to_string();
        assert_eq!(said, "QEMU gave up: no such device (its own log may say more); limosa saw: the file is cut");
    }
}
