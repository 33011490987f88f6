//! `limosa resume`: continue a VM that an interrupted job left stopped, and say why it was.

use std::path::PathBuf;
use std::time::Duration;

use crate::job_record::{JobKind, JobPhase, JobRecord, JobRecordError, VmAfterJob};
use crate::monitor::{Monitor, RunState};
use crate::process::Liveness;
use crate::qmp::QmpError;
use crate::takeover::{Actor, Outcome, QemuState, Takeover, take_over};

/// Options of [`resume`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ResumeOptions {
    /// Take over from a job of another host or container, and continue a VM that no job of limosa's has stopped.
    pub force: bool,
    /// How long a migration may take to end.
    pub timeout: Duration,
    /// The control sockets of servers of disks (`limosa serve`) that undo what an interrupted save had them do.
    pub disk_servers: Vec<PathBuf>,
}

impl Default for ResumeOptions {
    fn default() -> Self {
        Self { force: false, timeout: Duration::from_secs(600), disk_servers: Vec::new() }
    }
}

/// The outcome of [`resume`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Resumed {
    /// The reason for the VM's state, in a sentence.
    pub why: String,
    /// The interrupted job, if there was one.
    pub record: Option<JobRecord>,
    /// The steps taken.
    pub takeover: Takeover,
}

/// The reason why nothing was done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// A job lives, or its record cannot be read.
    #[error(transparent)]
    Record(#[from] JobRecordError),
    /// The VM has been saved, migrated or failed over, and may run elsewhere.
    #[error("{why}; it may run elsewhere")]
    Elsewhere {
        /// Why it is stopped.
        why: String,
    },
    /// The VM is stopped, but not by limosa.
    #[error("{why}; no job of limosa's stopped this VM")]
    NotOurs {
        /// Why it is stopped.
        why: String,
    },
    /// Continuing would not make it run.
    #[error("{why}; there is nothing that could be continued")]
    NothingToContinue {
        /// Why it is stopped.
        why: String,
    },
}

impl From<QmpError> for ResumeError {
    fn from(error: QmpError) -> Self {
        Self::Record(error.into())
    }
}

/// Examines the VM and takes the steps of a watchdog, or those that only a person may decide on.
///
/// # Errors
/// [`ResumeError`].
pub fn resume(monitor: &Monitor, options: &ResumeOptions) -> Result<Resumed, ResumeError> {
    let record = JobRecord::read(monitor)?;
    let seen = QemuState::of(monitor)?;
    let why = explain(record.as_ref(), &seen);
    let Some(record) = record else {
        let takeover = without_record(monitor, &seen, &why, options)?;
        return Ok(Resumed { why, record: None, takeover });
    };
    match record.process.liveness() {
        Liveness::Alive => return Err(JobRecordError::Busy(Box::new(record)).into()),
        Liveness::Elsewhere if !options.force => return Err(JobRecordError::Elsewhere(Box::new(record)).into()),
        Liveness::Elsewhere | Liveness::Dead => {}
    }
    if record.job == JobKind::Protect && record.phase == JobPhase::Undecided && !options.force {
        return Err(ResumeError::Elsewhere { why });
    }
    let takeover = take_over(monitor, &record, Actor::Person, (&options.disk_servers, options.timeout))?;
    Ok(Resumed { why, record: Some(record), takeover })
}

fn without_record(
    monitor: &Monitor,
    seen: &QemuState,
    why: &str,
    options: &ResumeOptions,
) -> Result<Takeover, ResumeError> {
    let done = |outcome, run, remarks| Takeover { outcome, run, remarks, notices: Vec::new() };
    if seen.run == RunState::Running {
        return Ok(done(Outcome::Running, seen.run.clone(), Vec::new()));
    }
    if matches!(seen.run, RunState::Inmigrate | RunState::Shutdown | RunState::GuestPanicked | RunState::InternalError)
    {
        return Err(ResumeError::NothingToContinue { why: why.to_owned() });
    }
    if !options.force {
        let why = why.to_owned();
        return Err(match seen.run {
            RunState::Postmigrate => ResumeError::Elsewhere { why },
            _ => ResumeError::NotOurs { why },
        });
    }
    monitor.cont()?;
    let run = monitor.status()?.state;
    let outcome = if run == RunState::Running { Outcome::Running } else { Outcome::ContinueRefused };
    Ok(done(outcome, run, vec!["the VM was continued".to_owned()]))
}

/// Returns the reason for a VM's state.
#[must_use]
pub fn explain(record: Option<&JobRecord>, seen: &QemuState) -> String {
    let now = format!("the VM is '{}', its migration '{}'", seen.run, seen.migration);
    let Some(record) = record else {
        return match &seen.run {
            RunState::Running => "the VM runs".to_owned(),
            RunState::Postmigrate => format!("{now}: it was migrated or saved and not continued"),
            RunState::Paused => format!("{now}: it was stopped"),
            RunState::Prelaunch => format!("{now}: it was started with -S and never continued"),
            RunState::Inmigrate => format!("{now}: it waits to be loaded"),
            _ => now,
        };
    };
    let what = match (record.job, record.phase, record.vm_after) {
        (JobKind::Save, JobPhase::Published, VmAfterJob::Stopped) => "was saved and was to stay stopped",
        (JobKind::Save, JobPhase::Published, VmAfterJob::AsBefore) => "was saved, but not continued",
        (JobKind::Save, JobPhase::Undecided, _) => "was being handed over, and may run elsewhere",
        (JobKind::Save, JobPhase::Working | JobPhase::Publishing, _) => "was being saved",
        (JobKind::Restore, ..) => "was being restored",
        (JobKind::Protect, JobPhase::Undecided, _) => "was being protected and was failed over",
        (JobKind::Protect, ..) => "was being protected",
    };
    match &record.failure {
        Some(failure) => {
            format!("it {what} ({}) when {} had to give up: {failure}; {now}", record.path, record.process)
        }
        None => format!("it {what} ({}) when {} died; {now}", record.path, record.process),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::monitor::Settings;

    #[test]
    fn the_explanation_names_job_snapshot_and_process() {
        let record = JobRecord::new(JobKind::Save, uuid::Uuid::nil(), Path::new("/snap"), true, Settings::new());
        let seen = QemuState { run: RunState::Postmigrate, migration: "completed".into(), holds_migration: false };
        let text = explain(Some(&record), &seen);
        for part in ["being saved", "/snap", &std::process::id().to_string(), "postmigrate", "completed"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(explain(None, &seen).contains("not continued"));
    }
}
