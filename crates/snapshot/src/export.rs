//! From a snapshot to a plain migration stream: one that QEMU loads from a file or a pipe.

use std::os::fd::OwnedFd;
use std::path::Path;

use limosa_channel::Channel;
use limosa_migrate::Handle;
use limosa_migrate::stats::PrecopyStats;
use limosa_migrate::stored::{PrecopyOptions, PrecopySource};

use crate::error::SnapshotError;
use crate::foreign::ForeignError;
use crate::reader::Snapshot;
use crate::unnamed_file::{Durability, UnnamedFile};

impl Snapshot {
    /// Writes the VM as a one-way precopy stream to a file or a pipe, from its present position on; `name` is for
    /// messages.
    ///
    /// QEMU takes it with `-incoming file:STREAM` (8.2 and newer) or `exec:cat STREAM`, in the run state that the
    /// device state has recorded.
    ///
    /// # Errors
    /// The snapshot would restore to a broken guest, cannot be read, or the stream cannot be written.
    pub fn export(&self, to: OwnedFd, name: &Path, handle: &Handle) -> Result<PrecopyStats, ForeignError> {
        self.check_restorable()?;
        let options = PrecopyOptions { return_path: false, ..PrecopyOptions::default() };
        let sent = Channel::from_fd(to)
            .map_err(Into::into)
            .and_then(|channel| PrecopySource::new(self, channel, handle).options(options).run());
        sent.map_err(|source| ForeignError::Stream { path: name.to_path_buf(), source })
    }

    /// As [`export`](Self::export), into a file that is durable before it gets its name.
    ///
    /// # Errors
    /// As `export`; nothing is left of the file then.
    pub fn export_file(&self, pending: UnnamedFile, handle: &Handle) -> Result<PrecopyStats, ForeignError> {
        let target = pending.target().to_path_buf();
        let copy = pending.file().try_clone();
        let copy = copy.map_err(|error| SnapshotError::io("duplicate its descriptor", &target, None, error))?;
        let stats = self.export(copy.into(), &target, handle)?;
        handle.control.check().map_err(|source| ForeignError::Stream { path: target, source })?;
        pending.publish(Durability::Synced)?;
        Ok(stats)
    }
}
