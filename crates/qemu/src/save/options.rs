//! How a VM is saved: the options, and those that contradict each other.

use std::path::PathBuf;
use std::time::Duration;

use limosa_channel::Uri;
use limosa_snapshot::Durability;
use limosa_stream::multifd::Compression;

use crate::conflict::{Conflict, JobOption};
use crate::job::JobError;

/// Who writes the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TransportChoice {
    /// QEMU itself where it can (9.0 or newer, monitor on this host), else limosa.
    #[default]
    Auto,
    /// QEMU writes the file through a descriptor that it is passed.
    File,
    /// QEMU sends its migration stream and limosa writes the file.
    Socket,
}

/// Action on a VM that changes its memory faster than it is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnTimeout {
    /// Stop the VM until it is saved; the rest of its memory goes at full speed.
    Pause,
    /// Give up; the VM continues.
    Cancel,
}

/// How long a VM may run while it is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveTimeout {
    /// Counted from the beginning of the save.
    pub limit: Duration,
    /// How the save ends after that time.
    pub action: OnTimeout,
}

/// Handling of writable disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskPolicy {
    /// Refuse where memory and disks could be of different instants.
    #[default]
    Check,
    /// The caller keeps them consistent.
    Ignore,
    /// A save freezes them at its instant, and the VM continues with overlays over them. A restore checks as with
    /// `Check`.
    Overlay,
}

/// How to save a VM.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Who writes the pages.
    pub transport: TransportChoice,
    /// Where QEMU connects when limosa writes; `None`: a socket pair passed through the monitor.
    pub listen: Option<Uri>,
    /// Channels beside the main one (QEMU's `multifd-channels`): to write the file with, or to send on. `None`: as many
    /// as suit a file; everything on one channel.
    pub channels: Option<u8>,
    /// How pages are compressed on these channels (QEMU's `multifd-compression`).
    pub compression: Compression,
    /// Leave the VM stopped.
    pub stop: bool,
    /// QEMU protects the memory against writing and saves it while the VM continues.
    pub background: bool,
    /// Replace the file if it is there.
    pub replace: bool,
    /// Record checksums.
    pub checksum: bool,
    /// QEMU's `downtime-limit`; `None` leaves it as it is.
    pub downtime: Option<Duration>,
    /// Ends a save that does not converge; `None`: the VM runs until its memory is saved.
    pub timeout: Option<SaveTimeout>,
    /// The policy for writable disks.
    pub disks: DiskPolicy,
    /// Where overlays go; `None`: each beside its disk.
    pub overlay_dir: Option<PathBuf>,
    /// The control sockets of servers of disks (`limosa serve`) that freeze those of the VM that they serve.
    pub disk_servers: Vec<PathBuf>,
    /// Whether to wait until a power cut cannot lose the file.
    pub durability: Durability,
    /// How long memory goes out slowly at the beginning until QEMU has heard which pages the guest's balloon hints as
    /// free; `None`: it goes as fast as it may from the beginning, and pages that left before the list came are
    /// stored.
    pub hint_wait: Option<Duration>,
}

impl SaveOptions {
    /// Refuses options that contradict each other.
    pub(super) fn check(&self) -> Result<(), JobError> {
        let refused = |why: &str, conflict: Conflict| Err(JobError::conflict(why, conflict));
        if self.background && self.stop {
            return refused(
                "a VM that is saved in the background continues",
                Conflict::Options(JobOption::Background, JobOption::Stop),
            );
        }
        if self.background && self.hint_wait.is_some() {
            return refused(
                "QEMU asks no balloon for free pages in the background",
                Conflict::Options(JobOption::Background, JobOption::HintWait),
            );
        }
        if self.channels.is_none() && self.compression != Compression::None {
            return refused(
                "only pages on channels of their own are compressed",
                Conflict::Missing(JobOption::Channels),
            );
        }
        if self.background && self.channels.is_some() {
            return refused(
                "QEMU saves on one channel in the background",
                Conflict::Options(JobOption::Background, JobOption::Channels),
            );
        }
        if self.overlay_dir.is_some() && self.disks != DiskPolicy::Overlay {
            return refused(
                "a folder for overlays has no meaning without overlays",
                Conflict::Missing(JobOption::Overlays),
            );
        }
        if !self.disk_servers.is_empty() && self.disks != DiskPolicy::Overlay {
            return refused("a server of disks freezes them by overlays only", Conflict::Missing(JobOption::Overlays));
        }
        if self.disks == DiskPolicy::Overlay && self.stop {
            return refused(
                "a VM that stays stopped changes its disks no more, and needs no overlays over them",
                Conflict::Options(JobOption::Overlays, JobOption::Stop),
            );
        }
        if self.disks == DiskPolicy::Overlay && self.background {
            return refused(
                "in the background memory is saved as it was at the beginning, and QEMU cannot freeze the disks there",
                Conflict::Options(JobOption::Overlays, JobOption::Background),
            );
        }
        if self.background && matches!(self.timeout, Some(SaveTimeout { action: OnTimeout::Pause, .. })) {
            return refused(
                "a background save is not late because the VM changes its memory: stopping it would not help",
                Conflict::Options(JobOption::Background, JobOption::PauseOnTimeout),
            );
        }
        Ok(())
    }

    /// Whether the same save is possible in the background.
    pub(super) fn allows_background(&self) -> bool {
        let here = !self.background && !self.stop && self.disks != DiskPolicy::Overlay;
        here && self.channels.is_none() && self.transport != TransportChoice::File
    }
}
