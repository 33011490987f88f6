//! Writing an object: in parts, on several streams.
//!
//! **Law: an object is complete or it is not there.** Parts become visible by one last request, under a condition where
//! the store knows one: nothing that somebody else wrote meanwhile is replaced. What is not completed is aborted, also
//! if the upload is dropped; or it has a record ([`record`]), which stays as long as the store may have parts of it:
//! after a kill, while the store cannot be reached, or when it refuses to abort. The next upload of the same object
//! continues it, or aborts it.
//!
//! ```mermaid
//! flowchart LR
//!     look["what is there?"] --> parts["parts, several at once"] --> complete["complete, if still so"]
//!     parts -- failed, dropped --> abort
//!     parts -- killed, cancelled, out of reach --> record["record on local disk"] --> parts
//! ```

mod follow;
mod plan;
mod record;
mod requests;
mod session;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use limosa_page::to_usize;
use limosa_storage::{Buffer, Operation, Storage, StorageError, block_on};

pub use self::follow::{FollowedFile, follow};
use self::session::{Session, Stopper};
use crate::error::RemoteError;
use crate::store::{Store, StoreOptions};
use crate::url::ObjectUrl;

/// The treatment of an object that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Existing {
    /// It fails.
    #[default]
    Refuse,
    /// It replaces the object that it has seen when it began. If that changes meanwhile it fails.
    Replace,
}

/// How an object is written.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UploadOptions {
    /// How its store is reached.
    pub store: StoreOptions,
    /// The treatment of an object that is there.
    pub existing: Existing,
    /// The least length of a part in bytes; parts of long objects are longer. Stores want 5 MiB at least.
    pub part_size: u64,
    /// Parts in flight. Each is in memory.
    pub streams: usize,
    /// A folder for records of uploads, with which one that was killed is continued; `None`: it is begun again, and the
    /// store keeps parts of the killed one until it removes them by itself.
    pub records: Option<PathBuf>,
    /// Set by whoever wants the upload to end: it fails. It is aborted, or continued later if it has a record.
    pub cancelled: Arc<AtomicBool>,
}

impl Default for UploadOptions {
    fn default() -> Self {
        Self {
            store: StoreOptions::default(),
            existing: Existing::Refuse,
            part_size: 16 << 20,
            streams: 4,
            records: None,
            cancelled: Arc::default(),
        }
    }
}

impl UploadOptions {
    /// Sets `store`.
    #[must_use]
    pub fn store(self, store: StoreOptions) -> Self {
        Self { store, ..self }
    }

    /// Sets `existing`.
    #[must_use]
    pub fn existing(self, existing: Existing) -> Self {
        Self { existing, ..self }
    }

    /// Sets `records` to the place for them in the folder of a cache.
    #[must_use]
    pub fn records_in(self, cache: impl Into<PathBuf>) -> Self {
        Self { records: Some(crate::cache::uploads(&cache.into())), ..self }
    }
}

/// Figures of an upload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UploadCounters {
    /// Requests to the store: what it charges for.
    pub requests: u64,
    /// Bytes sent as parts; repeated ones count again.
    pub bytes: u64,
    /// Parts of the object.
    pub parts: u64,
    /// Parts that an upload that was killed had sent.
    pub resumed: u64,
    /// Requests that repeated a failed one.
    pub retries: u64,
}

/// An object that was written.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Uploaded {
    /// Its length in bytes.
    pub length: u64,
    /// Its `ETag`, if the store gives one.
    pub e_tag: Option<String>,
    /// Whether the store itself has checked that nothing else was replaced; otherwise it was looked up right before.
    pub is_conditional: bool,
    /// Figures.
    pub counters: UploadCounters,
}

/// An object that is being written, part after part. Dropping it aborts the upload.
pub struct Upload {
    name: Arc<str>,
    session: Session,
}

impl Upload {
    /// Begins to write an object of at most `length` bytes: parts of [`Upload::part_size`], the last one shorter.
    ///
    /// # Errors
    /// A [`RemoteError`] as the source: there is an object already, no access, no connection within the budget.
    pub fn begin(url: &ObjectUrl, length: u64, options: &UploadOptions) -> Result<Self, StorageError> {
        let name: Arc<str> = url.to_string().into();
        let failed = |error: RemoteError| StorageError::for_storage(Operation::Create, &name, io::Error::from(error));
        let store = writable(url, options).map_err(failed)?;
        let session = Session::begin(store, length, options).map_err(failed)?;
        Ok(Self { name, session })
    }

    /// The length of all parts but the last one, in bytes.
    #[must_use]
    pub fn part_size(&self) -> u64 {
        self.session.part_size()
    }

    /// Sends the next part. Waits as long as all streams are busy.
    ///
    /// # Errors
    /// A [`RemoteError`] as the source, of this part or of an earlier one.
    pub fn put(&mut self, part: Vec<u8>) -> Result<(), StorageError> {
        self.session.put(part).map_err(|error| self.failed(error))
    }

    /// Sends the part of this index and digest, at any time and also again: what comes last is in the object.
    fn put_at(&mut self, index: usize, part: Vec<u8>, digest: String) -> Result<(), StorageError> {
        self.session.put_at(index, part, Some(digest)).map_err(|error| self.failed(error))
    }

    /// Fails if an earlier part has failed, or the upload is cancelled.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn check(&mut self) -> Result<(), StorageError> {
        self.session.check().map_err(|error| self.failed(error))
    }

    /// Whether an earlier upload has made the object: parts are only compared with those of it.
    fn is_completed(&self) -> bool {
        self.session.is_completed()
    }

    /// Returns what ends it from another thread.
    fn stopper(&self) -> Stopper {
        self.session.stopper()
    }

    /// Waits for all parts, and makes the object visible.
    ///
    /// # Errors
    /// A [`RemoteError`] as the source. The object is not there then, or still the old one.
    pub fn finish(mut self) -> Result<Uploaded, StorageError> {
        self.complete()
    }

    fn complete(&mut self) -> Result<Uploaded, StorageError> {
        self.session.finish().map_err(|error| self.failed(error))
    }

    /// Returns its figures.
    #[must_use]
    pub fn counters(&self) -> UploadCounters {
        self.session.counters()
    }

    fn failed(&self, error: RemoteError) -> StorageError {
        StorageError::for_storage(Operation::Write, &self.name, io::Error::from(error))
    }
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Fails if an upload would because of the object that is there, or because the store refuses to say. Nothing is
/// written: for whoever has to make the bytes first.
///
/// # Errors
/// As those of [`Upload::begin`].
pub fn check_target(url: &ObjectUrl, options: &UploadOptions) -> Result<(), StorageError> {
    let failed = |error: RemoteError| {
        StorageError::for_storage(Operation::Create, &url.to_string().into(), io::Error::from(error))
    };
    let store = writable(url, options).map_err(failed)?;
    Session::check_target(store, options).map_err(failed)
}

fn writable(url: &ObjectUrl, options: &UploadOptions) -> Result<Store, RemoteError> {
    if !url.is_writable() {
        return Err(RemoteError::Settings("files of web servers are only read".to_owned()));
    }
    Store::new(url, &options.store)
}

/// Writes all bytes of a storage, which nobody changes meanwhile, to an object.
///
/// # Errors
/// Those of the storage, and of [`Upload`].
pub fn upload(source: &Arc<dyn Storage>, url: &ObjectUrl, options: &UploadOptions) -> Result<Uploaded, StorageError> {
    match upload_once(source, url, options) {
        Err(error) if is_unknown_upload(&error) => upload_once(source, url, options),
        outcome => outcome,
    }
}

fn upload_once(source: &Arc<dyn Storage>, url: &ObjectUrl, options: &UploadOptions) -> Result<Uploaded, StorageError> {
    let length = source.length()?;
    let mut upload = Upload::begin(url, length, options)?;
    let size = upload.part_size();
    for index in 0..to_usize(length.div_ceil(size)) {
        upload.put(read_part(&**source, size, index, length)?)?;
    }
    upload.finish()
}

/// Reads a part of a storage of this length that is divided into parts of `size` bytes.
fn read_part(source: &dyn Storage, size: u64, index: usize, length: u64) -> Result<Vec<u8>, StorageError> {
    let start = (index as u64).saturating_mul(size);
    let buffer = Buffer::zeroed(to_usize(size.min(length.saturating_sub(start))));
    block_on(source.read(start, buffer.clone().into()))?;
    Ok(buffer.to_vec())
}

/// Whether the store does not know an upload that was to be continued. Its record is gone then.
fn is_unknown_upload(error: &StorageError) -> bool {
    let cause = error.source.get_ref().and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(RemoteError::UnknownUpload))
}
