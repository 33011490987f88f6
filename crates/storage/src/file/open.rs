//! An open file.

use std::fs::{Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{FileType, OFlags, SeekFrom, fcntl_getfl, fcntl_setfl, fstat, seek};
use rustix::io::Errno;

use crate::error::{Operation, StorageError};
use crate::file::align;
use crate::file::blocks::{Blocks, HeldRange};
use crate::file::counters::Counters;
use crate::file::lock::{self, LockPolicy};
use crate::file::open_error::OpenError;
use crate::file::options::{CacheMode, Create, FileOptions};
use crate::ring::{Handle, Registrations};
use crate::storage::Alignment;
use crate::striped::Striped;

/// Number of reads of a thread's stripe after which a file is registered with its ring: reopening it costs about as
/// much as these reads save.
const REGISTER_AFTER: u64 = 64;

/// Identity of a file, regardless of its path: equal for two paths of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub struct FileIdentity {
    /// Device number of the filesystem, or of the block device itself.
    pub device: u64,
    /// Inode number; 0 for a block device.
    pub inode: u64,
}

impl FileIdentity {
    /// The identity of the file that has this metadata.
    #[must_use]
    pub fn of(metadata: &Metadata) -> Self {
        if metadata.file_type().is_block_device() {
            Self { device: metadata.rdev(), inode: 0 }
        } else {
            Self { device: metadata.dev(), inode: metadata.ino() }
        }
    }
}

/// An open file. Requests in flight keep it open and locked.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) fd: OwnedFd,
    pub(crate) name: Arc<str>,
    pub(crate) read_only: bool,
    pub(crate) cache: CacheMode,
    pub(crate) is_block_device: bool,
    pub(crate) identity: FileIdentity,
    pub(crate) alignment: Alignment,
    pub(crate) blocks: Blocks,
    pub(crate) counters: Striped<Counters>,
    /// Its registrations with rings.
    pub(crate) registrations: Registrations,
    /// Whether locks were taken.
    locked: bool,
    /// The first failure of a flush. Writes before it may be lost, so later flushes fail, too.
    flush_error: Mutex<Option<Arc<io::Error>>>,
}

/// The name of a kind of files that hold no image.
fn name_of(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "directory",
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "pipe",
        FileType::Socket => "socket",
        _ => "file of its type",
    }
}

/// Adds that the file was opened for writing, where that may be why it failed.
fn for_writing(error: io::Error) -> io::Error {
    match error.kind() {
        kind @ (io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) => {
            io::Error::new(kind, format!("{error}; it was opened for writing"))
        }
        _ => error,
    }
}

impl OpenFile {
    /// Opens the file at a path.
    pub(crate) fn at(path: &Path, options: &FileOptions) -> Result<Self, StorageError> {
        let name: Arc<str> = path.to_string_lossy().into();
        let failed = |error| StorageError::for_storage(Operation::Open, &name, error);
        let mut open = OpenOptions::new();
        open.read(true).write(!options.read_only);
        match options.create {
            Create::No => {}
            _ if options.read_only => {
                let reason = "a file that is created must be opened for writing";
                return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, reason)));
            }
            Create::IfMissing => _ = open.create(true),
            Create::New => _ = open.create_new(true),
        }
        // O_NONBLOCK: opening a FIFO must not wait for the other end.
        let fd = open.custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path);
        let fd = fd.map_err(|error| {
            if options.create != Create::No && !path.exists() {
                return StorageError::for_storage(Operation::Create, &name, error);
            }
            failed(if options.read_only { error } else { for_writing(error) })
        })?;
        Self::of(fd.into(), name, options)
    }

    /// Uses an open file.
    pub(crate) fn of(fd: OwnedFd, name: Arc<str>, options: &FileOptions) -> Result<Self, StorageError> {
        let failed = |error: io::Error| StorageError::for_storage(Operation::Open, &name, error);
        let found = fstat(&fd).map_err(|error| failed(error.into()))?;
        let is_block_device = match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            kind => {
                let reason = format!("must be a regular file or a block device, not a {}", name_of(kind));
                return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, reason)));
            }
        };
        let flags = fcntl_getfl(&fd).map_err(|error| failed(error.into()))?;
        let can_read = !flags.contains(OFlags::WRONLY);
        let can_write = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        if !can_read || (!can_write && !options.read_only) {
            let reason = "the descriptor does not allow the requested access";
            return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, reason)));
        }
        let direct = if options.cache.is_direct() { OFlags::DIRECT } else { OFlags::empty() };
        fcntl_setfl(&fd, (flags - OFlags::NONBLOCK - OFlags::DIRECT) | direct).map_err(|error| {
            failed(if error == Errno::INVAL { OpenError::DirectIoUnsupported.into() } else { error.into() })
        })?;
        let alignment = if options.cache.is_direct() {
            align::direct(&fd, is_block_device).map_err(failed)?
        } else {
            Alignment { offset: 1, memory: 1 }
        };
        lock::lock(fd.as_fd(), options.read_only, options.lock)
            .map_err(|error| StorageError::for_storage(Operation::Lock, &name, error))?;
        let identity = if is_block_device {
            FileIdentity { device: found.st_rdev, inode: 0 }
        } else {
            FileIdentity { device: found.st_dev, inode: found.st_ino }
        };
        Ok(Self {
            fd,
            name,
            read_only: options.read_only,
            cache: options.cache,
            is_block_device,
            identity,
            alignment,
            blocks: Blocks::default(),
            counters: Striped::default(),
            registrations: Registrations::default(),
            locked: options.lock != LockPolicy::None,
            flush_error: Mutex::new(None),
        })
    }

    pub(crate) fn failed(&self, operation: Operation, error: impl Into<io::Error>) -> StorageError {
        StorageError::for_storage(operation, &self.name, error)
    }

    /// Its length in bytes, now.
    pub(crate) fn length(&self) -> io::Result<u64> {
        if self.is_block_device {
            return Ok(seek(&self.fd, SeekFrom::End(0))?);
        }
        u64::try_from(fstat(&self.fd)?.st_size).map_err(io::Error::other)
    }

    /// Whether an offset or a length is aligned.
    pub(crate) fn is_aligned(&self, bytes: u64) -> bool {
        bytes & (u64::from(self.alignment.offset) - 1) == 0
    }

    /// Whether only whole blocks can be written, so that partial writes need care.
    pub(crate) fn has_blocks(&self) -> bool {
        self.alignment.offset > 1
    }

    /// Holds the blocks that a range touches, where partial writes could undo a change to it.
    pub(crate) fn hold(&self, range: &Range<u64>) -> Option<HeldRange<'_>> {
        self.has_blocks().then(|| self.blocks.hold(align::around(self.alignment, range)))
    }

    /// Returns the slot in which this ring has the file registered for reading. Registers it if it is due. Only on the
    /// ring's thread.
    pub(crate) fn slot(&self, ring: &Arc<Handle>) -> Option<u32> {
        let is_due = self.counters.own().reads.operations() >= REGISTER_AFTER;
        is_due.then(|| self.registrations.slot(ring, self.fd.as_fd(), self.cache.is_direct())).flatten()
    }

    /// Whether a flush reaches the kernel.
    pub(crate) fn flushes(&self) -> bool {
        !self.read_only && !self.cache.ignores_flush()
    }

    /// Flushes on this thread.
    pub(crate) fn flush(&self) -> Result<(), StorageError> {
        self.flushed(self.sync())
    }

    /// Makes a change durable in the synchronous cache modes.
    pub(crate) fn sync_if_synchronous(&self) -> io::Result<()> {
        if !self.cache.is_synchronous() {
            return Ok(());
        }
        self.remember(self.sync()).map_err(|error| plain(&error))
    }

    fn sync(&self) -> io::Result<()> {
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&self.fd))?)
    }

    /// Handles the kernel's result of a flush.
    pub(crate) fn flushed(&self, answer: io::Result<()>) -> Result<(), StorageError> {
        self.remember(answer).map_err(|source| StorageError {
            operation: Operation::Flush,
            name: Arc::clone(&self.name),
            offset: None,
            length: 0,
            source,
        })
    }

    /// Remembers the first failure, and returns it from then on. The kernel reports lost writes once, to the first
    /// caller, and drops them from its cache; every later flush must fail, too. This includes direct I/O: a filesystem
    /// may use its cache for it, and a device that failed to flush its write cache may have lost any of its contents.
    fn remember(&self, answer: io::Result<()>) -> Result<(), Arc<io::Error>> {
        let mut first = self.flush_error.lock();
        if let (Err(error), None) = (answer, first.as_ref()) {
            *first = Some(Arc::new(error));
        }
        first.as_ref().map_or(Ok(()), |error| Err(Arc::clone(error)))
    }

    /// Remembers the failure of a synchronous write: the kernel may have reported the loss of other writes with it.
    pub(crate) fn write_failed(&self, error: &io::Error) {
        if self.cache.is_synchronous() && error.raw_os_error() == Some(libc::EIO) {
            _ = self.remember(Err(plain(error)));
        }
    }
}

impl OpenFile {
    /// Releases its locks.
    pub(crate) fn unlock(&self) {
        if self.locked {
            lock::release(self.fd.as_fd());
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.unlock();
    }
}

/// A copy of the kernel's error.
fn plain(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(cache: CacheMode) -> OpenFile {
        let file = tempfile::tempfile().unwrap();
        OpenFile::of(file.into(), "disk".into(), &FileOptions { cache, ..FileOptions::default() }).unwrap()
    }

    #[test]
    fn a_file_that_is_closed_is_not_locked_by_copies_of_its_descriptor() {
        let kept = tempfile::NamedTempFile::new().unwrap();
        let open = || OpenFile::at(kept.path(), &FileOptions::default());
        let file = open().unwrap();
        // As in a process that forked while the file was open.
        let copy = file.fd.try_clone().unwrap();
        assert_eq!(open().unwrap_err().source.kind(), io::ErrorKind::ResourceBusy);
        drop(file);
        open().unwrap();
        drop(copy);
    }

    #[test]
    fn an_error_of_opening_says_if_it_was_for_writing() {
        for errno in [libc::EACCES, libc::EPERM, libc::EROFS] {
            let error = for_writing(io::Error::from_raw_os_error(errno));
            assert!(error.to_string().ends_with("it was opened for writing"), "{error}");
        }
        assert_eq!(for_writing(io::Error::from_raw_os_error(libc::ENOENT)).raw_os_error(), Some(libc::ENOENT));
        // Not writable for any user; in a container /sys is read-only as a whole.
        let path = Path::new("/sys/kernel/uevent_seqnum");
        if path.exists() {
            let said = |read_only| {
                OpenFile::at(path, &FileOptions { read_only, ..FileOptions::default() })
                    .map(drop)
                    .map_err(|e| e.source.to_string())
            };
            assert!(said(false).unwrap_err().contains("for writing"));
            assert!(said(true).map_or_else(|said| !said.contains("for writing"), |()| true));
        }
    }

    #[test]
    fn a_flush_that_lost_writes_is_the_last_that_could_succeed() {
        for cache in [CacheMode::Writeback, CacheMode::None] {
            let file = opened(cache);
            file.flushed(Ok(())).unwrap();
            let error = file.flushed(Err(io::Error::from_raw_os_error(libc::EIO))).unwrap_err();
            assert_eq!(error.source.raw_os_error(), Some(libc::EIO));
            let error = file.flush().unwrap_err();
            assert_eq!((error.operation, error.source.raw_os_error()), (Operation::Flush, Some(libc::EIO)), "{cache}");
        }
    }

    #[test]
    fn what_could_not_be_made_durable_at_once_is_not_durable_later() {
        for cache in [CacheMode::Writethrough, CacheMode::Directsync] {
            let file = opened(cache);
            file.write_failed(&io::Error::from_raw_os_error(libc::ENOSPC));
            file.sync_if_synchronous().unwrap();
            file.write_failed(&io::Error::from_raw_os_error(libc::EIO));
            assert_eq!(file.sync_if_synchronous().unwrap_err().raw_os_error(), Some(libc::EIO));
            file.flush().unwrap_err();
        }
        // In other modes the failure of a write concerns that write only.
        let file = opened(CacheMode::Writeback);
        file.write_failed(&io::Error::from_raw_os_error(libc::EIO));
        file.flush().unwrap();
    }
}
