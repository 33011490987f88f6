//! The failures of a protection.

use std::time::Duration;

use limosa_channel::ChannelError;
use limosa_migrate::MigrateError;
use limosa_qemu::qmp::QmpError;
use limosa_qemu::{JobError, JobRecordError};
use limosa_snapshot::SnapshotError;

/// Why a VM is not protected, or not any more. The causes are in [`source`](std::error::Error::source).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtectError {
    /// The monitor, or QEMU behind it.
    #[error(transparent)]
    Qmp(#[from] QmpError),

    /// The private directory for QEMU's connection, or the watchdog.
    #[error(transparent)]
    Job(#[from] JobError),

    /// The record of the job inside QEMU: another job is there, or was.
    #[error(transparent)]
    Record(#[from] JobRecordError),

    /// QEMU's connection.
    #[error(transparent)]
    Channel(#[from] ChannelError),

    /// The stream of checkpoints.
    #[error(transparent)]
    Migrate(#[from] MigrateError),

    /// The directory of checkpoints.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),

    /// A gate of the VM's output.
    #[error("the output of the VM cannot be held back")]
    Gate(#[source] limosa_migrate::VmError),

    /// Protection is not possible with this QEMU, this VM or these options.
    #[error("{0}")]
    Refused(String),

    /// QEMU has no COLO, or one that does not work. Background snapshots may be possible.
    #[error("{0}")]
    ColoUnusable(String),

    /// QEMU gave the base up.
    #[error("QEMU gave up: {reason}")]
    Failed {
        /// QEMU's own message.
        reason: String,
    },

    /// QEMU ended the checkpoints by itself.
    #[error("QEMU ended the checkpoints ({reason})")]
    Ended {
        /// QEMU's reason, or the state of its migration.
        reason: String,
    },

    /// A checkpoint made no progress, so the VM was let go.
    #[error("a checkpoint made no progress for {} s, and the VM was let go", after.as_secs_f64())]
    Stalled {
        /// The limit.
        after: Duration,
    },

    /// QEMU has ended, or its host.
    #[error("QEMU has ended")]
    QemuEnded,

    /// The system has no thread left.
    #[error("cannot start a thread for the checkpoints")]
    Thread(#[source] std::io::Error),
}
