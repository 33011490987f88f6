//! Storages for tests: they hold requests back, delay them, let them fail, count them, and lose writes that were not
//! flushed.
//!
//! Law: each keeps the contract of [`Storage`], and uses up what freedom it leaves. What a test of an image finds on
//! one of these can happen on a disk.
//!
//! A behaviour ([`RequestHolder`], [`Delayed`], [`Failing`], [`RequestRecorder`], [`HardDisk`]) goes *over* any number
//! of storages, which then share it: an image, its data file and its backing file lie on one disk. [`SparseMemory`] and
//! [`PowerCut`] are what they go over.
//!
//! ```
//! use std::sync::Arc;
//! use limosa_storage::testing::{RequestRecorder, SparseMemory};
//! use limosa_storage::{Buffer, Operation, Storage, block_on};
//!
//! # fn main() -> Result<(), limosa_storage::StorageError> {
//! let counting = RequestRecorder::new();
//! let storage = counting.wrap(Arc::new(SparseMemory::file("disk", 1 << 20)));
//! block_on(storage.write(4096, Buffer::from_slice(b"contents").into()))?;
//! let seen = counting.take();
//! assert_eq!((seen[0].operation, seen[0].range.clone()), (Operation::Write, 4096..4104));
//! # Ok(())
//! # }
//! ```

mod chance;
mod completion;
mod counting;
mod delayed;
mod failing;
mod hard_disk;
mod held;
mod power_cut;
mod scheduler;
mod sparse;

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::buffer::IoVector;
use crate::error::{Operation, StorageError};
use crate::storage::{Alignment, Extent, Request, Storage, ZeroOptions};

pub use chance::SeededRandom;
pub use counting::{Counts, RequestRecorder, SeenRequest};
pub use delayed::Delayed;
pub use failing::{Failing, Fault};
pub use hard_disk::HardDisk;
pub use held::{HeldRequest, RequestHolder};
pub use power_cut::{Loss, PowerCut};
pub use sparse::SparseMemory;

/// A request as a value.
#[derive(Debug, Clone)]
enum Call {
    Read { offset: u64, into: IoVector },
    Write { offset: u64, from: IoVector },
    WriteZeroes { range: Range<u64>, how: ZeroOptions },
    Discard { range: Range<u64> },
    Flush,
    SetLength { len: u64 },
    Allocate { range: Range<u64> },
    Clone(CloneCall),
}

/// A clone as a value.
#[derive(Debug, Clone)]
struct CloneCall {
    range: Range<u64>,
    from: Arc<dyn Storage>,
    from_offset: u64,
    /// Whether the storage could.
    cloned: Arc<AtomicBool>,
}

impl CloneCall {
    fn begin(self, storage: &dyn Storage) -> Request {
        let length = self.range.end.saturating_sub(self.range.start);
        let cloned = storage.clone_range(self.range.start, &self.from, self.from_offset, length);
        Box::pin(async move {
            self.cloned.store(cloned.await?, Ordering::Release);
            Ok(())
        })
    }
}

impl Call {
    /// Returns the operation of the request.
    fn operation(&self) -> Operation {
        match self {
            Self::Read { .. } => Operation::Read,
            Self::Write { .. } => Operation::Write,
            Self::WriteZeroes { .. } => Operation::WriteZeroes,
            Self::Discard { .. } => Operation::Discard,
            Self::Flush => Operation::Flush,
            Self::SetLength { .. } => Operation::SetLength,
            Self::Allocate { .. } => Operation::Allocate,
            Self::Clone(_) => Operation::Clone,
        }
    }

    /// The bytes it is about: none for a flush, from the new end to itself for a new length.
    fn range(&self) -> Range<u64> {
        match self {
            Self::Read { offset, into: vector } | Self::Write { offset, from: vector } => {
                *offset..offset.saturating_add(vector.len() as u64)
            }
            Self::WriteZeroes { range, .. } | Self::Discard { range } | Self::Allocate { range } => range.clone(),
            Self::Flush => 0..0,
            Self::SetLength { len } => *len..*len,
            Self::Clone(clone) => clone.range.clone(),
        }
    }

    /// Has a storage do it.
    fn begin(self, storage: &dyn Storage) -> Request {
        match self {
            Self::Read { offset, into } => storage.read(offset, into),
            Self::Write { offset, from } => storage.write(offset, from),
            Self::WriteZeroes { range, how } => storage.write_zeroes(range, how),
            Self::Discard { range } => storage.discard(range),
            Self::Flush => storage.flush(),
            Self::SetLength { len } => storage.set_len(len),
            Self::Allocate { range } => storage.allocate(range),
            Self::Clone(clone) => clone.begin(storage),
        }
    }

    /// Its failure.
    fn failed(&self, name: &Arc<str>, source: impl Into<std::io::Error>) -> StorageError {
        let range = self.range();
        match self {
            Self::Flush | Self::SetLength { .. } => StorageError::for_storage(self.operation(), name, source),
            _ => StorageError::for_request(
                self.operation(),
                name,
                range.start,
                range.end.saturating_sub(range.start),
                source,
            ),
        }
    }
}

/// The treatment of requests to a storage.
trait Behaviour: Send + Sync + Debug {
    fn request(self: Arc<Self>, storage: &Arc<dyn Storage>, call: Call) -> Request;
}

/// A storage with a behaviour over it.
#[derive(Debug)]
struct Through {
    storage: Arc<dyn Storage>,
    behaviour: Arc<dyn Behaviour>,
}

impl Through {
    fn wrap<B: Behaviour + 'static>(storage: Arc<dyn Storage>, behaviour: &Arc<B>) -> Arc<dyn Storage> {
        let behaviour: Arc<dyn Behaviour> = Arc::<B>::clone(behaviour);
        Arc::new(Self { storage, behaviour })
    }

    fn request(&self, call: Call) -> Request {
        Arc::clone(&self.behaviour).request(&self.storage, call)
    }
}

/// Returns the memory below all behaviours, if the storage is in memory: a clone takes its bytes from there without
/// passing a behaviour, as the clone of a file reads nothing.
fn memory_under(storage: &dyn Storage) -> Option<&SparseMemory> {
    let any: &dyn Any = storage;
    match any.downcast_ref::<Through>() {
        Some(through) => memory_under(&*through.storage),
        None => any.downcast_ref::<SparseMemory>(),
    }
}

impl Storage for Through {
    fn name(&self) -> &Arc<str> {
        self.storage.name()
    }

    fn length(&self) -> Result<u64, StorageError> {
        self.storage.length()
    }

    fn is_read_only(&self) -> bool {
        self.storage.is_read_only()
    }

    fn alignment(&self) -> Alignment {
        self.storage.alignment()
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        self.request(Call::Read { offset, into })
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        self.request(Call::Write { offset, from })
    }

    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request {
        self.request(Call::WriteZeroes { range, how })
    }

    fn discard(&self, range: Range<u64>) -> Request {
        self.request(Call::Discard { range })
    }

    fn flush(&self) -> Request {
        self.request(Call::Flush)
    }

    fn set_len(&self, len: u64) -> Request {
        self.request(Call::SetLength { len })
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        self.request(Call::Allocate { range })
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        self.storage.extents(range)
    }

    fn clone_range(&self, offset: u64, from: &Arc<dyn Storage>, from_offset: u64, length: u64) -> Request<bool> {
        let (range, cloned) = (offset..offset.saturating_add(length), Arc::<AtomicBool>::default());
        let clone = CloneCall { range, from: Arc::clone(from), from_offset, cloned: Arc::clone(&cloned) };
        let request = self.request(Call::Clone(clone));
        Box::pin(async move { request.await.map(|()| cloned.load(Ordering::Acquire)) })
    }

    fn clone_alignment(&self) -> u64 {
        self.storage.clone_alignment()
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.storage.file()
    }
}
