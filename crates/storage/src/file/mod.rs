//! Files and block devices.

mod align;
mod blocks;
mod bounce;
mod change;
mod counters;
mod extents;
mod lock;
pub(crate) mod open;
mod open_error;
mod options;
pub(crate) mod transfer;

use std::future::ready;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use limosa_page::to_usize;
use rustix::fs::{AtFlags, StatxFlags, statx};

pub use counters::{FileCounters, OperationCount};
pub use lock::LockPolicy;
pub use open::FileIdentity;
pub use open_error::{LockHolders, OpenError};
pub use options::{CacheMode, Create, FileOptions, Io, UnknownCacheMode};

use crate::buffer::IoVector;
use crate::error::{Operation, StorageError};
use crate::file::align::MAX_OFFSET;
use crate::file::bounce::Fit;
use crate::file::counters::Counters;
use crate::file::open::OpenFile;
use crate::file::transfer::{Direction, Transfer};
use crate::pool;
use crate::request::{FileRequest, Work};
use crate::ring;
use crate::storage::{self, Alignment, ContentRun, Extent, Request, Storage, ZeroOptions};
use crate::striped::{Striped, StripedArc};

/// A request of ioctl(2), of the type that this C library wants: glibc's is unsigned and wider than musl's.
#[allow(clippy::cast_lossless, clippy::cast_possible_wrap, reason = "libraries differ")]
const fn ioctl_request(number: u32) -> libc::Ioctl {
    number as libc::Ioctl
}

/// Length in bytes from which copying dominates a request through the page cache. In a ring the waiting thread copies
/// for one request after the other; a pool copies for several at a time.
const LARGE: usize = 256 << 10;

/// Whether `io_uring` is available; probed once.
fn has_ring() -> &'static io::Result<()> {
    static FOUND: OnceLock<io::Result<()>> = OnceLock::new();
    FOUND.get_or_init(ring::probe)
}

/// A file or a block device.
///
/// A request begins with its first poll. A request that has begun is completed even if its future is dropped, and keeps
/// the file open (and locked) until then.
#[derive(Debug)]
pub struct FileStorage {
    file: Striped<StripedArc<OpenFile>>,
    io: Io,
    /// Whether large requests go to the thread pool.
    is_spread: bool,
}

impl FileStorage {
    /// Opens the file at a path.
    ///
    /// # Errors
    /// Errors of the kernel; [`OpenError::Locked`] ([`io::ErrorKind::ResourceBusy`]) if another process holds a
    /// conflicting lock (see [`LockPolicy`]); [`OpenError`] ([`io::ErrorKind::Unsupported`]) if direct I/O or
    /// [`Io::Uring`] is requested and unavailable; [`io::ErrorKind::InvalidInput`] if it is neither a regular file nor
    /// a block device.
    pub fn open(path: impl AsRef<Path>, options: &FileOptions) -> Result<Arc<Self>, StorageError> {
        Self::with(OpenFile::at(path.as_ref(), options)?, options)
    }

    /// Uses an open file. `name` appears in messages. Flags (`O_DIRECT`) and locks belong to the open file description:
    /// they affect every descriptor that shares it.
    ///
    /// # Errors
    /// As [`FileStorage::open`]; [`io::ErrorKind::PermissionDenied`] if the descriptor does not allow the access that
    /// the options ask for.
    pub fn from_fd(fd: OwnedFd, name: &str, options: &FileOptions) -> Result<Arc<Self>, StorageError> {
        Self::with(OpenFile::of(fd, name.into(), options)?, options)
    }

    /// Asks the filesystem to allocate space in pieces of this many bytes, so that a file that is written in random
    /// order has few extents (XFS). False: the filesystem does not do that, or not for this file, such as one that has
    /// extents already.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn set_extent_size_hint(&self, bytes: u32) -> Result<bool, StorageError> {
        match change::set_extent_size_hint(self.file(), bytes) {
            Ok(()) => Ok(true),
            Err(error) if change::is_unsupported(&error) => Ok(false),
            Err(error) => Err(self.file().failed(Operation::Allocate, error)),
        }
    }

    fn with(file: OpenFile, options: &FileOptions) -> Result<Arc<Self>, StorageError> {
        let io = match options.io {
            Io::Threads | Io::CallerThread => options.io,
            io => match (has_ring(), io) {
                (Ok(()), _) => Io::Uring,
                (Err(_), Io::Auto) => Io::Threads,
                (Err(reason), _) => {
                    return Err(file.failed(Operation::Open, OpenError::UringUnavailable(reason.to_string())));
                }
            },
        };
        let is_spread = options.io == Io::Auto && !options.cache.is_direct();
        Ok(Arc::new(Self { file: StripedArc::striped(file), io, is_spread }))
    }

    fn file(&self) -> &StripedArc<OpenFile> {
        self.file.own()
    }

    /// Operations and bytes since it was opened.
    #[must_use]
    pub fn counters(&self) -> FileCounters {
        Counters::sum(&self.file().counters)
    }

    /// Identity of the file, regardless of its path.
    #[must_use]
    pub fn identity(&self) -> FileIdentity {
        self.file().identity
    }

    /// Returns when the file was created: seconds since 1970 and nanoseconds; 0 if the filesystem does not know. A file
    /// that has the inode of one that was removed has another time.
    #[must_use]
    pub fn birth(&self) -> [u64; 2] {
        let found = statx(&self.file().fd, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok();
        let known = found.filter(|found| found.stx_mask & StatxFlags::BTIME.bits() != 0);
        known.map_or([0; 2], |found| [found.stx_btime.tv_sec.cast_unsigned(), found.stx_btime.tv_nsec.into()])
    }

    /// Whether it is a block device.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.file().is_block_device
    }

    /// The cache mode.
    #[must_use]
    pub fn cache(&self) -> CacheMode {
        self.file().cache
    }

    /// Returns the executor of requests: [`Io::Uring`], [`Io::Threads`] or [`Io::CallerThread`].
    #[must_use]
    pub fn io(&self) -> Io {
        self.io
    }

    fn execute_transfer(&self, direction: Direction, offset: u64, vector: IoVector) -> Request {
        let io = if self.is_spread && vector.len() >= LARGE { Io::Threads } else { self.io };
        execute(io, Work::Transfer(Transfer::new(self.file().clone(), direction, offset, vector)))
    }

    /// A read with unaligned offset, length or memory.
    fn read_around(&self, offset: u64, into: IoVector) -> Request {
        self.file().counters.own().bounced.add(into.len() as u64);
        let (file, io) = (self.file().clone(), self.io);
        Box::pin(async move {
            let Some(end) = offset.checked_add(into.len() as u64).filter(|end| *end <= MAX_OFFSET) else {
                return execute(io, Work::Transfer(Transfer::new(file, Direction::Read, offset, into))).await;
            };
            let around = align::around(file.alignment, &(offset..end));
            let length = into.len() as u64;
            let memory = bounce::memory(&around)
                .map_err(|error| StorageError::for_request(Operation::Read, &file.name, offset, length, error))?;
            let from = to_usize(offset - around.start);
            let part = memory.slice(from..from + into.len());
            let read = Transfer::new(file, Direction::Read, around.start, memory.into());
            execute(io, Work::Transfer(read)).await?;
            IoVector::from(part).copy_into(&into);
            Ok(())
        })
    }

    /// A write of whole blocks from unaligned memory.
    fn write_copied(&self, offset: u64, from: IoVector) -> Request {
        self.file().counters.own().bounced.add(from.len() as u64);
        let (file, io) = (self.file().clone(), self.io);
        Box::pin(async move {
            let write = Transfer::new(file, Direction::Write, offset, bounce::copied(&from));
            execute(io, Work::Transfer(write)).await
        })
    }

    /// A write with partial blocks.
    fn write_parts(&self, offset: u64, from: IoVector) -> Request {
        self.file().counters.own().bounced.add(from.len() as u64);
        let file = self.file().clone();
        Box::pin(pool::run(move || bounce::write(&file, offset, &from)))
    }

    /// A change that clones or copies from another file. False if the other storage is not a file.
    fn with_source(
        &self,
        operation: Operation,
        range: Range<u64>,
        from: &Arc<dyn Storage>,
        transfer: impl FnOnce(&OpenFile, &OwnedFd) -> io::Result<bool> + Send + 'static,
    ) -> Request<bool> {
        let Some(from) = from.file() else { return Box::pin(ready(Ok(false))) };
        match from.try_clone_to_owned() {
            Ok(from) => self.change(operation, range, move |file| transfer(file, &from)),
            Err(error) => {
                let length = range.end - range.start;
                let error = StorageError::for_request(operation, &self.file().name, range.start, length, error);
                Box::pin(ready(Err(error)))
            }
        }
    }

    /// A blocking change, on a thread of the pool.
    fn change<T: Send + 'static>(
        &self,
        operation: Operation,
        range: Range<u64>,
        change: impl FnOnce(&StripedArc<OpenFile>) -> io::Result<T> + Send + 'static,
    ) -> Request<T> {
        let file = self.file().clone();
        Box::pin(pool::run(move || {
            let length = range.end.saturating_sub(range.start);
            change(&file).map_err(|error| StorageError::for_request(operation, &file.name, range.start, length, error))
        }))
    }
}

fn execute(io: Io, work: Work) -> Request {
    match io {
        Io::Threads => Box::pin(pool::run(move || work.block())),
        Io::CallerThread => Box::pin(async move { work.block() }),
        Io::Uring | Io::Auto => Box::pin(FileRequest::new(work)),
    }
}

impl FileStorage {
    fn extents_failed(&self, range: &Range<u64>, error: io::Error) -> StorageError {
        let length = range.end.saturating_sub(range.start);
        StorageError::for_request(Operation::Extents, &self.file().name, range.start, length, error)
    }
}

impl Storage for FileStorage {
    fn name(&self) -> &Arc<str> {
        &self.file().name
    }

    fn length(&self) -> Result<u64, StorageError> {
        self.file().length().map_err(|error| self.file().failed(Operation::Extents, error))
    }

    fn unlock(&self) {
        self.file().unlock();
    }

    fn is_read_only(&self) -> bool {
        self.file().read_only
    }

    fn alignment(&self) -> Alignment {
        self.file().alignment
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        self.file().counters.own().reads.add(into.len() as u64);
        match bounce::fit(self.file().alignment, offset, &into) {
            Fit::Direct => self.execute_transfer(Direction::Read, offset, into),
            Fit::Memory | Fit::Parts => self.read_around(offset, into),
        }
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        self.file().counters.own().writes.add(from.len() as u64);
        match bounce::fit(self.file().alignment, offset, &from) {
            Fit::Direct => self.execute_transfer(Direction::Write, offset, from),
            Fit::Memory => self.write_copied(offset, from),
            Fit::Parts => self.write_parts(offset, from),
        }
    }

    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request {
        self.change(Operation::WriteZeroes, range.clone(), move |file| change::write_zeroes(file, range, how))
    }

    fn discard(&self, range: Range<u64>) -> Request {
        self.change(Operation::Discard, range.clone(), move |file| change::discard(file, range))
    }

    fn flush(&self) -> Request {
        if !self.file().flushes() {
            return Box::pin(ready(Ok(())));
        }
        self.file().counters.own().flushes.add(0);
        execute(self.io, Work::Flush(self.file().clone()))
    }

    fn set_len(&self, len: u64) -> Request {
        self.change(Operation::SetLength, len..len, move |file| change::set_len(file, len))
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        self.change(Operation::Allocate, range.clone(), move |file| change::allocate(file, range))
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        extents::extents(self.file(), range.clone()).map_err(|error| self.extents_failed(&range, error))
    }

    fn first_run(&self, range: Range<u64>) -> Result<ContentRun, StorageError> {
        match extents::first_run(self.file(), &range).map_err(|error| self.extents_failed(&range, error))? {
            Some(run) => Ok(run),
            None => storage::first_run(self, range),
        }
    }

    fn clone_range(&self, offset: u64, from: &Arc<dyn Storage>, from_offset: u64, length: u64) -> Request<bool> {
        let clone = move |file: &OpenFile, from: &OwnedFd| change::clone(file, offset, from, from_offset, length);
        self.with_source(Operation::Clone, offset..offset.saturating_add(length), from, clone)
    }

    fn copy_range(&self, offset: u64, from: &Arc<dyn Storage>, from_offset: u64, length: u64) -> Request<bool> {
        let copy = move |file: &OpenFile, from: &OwnedFd| change::copy(file, offset, from, from_offset, length);
        self.with_source(Operation::Write, offset..offset.saturating_add(length), from, copy)
    }

    fn clone_alignment(&self) -> u64 {
        change::block(self.file())
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file().as_fd())
    }
}
