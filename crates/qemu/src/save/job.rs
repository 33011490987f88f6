//! A save that has begun, and its result: the parts that both transports share.

use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::Counters;
use limosa_snapshot::{Manifest, Published, Transport, WriteOptions};

use super::background;
use super::options::SaveOptions;
use super::preflight::{Preflight, is_live};
use crate::job::{JobContext, JobError};
use crate::job_record::{JobPhase, JobRecord};
use crate::monitor::{Monitor, RunState};
use crate::qmp::QmpError;

/// How long QEMU may take to bring the VM into its state after the save: a limit for a QEMU that hangs.
pub(super) const SETTLES_WITHIN: Duration = Duration::from_secs(10);

/// The result of a save.
#[derive(Debug)]
#[non_exhaustive]
pub struct SaveReport {
    /// The file that now has its name.
    pub published: Published,
    /// Who wrote it.
    pub transport: Transport,
    /// How long the VM stood still; `None` if it was not running, or was left stopped.
    pub downtime: Option<Duration>,
    /// The state that the VM is in now.
    pub vm_state: String,
    /// From the first command to the VM running again.
    pub time_to_vm_running: Duration,
    /// From the first command to the published file.
    pub elapsed: Duration,
    /// Of the channel, when limosa wrote.
    pub channel: Option<Counters>,
    /// Of the file, when limosa wrote.
    pub file: Option<Counters>,
    /// How often QEMU went over its dirty log; `None` if it did not report it.
    pub rounds: Option<u64>,
}

/// A saved VM before its file is published.
pub(super) struct Saved {
    pub(super) manifest: Manifest,
    pub(super) downtime: Option<Duration>,
    pub(super) rounds: Option<u64>,
    pub(super) to_vm_running: Duration,
}

/// The parts of a save that both transports work with.
pub(super) struct SaveJob<'a> {
    pub(super) monitor: &'a Monitor,
    pub(super) options: &'a SaveOptions,
    pub(super) watch: JobContext<'a>,
    pub(super) before: Preflight,
    pub(super) begun: Instant,
}

impl SaveJob<'_> {
    /// Whether the VM is to run when it has been saved.
    pub(super) fn goes_on(&self) -> bool {
        self.before.was_running && !self.options.stop
    }

    /// Turns QEMU's refusal of the migration, before it begins, into an error for a person.
    pub(super) fn setup_error(&self, error: QmpError) -> JobError {
        if self.options.background { background::explain(error) } else { error.into() }
    }

    pub(super) fn write_options(&self) -> WriteOptions {
        let mut options = WriteOptions::new();
        options.durability = self.options.durability;
        options.checksum = self.options.checksum;
        options
    }

    /// Records that the file is about to get its name, if a takeover has to know that.
    pub(super) fn publishing(&self, record: &mut JobRecord) -> Result<(), JobError> {
        if !record.has_changed_disks() {
            return Ok(());
        }
        record.phase = JobPhase::Publishing;
        Ok(record.update(self.monitor)?)
    }

    /// Records that the file is published, for a process that might have to take over.
    pub(super) fn published(&self, record: &mut JobRecord, file: &Published) -> Result<(), JobError> {
        record.phase = JobPhase::Published;
        record.update(self.monitor).map_err(|error| afterwards(file, error.into()))
    }

    /// Decides whether the VM is to run again: not if it stopped for a reason of its own while it was saved. `state` is
    /// the one that it was in when it stopped for the save.
    pub(super) fn runs_again(&self, state: &RunState, record: &mut JobRecord) -> Result<bool, JobError> {
        if self.before.was_running && !is_live(state) {
            (self.watch.notice)(&format!("the VM has stopped by itself meanwhile ({state}) and is left so"));
            record.was_running = false;
            record.update(self.monitor)?;
        }
        Ok(self.goes_on() && record.was_running)
    }

    /// Returns the VM's state when QEMU is done with the migration: it reports `completed` a moment before it leaves
    /// `finish-migrate`, and until then refuses every further job of the VM.
    pub(super) fn settled_state(&self) -> String {
        let limit = Instant::now() + SETTLES_WITHIN;
        loop {
            match self.monitor.status() {
                Ok(status) if status.state == RunState::FinishMigrate && Instant::now() < limit => {
                    thread::sleep(Duration::from_millis(1));
                }
                Ok(status) => return status.state.to_string(),
                Err(_) => return "unknown".into(),
            }
        }
    }

    pub(super) fn report(&self, published: Published, transport: Transport, saved: Saved) -> SaveReport {
        SaveReport {
            published,
            transport,
            downtime: saved.downtime,
            vm_state: self.settled_state(),
            time_to_vm_running: saved.to_vm_running,
            elapsed: self.begun.elapsed(),
            channel: None,
            file: None,
            rounds: saved.rounds,
        }
    }
}

pub(super) fn afterwards(file: &Published, error: JobError) -> JobError {
    JobError::AfterPublish { path: file.path.clone(), source: Box::new(error) }
}
