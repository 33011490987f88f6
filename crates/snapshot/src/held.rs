//! A snapshot file that is changed or removed: nobody serves it or replaces it meanwhile.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use crate::error::SnapshotError;
use crate::lock;
use crate::sidecar;
use crate::unnamed_file::names_file;

/// The exclusive lock of a snapshot file, released when it is dropped.
#[derive(Debug)]
pub struct HeldSnapshot {
    file: File,
    path: PathBuf,
}

impl HeldSnapshot {
    /// Takes the lock, without waiting. The file is open for writing where that is allowed.
    ///
    /// # Errors
    /// [`SnapshotError::Locked`] while it is served or replaced; it cannot be opened, or another file has its name now.
    pub fn lock(path: &Path) -> Result<Self, SnapshotError> {
        let failed = |errno: rustix::io::Errno| SnapshotError::io("open it", path, None, errno);
        let file = lock::open_for_exclusive(CWD, path).map_err(failed)?;
        lock::exclusive(&file, path)?;
        if !names_file(CWD, path, &file) {
            let (path, what) = (path.to_path_buf(), "another file has its name now".to_owned());
            return Err(SnapshotError::Changed { path, what });
        }
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// The file.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Removes the file, durably, and its working set.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove(self) -> Result<(), SnapshotError> {
        let failed = |errno: rustix::io::Errno| SnapshotError::io("remove it", &self.path, None, errno);
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = self.path.file_name().unwrap_or_default();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(parent, flags, Mode::empty()).map_err(failed)?;
        rustix::fs::unlinkat(directory.as_fd(), name, AtFlags::empty()).map_err(failed)?;
        sidecar::remove_stale(directory.as_fd(), name);
        rustix::fs::fsync(&directory).map_err(failed)
    }
}

impl Drop for HeldSnapshot {
    fn drop(&mut self) {
        // Said aloud, because a child that was just forked may have a copy of the descriptor.
        lock::release(&self.file);
    }
}
