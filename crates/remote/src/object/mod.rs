//! An object as a storage that is only read.

mod blocks;
mod fetch;
mod hedging;
mod kept;
mod pace;
mod pin;
mod queue;
mod read_ahead;
mod waiting;

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use limosa_storage::{
    Alignment, Buffer, Extent, ExtentKind, IoVector, Operation, Request, Storage, StorageError, ZeroOptions,
};

use self::blocks::Blocks;
use crate::cache::BlockCache;
use crate::counters::{RemoteCounters, RemoteFigures};
use crate::error::RemoteError;
use crate::runtime;
use crate::store::{Store, StoreOptions};
use crate::url::ObjectUrl;

pub use self::pin::Pin;

/// How an object is read.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// How its store is reached.
    pub store: StoreOptions,
    /// Bytes that are fetched and kept as one: a power of two, from 4 KiB to 16 MiB.
    pub block_size: u32,
    /// Requests in flight, from 1 to 256.
    pub concurrency: usize,
    /// Bytes of blocks that are kept in memory. As many bytes again may be in flight.
    pub memory: u64,
    /// Bytes that are fetched ahead of a sequential reader, at most a quarter of the memory; 0: none.
    pub read_ahead: u64,
    /// Whether a second request is made when one is slower than most.
    pub hedge: bool,
    /// The cache on local disk.
    pub cache: Option<Arc<BlockCache>>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self {
            store: StoreOptions::default(),
            block_size: 256 << 10,
            concurrency: 64,
            memory: 64 << 20,
            // What a line of 1 Gbit/s carries in 130 ms.
            read_ahead: 16 << 20,
            hedge: true,
            cache: None,
        }
    }
}

impl RemoteOptions {
    /// Sets `store`.
    #[must_use]
    pub fn store(self, store: StoreOptions) -> Self {
        Self { store, ..self }
    }

    /// Sets `cache`.
    #[must_use]
    pub fn cache(self, cache: Option<Arc<BlockCache>>) -> Self {
        Self { cache, ..self }
    }
}

/// An object of a store, pinned as it was when it was opened. It is only read.
///
/// Reads are made of blocks: those in memory are copied, those in the cache on disk are read and verified, the others
/// are fetched. Blocks ahead of a sequential reader are fetched in time. A read that is dropped completes on its own.
pub struct RemoteObject {
    name: Arc<str>,
    blocks: Arc<Blocks>,
}

impl RemoteObject {
    /// Opens an object with one request, which also brings its first bytes.
    ///
    /// # Errors
    /// A [`RemoteError`] as the source: there is no such object, no access, no connection within the budget.
    pub fn open(url: &ObjectUrl, options: &RemoteOptions) -> Result<Arc<Self>, StorageError> {
        let name: Arc<str> = url.to_string().into();
        let failed = |error: io::Error| StorageError::for_storage(Operation::Open, &name, error);
        let sizes = 4 << 10..=16 << 20;
        if !options.block_size.is_power_of_two() || !sizes.contains(&options.block_size) {
            let why = "the block size must be a power of two from 4 KiB to 16 MiB".to_owned();
            return Err(failed(RemoteError::Settings(why).into()));
        }
        let store = Store::new(url, &options.store).map_err(|error| failed(error.into()))?;
        let opened = runtime::block_on(Blocks::open(store, options.clone())).map_err(failed)?;
        let blocks = opened.map_err(|error| failed(error.into()))?;
        Ok(Arc::new(Self { name, blocks }))
    }

    /// Returns how a replacement of the object is recognized.
    #[must_use]
    pub fn pin(&self) -> Pin {
        self.blocks.pin()
    }

    /// Returns a line about its contents: objects that differ in it are not the same.
    #[must_use]
    pub fn content(&self) -> String {
        self.blocks.pinned.content()
    }

    /// Returns its figures.
    #[must_use]
    pub fn counters(&self) -> RemoteCounters {
        self.figures().counters()
    }

    /// Returns its figures for whoever wants to know them also after it is closed.
    #[must_use]
    pub fn figures(&self) -> RemoteFigures {
        self.blocks.figures()
    }

    fn refusal<T: Send + 'static>(&self, operation: Operation, range: &Range<u64>) -> Request<T> {
        let why = io::Error::new(io::ErrorKind::PermissionDenied, "an object is only read");
        let length = range.end.saturating_sub(range.start);
        let error = StorageError::for_request(operation, &self.name, range.start, length, why);
        Box::pin(std::future::ready(Err(error)))
    }
}

impl Drop for RemoteObject {
    fn drop(&mut self) {
        self.blocks.stop_prefetching();
    }
}

impl fmt::Debug for RemoteObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteObject").field("name", &self.name).field("pin", &self.pin()).finish_non_exhaustive()
    }
}

impl Storage for RemoteObject {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn length(&self) -> Result<u64, StorageError> {
        Ok(self.blocks.length())
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        let inside = limosa_page::to_usize(self.blocks.length().saturating_sub(offset).min(into.len() as u64));
        into.slice(inside..into.len()).buffers().iter().for_each(Buffer::clear);
        if inside == 0 {
            return Box::pin(std::future::ready(Ok(())));
        }
        let (name, length) = (Arc::clone(&self.name), into.len() as u64);
        let (read, end) = self.blocks.read(offset, &into.slice(0..inside));
        Box::pin(async move {
            // It also ends if the task that would have filled it is gone.
            _ = end.await;
            read.outcome().map_err(|error| StorageError::for_request(Operation::Read, &name, offset, length, error))
        })
    }

    /// Fetches ranges ahead of reads, in this order, while there is room. Without a cache on disk at most a half of the
    /// memory is for what was not read yet.
    fn prefetch(&self, ranges: &[Range<u64>]) {
        self.blocks.prefetch(ranges);
    }

    fn is_near(&self, range: &Range<u64>) -> bool {
        self.blocks.is_near(range)
    }

    /// `None` if a replacement might not be noticed.
    fn content_id(&self) -> Option<String> {
        self.blocks.content_id()
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        self.refusal(Operation::Write, &(offset..offset.saturating_add(from.len() as u64)))
    }

    fn write_zeroes(&self, range: Range<u64>, _how: ZeroOptions) -> Request {
        self.refusal(Operation::WriteZeroes, &range)
    }

    fn discard(&self, range: Range<u64>) -> Request {
        self.refusal(Operation::Discard, &range)
    }

    fn flush(&self) -> Request {
        Box::pin(std::future::ready(Ok(())))
    }

    fn set_len(&self, len: u64) -> Request {
        self.refusal(Operation::SetLength, &(0..len))
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        self.refusal(Operation::Allocate, &range)
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        let end = self.blocks.length().clamp(range.start, range.end.max(range.start));
        let parts = [(range.start..end, ExtentKind::Data), (end..range.end, ExtentKind::Hole)];
        Ok(parts
            .into_iter()
            .filter(|(range, _)| !range.is_empty())
            .map(|(range, kind)| Extent::new(range, kind))
            .collect())
    }

    fn clone_range(&self, offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, length: u64) -> Request<bool> {
        self.refusal(Operation::Clone, &(offset..offset.saturating_add(length)))
    }
}
