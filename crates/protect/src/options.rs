//! The options of a protection.

use std::path::PathBuf;
use std::time::Duration;

use limosa_migrate::output::OutputGates;
use limosa_snapshot::CheckpointOptions;

/// Treatment of the VM's writable disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProtectDisks {
    /// They belong to the checkpoints: each is served by one of the servers of disks with these control sockets
    /// (`limosa serve --control`). A VM with another one is refused: a checkpoint would hold its memory of one instant
    /// and its disks of another.
    Served(Vec<PathBuf>),
    /// They are kept consistent by other means.
    Ignore,
}

impl ProtectDisks {
    /// The control sockets of servers of disks.
    pub(crate) fn servers(&self) -> &[PathBuf] {
        match self {
            Self::Served(servers) => servers,
            Self::Ignore => &[],
        }
    }
}

/// Time from one checkpoint to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointTiming {
    /// Always the same, at least 1 ms. A gate that is nearly full makes it shorter.
    Period(Duration),
    /// As long as nothing wants to leave the VM (Kemari's rule), and at most this.
    Output {
        /// The longest time.
        at_most: Duration,
    },
}

impl CheckpointTiming {
    /// Longest time from one checkpoint to the next.
    #[must_use]
    pub const fn longest(self) -> Duration {
        match self {
            Self::Period(longest) | Self::Output { at_most: longest } => longest,
        }
    }

    /// Whether output makes it shorter.
    #[must_use]
    pub const fn is_by_output(self) -> bool {
        matches!(self, Self::Output { .. })
    }
}

/// How a VM is protected.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProtectOptions {
    /// Time from one checkpoint to the next.
    pub every: CheckpointTiming,
    /// How long the VM may stand still for a checkpoint that makes no progress. After it COLO is ended, and the VM
    /// continues without protection.
    pub stall_timeout: Duration,
    /// Bytes of a checkpoint's pages that wait in memory until the VM continues; more is stored while it stands still.
    pub buffer: u64,
    /// Treatment of disks.
    pub disks: ProtectDisks,
    /// How checkpoints are kept.
    pub store: CheckpointOptions,
}

impl ProtectOptions {
    /// Whether the time between checkpoints is kept here, not by QEMU.
    pub(crate) fn paces(&self, outputs: OutputGates<'_>) -> bool {
        !outputs.is_empty() || self.every.is_by_output()
    }
}

impl Default for ProtectOptions {
    /// Every 100 ms, stalls of up to 2 s, 128 MiB of pages in memory, no disk and no server of one, checkpoints that
    /// survive the end of any process.
    fn default() -> Self {
        Self {
            every: CheckpointTiming::Period(Duration::from_millis(100)),
            stall_timeout: Duration::from_secs(2),
            buffer: 128 << 20,
            disks: ProtectDisks::Served(Vec::new()),
            store: CheckpointOptions::default(),
        }
    }
}
