//! The decision: a pure function from what is seen to the next thing to do.

use std::fmt;
use std::time::Duration;

use crate::job_record::{JobKind, JobPhase, JobRecord, VmAfterJob};
use crate::monitor::{MigrationStatus, RunState};

/// How long the migration of a restore that has lost its sender may stay in `setup` before it is given up.
const LOAD_SETUP_PATIENCE: Duration = Duration::from_secs(2);

/// How long the migration of a save may stay in `setup` before it is cancelled, which is not safe then
/// ([`HeldConnections`](crate::watchdog::HeldConnections)). QEMU's part takes milliseconds, unless its host is
/// overloaded.
pub(crate) const SAVE_SETUP_PATIENCE: Duration = Duration::from_secs(10);

/// How long the base of checkpoints that has lost its keeper may take to fail by itself. Only then is it cancelled: a
/// cancel that comes when QEMU is in COLO already leaves it in `cancelling` for good.
const BASE_PATIENCE: Duration = Duration::from_secs(10);

/// How often `cont` is tried.
const CONTINUE_ATTEMPTS: u32 = 50;

/// Who takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Actor {
    /// The watchdog, without a person.
    Watchdog,
    /// A person who wants the VM to run: `limosa resume`.
    Person,
}

/// QEMU's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuState {
    /// The VM's state.
    pub run: RunState,
    /// The migration's state.
    pub migration: MigrationStatus,
    /// QEMU still holds on to a migration, also if it says that it is over
    /// ([`crate::monitor::Monitor::holds_migration`]).
    pub holds_migration: bool,
}

/// Steps taken so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// A cancel was sent.
    pub cancelled: bool,
    /// The filters of the VM's output were removed.
    pub filters_removed: bool,
    /// COLO was ended.
    pub colo_ended: bool,
    /// How often `cont` was sent.
    pub continued: u32,
    /// The settings were put back (or cannot be).
    pub put_back: bool,
    /// The overlays over the disks were undone, or stay.
    pub overlays_undone: bool,
    /// The descriptors were removed.
    pub dropped: bool,
    /// Time since the beginning.
    pub waited: Duration,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Check again in a moment.
    Wait,
    /// `migrate_cancel`.
    Cancel,
    /// Remove the filters that hold the VM's output back.
    RemoveFilters,
    /// `x-colo-lost-heartbeat`.
    EndColo,
    /// `cont`.
    Continue,
    /// Put the settings back.
    PutBack,
    /// Undo the overlays over the disks.
    UndoOverlays,
    /// Remove the descriptors.
    DropDescriptors,
    /// Nothing more.
    Finish(Outcome),
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The VM runs.
    Running,
    /// The VM is stopped, as it was before the job.
    StoppedAsBefore,
    /// The VM is stopped because that was the job's purpose, which it fulfilled.
    StoppedOnPurpose,
    /// The VM is stopped for a reason outside limosa: the guest powered off, panicked, a disk failed.
    StoppedByItself,
    /// QEMU refused to let the VM run.
    ContinueRefused,
    /// The VM may have been handed over: only a person decides.
    Undecided,
    /// A lazy restore was interrupted: memory is missing.
    NeedsRecovery,
    /// No VM was loaded; this QEMU can still be used.
    NotLoaded,
    /// No VM was loaded, and this QEMU accepts no second attempt.
    LoadFailed,
    /// QEMU is in a state that this limosa does not know.
    Unknown,
    /// It took too long.
    GaveUp,
    /// A disk that belongs to the VM's checkpoints is lost with its server. The VM is stopped.
    DiskLost,
}

impl Outcome {
    /// Whether the job is over, so that its record can go.
    #[must_use]
    pub fn ends_job(self) -> bool {
        use Outcome::{ContinueRefused, DiskLost, GaveUp, NeedsRecovery, Undecided, Unknown};
        !matches!(self, Undecided | NeedsRecovery | Unknown | GaveUp | ContinueRefused | DiskLost)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "the VM runs",
            Self::StoppedAsBefore => "the VM is stopped, as it was before",
            Self::StoppedOnPurpose => "the VM is saved and stays stopped, as was asked",
            Self::StoppedByItself => "the VM has stopped for a reason of its own and stays so",
            Self::ContinueRefused => "QEMU refuses to continue the VM",
            Self::Undecided => "the VM may already run elsewhere and stays stopped",
            Self::NeedsRecovery => "a part of the VM's memory is still in the snapshot",
            Self::NotLoaded => "no VM was loaded; QEMU still waits for one",
            Self::LoadFailed => "no VM was loaded, and QEMU accepts no second attempt: start a new one",
            Self::Unknown => "QEMU is in a state that this limosa does not know; nothing was changed",
            Self::GaveUp => "QEMU did not come to an end of the migration in time",
            Self::DiskLost => "a disk of the VM is lost, and the VM stands still",
        })
    }
}

/// Returns the next step for the VM of `record`.
#[must_use]
pub fn next_step(record: &JobRecord, seen: &QemuState, progress: &Progress, actor: Actor) -> Step {
    match record.job {
        JobKind::Save => save(record, seen, progress, actor),
        JobKind::Restore => restore(record, seen, progress),
        JobKind::Protect => protect(record, seen, progress, actor),
    }
}

/// Checkpoints that have lost their keeper: the VM continues alone, unless it was failed over.
fn protect(record: &JobRecord, seen: &QemuState, progress: &Progress, actor: Actor) -> Step {
    use MigrationStatus as M;
    if record.phase == JobPhase::Undecided && actor == Actor::Watchdog {
        return Step::Finish(Outcome::Undecided);
    }
    // First of all: the VM has no network before, and ending the checkpoints may take a while.
    if !record.filters.is_empty() && !progress.filters_removed {
        return Step::RemoveFilters;
    }
    match &seen.migration {
        M::Colo => Step::EndColo,
        M::Setup | M::Active | M::PreSwitchover | M::Device | M::WaitUnplug if progress.waited < BASE_PATIENCE => {
            Step::Wait
        }
        // It is about to leave this state.
        M::Completed | M::Failed | M::Cancelled if seen.run == RunState::Colo => Step::Wait,
        _ => save(record, seen, progress, actor),
    }
}

fn save(record: &JobRecord, seen: &QemuState, progress: &Progress, actor: Actor) -> Step {
    use MigrationStatus as M;
    match &seen.migration {
        M::Setup | M::Active | M::PreSwitchover | M::Device | M::WaitUnplug => {
            if record.phase == JobPhase::Undecided && actor == Actor::Watchdog {
                return Step::Finish(Outcome::Undecided);
            }
            if seen.migration == M::Setup && progress.waited < SAVE_SETUP_PATIENCE {
                return wait(record, seen, progress);
            }
            // A migration that waits goes nowhere by itself, also when it came there after it was too late to cancel
            // it.
            let waits = seen.migration == M::PreSwitchover;
            if progress.cancelled && !waits { wait(record, seen, progress) } else { Step::Cancel }
        }
        M::Cancelling | M::Failing => wait(record, seen, progress),
        M::PostcopyDevice | M::PostcopyActive | M::PostcopyPaused | M::PostcopyRecoverSetup | M::PostcopyRecover => {
            Step::Finish(Outcome::Undecided)
        }
        M::Colo | M::Other(_) => Step::Finish(Outcome::Unknown),
        M::None | M::Completed | M::Failed | M::Cancelled => {
            let outcome = match &seen.run {
                RunState::FinishMigrate | RunState::SaveVm | RunState::RestoreVm => return Step::Wait,
                RunState::Running => Outcome::Running,
                RunState::Prelaunch if !record.was_running => Outcome::StoppedAsBefore,
                // (A guest that was reset while it stood still for its save is in `prelaunch`.)
                RunState::Paused | RunState::Postmigrate | RunState::Prelaunch => {
                    let stays = match (record.phase, actor) {
                        (JobPhase::Undecided, Actor::Watchdog) => Some(Outcome::Undecided),
                        (JobPhase::Published, Actor::Watchdog) if record.vm_after == VmAfterJob::Stopped => {
                            Some(Outcome::StoppedOnPurpose)
                        }
                        _ if !record.was_running => Some(Outcome::StoppedAsBefore),
                        _ => None,
                    };
                    match stays {
                        Some(outcome) => outcome,
                        None if progress.continued < CONTINUE_ATTEMPTS => return Step::Continue,
                        None => Outcome::ContinueRefused,
                    }
                }
                RunState::Other(_) | RunState::Inmigrate | RunState::Colo => Outcome::Unknown,
                _ => Outcome::StoppedByItself,
            };
            // Some of its threads may still run, with the settings that would be changed.
            if seen.holds_migration && outcome.ends_job() && !progress.put_back {
                Step::Wait
            } else {
                tidy(outcome, progress)
            }
        }
    }
}

/// Waits for the end of a migration. A VM that stands still for its save is continued before: no file has its name yet.
fn wait(record: &JobRecord, seen: &QemuState, progress: &Progress) -> Step {
    let stands_still = matches!(seen.run, RunState::Paused | RunState::Prelaunch) && record.was_running;
    let is_unfinished = record.job == JobKind::Save && record.phase == JobPhase::Working;
    if stands_still && is_unfinished && progress.continued < CONTINUE_ATTEMPTS { Step::Continue } else { Step::Wait }
}

fn restore(record: &JobRecord, seen: &QemuState, progress: &Progress) -> Step {
    use MigrationStatus as M;
    match &seen.migration {
        M::None => tidy(Outcome::NotLoaded, progress),
        M::Failed | M::Cancelled => tidy(Outcome::LoadFailed, progress),
        // The sender died with limosa: what it had connected fails soon, what it had not never begins.
        M::Setup if progress.waited >= LOAD_SETUP_PATIENCE => tidy(Outcome::LoadFailed, progress),
        M::Setup
        | M::Active
        | M::PostcopyDevice
        | M::PostcopyActive
        | M::PostcopyRecoverSetup
        | M::PostcopyRecover
        | M::Cancelling
        | M::Failing => Step::Wait,
        M::PostcopyPaused => Step::Finish(Outcome::NeedsRecovery),
        M::Device | M::PreSwitchover | M::WaitUnplug | M::Colo | M::Other(_) => Step::Finish(Outcome::Unknown),
        M::Completed => {
            let outcome = match &seen.run {
                RunState::Inmigrate | RunState::FinishMigrate | RunState::RestoreVm => return Step::Wait,
                RunState::Running => Outcome::Running,
                RunState::Paused | RunState::Prelaunch if !record.was_running => Outcome::StoppedAsBefore,
                RunState::Paused | RunState::Prelaunch if progress.continued < CONTINUE_ATTEMPTS => {
                    return Step::Continue;
                }
                RunState::Paused | RunState::Prelaunch => Outcome::ContinueRefused,
                RunState::Other(_) | RunState::Colo => Outcome::Unknown,
                _ => Outcome::StoppedByItself,
            };
            tidy(outcome, progress)
        }
    }
}

/// Returns the next step when the VM is where it belongs. Running comes first, because a stopped VM does most harm.
fn tidy(outcome: Outcome, progress: &Progress) -> Step {
    if !outcome.ends_job() {
        return Step::Finish(outcome);
    }
    match progress {
        Progress { put_back: false, .. } => Step::PutBack,
        Progress { overlays_undone: false, .. } => Step::UndoOverlays,
        Progress { dropped: false, .. } => Step::DropDescriptors,
        _ => Step::Finish(outcome),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use uuid::Uuid;

    use super::*;
    use crate::monitor::Settings;

    const TIDY: Progress = Progress {
        cancelled: true,
        filters_removed: true,
        colo_ended: true,
        continued: 0,
        put_back: true,
        overlays_undone: true,
        dropped: true,
        waited: Duration::ZERO,
    };

    fn record(job: JobKind, was_running: bool) -> JobRecord {
        JobRecord::new(job, Uuid::nil(), Path::new("/s"), was_running, Settings::new())
    }

    fn seen(run: &str, migration: &str) -> QemuState {
        QemuState { run: run.into(), migration: migration.into(), holds_migration: false }
    }

    fn save_step(run: &str, migration: &str) -> Step {
        next_step(&record(JobKind::Save, true), &seen(run, migration), &TIDY, Actor::Watchdog)
    }

    const RUN_STATES: [&str; 17] = [
        "debug",
        "inmigrate",
        "internal-error",
        "io-error",
        "paused",
        "postmigrate",
        "prelaunch",
        "finish-migrate",
        "restore-vm",
        "running",
        "save-vm",
        "shutdown",
        "suspended",
        "watchdog",
        "guest-panicked",
        "colo",
        "novel",
    ];
    const MIGRATION_STATES: [&str; 18] = [
        "none",
        "setup",
        "active",
        "postcopy-active",
        "postcopy-paused",
        "postcopy-recover-setup",
        "postcopy-recover",
        "pre-switchover",
        "device",
        "completed",
        "postcopy-device",
        "failing",
        "failed",
        "cancelling",
        "cancelled",
        "wait-unplug",
        "colo",
        "novel",
    ];

    #[test]
    fn a_save_that_is_under_way_is_cancelled_once_and_its_end_awaited() {
        for migration in ["setup", "active", "pre-switchover", "device", "wait-unplug"] {
            let record = record(JobKind::Save, true);
            let step = |waited| {
                let fresh = Progress { waited, ..Progress::default() };
                next_step(&record, &seen("running", migration), &fresh, Actor::Watchdog)
            };
            let at_once = if migration == "setup" { Step::Wait } else { Step::Cancel };
            assert_eq!([step(Duration::ZERO), step(SAVE_SETUP_PATIENCE)], [at_once, Step::Cancel]);
            let then = if migration == "pre-switchover" { Step::Cancel } else { Step::Wait };
            assert_eq!(save_step("running", migration), then);
        }
        assert_eq!(save_step("finish-migrate", "cancelling"), Step::Wait);
        assert_eq!(save_step("finish-migrate", "completed"), Step::Wait);
    }

    #[test]
    fn a_vm_that_stands_still_for_its_save_does_not_wait_for_the_end_of_the_migration() {
        let step = |record: &JobRecord, run, migration, cancelled| {
            let progress = Progress { cancelled, ..Progress::default() };
            next_step(record, &seen(run, migration), &progress, Actor::Watchdog)
        };
        let working = record(JobKind::Save, true);
        for run in ["paused", "prelaunch"] {
            assert_eq!(step(&working, run, "setup", false), Step::Continue);
            assert_eq!(step(&working, run, "active", false), Step::Cancel);
            for migration in ["active", "device", "cancelling", "failing"] {
                assert_eq!(step(&working, run, migration, true), Step::Continue, "{migration}");
            }
        }
        let published = JobRecord { phase: JobPhase::Published, ..record(JobKind::Save, true) };
        for other in [published, record(JobKind::Save, false), record(JobKind::Protect, true)] {
            assert_eq!(step(&other, "paused", "cancelling", true), Step::Wait);
        }
        let refused = Progress { continued: CONTINUE_ATTEMPTS, ..Progress::default() };
        assert_eq!(next_step(&working, &seen("paused", "cancelling"), &refused, Actor::Watchdog), Step::Wait);
    }

    #[test]
    fn a_vm_that_ran_before_a_save_is_continued_before_anything_is_tidied() {
        let record = record(JobKind::Save, true);
        let ends =
            [("postmigrate", "completed"), ("paused", "failed"), ("paused", "cancelled"), ("prelaunch", "failed")];
        for (run, migration) in ends {
            assert_eq!(
                next_step(&record, &seen(run, migration), &Progress::default(), Actor::Watchdog),
                Step::Continue
            );
        }
        let refused = Progress { continued: CONTINUE_ATTEMPTS, ..TIDY };
        let end = next_step(&record, &seen("postmigrate", "completed"), &refused, Actor::Watchdog);
        assert_eq!(end, Step::Finish(Outcome::ContinueRefused));
    }

    #[test]
    fn settings_stay_until_qemu_has_let_go_of_the_migration() {
        for migration in ["failed", "cancelled", "completed", "none"] {
            let over = seen("running", migration);
            let held = QemuState { holds_migration: true, ..over.clone() };
            for actor in [Actor::Watchdog, Actor::Person] {
                let record = record(JobKind::Save, true);
                assert_eq!(next_step(&record, &held, &Progress::default(), actor), Step::Wait, "{migration}");
                assert_eq!(next_step(&record, &over, &Progress::default(), actor), Step::PutBack, "{migration}");
                let stopped = QemuState { run: RunState::Paused, ..held.clone() };
                let step = next_step(&record, &stopped, &Progress::default(), actor);
                assert_eq!(step, Step::Continue, "{migration}: the VM does not wait for that");
            }
        }
    }

    #[test]
    fn a_vm_that_was_stopped_before_a_save_stays_stopped() {
        let record = record(JobKind::Save, false);
        for actor in [Actor::Watchdog, Actor::Person] {
            let step = next_step(&record, &seen("postmigrate", "completed"), &TIDY, actor);
            assert_eq!(step, Step::Finish(Outcome::StoppedAsBefore));
        }
    }

    #[test]
    fn a_vm_that_stopped_for_its_own_reasons_is_never_continued() {
        for run in ["shutdown", "guest-panicked", "io-error", "internal-error", "watchdog", "suspended", "debug"] {
            assert_eq!(save_step(run, "completed"), Step::Finish(Outcome::StoppedByItself), "{run}");
        }
    }

    #[test]
    fn an_undecided_vm_is_continued_by_a_person_and_never_by_the_watchdog() {
        let record = JobRecord { phase: JobPhase::Undecided, ..record(JobKind::Save, true) };
        for run in RUN_STATES {
            for migration in MIGRATION_STATES {
                for progress in [Progress::default(), TIDY] {
                    let step = next_step(&record, &seen(run, migration), &progress, Actor::Watchdog);
                    assert_ne!(step, Step::Continue, "{run} {migration}");
                    assert_ne!(step, Step::Cancel, "{run} {migration}: a cancel lets the VM run");
                }
            }
        }
        let step = next_step(&record, &seen("postmigrate", "completed"), &TIDY, Actor::Person);
        assert_eq!(step, Step::Continue);
    }

    #[test]
    fn a_vm_that_was_failed_over_is_left_standing_still_by_the_watchdog() {
        let record = JobRecord { phase: JobPhase::Undecided, ..record(JobKind::Protect, true) };
        for run in RUN_STATES {
            for migration in MIGRATION_STATES {
                let step = next_step(&record, &seen(run, migration), &Progress::default(), Actor::Watchdog);
                assert_eq!(step, Step::Finish(Outcome::Undecided), "{run} {migration}");
            }
        }
    }

    #[test]
    fn a_published_save_that_was_to_stop_the_vm_leaves_it_stopped_until_a_person_resumes_it() {
        let base = JobRecord { vm_after: VmAfterJob::Stopped, ..record(JobKind::Save, true) };
        let seen = seen("postmigrate", "completed");
        assert_eq!(next_step(&base, &seen, &TIDY, Actor::Watchdog), Step::Continue);
        let published = JobRecord { phase: JobPhase::Published, ..base };
        assert_eq!(next_step(&published, &seen, &TIDY, Actor::Watchdog), Step::Finish(Outcome::StoppedOnPurpose));
        assert_eq!(next_step(&published, &seen, &TIDY, Actor::Person), Step::Continue);
    }

    #[test]
    fn a_vm_handed_over_by_postcopy_is_left_alone() {
        for migration in
            ["postcopy-device", "postcopy-active", "postcopy-paused", "postcopy-recover", "postcopy-recover-setup"]
        {
            for actor in [Actor::Watchdog, Actor::Person] {
                let step = next_step(
                    &record(JobKind::Save, true),
                    &seen("finish-migrate", migration),
                    &Progress::default(),
                    actor,
                );
                assert_eq!(step, Step::Finish(Outcome::Undecided));
            }
        }
    }

    #[test]
    fn an_interrupted_lazy_restore_is_kept_for_recovery() {
        let record = record(JobKind::Restore, true);
        for run in ["running", "paused"] {
            let step = next_step(&record, &seen(run, "postcopy-paused"), &Progress::default(), Actor::Watchdog);
            assert_eq!(step, Step::Finish(Outcome::NeedsRecovery));
        }
        let step = next_step(&record, &seen("running", "postcopy-active"), &Progress::default(), Actor::Watchdog);
        assert_eq!(step, Step::Wait);
        assert!(!Outcome::NeedsRecovery.ends_job());
    }

    #[test]
    fn a_restored_vm_runs_only_if_that_was_asked() {
        let completed = seen("paused", "completed");
        let fresh = Progress::default();
        assert_eq!(next_step(&record(JobKind::Restore, true), &completed, &fresh, Actor::Watchdog), Step::Continue);
        let step = next_step(&record(JobKind::Restore, false), &completed, &TIDY, Actor::Watchdog);
        assert_eq!(step, Step::Finish(Outcome::StoppedAsBefore));
    }

    #[test]
    fn a_destination_that_nobody_connects_to_is_given_up_after_a_while() {
        let record = record(JobKind::Restore, true);
        let setup = seen("inmigrate", "setup");
        assert_eq!(next_step(&record, &setup, &TIDY, Actor::Watchdog), Step::Wait);
        let late = Progress { waited: LOAD_SETUP_PATIENCE, ..TIDY };
        assert_eq!(next_step(&record, &setup, &late, Actor::Watchdog), Step::Finish(Outcome::LoadFailed));
    }

    #[test]
    fn checkpoints_are_ended_and_never_cancelled_while_they_may_be_made() {
        let record = record(JobKind::Protect, true);
        for run in RUN_STATES {
            for progress in [Progress::default(), TIDY] {
                assert_eq!(next_step(&record, &seen(run, "colo"), &progress, Actor::Watchdog), Step::EndColo, "{run}");
            }
            for migration in ["setup", "active", "device", "failing", "cancelling"] {
                let step = next_step(&record, &seen(run, migration), &Progress::default(), Actor::Watchdog);
                assert_eq!(step, Step::Wait, "{run} {migration}: it fails by itself");
            }
        }
        assert_eq!(next_step(&record, &seen("colo", "completed"), &TIDY, Actor::Watchdog), Step::Wait);
        let late = Progress { waited: BASE_PATIENCE, ..Progress::default() };
        assert_eq!(next_step(&record, &seen("running", "active"), &late, Actor::Watchdog), Step::Cancel);
    }

    #[test]
    fn filters_that_hold_output_are_removed_before_anything_else() {
        let filters = vec!["inner".to_owned(), "outer".to_owned()];
        let record = record(JobKind::Protect, true).with_filters(filters);
        for run in RUN_STATES {
            for migration in MIGRATION_STATES {
                let step = next_step(&record, &seen(run, migration), &Progress::default(), Actor::Watchdog);
                assert_eq!(step, Step::RemoveFilters, "{run} {migration}");
            }
        }
        assert_eq!(next_step(&record, &seen("colo", "colo"), &TIDY, Actor::Watchdog), Step::EndColo);
    }

    #[test]
    fn a_vm_whose_checkpoints_have_ended_runs() {
        let record = record(JobKind::Protect, true);
        for migration in ["completed", "failed"] {
            let step = |run, progress| next_step(&record, &seen(run, migration), &progress, Actor::Watchdog);
            assert_eq!(step("running", TIDY), Step::Finish(Outcome::Running));
            assert_eq!(step("running", Progress::default()), Step::PutBack);
            // A QEMU that does not enter COLO stops the VM as after any migration.
            assert_eq!(step("postmigrate", Progress::default()), Step::Continue);
        }
    }

    #[test]
    fn settings_and_descriptors_are_tidied_before_every_end_of_a_job() {
        for job in [JobKind::Save, JobKind::Restore, JobKind::Protect] {
            for run in RUN_STATES {
                for migration in MIGRATION_STATES {
                    let step =
                        next_step(&record(job, true), &seen(run, migration), &Progress::default(), Actor::Watchdog);
                    if let Step::Finish(outcome) = step {
                        assert!(!outcome.ends_job(), "{job} {run} {migration}: {outcome:?}");
                    }
                }
            }
        }
    }
}
