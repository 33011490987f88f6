//! Objects of stores as images: how they are opened, what they cost, and how one is written.
//!
//! The client of stores is the feature `remote`. Without it every use of an object says so.

use std::path::{Path, PathBuf};

use anyhow::bail;
use limosa_console::{quantity, say};
use limosa_image::reference::{is_object, shown_object};
use serde_json::Value;

#[cfg(feature = "remote")]
pub(crate) use with_client::{Staging, Url, check, content, cost, expect, is_in_use, stay_out, stores, target};
#[cfg(not(feature = "remote"))]
pub(crate) use without_client::{Staging, Url, check, content, cost, expect, is_in_use, stay_out, stores, target};

/// The folder of files that become objects: `$TMPDIR`, or `/var/tmp`, which outlives a restart of the machine.
pub(crate) fn staging_folder() -> PathBuf {
    let folder = std::env::var_os("TMPDIR").filter(|folder| !folder.is_empty());
    folder.map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

/// The end of an upload.
#[cfg_attr(not(feature = "remote"), expect(dead_code, reason = "there are no uploads"))]
pub(crate) enum Sent {
    Whole {
        length: u64,
        requests: u64,
    },
    /// `is_kept`: the same upload can be continued.
    Cancelled {
        is_kept: bool,
    },
}

/// Refuses a name of an object where a file is made.
///
/// # Errors
/// It is one; `instead` says what to do.
pub(crate) fn refuse_target(name: &Path, instead: &str) -> anyhow::Result<()> {
    if is_object(name) {
        let shown = shown_object(&name.to_string_lossy());
        bail!("{shown}: is an object of a store, and only packed snapshots become one: {instead}");
    }
    Ok(())
}

/// Tells people what objects have cost; nothing if there was none.
pub(crate) fn tell_cost() {
    let Some(cost) = cost() else { return };
    let figure = |name: &str| cost[name].as_u64().unwrap_or(0);
    say!(
        "  object store: {} requests, {} received, {} sent",
        quantity::count(figure("requests")),
        quantity::bytes(figure("bytes-received")),
        quantity::bytes(figure("bytes-sent"))
    );
}

/// Adds what objects have cost to an object for programs.
pub(crate) fn add_cost(object: &mut Value) {
    if let (Some(object), Some(cost)) = (object.as_object_mut(), cost()) {
        object.insert("remote".to_owned(), cost);
    }
}

#[cfg(feature = "remote")]
mod with_client {
    use std::collections::{BTreeMap, BTreeSet};
    use std::ffi::OsStr;
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd as _;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, OnceLock, Weak};

    use anyhow::Context as _;
    use limosa_console::{parse, say};
    use limosa_image::reference::{ObjectEntry, ObjectStores, OpenObject, shown_object};
    use limosa_remote::{
        BlockCache, CacheOptions, ListedObject, ObjectUrl, RemoteCounters, RemoteError, RemoteFigures, RemoteObject,
        RemoteOptions, UploadCounters, UploadOptions, check_target, upload,
    };
    use limosa_storage::{FileOptions, FileStorage, Operation, Storage, StorageError};
    use parking_lot::Mutex;
    use serde_json::{Value, json};

    use super::{Sent, staging_folder};

    /// The name of an object.
    pub(crate) type Url = ObjectUrl;

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
                return Err(failed(io::Error::other(
                    "the server is in a sandbox and makes no connections (--sandbox)",
                )));
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
            let failed =
                |error| say!("limosa: {}: cannot be the cache: {error}; going on without", directory.display());
            BlockCache::open(&options).map_err(failed).ok()
        };
        CACHE.get_or_init(open).clone()
    }

    fn cache_directory() -> Option<PathBuf> {
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

    /// Returns the object that a name of a target means; `None`: it means a file.
    ///
    /// # Errors
    /// It begins as the URL of one, and is not valid.
    pub(crate) fn target(name: &OsStr) -> anyhow::Result<Option<ObjectUrl>> {
        let Some(text) = name.to_str().filter(|text| ObjectUrl::is_one(text)) else { return Ok(None) };
        Ok(Some(text.parse().with_context(|| shown_object(text))?))
    }

    /// Fails if there is an object already that an upload would not replace.
    ///
    /// # Errors
    /// There is; the store's.
    pub(crate) fn check(url: &ObjectUrl) -> anyhow::Result<()> {
        Ok(check_target(url, &upload_options())?)
    }

    fn upload_options() -> UploadOptions {
        let options = UploadOptions::default();
        match cache_directory() {
            Some(directory) => options.records_in(directory),
            None => options,
        }
    }

    /// A file without a name, in which an image is made that becomes an object: its tables are written last and
    /// elsewhere, and an object is written once and in order.
    #[derive(Debug)]
    pub(crate) struct Staging(File);

    impl Staging {
        /// Makes one, in `$TMPDIR` or `/var/tmp`.
        ///
        /// # Errors
        /// The kernel's.
        pub(crate) fn new() -> anyhow::Result<Self> {
            use rustix::fs::{CWD, Mode, OFlags, openat};
            let folder = staging_folder();
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let file = openat(CWD, &folder, flags, Mode::from_raw_mode(0o600));
            let file = file.with_context(|| format!("{}: no temporary file (set TMPDIR)", folder.display()))?;
            Ok(Self(file.into()))
        }

        pub(crate) fn file(&self) -> &File {
            &self.0
        }

        /// The name under which this process can open it.
        pub(crate) fn path(&self) -> PathBuf {
            format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
        }

        /// Writes its contents to an object that must not exist. It ends when `cancelled` is set.
        ///
        /// # Errors
        /// The store's; it exists already.
        pub(crate) fn upload(self, url: &ObjectUrl, cancelled: Arc<AtomicBool>) -> anyhow::Result<Sent> {
            let file: Arc<dyn Storage> =
                FileStorage::from_fd(self.0.into(), &url.to_string(), &FileOptions::default())?;
            let mut options = upload_options();
            options.cancelled = cancelled;
            match upload(&file, url, &options) {
                Ok(done) => {
                    *UPLOADED.lock() = Some(done.counters);
                    Ok(Sent::Whole { length: done.length, requests: done.counters.requests })
                }
                Err(error) => match error.source.get_ref().and_then(|cause| cause.downcast_ref()) {
                    Some(RemoteError::Cancelled { is_kept }) => Ok(Sent::Cancelled { is_kept: *is_kept }),
                    _ => Err(error.into()),
                },
            }
        }
    }
}

#[cfg(not(feature = "remote"))]
mod without_client {
    use std::convert::Infallible;
    use std::ffi::OsStr;
    use std::fs::File;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use limosa_image::reference::ObjectStores;
    use serde_json::Value;

    use super::Sent;

    pub(crate) fn stores() -> ObjectStores {
        ObjectStores::default()
    }

    pub(crate) fn is_in_use() -> bool {
        false
    }

    pub(crate) fn stay_out() {}

    pub(crate) fn content(_: &str) -> Option<String> {
        None
    }

    pub(crate) fn expect(_: &str, _: &str) {}

    pub(crate) fn check(_: &Infallible) -> anyhow::Result<()> {
        Ok(())
    }

    pub(crate) fn cost() -> Option<Value> {
        None
    }

    pub(crate) fn target(_: &OsStr) -> anyhow::Result<Option<Infallible>> {
        Ok(None)
    }

    #[derive(Debug)]
    pub(crate) struct Staging(Infallible);

    pub(crate) type Url = Infallible;

    impl Staging {
        pub(crate) fn new() -> anyhow::Result<Self> {
            anyhow::bail!("this program has no client of object stores")
        }

        pub(crate) fn path(&self) -> PathBuf {
            match self.0 {}
        }

        pub(crate) fn file(&self) -> &File {
            match self.0 {}
        }

        pub(crate) fn upload(self, _: &Infallible, _: Arc<AtomicBool>) -> anyhow::Result<Sent> {
            match self.0 {}
        }
    }
}
