//! A bounded cache of blocks on local disk, which the processes of a user share.
//!
//! **Law: a block of the cache is what the store sent, or it is not there.** Each has a checksum that is verified when
//! it is read. Nothing is flushed: after a power cut blocks may be lost, cut or mixed up, which their checksums show. A
//! cache that is full, broken or read-only costs time, and never fails a read.
//!
//! A file has the blocks of one version of an object ([`layout`]). Data is written before its entry. What was not used
//! for the longest time is removed first: whole files, and of the last one its oldest blocks.

mod directory;
mod layout;
mod object;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use self::layout::Layout;
use crate::counters::Count;

pub(crate) use self::directory::{Directory, read_all, write_all};
pub(crate) use self::object::CachedObject;

/// How a cache is opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CacheOptions {
    /// Its folder.
    pub directory: PathBuf,
    /// Bytes that it may take on disk. Processes that fill it together exceed it for a short time.
    pub limit: u64,
}

impl CacheOptions {
    /// A cache in this folder, of at most 10 GiB.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), limit: 10 << 30 }
    }

    /// Sets `limit`.
    #[must_use]
    pub fn limit(self, limit: u64) -> Self {
        Self { limit, ..self }
    }

    /// The usual folder: `$XDG_CACHE_HOME/limosa`, or `~/.cache/limosa`.
    #[must_use]
    pub fn usual_directory() -> Option<PathBuf> {
        let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        Some(cache?.join("limosa"))
    }
}

/// Figures of a cache, as this process has used it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheCounters {
    /// Blocks that were there.
    pub hits: u64,
    /// Blocks that were not.
    pub misses: u64,
    /// Blocks that were written.
    pub written: u64,
    /// Blocks whose checksum was wrong: they count as missing, too.
    pub damaged: u64,
    /// Calls of the kernel that failed.
    pub errors: u64,
    /// Bytes on disk that were given back.
    pub evicted: u64,
}

#[derive(Debug, Default)]
struct Tally {
    hits: Count,
    misses: Count,
    written: Count,
    damaged: Count,
    errors: Count,
    evicted: Count,
}

/// A cache of blocks on local disk.
#[derive(Debug)]
pub struct BlockCache {
    directory: Directory,
    limit: u64,
    tally: Tally,
    /// Bytes written since files were last counted.
    written: AtomicU64,
    /// The files that this process uses, by name.
    open: Mutex<Vec<(String, std::sync::Weak<CachedObject>)>>,
}

impl BlockCache {
    /// Opens a cache, and makes its folder if it is missing.
    ///
    /// # Errors
    /// The kernel's; [`io::ErrorKind::PermissionDenied`]: the folder is another user's, or others can write to it.
    pub fn open(options: &CacheOptions) -> io::Result<Arc<Self>> {
        let cache = Self {
            directory: Directory::open(&options.directory.join("blocks"))?,
            limit: options.limit,
            tally: Tally::default(),
            written: AtomicU64::new(0),
            open: Mutex::default(),
        };
        cache.evict();
        Ok(Arc::new(cache))
    }

    /// Returns its figures.
    #[must_use]
    pub fn counters(&self) -> CacheCounters {
        let tally = &self.tally;
        CacheCounters {
            hits: tally.hits.get(),
            misses: tally.misses.get(),
            written: tally.written.get(),
            damaged: tally.damaged.get(),
            errors: tally.errors.get(),
            evicted: tally.evicted.get(),
        }
    }

    /// The blocks of a version of an object; `None`: they cannot be kept.
    pub(crate) fn object(self: &Arc<Self>, identity: &str, length: u64, block_size: u64) -> Option<Arc<CachedObject>> {
        let layout = Layout::new(identity, length, block_size).filter(|_| block_size <= self.limit / 4)?;
        let name = layout.name();
        let mut open = self.open.lock();
        open.retain(|(_, object)| object.strong_count() > 0);
        if let Some(object) = open.iter().find(|(known, _)| *known == name).and_then(|(_, object)| object.upgrade()) {
            return Some(object);
        }
        match self.file(&layout, &name) {
            Ok(Some(file)) => {
                let object = Arc::new(CachedObject::new(Arc::clone(self), file, layout));
                open.push((name, Arc::downgrade(&object)));
                Some(object)
            }
            Ok(None) => None,
            Err(error) => {
                self.failed(&error);
                None
            }
        }
    }

    /// Opens the file of an object; one that is not its own, or is broken, is replaced.
    fn file(&self, layout: &Layout, name: &str) -> io::Result<Option<OwnedFd>> {
        if let Some(file) = self.directory.open_file(name)? {
            let mut header = vec![0; layout::header_length()];
            if read_all(&file, &mut header, 0)? == header.len() && header == layout.header() {
                return Ok(Some(file));
            }
            self.tally.damaged.add(1);
            self.directory.remove(name.as_bytes());
        }
        self.directory.create_file(name, &layout.header())
    }

    fn failed(&self, error: &io::Error) {
        if self.tally.errors.get() == 0 {
            tracing::warn!(%error, "the cache of objects cannot be used; reads continue without it");
        }
        self.tally.errors.add(1);
    }

    /// Counts bytes that were written, and makes room from time to time.
    fn wrote(&self, bytes: u64) {
        self.tally.written.add(1);
        let share = (self.limit / 32).max(1);
        if self.written.fetch_add(bytes, Ordering::Relaxed) + bytes >= share {
            self.evict();
        }
    }

    /// Removes what was not used for the longest time, until the cache is a bit smaller than it may be.
    fn evict(&self) {
        self.written.store(0, Ordering::Relaxed);
        if let Err(error) = self.try_evict() {
            self.failed(&error);
        }
    }

    fn try_evict(&self) -> io::Result<()> {
        let Some(_lock) = self.directory.try_lock()? else { return Ok(()) };
        let mut files = self.directory.list()?;
        let total: u64 = files.iter().map(|file| file.space).sum();
        if total <= self.limit {
            return Ok(());
        }
        let mut excess = total - (self.limit - self.limit / 8);
        files.sort_unstable_by_key(|file| file.used);
        let Some(newest) = files.pop() else { return Ok(()) };
        for file in files {
            if excess == 0 {
                return Ok(());
            }
            self.directory.remove(&file.name);
            self.tally.evicted.add(file.space);
            excess = excess.saturating_sub(file.space);
        }
        let Ok(name) = String::from_utf8(newest.name) else { return Ok(()) };
        let open = self.open.lock().iter().find(|(known, _)| *known == name).and_then(|(_, object)| object.upgrade());
        let freed = match open {
            Some(object) => object.evict(excess)?,
            // Another process uses it, and keeps it within the limit.
            None => 0,
        };
        self.tally.evicted.add(freed);
        Ok(())
    }
}

/// The folder in which uploads leave what they need to be resumed.
pub(crate) fn uploads(directory: &Path) -> PathBuf {
    directory.join("uploads")
}

#[cfg(test)]
mod tests;
