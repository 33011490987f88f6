//! The options of a protection.

use std::path::PathBuf;
use std::time::Duration;

use limosa_channel::Uri;
use limosa_migrate::output::OutputGates;
use limosa_qemu::explain_background_refusal;
use limosa_qemu::monitor::{Monitor, SettingChange};
use limosa_snapshot::CheckpointOptions;
use uuid::Uuid;

use crate::error::ProtectError;

/// Treatment of the VM's writable disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProtectDisks {
    /// They belong to the checkpoints: each is served by one of the servers of disks with these control sockets
    /// (`limosa serve --control`). A VM with another one is refused: a checkpoint would hold its memory of one instant
    /// and its disks of another.
    Served(Vec<PathBuf>),
    /// They belong to the checkpoints: files of this host that QEMU opens itself, with an overlay beside each for the
    /// writes of every checkpoint, and disks of servers with these control sockets. Takes a period of at least 1 s.
    Overlays(Vec<PathBuf>),
    /// They are kept consistent by other means.
    Ignore,
}

impl ProtectDisks {
    /// The control sockets of servers of disks.
    pub(crate) fn servers(&self) -> &[PathBuf] {
        match self {
            Self::Served(servers) | Self::Overlays(servers) => servers,
            Self::Ignore => &[],
        }
    }
}

/// How QEMU makes checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CheckpointMethod {
    /// Its COLO: only pages that have changed come, and the VM waits until they are here.
    #[default]
    Colo,
    /// Background snapshots: all of the VM comes each time, while it runs. For a QEMU without a COLO that works.
    Background,
}

impl CheckpointMethod {
    /// Refuses a QEMU that does not know the settings which it needs.
    pub(crate) fn check_known(self, change: &SettingChange) -> Result<(), ProtectError> {
        let missing = |needed: &[&str]| change.unknown.iter().find(|name| needed.contains(&name.as_str()));
        match self {
            Self::Colo => missing(&["x-colo", "x-checkpoint-delay"]).map_or(Ok(()), |missing| {
                let why = format!("this QEMU was built without COLO (it does not know {missing})");
                Err(ProtectError::ColoUnusable(why))
            }),
            Self::Background => missing(&["background-snapshot"])
                .map_or(Ok(()), |_| Err(ProtectError::Refused("this QEMU has no background snapshots".into()))),
        }
    }

    /// Changes QEMU's settings.
    pub(crate) fn apply(self, monitor: &Monitor, change: &SettingChange) -> Result<(), ProtectError> {
        let applied = monitor.apply_settings(&change.set);
        match self {
            Self::Colo => Ok(applied?),
            Self::Background => Ok(applied.map_err(explain_background_refusal)?),
        }
    }
}

/// Treatment of a VM whose keeper on another host is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLoss {
    /// It continues without protection until the keeper is back.
    #[default]
    Continue,
    /// It stands still until the keeper is back, or its user continues it. A limosa that is killed meanwhile does not
    /// hold it.
    Pause,
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
    /// How checkpoints are made.
    pub method: CheckpointMethod,
    /// Time from one checkpoint to the next.
    pub every: CheckpointTiming,
    /// How long the VM may stand still for a checkpoint that makes no progress. After it COLO is ended, and the VM
    /// continues without protection.
    pub stall_timeout: Duration,
    /// Address to which QEMU connects; `None`: in a private directory, which takes a QEMU on this host that sees it.
    pub listen: Option<Uri>,
    /// Multifd channels on which QEMU sends pages, beside the main one; `None`: on that alone. Of checkpoints by
    /// [COLO](CheckpointMethod::Colo) in a directory of this host.
    pub channels: Option<u8>,
    /// How long a keeper on another host may owe an answer, or be out of reach, while the VM runs.
    pub lost_after: Duration,
    /// Treatment of the VM when that keeper is lost.
    pub on_loss: OnLoss,
    /// Bytes of a checkpoint's pages that wait in memory until the VM continues; more is stored while it stands still.
    pub buffer: u64,
    /// Whether output is held back by filters in QEMU, for a VM that was not prepared with gates.
    pub filters: bool,
    /// Treatment of disks.
    pub disks: ProtectDisks,
    /// The control sockets of the VM's gates, absolute: its checkpoints have them, and a failover fences there.
    pub gates: Vec<PathBuf>,
    /// The protection's id, by which gates, keepers and servers of disks know it: one that no other has. `None`: a new
    /// one.
    pub id: Option<Uuid>,
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
            method: CheckpointMethod::Colo,
            every: CheckpointTiming::Period(Duration::from_millis(100)),
            stall_timeout: Duration::from_secs(2),
            listen: None,
            channels: None,
            lost_after: Duration::from_secs(3),
            on_loss: OnLoss::Continue,
            buffer: 128 << 20,
            filters: false,
            disks: ProtectDisks::Served(Vec::new()),
            gates: Vec::new(),
            id: None,
            store: CheckpointOptions::default(),
        }
    }
}
