//! Object stores as a storage: S3, Google Cloud Storage, Azure Blob Storage, and files of web servers.
//!
//! A [`RemoteObject`] is a [`limosa_storage::Storage`] that is only read. It is pinned when it is opened: every request
//! names the version or `ETag` that was seen then. An object that is replaced meanwhile is an error, never a mixture of
//! two. Reads are made of blocks. Demanded blocks go before prefetched ones; neighbouring blocks are fetched by one
//! request; all attempts of a fetch share one budget of time. A [`BlockCache`] keeps blocks on local disk. [`upload`]
//! writes an object in parts: it is complete or it is not there.
//!
//! **Law: the async runtime stays in here.** The HTTP client's runs on one thread (`runtime.rs`); what leaves
//! this crate are blocking functions, and futures that any thread can poll.
//!
//! ```no_run
//! use limosa_remote::{ObjectUrl, RemoteObject, RemoteOptions};
//! use limosa_storage::{Buffer, Storage, block_on};
//!
//! let url: ObjectUrl = "s3://images/debian.qcow2".parse()?;
//! let object = RemoteObject::open(&url, &RemoteOptions::default())?;
//! let header = Buffer::zeroed(104);
//! block_on(object.read(0, header.clone().into()))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod budget;
mod cache;
mod counters;
mod error;
mod listing;
mod object;
mod printable;
mod runtime;
mod store;
mod upload;
mod url;

pub use cache::{BlockCache, CacheCounters, CacheOptions};
pub use counters::{RemoteCounters, RemoteFigures};
pub use error::RemoteError;
pub use listing::{ListedObject, Listing, list, remove};
pub use object::{Pin, RemoteObject, RemoteOptions};
pub use store::{Environment, StoreOptions};
pub use upload::{
    Existing, FollowedFile, Upload, UploadCounters, UploadOptions, Uploaded, check_target, follow, upload,
};
pub use url::{ObjectUrl, Scheme, UrlError};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
