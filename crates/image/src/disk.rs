//! A disk as a guest sees it.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use limosa_storage::{IoVector, Storage};

use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

/// A request under way: a future that needs no runtime. If it is dropped half-way, what it has begun completes by
/// itself and the image stays consistent; the contents of the range it was to write are undefined, as after a failed
/// write.
pub type Pending<'a, T = ()> = Pin<Box<dyn Future<Output = Result<T, ImageError>> + Send + 'a>>;

/// A disk at guest offsets: an image of any format, with all that lies below it.
///
/// Any number of requests may be under way, from any number of threads. Those that overlap, one of them a write, leave
/// of each byte one or the other, and have no order: a write that is under way while its bytes are zeroed or discarded
/// may come after it, at whatever time until it is done. A caller that wants an order waits. A flush makes durable what
/// had been acknowledged when it began.
pub trait Disk: Send + Sync + Debug {
    /// Its name for people: a path.
    fn name(&self) -> &Arc<str>;

    /// `raw`, `qcow2`.
    fn format(&self) -> &'static str;

    /// Its length in bytes.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether nothing may be written.
    fn is_read_only(&self) -> bool;

    /// Bytes that are allocated together, a power of two: a cluster, or a subcluster. A write of such a whole
    /// spares filling it up.
    fn granularity(&self) -> u64 {
        512
    }

    /// Fills `into` with what is at `at`. Behind the end: [`ImageError::Outside`], as for all requests.
    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_>;

    /// Writes all of `from` at `at`.
    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_>;

    /// Has `length` bytes read as zeros; `unmap`: their space may be given back.
    fn write_zeroes(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_>;

    /// Tells that `length` bytes are not needed any more: as far as whole clusters are concerned they read as zeros
    /// from now on, also where a backing file has something; the rest stays as it is.
    fn discard(&self, at: GuestOffset, length: u64) -> Pending<'_>;

    /// Makes durable what was acknowledged.
    fn flush(&self) -> Pending<'_>;

    /// Where the bytes from `at` on come from: as many as are alike, at most `length`, at least one. A `length` of 0
    /// counts as 1.
    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, Mapped>;

    /// The storage in which contents of a disk `depth` files further down lie as they are, at the offsets that
    /// [`Disk::map`] tells.
    fn storage(&self, _depth: u32) -> Option<Arc<dyn Storage>> {
        None
    }

    /// Has the kernel copy `length` bytes at `from_offset` of a storage to `at`: false if it cannot, and what is there
    /// then is undefined, as after a failed write.
    fn copy_from(
        &self,
        _at: GuestOffset,
        _from: &Arc<dyn Storage>,
        _from_offset: HostOffset,
        _length: u64,
    ) -> Pending<'_, bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Makes everything durable and lets go: space taken ahead is given back, the dirty bit cleared. An image that is
    /// dropped without it is as after a power cut, after the last flush.
    ///
    /// It begins with its first poll. Requests that are polled for the first time after that fail; those that had been
    /// polled before are waited for, until they are done or dropped, so a caller that holds some goes on polling them
    /// meanwhile, or drops them first: a close that is waited for in place of them never ends.
    fn close(&self) -> Pending<'_>;
}

/// Where a run of bytes comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapped {
    /// How many bytes are alike.
    pub length: u64,
    /// What they are.
    pub kind: BlockStatus,
    /// How many files further down the chain than the disk asked: 0 is the disk itself. Of what no file has: the last
    /// one's.
    pub depth: u32,
    /// The storage they lie in, by its name, and where, if they lie there as they are. What reads as zeros may have
    /// such a place, too: a cluster that is kept for it.
    pub host: Option<(Arc<str>, HostOffset)>,
}

/// What a run of bytes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockStatus {
    /// Contents.
    Data,
    /// Contents that are compressed.
    Compressed,
    /// Zeros, because the image says so.
    Zero,
    /// Zeros, because nothing was ever written there: to the image they are contents, for which space was set aside
    /// when it was made, and the file has a hole there.
    Preallocated,
    /// Zeros, because no file of the chain has anything.
    Unallocated,
}

impl BlockStatus {
    /// Whether it is known to read as zeros.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        matches!(self, Self::Zero | Self::Preallocated | Self::Unallocated)
    }
}
