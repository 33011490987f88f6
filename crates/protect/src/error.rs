//! The failures of a protection.

use std::path::PathBuf;
use std::time::Duration;

use limosa_channel::ChannelError;
use limosa_migrate::MigrateError;
use limosa_qemu::qmp::QmpError;
use limosa_qemu::{JobError, JobRecordError};
use limosa_snapshot::SnapshotError;

use crate::gate::GateError;

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

    /// The connection to the keeper on another host is lost, or cannot be made.
    #[error("no connection to the keeper at {keeper}")]
    LineLost {
        /// Its address.
        keeper: String,
        /// The reason.
        source: Box<MigrateError>,
    },

    /// The keeper on another host has no room for this VM now.
    #[error("the keeper at {keeper} does not take this VM: {why}")]
    KeeperBusy {
        /// Its address.
        keeper: String,
        /// Its own message.
        why: String,
    },

    /// The VM continues elsewhere: it must not run here.
    #[error("the VM was failed over by the keeper at {keeper} ({why})")]
    TakenOver {
        /// Its address.
        keeper: String,
        /// Its own message.
        why: String,
    },

    /// The record of whose VM it is.
    #[error("{}: cannot read or write whose VM it is", directory.display())]
    Ownership {
        /// The directory of the checkpoints.
        directory: PathBuf,
        /// The reason.
        source: std::io::Error,
    },

    /// The standby QEMU.
    #[error("the standby QEMU cannot continue the VM: {reason}")]
    Standby {
        /// QEMU's own message, or its state.
        reason: String,
    },

    /// Protection is not possible with this QEMU, this VM or these options.
    #[error("{0}")]
    Refused(String),

    /// The VM has writable disks that would not belong to its checkpoints.
    #[error(
        "the VM has writable disks ({}), whose contents would be later than its memory after a failover",
        devices.join(", ")
    )]
    WritableDisks {
        /// Their devices.
        devices: Vec<String>,
    },

    /// The VM's writable disks are not those with which its protection began.
    #[error("the VM's disks have changed since its protection began: {what}")]
    DisksChanged {
        /// The first difference.
        what: String,
    },

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

/// The reason where QEMU has not said one.
pub(crate) fn unsaid() -> String {
    "it does not say why; its own log does".into()
}

impl ProtectError {
    /// QEMU gave up, with its own message if it has one.
    pub(crate) fn gave_up(said: Option<String>) -> Self {
        Self::Failed { reason: said.unwrap_or_else(unsaid) }
    }

    /// Whether the VM was failed over, as its keeper or a gate says.
    pub(crate) fn is_failed_over(&self) -> bool {
        match self {
            Self::TakenOver { .. } => true,
            Self::Gate(error) => matches!(error.downcast_ref(), Some(GateError::FailedOver { .. })),
            _ => false,
        }
    }
}
