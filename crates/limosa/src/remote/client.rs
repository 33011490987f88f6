//! The client of object stores: how objects are opened and listed, their cache, and their figures.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use limosa_console::{parse, say};
use limosa_image::reference::{ObjectEntry, ObjectStores, OpenObject, shown_object};
use limosa_remote::{
    BlockCache, CacheOptions, ListedObject, ObjectUrl, RemoteCounters, RemoteFigures, RemoteObject, RemoteOptions,
    UploadCounters,
};
use limosa_storage::{Operation, Storage, StorageError};
use parking_lot::Mutex;
use serde_json::{Value, json};

/// The folder of the cache; empty: no cache.
const CACHE_DIRECTORY: &str = "LIMOSA_CACHE_DIR";

/// The most bytes of the cache.
const CACHE_SIZE: &str = "LIMOSA_CACHE_SIZE";

/// Bytes that are fetched as one: a guest that waits for a page waits for all of them.
const BLOCK_SIZE: u32 = 64 << 10;

/// Objects that are open, and the figures of all.
static OPENED: Mutex<Opened> = Mutex::new(Opened { objects: Vec::new(), closed: None });

/// Contents that objects must have, by their URLs.
static EXPECTED: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// Figures of what was written.
static UPLOADED: Mutex<Option<UploadCounters>> = Mutex::new(None);

/// Whether no object may be opened any more: connections would fail, after all attempts.
static STAYS_OUT: AtomicBool = AtomicBool::new(false);

/// Objects that were opened. A server opens and closes them as long as it runs: of those that are closed only the
/// sum of their figures stays.
struct Opened {
    objects: Vec<OpenedObject>,
    closed: Option<RemoteCounters>,
}

struct OpenedObject {
    url: String,
    content: String,
    object: Weak<RemoteObject>,
    figures: RemoteFigures,
}

impl Opened {
    fn add(&mut self, url: &str, object: &Arc<RemoteObject>) {
        let closed = self.closed.get_or_insert_default();
        self.objects.retain(|opened| {
            let stays = opened.object.strong_count() > 0;
            if !stays {
                *closed += opened.figures.counters();
            }
            stays
        });
        let (content, figures) = (object.content(), object.figures());
        self.objects.push(OpenedObject { url: url.to_owned(), content, object: Arc::downgrade(object), figures });
    }

    fn sum(&self) -> Option<RemoteCounters> {
        let mut sum = self.closed?;
        self.objects.iter().for_each(|opened| sum += opened.figures.counters());
        Some(sum)
    }
}

#[derive(Debug)]
struct Client;

impl OpenObject for Client {
    fn open(&self, url: &str) -> Result<Arc<dyn Storage>, StorageError> {
        let failed = |why: io::Error| StorageError::for_storage(Operation::Open, &shown_object(url).into(), why);
        if STAYS_OUT.load(Ordering::Relaxed) {
            return Err(failed(io::Error::other("the server is in a sandbox and makes no connections (--sandbox)")));
        }
        let parsed: ObjectUrl =
            url.parse().map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        let mut options = RemoteOptions::default().cache(cache());
        options.block_size = BLOCK_SIZE;
        let object = RemoteObject::open(&parsed, &options)?;
        if EXPECTED.lock().get(url).is_some_and(|expected| *expected != object.content()) {
            let why = format!("the object was replaced since the overlay was made: it is {}", object.content());
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        if !object.pin().is_strong() && WEAK.lock().insert(url.to_owned()) {
            say!("limosa: {url}: pinned by its {} only: not every replacement can be noticed", object.pin());
        }
        OPENED.lock().add(url, &object);
        Ok(object)
    }

    fn list(&self, folder: &str) -> Result<Vec<ObjectEntry>, StorageError> {
        let shown = shown_object(folder);
        if shown != folder {
            let why = io::Error::new(io::ErrorKind::InvalidInput, "a URL with a secret is refused");
            return Err(StorageError::for_storage(Operation::List, &shown.into(), why));
        }
        let found = limosa_remote::list(folder, &RemoteOptions::default().store)?;
        LISTED.fetch_add(found.requests, Ordering::Relaxed);
        let entry = |object: ListedObject| ObjectEntry {
            url: object.url,
            length: object.length,
            modified: object.modified,
            tag: object.tag,
        };
        Ok(found.objects.into_iter().map(entry).collect())
    }

    fn remove(&self, url: &str) -> Result<(), StorageError> {
        let failed = |error| StorageError::for_storage(Operation::Remove, &shown_object(url).into(), error);
        let parsed: ObjectUrl =
            url.parse().map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        let requests = limosa_remote::remove(&parsed, &RemoteOptions::default().store)?;
        LISTED.fetch_add(requests, Ordering::Relaxed);
        Ok(())
    }
}

/// Objects whose replacement may not be noticed, which was said.
static WEAK: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Requests that were no part of reading or writing an object.
static LISTED: AtomicU64 = AtomicU64::new(0);

/// The cache on local disk; `None`: not wanted, or it cannot be used, which is said once.
fn cache() -> Option<Arc<BlockCache>> {
    static CACHE: OnceLock<Option<Arc<BlockCache>>> = OnceLock::new();
    let open = || {
        let directory = cache_directory()?;
        let mut options = CacheOptions::new(&directory);
        if let Some(size) = std::env::var_os(CACHE_SIZE) {
            match size.to_str().map(parse::size) {
                Some(Ok(size)) => options = options.limit(size),
                _ => say!("limosa: {CACHE_SIZE}: must be a size as 10G; 10G is used"),
            }
        }
        let failed = |error| say!("limosa: {}: cannot be the cache: {error}; going on without", directory.display());
        BlockCache::open(&options).map_err(failed).ok()
    };
    CACHE.get_or_init(open).clone()
}

/// Returns the folder of the cache; `None`: it is not wanted.
pub(super) fn cache_directory() -> Option<PathBuf> {
    match std::env::var_os(CACHE_DIRECTORY) {
        Some(directory) if directory.is_empty() => None,
        Some(directory) => Some(directory.into()),
        None => CacheOptions::usual_directory(),
    }
}

/// Returns the client of object stores.
pub(crate) fn stores() -> ObjectStores {
    ObjectStores::new(Arc::new(Client))
}

/// Whether an object was opened: its client has a thread, and connections.
pub(crate) fn is_in_use() -> bool {
    OPENED.lock().closed.is_some()
}

/// Returns a line about the contents of the object that was opened last by this URL. `None`: none was.
pub(crate) fn content(url: &str) -> Option<String> {
    let opened = OPENED.lock();
    opened.objects.iter().rev().find(|opened| opened.url == url).map(|opened| opened.content.clone())
}

/// Notes what an object has cost that was written.
pub(super) fn note_upload(counters: UploadCounters) {
    *UPLOADED.lock() = Some(counters);
}

/// Lets an object be opened only if it has such contents.
pub(crate) fn expect(url: &str, content: &str) {
    EXPECTED.lock().insert(url.to_owned(), content.to_owned());
}

/// Lets no further object be opened.
pub(crate) fn stay_out() {
    STAYS_OUT.store(true, Ordering::Relaxed);
}

/// Returns what objects have cost until now; `None`: there was none.
pub(crate) fn cost() -> Option<Value> {
    let (read, sent) = (OPENED.lock().sum(), *UPLOADED.lock());
    let listed = LISTED.load(Ordering::Relaxed);
    if read.is_none() && sent.is_none() && listed == 0 {
        return None;
    }
    let (read, sent) = (read.unwrap_or_default(), sent.unwrap_or_default());
    Some(json!({
        "requests": read.requests + sent.requests + listed,
        "bytes-received": read.bytes,
        "bytes-sent": sent.bytes,
        "retries": read.retries + sent.retries,
        "hedges": read.hedges,
        "hedges-won": read.hedges_won,
        "blocks-in-memory": read.memory_hits,
        "blocks-in-cache": read.cache_hits,
        "blocks-demanded": read.demanded,
        "blocks-prefetched": read.prefetched,
        "parts": sent.parts,
        "parts-resumed": sent.resumed,
    }))
}
