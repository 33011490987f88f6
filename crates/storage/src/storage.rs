//! The trait [`Storage`].

use std::any::Any;
use std::fmt::Debug;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use crate::buffer::IoVector;
use crate::error::StorageError;

/// A request in flight. It owns everything that it needs. Dropping it does not cancel it: it completes on its own,
/// keeps its buffers until then, and its result is lost. It may begin with the call that returns it or with its first
/// poll.
pub type Request<T = ()> = Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send + 'static>>;

/// Bytes at offsets.
///
/// The contract of every storage:
///
/// * Requests in flight may be executed in any order. If two overlap and one of them is a write, each byte is that of
///   one or the other.
/// * A request completes fully or fails. After a failed write, the contents of its range are undefined; nothing else
///   changes.
/// * Reads beyond the end return zeros. Writes beyond the end make the storage longer, with zeros in between (a block
///   device fails).
/// * A flush makes all requests durable that had completed when it began; nothing else guarantees durability.
/// * A request that is dropped completes on its own.
///
/// It is [`Any`], so that a storage that clones recognizes storages of its own kind.
pub trait Storage: Any + Send + Sync + Debug {
    /// Its name in messages: a path.
    fn name(&self) -> &Arc<str>;

    /// Its length in bytes, now.
    ///
    /// # Errors
    /// Errors of the kernel.
    fn length(&self) -> Result<u64, StorageError>;

    /// Whether writes fail.
    fn is_read_only(&self) -> bool;

    /// Alignment with which requests are executed without a copy. Requests of any alignment are accepted.
    fn alignment(&self) -> Alignment;

    /// Reads from `offset` into all of `into`.
    fn read(&self, offset: u64, into: IoVector) -> Request;

    /// Writes all of `from` at `offset`.
    fn write(&self, offset: u64, from: IoVector) -> Request;

    /// Makes `range` read as zeros.
    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request;

    /// Declares that the contents of `range` are not needed: it reads as zeros or as before. Where discard is not
    /// supported, nothing changes.
    fn discard(&self, range: Range<u64>) -> Request;

    /// Has ranges fetched that will be read soon, in this order, where that takes a connection. Says nothing of what
    /// fails: a read will.
    fn prefetch(&self, _ranges: &[Range<u64>]) {}

    /// Whether a range can be read without waiting for a connection. If not, has it fetched before what is prefetched.
    fn is_near(&self, _range: &Range<u64>) -> bool {
        true
    }

    /// Returns what tells its contents from all others of its name, if it is pinned to them; `None`: they may change,
    /// or that is not known.
    fn content_id(&self) -> Option<String> {
        None
    }

    /// Makes completed writes durable.
    fn flush(&self) -> Request;

    /// Sets the length in bytes. New bytes are zeros.
    fn set_len(&self, len: u64) -> Request;

    /// Allocates space for `range`, and makes the storage longer if needed. Contents stay; new bytes are zeros.
    fn allocate(&self, range: Range<u64>) -> Request;

    /// Returns the extents of `range` that are known without reading. They cover it without gaps, may reach beyond its
    /// end, and adjacent ones differ in kind. Unknown contents are [`ExtentKind::Data`].
    ///
    /// # Errors
    /// Errors of the kernel.
    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError>;

    /// Returns the beginning of `range`: how many bytes are alike, without reading. What follows may be alike, too.
    ///
    /// # Errors
    /// Errors of the kernel.
    fn first_run(&self, range: Range<u64>) -> Result<ContentRun, StorageError> {
        first_run(self, range)
    }

    /// Clones `length` bytes at `from_offset` of another storage, or of itself, to `offset`, by sharing extents. False
    /// if the filesystem does not support it; nothing has changed then. Offsets and length should be multiples of
    /// [`Storage::clone_alignment`], and the source range within the other storage's length; otherwise the result may
    /// be false, too.
    fn clone_range(&self, offset: u64, from: &Arc<dyn Storage>, from_offset: u64, length: u64) -> Request<bool>;

    /// Has the kernel copy `length` bytes at `from_offset` of another storage to `offset`. False if it cannot; the
    /// contents are then undefined, as after a failed write.
    fn copy_range(&self, _offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, _length: u64) -> Request<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Alignment of clones in bytes: a power of two.
    fn clone_alignment(&self) -> u64 {
        4096
    }

    /// Releases the locks of its file: others may change it from now on, so nothing uses this storage any more.
    fn unlock(&self) {}

    /// The descriptor of the file, for clones and copies from it.
    fn file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
}

/// How a range may be zeroed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ZeroOptions {
    /// Space may be deallocated.
    pub unmap: bool,
    /// Fail with [`std::io::ErrorKind::Unsupported`] rather than write zeros.
    pub only_fast: bool,
}

/// Alignment of requests in bytes: powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Alignment {
    /// Of offsets and lengths.
    pub offset: u32,
    /// Of memory addresses.
    pub memory: u32,
}

impl Alignment {
    /// No alignment is required.
    pub const NONE: Self = Self::new(1, 1);

    /// Alignment of offsets and lengths, and of memory addresses, in bytes: powers of two.
    #[must_use]
    pub const fn new(offset: u32, memory: u32) -> Self {
        Self { offset, memory }
    }
}

/// The beginning of a range by its extents: a few are examined first, and more as long as all are alike.
pub(crate) fn first_run<S: Storage + ?Sized>(storage: &S, range: Range<u64>) -> Result<ContentRun, StorageError> {
    /// Bytes that are examined first.
    const FIRST_LOOK: u64 = 64 << 10;
    let (mut end, mut kind, mut window) = (range.start, None, FIRST_LOOK);
    'look: while end < range.end {
        let begin = end;
        for extent in storage.extents(begin..range.end.min(begin.saturating_add(window)))? {
            if extent.range.end <= end {
                continue;
            }
            let is_zero = extent.kind.is_zero();
            if *kind.get_or_insert(is_zero) != is_zero || extent.range.start > end {
                break 'look;
            }
            end = extent.range.end.min(range.end);
        }
        if end == begin {
            break;
        }
        window = window.saturating_mul(4);
    }
    let is_zero = kind.unwrap_or(ExtentKind::Data.is_zero());
    let end = if end > range.start { end } else { range.end };
    Ok(ContentRun::new(end.saturating_sub(range.start), is_zero))
}

/// A range of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extent {
    /// Its offsets in bytes.
    pub range: Range<u64>,
    /// Its kind.
    pub kind: ExtentKind,
}

impl Extent {
    /// A range of offsets in bytes, and its kind.
    #[must_use]
    pub const fn new(range: Range<u64>, kind: ExtentKind) -> Self {
        Self { range, kind }
    }
}

/// The beginning of a range whose bytes are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContentRun {
    /// Its length in bytes.
    pub length: u64,
    /// Whether it is known to be zeros.
    pub is_zero: bool,
}

impl ContentRun {
    /// A run of this length.
    #[must_use]
    pub const fn new(length: u64, is_zero: bool) -> Self {
        Self { length, is_zero }
    }
}

/// Kind of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Data, or unknown.
    Data,
    /// Allocated space that reads as zeros.
    Unwritten,
    /// No space; reads as zeros. Also everything beyond the end.
    Hole,
}

impl ExtentKind {
    /// Whether it reads as zeros.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self != Self::Data
    }
}
