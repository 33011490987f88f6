//! The doing: looks, asks the plan, acts, until the plan has nothing more to do.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::plan::{Actor, Outcome, Progress, QemuState, SAVE_SETUP_PATIENCE, Step, next_step};
use super::{overlays, served};
use crate::job_record::{JobRecord, JobRecordError};
use crate::monitor::{MigrationStatus, Monitor, RunState};
use crate::qmp::QmpError;
use crate::watchdog::{HOLD, HeldConnections};

/// How long they are held while QEMU sets a migration up, after each look.
const HOLD_IN_SETUP: Duration = Duration::from_secs(2);
/// How long they are held behind a cancel, while QEMU's threads end.
const HOLD_CANCELLED: Duration = Duration::from_millis(100);

/// How long a checkpoint that was answered may take to let a VM continue.
const CONTINUES_WITHIN: Duration = Duration::from_millis(200);

/// How often to check while waiting; an event ends the wait at once.
const LOOK: Duration = Duration::from_millis(100);
/// The same when no event is expected.
const LOOK_SOON: Duration = Duration::from_millis(5);

/// The outcome of taking over a VM whose job died.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Takeover {
    /// How it ended.
    pub outcome: Outcome,
    /// The VM's state at the end.
    pub run: RunState,
    /// Steps taken, and steps that failed, in sentences for people.
    pub remarks: Vec<String>,
    /// Notices that a person must act on: disks that are not where they were.
    pub notices: Vec<String>,
}

impl QemuState {
    /// QEMU's state afterwards.
    ///
    /// # Errors
    /// The monitor's.
    pub(crate) fn of(monitor: &Monitor) -> Result<Self, QmpError> {
        // In this order: the state of a VM that was asked for before the migration was over may be one that it has left
        // since, to be stopped for the end; and what is not held any more after it was over has come to its end.
        let migration = monitor.migration()?.status;
        let run = monitor.status()?.state;
        Ok(Self { run, migration, holds_migration: monitor.holds_migration()? })
    }
}

/// Carries the plan out, for at most `patience`. The record is removed if that ends the job. `disk_servers`: the
/// control sockets of servers of disks that may undo overlays.
///
/// # Errors
/// The monitor's. A step that QEMU refuses becomes a remark instead.
pub fn take_over(
    monitor: &Monitor,
    record: &JobRecord,
    actor: Actor,
    (disk_servers, patience): (&[PathBuf], Duration),
) -> Result<Takeover, JobRecordError> {
    take_over_holding(&HeldConnections::default(), monitor, record, actor, (disk_servers, patience))
}

/// As [`take_over`], with connections of QEMU's that are held until it can do without them.
pub(crate) fn take_over_holding(
    held: &HeldConnections,
    monitor: &Monitor,
    record: &JobRecord,
    actor: Actor,
    (disk_servers, patience): (&[PathBuf], Duration),
) -> Result<Takeover, JobRecordError> {
    let begun = Instant::now();
    let mut progress = Progress::default();
    held.release_in(HOLD);
    // Before the base there were no epochs, and in COLO nobody holds a descriptor that QEMU needs.
    let has_epochs = matches!(monitor.migration()?.status, MigrationStatus::Colo | MigrationStatus::Completed);
    if actor == Actor::Watchdog
        && has_epochs
        && let Some(why) = served::lost_disk(record, disk_servers)
    {
        held.release();
        return leave_standing(monitor, why);
    }
    let (mut remarks, mut notices) = (Vec::new(), Vec::new());
    let (outcome, run) = loop {
        progress.waited = begun.elapsed();
        let seen = QemuState::of(monitor)?;
        if seen.migration == MigrationStatus::Setup && progress.waited < SAVE_SETUP_PATIENCE {
            // It writes next to nothing yet, and the next look prolongs this.
            held.release_in(HOLD_IN_SETUP);
        }
        let step = match next_step(record, &seen, &progress, actor) {
            Step::Wait if progress.waited >= patience => Step::Finish(Outcome::GaveUp),
            // The VM is there already, and stays in a state that has to be reported.
            Step::Cancel if progress.cancelled && progress.waited >= patience => Step::Finish(Outcome::GaveUp),
            Step::EndColo if progress.colo_ended && progress.waited >= patience => Step::Finish(Outcome::GaveUp),
            step => step,
        };
        match step {
            Step::Wait if seen.migration.is_over() => std::thread::sleep(LOOK_SOON),
            Step::Wait => pause(monitor)?,
            Step::Cancel => {
                if progress.cancelled {
                    pause(monitor)?;
                }
                progress.cancelled = true;
                held.release_in(HOLD_CANCELLED);
                let what = match cancel(monitor, record) {
                    Ok(true) => "the migration was cancelled".to_owned(),
                    Ok(false) => "the migration was about to end by itself".to_owned(),
                    Err(error) if error.is_refusal() => error.to_string(),
                    Err(other) => return Err(other.into()),
                };
                if !remarks.contains(&what) {
                    remarks.push(what);
                }
            }
            Step::RemoveFilters => {
                progress.filters_removed = true;
                let removed = record.filters.iter().map(|id| monitor.remove_output_filter(id));
                // Each is tried, even if one is refused.
                let removed = removed.fold(Ok(()), Result::and);
                remark(&mut remarks, "the filters of its output were removed", removed)?;
            }
            Step::EndColo => {
                if progress.colo_ended {
                    pause(monitor)?;
                }
                progress.colo_ended = true;
                let what = match monitor.end_colo() {
                    Ok(()) => "the checkpoints were ended".to_owned(),
                    // It was told before, and has not left the state yet; or it has just left it.
                    Err(error) if error.is_refusal() => error.to_string(),
                    Err(other) => return Err(other.into()),
                };
                if !remarks.contains(&what) {
                    remarks.push(what);
                }
            }
            Step::Continue => {
                progress.continued += 1;
                match monitor.cont() {
                    Ok(()) => remarks.push("the VM was continued".to_owned()),
                    // It may not be allowed yet; the last refusal is worth a remark.
                    Err(error) if error.is_refusal() => {
                        remarks.retain(|remark| !remark.starts_with("QEMU refuses cont"));
                        remarks.push(error.to_string());
                    }
                    Err(other) => return Err(other.into()),
                }
                pause(monitor)?;
            }
            Step::PutBack => {
                progress.put_back = true;
                if !record.undo.is_empty() {
                    remark(
                        &mut remarks,
                        "the migration settings were put back",
                        monitor.restore_settings(&record.undo),
                    )?;
                }
            }
            Step::UndoOverlays => {
                progress.overlays_undone = true;
                let means = (disk_servers, begun + patience);
                overlays::undo_all(monitor, record, means, &mut remarks, &mut notices)?;
            }
            Step::DropDescriptors => {
                progress.dropped = true;
                drop_sets(monitor, record)?;
                for name in &record.descriptors {
                    monitor.closefd(name)?;
                }
            }
            Step::Finish(outcome) => {
                held.release();
                break (outcome, seen.run);
            }
        }
    };
    if outcome.ends_job() {
        JobRecord::remove(monitor)?;
    }
    Ok(Takeover { outcome, run, remarks, notices })
}

/// Stops a VM that has lost a disk. Its record stays, for a person who wants it to run all the same.
fn leave_standing(monitor: &Monitor, why: String) -> Result<Takeover, JobRecordError> {
    let begun = Instant::now();
    while begun.elapsed() < CONTINUES_WITHIN {
        monitor.stop()?;
        std::thread::sleep(LOOK_SOON);
    }
    let run = monitor.status()?.state;
    let notices = vec![format!("{why}: the VM was stopped, as its disk can only go back to the newest checkpoint")];
    Ok(Takeover { outcome: Outcome::DiskLost, run, remarks: Vec::new(), notices })
}

/// Cancels in the way that suits the migration; returns false if it is so near its end that it was left alone.
fn cancel(monitor: &Monitor, record: &JobRecord) -> Result<bool, QmpError> {
    if record.descriptor_sets.is_empty() {
        monitor.migrate_cancel().map(|()| true)
    } else {
        monitor.cancel_file_migration()
    }
}

/// Removes the job's descriptor sets: those of the record, and one that was made a moment before its record could
/// be, which is known by its remark.
fn drop_sets(monitor: &Monitor, record: &JobRecord) -> Result<(), QmpError> {
    let id = record.snapshot.to_string();
    for (set, remarks) in monitor.descriptor_sets()? {
        if record.descriptor_sets.contains(&set) || remarks.iter().any(|remark| remark.ends_with(&id)) {
            monitor.remove_fd(set)?;
        }
    }
    Ok(())
}

fn pause(monitor: &Monitor) -> Result<(), QmpError> {
    monitor.qmp().wait_event(&["MIGRATION", "STOP", "RESUME"], LOOK).map(|_| ())
}

/// Notes a step or its refusal; only a failing connection is an error.
fn remark(remarks: &mut Vec<String>, done: &str, result: Result<(), QmpError>) -> Result<(), QmpError> {
    match result {
        Ok(()) => remarks.push(done.to_owned()),
        Err(error) if error.is_refusal() => remarks.push(error.to_string()),
        Err(other) => return Err(other),
    }
    Ok(())
}
