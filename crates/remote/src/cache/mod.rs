//! A bounded cache of blocks on local disk, which the processes of a user share.
//!
//! **Law: a block of the cache is what the store sent, or it is not there.** Each has a checksum that is verified when
//! it is read. Nothing is flushed: after a power cut blocks may be lost, cut or mixed up, which their checksums show. A
//! cache that is full, broken or read-only costs time, and never fails a read.
//!
//! A file has the blocks of one version of an object (`layout.rs`). Data is written before its entry. Who uses a file
//! has a shared lock on it. What was not used for the longest time is removed first: whole files that nobody uses, and
//! of the others the oldest blocks. A file that was unlinked under its users would take space that nobody counts.

mod directory;
mod files;
mod layout;
mod object;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, Timespec, Timestamps};

use self::directory::Listed;
use self::layout::Layout;
use crate::counters::Count;

pub(crate) use self::directory::{Directory, read_all, write_all};
pub(crate) use self::files::Files;
pub(crate) use self::object::CachedObject;

/// How often a file is opened that other processes remove meanwhile.
const OPENED_AGAIN: u32 = 8;

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
    files: Files,
    limit: u64,
    tally: Tally,
    /// Gives the warning that the cache cannot be used once.
    warned: Once,
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
            files: Files::threads()?,
            limit: options.limit,
            tally: Tally::default(),
            warned: Once::new(),
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

    /// The threads that its calls run on.
    pub(crate) fn files(&self) -> &Files {
        &self.files
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

    /// Opens the file of an object, and locks it as one that is used.
    fn file(&self, layout: &Layout, name: &str) -> io::Result<Option<OwnedFd>> {
        for _ in 0..OPENED_AGAIN {
            let Some(file) = self.open_file(layout, name)? else { return Ok(None) };
            // A process that removes it has the lock for that moment only.
            rustix::fs::flock(&file, FlockOperation::LockShared)?;
            if rustix::fs::fstat(&file)?.st_nlink > 0 {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// Opens the file of an object; one that is not its own, or is broken, is replaced.
    fn open_file(&self, layout: &Layout, name: &str) -> io::Result<Option<OwnedFd>> {
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
        // Several threads may fail together.
        self.warned.call_once(|| {
            tracing::warn!(%error, "the cache of objects cannot be used; reads continue without it");
        });
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
        for file in files {
            if excess == 0 {
                break;
            }
            let freed = self.give_back(&file, excess)?;
            self.tally.evicted.add(freed);
            excess = excess.saturating_sub(freed);
        }
        Ok(())
    }

    /// Removes a file that nobody uses, or at least `wanted` bytes of one that is used. Returns how many.
    fn give_back(&self, listed: &Listed, wanted: u64) -> io::Result<u64> {
        let Ok(name) = std::str::from_utf8(&listed.name) else { return Ok(0) };
        let Some(file) = self.directory.open_file(name)? else { return Ok(0) };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                self.directory.remove(&listed.name);
                Ok(listed.space)
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut header = vec![0; layout::header_length()];
                read_all(&file, &mut header, 0)?;
                let Some(layout) = Layout::parse(&header) else { return Ok(0) };
                let freed = object::evict(&file, &layout, wanted)?;
                // That was no use of it.
                let used = Timespec { tv_sec: i64::try_from(listed.used).unwrap_or(i64::MAX), tv_nsec: 0 };
                let times = Timestamps { last_access: used, last_modification: used };
                rustix::fs::futimens(&file, &times)?;
                Ok(freed)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The folder in which uploads leave what they need to be resumed.
pub(crate) fn uploads(directory: &Path) -> PathBuf {
    directory.join("uploads")
}

#[cfg(test)]
mod tests;
