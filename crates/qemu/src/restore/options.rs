//! Options of a restore.

use std::path::PathBuf;
use std::time::Duration;

use limosa_channel::{Uri, ZeroCopy};
use limosa_snapshot::{Snapshot, WorkingSet};
use limosa_stream::multifd::Compression;

use crate::monitor::RunState;
use crate::save::{DiskPolicy, TransportChoice};

/// How the guest gets its memory, and so when it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum RestoreMode {
    /// Mapped where the destination maps the snapshot, lazily where it can, else eagerly, with a notice why.
    #[default]
    Auto,
    /// At once: its memory is the snapshot file, mapped by the destination's memory backends. No page is sent, and
    /// nothing is left to do afterwards.
    Mapped,
    /// At once; its pages follow.
    Lazy,
    /// When all pages are there.
    Eager,
}

impl RestoreMode {
    /// Returns its name in options and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The run state that the VM comes back in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RunChoice {
    /// The one it was saved in.
    #[default]
    AsSaved,
    /// Running.
    Run,
    /// Paused.
    Paused,
}

impl RunChoice {
    /// Whether the VM of `snapshot` is to run.
    ///
    /// The state of a foreign stream may be missing; a VM that was migrated was running far more often than not. One
    /// that slept continues sleeping: its devices know.
    #[must_use]
    pub fn runs(self, snapshot: &Snapshot) -> bool {
        match self {
            Self::Run => true,
            Self::Paused => false,
            Self::AsSaved => snapshot
                .run_state()
                .is_none_or(|state| state == RunState::Running.as_str() || state == RunState::Suspended.as_str()),
        }
    }
}

/// How to restore a VM.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct RestoreOptions {
    /// When the guest runs.
    pub mode: RestoreMode,
    /// Who reads the pages in an eager restore.
    pub transport: TransportChoice,
    /// Where QEMU listens; `None`: a socket in a private directory.
    pub listen: Option<Uri>,
    /// Move the memory of an eager restore on channels beside the main one.
    pub channels: Option<RestoreChannels>,
    /// Answer requested pages on a channel of their own.
    pub preempt: bool,
    /// The run state.
    pub run: RunChoice,
    /// The policy for disks that changed since the VM was saved.
    pub disks: DiskPolicy,
    /// The control sockets of servers of disks (`limosa serve`) at which those of the destination are looked at.
    pub disk_servers: Vec<PathBuf>,
    /// Pages that are sent first if the memory comes lazily.
    pub working_set: Option<WorkingSet>,
    /// Whether the working set is read into the page cache if the memory is mapped.
    pub read_ahead: bool,
    /// Record the pages that the guest requests within this time of a lazy restore, during which no other page is sent.
    /// [`MappedRecording`](crate::MappedRecording) records mapped guests.
    pub record_for: Option<Duration>,
}

/// The channels that the memory of an eager restore comes on: QEMU's multifd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoreChannels {
    /// How many, 1 to 16.
    pub count: u8,
    /// How pages are compressed; only limosa compresses, not a file.
    pub compression: Compression,
    /// Whether limosa looks if stored pages are zero.
    pub detect_zero: bool,
    /// How stored pages leave the file, where limosa sends them.
    pub zero_copy: ZeroCopy,
}

impl RestoreChannels {
    /// Returns `count` channels, without compression or a look for zero pages.
    #[must_use]
    pub fn new(count: u8) -> Self {
        Self { count, compression: Compression::None, detect_zero: false, zero_copy: ZeroCopy::Auto }
    }
}
