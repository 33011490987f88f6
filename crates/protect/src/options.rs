//! The options of a protection.

use std::time::Duration;

use limosa_snapshot::CheckpointOptions;

/// Treatment of the VM's writable disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProtectDisks {
    /// A VM that has some is refused: a checkpoint would hold its memory of one instant and its disks of another.
    #[default]
    Refuse,
    /// They are kept consistent by other means.
    Ignore,
}

/// How a VM is protected.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProtectOptions {
    /// Time from one checkpoint to the next (QEMU's `x-checkpoint-delay`), at least 1 ms.
    pub every: Duration,
    /// How long the VM may stand still for a checkpoint that makes no progress. After it COLO is ended, and the VM
    /// continues without protection.
    pub stall_timeout: Duration,
    /// Treatment of disks.
    pub disks: ProtectDisks,
    /// How checkpoints are kept.
    pub store: CheckpointOptions,
}

impl Default for ProtectOptions {
    /// Every 100 ms, stalls of up to 2 s, no disks, checkpoints that survive the end of any process.
    fn default() -> Self {
        Self {
            every: Duration::from_millis(100),
            stall_timeout: Duration::from_secs(2),
            disks: ProtectDisks::Refuse,
            store: CheckpointOptions::default(),
        }
    }
}
