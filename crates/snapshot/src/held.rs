//! A snapshot file that is replaced or removed: nobody serves it or replaces it meanwhile.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use limosa_page::directory_of;
use rustix::fs::{AtFlags, Mode, OFlags};

use crate::checkpoints::CHECKPOINT_NAME;
use crate::error::SnapshotError;
use crate::lock;
use crate::sidecar;
use crate::unnamed_file::names_file;

/// Time between two attempts to take a lock.
const POLL: Duration = Duration::from_millis(20);

/// The lock of a snapshot file, released when it is dropped.
#[derive(Debug)]
pub struct HeldSnapshot {
    file: File,
    directory: OwnedFd,
    name: OsString,
    path: PathBuf,
}

impl HeldSnapshot {
    /// Takes the exclusive lock, without waiting. The file is open for writing where that is allowed.
    ///
    /// # Errors
    /// [`SnapshotError::Locked`] while it is served or replaced; it cannot be opened, or another file has its name now.
    pub fn lock(path: &Path) -> Result<Self, SnapshotError> {
        let held = Self::open(path)?;
        held.exclude(Duration::ZERO)?;
        Ok(held)
    }

    /// Opens a file whose locks are taken later.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        let failed = |errno: rustix::io::Errno| SnapshotError::io("open it", path, None, errno);
        let name = path.file_name().unwrap_or_default().to_os_string();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory_of(path), flags, Mode::empty()).map_err(failed)?;
        let file = lock::open_for_exclusive(&directory, name.as_os_str()).map_err(failed)?;
        Ok(Self { file, directory, name, path: path.to_path_buf() })
    }

    /// The file.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// The file's path, as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) const fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    pub(crate) fn name(&self) -> &OsStr {
        &self.name
    }

    /// Checks that the file still has its name.
    ///
    /// # Errors
    /// [`SnapshotError::Changed`]: another file has it, or none.
    pub fn check_named(&self) -> Result<(), SnapshotError> {
        if names_file(&self.directory, self.name.as_os_str(), &self.file) {
            return Ok(());
        }
        let what = "another file has its name now, or none".to_owned();
        Err(SnapshotError::Changed { path: self.path.clone(), what })
    }

    /// Makes the lock that of a server, beside which others may serve the file.
    ///
    /// # Errors
    /// Another process has taken the exclusive lock at this moment.
    pub fn share(&self) -> Result<(), SnapshotError> {
        lock::end_writing(&self.file, &self.path)?;
        lock::shared(&self.file, &self.path)
    }

    /// Takes the exclusive lock. Waits for readers that are soon done.
    ///
    /// # Errors
    /// [`SnapshotError::Locked`] if it is not free within `patience`; a lock of [`share`](Self::share) is lost then.
    /// Another file has the name now.
    pub fn exclude(&self, patience: Duration) -> Result<(), SnapshotError> {
        self.take_within(patience, || lock::exclusive(&self.file, &self.path))
    }

    /// Takes the exclusive lock and those of QEMU's disk images and of VMs that map the file: no program that keeps to
    /// one of these has it open then.
    ///
    /// # Errors
    /// As [`exclude`](Self::exclude).
    pub fn exclude_all(&self, patience: Duration) -> Result<(), SnapshotError> {
        self.take_within(patience, || {
            lock::exclusive(&self.file, &self.path)?;
            lock::alone(&self.file, &self.path)
        })
    }

    fn take_within(
        &self,
        patience: Duration,
        take: impl Fn() -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let begun = Instant::now();
        loop {
            match take() {
                Err(SnapshotError::Locked { .. }) if begun.elapsed() < patience => thread::sleep(POLL),
                taken => break taken?,
            }
        }
        self.check_named()
    }

    /// Removes the file, durably, and its working set.
    ///
    /// # Errors
    /// Another file has the name now; it is the checkpoint of a process that keeps checkpoints; the kernel's.
    pub fn remove(self) -> Result<(), SnapshotError> {
        let failed = |errno: rustix::io::Errno| SnapshotError::io("remove it", &self.path, None, errno);
        let is_checkpoint = self.name == CHECKPOINT_NAME;
        if is_checkpoint {
            lock::directory(&self.directory, &self.path)?;
        }
        // The lock keeps limosa from changing the name, and nobody else.
        self.check_named()?;
        rustix::fs::unlinkat(&self.directory, self.name.as_os_str(), AtFlags::empty()).map_err(failed)?;
        sidecar::remove_stale(&self.directory, &self.name);
        rustix::fs::fsync(&self.directory).map_err(failed)
    }
}

impl Drop for HeldSnapshot {
    fn drop(&mut self) {
        // Said aloud, because a child that was just forked may have a copy of the descriptor.
        lock::release(&self.file);
        lock::release(&self.directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_has_locked_as_an_image_is_excluded_and_a_moved_file_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm");
        std::fs::write(&path, b"contents").unwrap();
        let reader = File::open(&path).unwrap();
        lock::mapping(&reader, &path).unwrap();
        let held = HeldSnapshot::lock(&path).unwrap();
        let refused = held.exclude_all(Duration::from_millis(50)).unwrap_err();
        assert!(matches!(refused, SnapshotError::Locked { .. }), "{refused}");
        held.share().unwrap();
        let server = File::open(&path).unwrap();
        lock::shared(&server, &path).unwrap();
        drop(reader);
        assert!(held.exclude_all(Duration::ZERO).is_err(), "it is served");
        drop(server);
        held.exclude_all(Duration::ZERO).unwrap();
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        std::fs::write(&path, b"another").unwrap();
        assert!(matches!(held.remove().unwrap_err(), SnapshotError::Changed { .. }));
        assert_eq!(std::fs::read(&path).unwrap(), b"another");
    }
}
