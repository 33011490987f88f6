//! What images lie in.

use std::fmt::Debug;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use crate::buffer::IoVector;
use crate::error::StorageError;

/// A request under way. It owns what it needs: nothing is borrowed. One that is dropped is not taken back: it settles by
/// itself, its buffers stay until then, and nobody is told what became of it. It may be begun by the call that returned it or by the
/// first poll.
pub type Request<T = ()> = Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send + 'static>>;

/// Bytes at offsets.
///
/// The contract of all storages:
///
/// * Requests under way at the same time may be carried out in any order; two that overlap, one of them a write, leave of each
///   byte one or the other.
/// * A request is complete or an error. After a failed write, what was to be written is undefined there, and nowhere else.
/// * What is read behind the end is zeros; what is written there makes the storage longer, with zeros up to it (a block
///   device refuses).
/// * A flush makes everything durable whose request had completed when the flush was begun; nothing else promises to.
/// * A request that is dropped settles by itself.
pub trait Storage: Send + Sync + Debug {
    /// Its name for people: a path.
    fn name(&self) -> &Arc<str>;

    /// Its length in bytes, now.
    ///
    /// # Errors
    /// The kernel's.
    fn length(&self) -> Result<u64, StorageError>;

    /// Whether nothing may be written.
    fn is_read_only(&self) -> bool;

    /// What requests have to be aligned to. [`Storage`]s take any request all the same, and copy where they must.
    fn alignment(&self) -> Alignment;

    /// Fills `into` with what is at `offset`.
    fn read(&self, offset: u64, into: IoVector) -> Request;

    /// Writes all of `from` at `offset`.
    fn write(&self, offset: u64, from: IoVector) -> Request;

    /// Has `range` read as zeros.
    fn write_zeroes(&self, range: Range<u64>, how: ZeroHow) -> Request;

    /// Tells that nobody needs what is in `range`: it reads as zeros or as what was there. What cannot be discarded is left.
    fn discard(&self, range: Range<u64>) -> Request;

    /// Makes durable what was written.
    fn flush(&self) -> Request;

    /// Makes it so long: shorter, or longer with zeros.
    fn set_len(&self, len: u64) -> Request;

    /// Makes sure that there is space for `range`, lengthening it if need be; the contents stay (zeros where there were none).
    fn allocate(&self, range: Range<u64>) -> Request;

    /// What is in `range`, as far as it can be known without reading: neighbours that differ, from its beginning to its
    /// end or further. What is not known is [`ExtentKind::Data`].
    ///
    /// # Errors
    /// The kernel's.
    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError>;

    /// Takes over `length` bytes at `from_offset` of another storage, or of itself, without copying them, if the filesystem can:
    /// false if it cannot, and nothing has changed then. Both offsets and the length are multiples of [`Storage::clone_block`], and
    /// the bytes are within the other one's length; what is not so may be refused, too.
    fn clone_range(&self, offset: u64, from: &Arc<dyn Storage>, from_offset: u64, length: u64) -> Request<bool>;

    /// Has the kernel copy `length` bytes at `from_offset` of another storage: false if it cannot, and what stands there then is
    /// undefined, as after a failed write.
    fn copy_range(&self, _offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, _length: u64) -> Request<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// What clones have to be aligned to, in bytes: a power of two.
    fn clone_block(&self) -> u64 {
        4096
    }

    /// The descriptor of the file, for those who clone from it.
    fn file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    /// The memory that it is, beneath whatever watches it, for those who clone from it.
    #[cfg(any(test, feature = "testing"))]
    fn memory(&self) -> Option<&crate::testing::SparseMemory> {
        None
    }
}

/// How zeros may come about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ZeroHow {
    /// Space may be given back.
    pub unmap: bool,
    /// An error, with [`std::io::ErrorKind::Unsupported`], in place of writing zeros one by one.
    pub only_fast: bool,
}

/// What requests have to be aligned to, in bytes: powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Of offsets and lengths.
    pub offset: u32,
    /// Of addresses in memory.
    pub memory: u32,
}

/// Bytes of a storage of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// From where to where.
    pub range: Range<u64>,
    /// What is there.
    pub kind: ExtentKind,
}

/// What is in a part of a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Bytes that have to be read to be known.
    Data,
    /// Space without contents: allocated, reads as zeros.
    Unwritten,
    /// No space: reads as zeros. Behind the end, too.
    Hole,
}

impl ExtentKind {
    /// Whether it is known to read as zeros.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self != Self::Data
    }
}
