//! The blocks of one version of an object in the cache.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use limosa_page::to_usize;
use rustix::fs::{FallocateFlags, Timespec, Timestamps, UTIME_NOW};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::directory::{read_all, write_all};
use super::layout::{ENTRY, Layout, USED};
use super::{BlockCache, Files};

/// Blocks that may wait to be written. More are not kept.
const WRITES: usize = 64;

/// Seconds without writes after one failed: the disk is full, or read-only.
const WITHOUT_WRITES: u64 = 60;

/// Minutes after which a use is noted again.
const USE_NOTED: u32 = 10;

/// Entries that are read at once.
const ENTRIES: u64 = 4096;

/// The blocks of one version of an object. Its calls block, and never fail: what goes wrong is counted.
#[derive(Debug)]
pub(crate) struct CachedObject {
    cache: Arc<BlockCache>,
    file: OwnedFd,
    layout: Layout,
    writes: Arc<Semaphore>,
    /// When writes may be tried again, in seconds since 1970.
    write_again: AtomicU64,
    /// When the file's use was noted, in minutes since 1970.
    noted: AtomicU64,
}

impl CachedObject {
    pub(super) fn new(cache: Arc<BlockCache>, file: OwnedFd, layout: Layout) -> Self {
        let object = Self {
            cache,
            file,
            layout,
            writes: Arc::new(Semaphore::new(WRITES)),
            write_again: AtomicU64::new(0),
            noted: AtomicU64::new(0),
        };
        object.note_use(minute());
        object
    }

    /// The threads that its calls run on.
    pub(crate) fn files(&self) -> &Files {
        self.cache.files()
    }

    /// Whether a block is there, as its entry says.
    pub(crate) fn has(&self, block: u64) -> bool {
        self.entry(block).is_some()
    }

    /// Reads a block, and verifies it.
    pub(crate) fn read(&self, block: u64) -> Option<Bytes> {
        let tally = &self.cache.tally;
        let Some((sum, used)) = self.entry(block) else {
            tally.misses.add(1);
            return None;
        };
        let place = self.layout.data(block);
        let mut bytes = vec![0; to_usize(place.end - place.start)];
        let outcome = read_all(&self.file, &mut bytes, place.start);
        let is_whole = matches!(&outcome, Ok(length) if *length == bytes.len()) && crc32c::crc32c(&bytes) == sum;
        if !is_whole {
            match outcome {
                // The block is fetched again, and written over this one.
                Ok(_) => tally.damaged.add(1),
                Err(error) => self.cache.failed(&error),
            }
            tally.misses.add(1);
            return None;
        }
        tally.hits.add(1);
        let now = minute();
        if now.wrapping_sub(used) >= USE_NOTED {
            self.count(write_all(&self.file, &now.to_le_bytes(), self.layout.entry(block) + USED));
        }
        self.note_use(now);
        Some(bytes.into())
    }

    /// A place among the blocks that wait to be written; `None`: there are too many, or writes fail.
    pub(crate) fn room_for_write(&self) -> Option<OwnedSemaphorePermit> {
        if seconds() < self.write_again.load(Ordering::Relaxed) {
            return None;
        }
        Arc::clone(&self.writes).try_acquire_owned().ok()
    }

    /// Writes a block.
    pub(crate) fn write(&self, block: u64, bytes: &[u8]) {
        let place = self.layout.data(block);
        debug_assert_eq!(bytes.len() as u64, place.end - place.start);
        let entry = self.layout.entry_of(block, bytes, minute());
        // The entry comes last: until then the block is not there.
        let written = write_all(&self.file, bytes, place.start)
            .and_then(|()| write_all(&self.file, &entry, self.layout.entry(block)));
        match written {
            Ok(()) => self.cache.wrote(bytes.len() as u64),
            Err(error) => {
                self.cache.failed(&error);
                self.write_again.store(seconds() + WITHOUT_WRITES, Ordering::Relaxed);
            }
        }
    }

    fn entry(&self, block: u64) -> Option<(u32, u32)> {
        let mut entry = [0; to_usize(ENTRY)];
        match read_all(&self.file, &mut entry, self.layout.entry(block)) {
            Ok(length) => self.layout.parse_entry(block, entry.get(..length)?),
            Err(error) => {
                self.cache.failed(&error);
                None
            }
        }
    }

    /// Notes that the file is used, once a minute.
    fn note_use(&self, minute: u32) {
        if self.noted.swap(minute.into(), Ordering::Relaxed) != u64::from(minute) {
            let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
            let times = Timestamps { last_access: now, last_modification: now };
            self.count(rustix::fs::futimens(&self.file, &times).map_err(Into::into));
        }
    }

    fn count(&self, outcome: io::Result<()>) {
        if let Err(error) = outcome {
            self.cache.failed(&error);
        }
    }
}

/// Gives back at least `wanted` bytes on disk, of the blocks that were not used for the longest time. Returns how
/// many. Its users find them missing.
pub(super) fn evict(file: &OwnedFd, layout: &Layout, wanted: u64) -> io::Result<u64> {
    let mut blocks = Vec::new();
    let mut first = 0;
    while first < layout.blocks() {
        let count = ENTRIES.min(layout.blocks() - first);
        let mut entries = vec![0; to_usize(count * ENTRY)];
        read_all(file, &mut entries, layout.entry(first))?;
        for (block, entry) in (first..).zip(entries.chunks(to_usize(ENTRY))) {
            if let Some((_, used)) = layout.parse_entry(block, entry) {
                blocks.push((used, block));
            }
        }
        first += count;
    }
    blocks.sort_unstable();
    let mut freed = 0;
    for (_, block) in blocks {
        if freed >= wanted {
            break;
        }
        let place = layout.data(block);
        // First it is not there any more, then its space is given back.
        write_all(file, &[0; to_usize(ENTRY)], layout.entry(block))?;
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, how, place.start, place.end - place.start)?;
        freed += place.end - place.start;
    }
    Ok(freed)
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Minutes since 1970: enough for 8,000 years.
fn minute() -> u32 {
    u32::try_from(seconds() / 60).unwrap_or(u32::MAX)
}
