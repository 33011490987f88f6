//! Bytes at offsets, under disk images and snapshots.
//!
//! A [`Storage`] is a file, a block device or memory. Its requests are futures that need no async runtime: [`block_on`]
//! runs them on the calling thread. They read into and write from [`Buffer`]s: memory that the kernel or a guest may
//! write at any time.
//!
//! ```
//! use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};
//!
//! # fn main() -> Result<(), limosa_storage::StorageError> {
//! let storage = MemoryStorage::growing_to(1 << 20);
//! block_on(storage.write(4096, Buffer::from_slice(b"contents").into()))?;
//! let found = Buffer::zeroed(8);
//! block_on(storage.read(4096, found.clone().into()))?;
//! assert_eq!(found.to_vec(), b"contents");
//! # Ok(())
//! # }
//! ```

mod arena;
mod buffer;
mod drive;
mod error;
mod file;
mod memory;
mod null;
mod pollable;
mod pool;
mod replace;
mod request;
mod ring;
mod shared_words;
mod storage;
mod striped;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod unit_locks;
mod watch;

pub use buffer::{Buffer, IoVector};
pub use drive::{block_on, submit_gathered};
pub use error::{Operation, StorageError};
pub use file::{
    CacheMode, Create, FileCounters, FileIdentity, FileOptions, FileStorage, Io, LockHolders, LockPolicy, OpenError,
    OperationCount, UnknownCacheMode,
};
pub use memory::MemoryStorage;
pub use null::NullStorage;
pub use pollable::{Pollable, Ready};
pub use pool::retire_threads;
pub use replace::{replace_file, sync_folder};
pub use shared_words::SharedWords;
pub use storage::{Alignment, ContentRun, Extent, ExtentKind, Request, Storage, ZeroOptions};
pub use striped::{Striped, StripedArc};
pub use unit_locks::{ReadInUnits, UnitLocks};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
