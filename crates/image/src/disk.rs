//! A disk as a guest sees it.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use limosa_storage::{IoVector, Storage};

use crate::bitmap::{BitmapAction, BitmapBits, DirtyBitmap};
use crate::compression::{CompressedClusters, Compressor};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};
use crate::setters::setters;

/// A request in flight: a future that needs no runtime. If it is dropped before it is done, storage requests already
/// started complete by themselves and the image stays consistent; the contents of the range that it writes are
/// undefined, as after a failed write.
pub type Pending<'a, T = ()> = Pin<Box<dyn Future<Output = Result<T, ImageError>> + Send + 'a>>;

/// A disk at guest offsets: an image of any format, with its backing files.
///
/// Any number of requests may be in flight, from any number of threads. Requests that overlap, one of them a write,
/// have no order, and each byte is of one or the other: a write that is in flight while its bytes are zeroed or
/// discarded may take effect after that, at any time until it completes. A caller that needs an order waits. A flush
/// makes durable all writes that were acknowledged before it began.
pub trait Disk: Send + Sync + Debug {
    /// Returns its name for people: a path.
    fn name(&self) -> &Arc<str>;

    /// Returns `raw` or `qcow2`.
    fn format(&self) -> &'static str;

    /// Returns its length in bytes.
    fn len(&self) -> u64;

    /// Returns whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether writes are refused.
    fn is_read_only(&self) -> bool;

    /// Returns the bytes that are allocated together, a power of two: a cluster, or a subcluster. A write of all of it
    /// needs no copy-on-write.
    fn allocation_unit(&self) -> u64 {
        512
    }

    /// Reads `into.len()` bytes at `at`. Past the end: [`ImageError::PastEnd`], as for all requests.
    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_>;

    /// Has `length` bytes at `at` fetched that will be read soon, where that takes a connection. Those past the end are
    /// left out.
    fn prefetch(&self, _at: GuestOffset, _length: u64) -> Pending<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Writes all of `from` at `at`.
    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_>;

    /// Returns a compressor for [`Disk::write_compressed`], of this level; `None`: one that makes images as small as
    /// QEMU's.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: the image cannot have compressed contents, or there is no such level.
    fn compressor(&self, _level: Option<u8>) -> Result<Compressor, ImageError> {
        Err(no_compression(self.name(), self.format()))
    }

    /// Writes clusters that a compressor of this disk has compressed at `at`, the beginning of a cluster. They are
    /// whole, except the last one of the disk.
    fn write_compressed(&self, _at: GuestOffset, _from: CompressedClusters) -> Pending<'_> {
        Box::pin(std::future::ready(Err(no_compression(self.name(), self.format()))))
    }

    /// Makes `length` bytes read as zeros; `unmap`: their space may be given back.
    fn write_zeroes(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_>;

    /// As [`write_zeroes`](Self::write_zeroes), but only if no zeros have to be written for it. Returns false if some
    /// would have to; nothing has changed then.
    fn write_zeroes_fast(&self, _at: GuestOffset, _length: u64, _unmap: bool) -> Pending<'_, bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Discards `length` bytes: whole clusters among them read as zeros from now on, even where a backing file has
    /// contents; other bytes stay as they are.
    fn discard(&self, at: GuestOffset, length: u64) -> Pending<'_>;

    /// Makes acknowledged writes durable.
    fn flush(&self) -> Pending<'_>;

    /// Returns where the bytes from `at` on come from: a run of one kind, at most `length` bytes, at least one. A
    /// `length` of 0 counts as 1.
    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, MapEntry>;

    /// Returns the storage that has contents of the disk `depth` files further down unchanged, at the offsets that
    /// [`Disk::map`] returns.
    fn storage(&self, _depth: u32) -> Option<Arc<dyn Storage>> {
        None
    }

    /// Lets the kernel copy `length` bytes at `from_offset` of a storage to `at`. Returns false if it cannot; the range
    /// is then undefined, as after a failed write.
    fn copy_from(
        &self,
        _at: GuestOffset,
        _from: &Arc<dyn Storage>,
        _from_offset: HostOffset,
        _length: u64,
    ) -> Pending<'_, bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Makes the disk `size` bytes long, durably; added bytes read as zeros. Requests may be in flight; those past the
    /// old end are admitted when it is done. Several growths at a time are carried out one after the other.
    ///
    /// [`ImageError::Unsupported`]: shorter, no multiple of 512, or the disk has a fixed length.
    fn grow(&self, _size: u64) -> Pending<'_> {
        let what = "its length is fixed".to_owned();
        Box::pin(std::future::ready(Err(ImageError::Unsupported { image: Arc::clone(self.name()), what })))
    }

    /// Returns its dirty bitmaps.
    fn bitmaps(&self) -> Pending<'_, Vec<DirtyBitmap>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// Returns whether a bitmap says that the byte at `at` was written, and of how many of `length` bytes from there on
    /// it says the same: at least one. A request that is in flight may not be in it yet. Of a disk that is only read,
    /// [`bitmaps`](Self::bitmaps) comes first.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: there is no such bitmap, or it cannot be relied on.
    fn dirty_run(&self, _bitmap: &str, _at: GuestOffset, _length: u64) -> Result<(bool, u64), ImageError> {
        Err(no_bitmaps(self.name(), self.format()))
    }

    /// Returns the bits of a bitmap, under the conditions of [`dirty_run`](Self::dirty_run).
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: there is no such bitmap, or it cannot be relied on.
    fn bitmap_bits(&self, _bitmap: &str) -> Result<BitmapBits, ImageError> {
        Err(no_bitmaps(self.name(), self.format()))
    }

    /// Changes bitmaps, each by its name, one after the other: all of it, or nothing if a change cannot be. It is one
    /// moment for all of them: a request that is in flight meanwhile counts as one that comes later, or sets bits in
    /// both what was and what is, perhaps those of whole clusters. So does one that was dropped, whose bytes may still
    /// change. If this request is dropped, the changes have taken effect by then or never do. When the disk is closed
    /// bitmaps are stored.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: a change that cannot be, or the format has no bitmaps.
    fn change_bitmaps(&self, _changes: &[(String, BitmapAction)]) -> Pending<'_> {
        Box::pin(std::future::ready(Err(no_bitmaps(self.name(), self.format()))))
    }

    /// Makes everything durable and closes the disk: space allocated ahead is given back, the dirty bit cleared. An
    /// image that is dropped without it is as after a power cut, after the last flush.
    ///
    /// It begins with its first poll. Requests that are first polled after that fail. Requests that were polled before
    /// are waited for until they are done or dropped, so a caller that holds some keeps polling them meanwhile, or
    /// drops them first: otherwise the close never ends.
    ///
    /// [`ImageError::BitmapsNotStored`]: it is closed, and everything but its dirty bitmaps is durable.
    fn close(&self) -> Pending<'_>;

    /// Releases the locks of its files, of a disk that is [closed](Self::close): others may open them to write,
    /// although this disk has not been dropped yet.
    fn unlock(&self) {}
}

fn no_bitmaps(name: &Arc<str>, format: &str) -> ImageError {
    ImageError::Unsupported { image: Arc::clone(name), what: format!("format {format} has no bitmaps") }
}

fn no_compression(name: &Arc<str>, format: &str) -> ImageError {
    let what = format!("format {format} does not support compressed contents");
    ImageError::Unsupported { image: Arc::clone(name), what }
}

/// The origin of a run of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapEntry {
    /// Bytes of the run.
    pub length: u64,
    /// Their kind.
    pub kind: BlockStatus,
    /// Number of files further down the chain than the disk that was asked: 0 is the disk itself. For bytes that no
    /// file has, the number of the last file.
    pub depth: u32,
    /// The name of the storage that has them unchanged, and their offset. Zeros may have a place, too: a cluster that
    /// is kept for them.
    pub host: Option<(Arc<str>, HostOffset)>,
}

impl MapEntry {
    /// A run of the disk itself, without a place in a storage.
    #[must_use]
    pub const fn new(length: u64, kind: BlockStatus) -> Self {
        Self { length, kind, depth: 0, host: None }
    }
}

setters!(MapEntry { depth: u32, host: Option<(Arc<str>, HostOffset)> });

/// The kind of a run of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockStatus {
    /// Contents.
    Data,
    /// Compressed contents.
    Compressed,
    /// Zeros, because the image says so.
    Zero,
    /// Zeros, because nothing was ever written there: the image counts them as contents, since their space was
    /// preallocated, and the file has a hole there.
    Preallocated,
    /// Zeros, because no file of the chain has contents.
    Unallocated,
}

impl BlockStatus {
    /// Returns whether it is known to read as zeros.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        matches!(self, Self::Zero | Self::Preallocated | Self::Unallocated)
    }
}
