//! Shared by saves and restores: how they are watched, and their errors.

use std::path::{Path, PathBuf};
use std::time::Duration;

use limosa_channel::ChannelError;
use limosa_migrate::{Handle, MigrateError};
use limosa_pack::PackError;
use limosa_snapshot::SnapshotError;

use crate::conflict::{Conflict, DiskConflict};
use crate::job_record::JobRecordError;
use crate::qmp::QmpError;
use crate::watchdog::WatchdogError;

/// The handles by which a running job is watched and reached into.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct JobContext<'a> {
    /// Stops the job, changes its rate, and shows its progress.
    pub handle: &'a Handle,
    /// Receives notices for a person while the job runs, one line each.
    pub notice: &'a (dyn Fn(&str) + Sync),
    /// Called at most once, during a save that does not converge and has no time limit.
    pub not_converging: Option<&'a (dyn Fn(&NotConverging) + Sync)>,
}

impl<'a> JobContext<'a> {
    /// Handles of a job whose convergence nobody watches.
    #[must_use]
    pub fn new(handle: &'a Handle, notice: &'a (dyn Fn(&str) + Sync)) -> Self {
        Self { handle, notice, not_converging: None }
    }
}

impl std::fmt::Debug for JobContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobContext").field("handle", &self.handle).finish_non_exhaustive()
    }
}

/// A save that does not converge: the VM writes to its memory as fast as it is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotConverging {
    /// Rounds over the dirty log so far.
    pub rounds: u64,
    /// Bytes of memory that were dirty at the beginning of the last one.
    pub remaining: u64,
    /// Whether the same save in the background ([`SaveOptions::background`](crate::SaveOptions)) is possible,
    /// judged by QEMU and the other options.
    pub background: bool,
}

/// The failure of a save or a restore.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The monitor, or QEMU behind it.
    #[error(transparent)]
    Qmp(#[from] QmpError),

    /// The file.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),

    /// A packed snapshot, or an image that it stands on.
    #[error(transparent)]
    Packed(#[from] PackError),

    /// The stream.
    #[error(transparent)]
    Migrate(#[from] MigrateError),

    /// The record of the job inside QEMU: another job is there, or was.
    #[error(transparent)]
    Record(#[from] JobRecordError),

    /// The process that watches over the job.
    #[error(transparent)]
    Watchdog(#[from] WatchdogError),

    /// The transport, before there was a stream.
    #[error(transparent)]
    Channel(#[from] ChannelError),

    /// An operation on a file, directory or process that the job needs failed.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The kernel's reason.
        source: std::io::Error,
    },

    /// The job is not possible with these options, this QEMU or the VM in its present state.
    #[error("{why}")]
    Refused {
        /// The reason, with the remedy if that is something to be done to QEMU or the host.
        why: String,
        /// The conflict, if other options or another command resolve it.
        conflict: Option<Conflict>,
    },

    /// QEMU gave the migration up.
    #[error("QEMU gave up: {reason}")]
    Failed {
        /// QEMU's own message.
        reason: String,
    },

    /// QEMU did not start the guest of a lazy restore, though it has all that it needs for that.
    #[error("QEMU could not load the devices (its log says why)")]
    DevicesNotLoaded,

    /// A lazy restore failed while QEMU loaded the devices, and QEMU waits for a page that will not come.
    #[error("QEMU waits for memory that will not come, and answers nothing")]
    QemuHangs {
        /// Why the restore failed.
        source: Box<JobError>,
    },

    /// QEMU ended before it had all of the VM.
    #[error("QEMU ended while it loaded the VM (its log says why)")]
    QemuEnded,

    /// QEMU gave up writing the file.
    #[error("{}: QEMU gave up writing it: {reason}; nothing was kept", path.display())]
    FileNotWritten {
        /// The file that there was to be.
        path: PathBuf,
        /// QEMU's own message.
        reason: String,
    },

    /// The snapshot is in place, but a later step failed.
    #[error("the snapshot {} is whole and in place, but a later step failed", path.display())]
    AfterPublish {
        /// The snapshot.
        path: PathBuf,
        /// The reason.
        source: Box<JobError>,
    },

    /// The VM changed its memory faster than it could be saved.
    #[error("not done within {} s: the VM changes its memory faster than it is saved, or the rate is limited too low", after.as_secs_f64())]
    TimedOut {
        /// The limit that was set.
        after: Duration,
    },
}

impl JobError {
    /// A disk that is not as of the checkpoint of `epoch`, and why.
    pub(crate) fn other_instant(device: &str, path: &Path, epoch: u64, why: &str) -> Self {
        let path = path.display();
        Self::conflict(
            format!("the disk {device} ({path}) is not as of checkpoint {epoch}, to which the memory belongs: {why}"),
            Conflict::Disk(DiskConflict::Changed),
        )
    }

    /// Whether QEMU left a command unanswered: it may be asked again much later, but not by a person who
    /// waits.
    pub(crate) fn is_unanswered(&self) -> bool {
        matches!(
            self,
            Self::Qmp(QmpError::NoReply { .. }) | Self::Record(JobRecordError::Qmp(QmpError::NoReply { .. }))
        )
    }

    /// Whether the connection to QEMU, or its monitor, was lost.
    pub(crate) fn is_lost_connection(&self) -> bool {
        match self {
            Self::Qmp(error) => error.is_gone(),
            Self::Channel(error) | Self::Migrate(MigrateError::Channel(error)) => error.is_closed(),
            Self::Migrate(MigrateError::Multifd { source, .. }) => {
                matches!(&**source, MigrateError::Channel(error) if error.is_closed())
            }
            _ => false,
        }
    }

    /// Returns a refusal that no option resolves.
    pub(crate) fn refused(why: impl Into<String>) -> Self {
        Self::Refused { why: why.into(), conflict: None }
    }

    /// Returns a refusal because of a conflict that options or another command resolve.
    pub(crate) fn conflict(why: impl Into<String>, conflict: Conflict) -> Self {
        Self::Refused { why: why.into(), conflict: Some(conflict) }
    }
}
