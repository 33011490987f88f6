//! Files that rings know by numbers of their own.
//!
//! **Law: what a ring knows holds no lock, and no longer than the storage does.** A ring keeps what is registered with it open: when its
//! process is killed, for 20 to 30 ms, until the kernel has taken the ring down. A file that is locked would stay locked so long, which who
//! opens the image next must not find. So a file is opened once more for its rings, for reading only, and that one has no locks.
//! Writes go on naming the file that has them: one that is under way when the process is killed keeps the lock until it is done.
//!
//! Who drops a file empties its slots, on whatever thread. Reads of it are not under way then: they have it, too.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::fstat;

use crate::file::open::OpenFile;
use crate::ring::handle::Handle;

/// Files that a ring knows at a time: a chain of images has fewer, as a rule.
pub(crate) const SLOTS: u32 = 64;
/// Reads of a file from which on it gets slots: opening it once more costs as much as is saved by so many.
const WORTH: u64 = 64;
/// The owner of a slot that is nobody's.
const NOBODY: u64 = 0;

/// Who has which slot of a ring. The ring's thread gives slots away; whoever drops a file gives them back.
pub(crate) struct Owners {
    keys: [AtomicU64; SLOTS as usize],
    /// Whether the kernel has no such table for this ring.
    is_refused: AtomicBool,
}

impl Owners {
    pub(crate) fn new(has_table: bool) -> Self {
        Self { keys: [const { AtomicU64::new(NOBODY) }; SLOTS as usize], is_refused: AtomicBool::new(!has_table) }
    }

    /// The first slot of this owner, from the owner's own place on.
    fn find(&self, key: u64, owner: u64) -> Option<u32> {
        // The remainder is below a number that fits.
        let home = u32::try_from(key % u64::from(SLOTS)).unwrap_or_default();
        (0..SLOTS).map(|step| (home + step) % SLOTS).find(|slot| self.owner(*slot) == owner)
    }

    fn owner(&self, slot: u32) -> u64 {
        self.keys.get(slot as usize).map_or(NOBODY, |key| key.load(Ordering::Acquire))
    }

    fn give(&self, slot: u32, owner: u64) {
        if let Some(key) = self.keys.get(slot as usize) {
            key.store(owner, Ordering::Release);
        }
    }
}

/// Where rings know a file.
#[derive(Debug)]
pub(crate) struct Places {
    /// What it is known by: no other file of this process has it, ever.
    key: u64,
    rings: Mutex<Vec<(Weak<Handle>, u32)>>,
    /// Whether it could not be opened once more.
    is_refused: AtomicBool,
}

impl Default for Places {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(NOBODY + 1);
        Self { key: NEXT.fetch_add(1, Ordering::Relaxed), rings: Mutex::default(), is_refused: AtomicBool::new(false) }
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        let rings = self.rings.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (ring, slot) in rings.drain(..) {
            // A child that was forked off has copies of our handles, and must leave our rings alone.
            let Some(ring) = ring.upgrade().filter(|ring| ring.is_ours()) else { continue };
            if ring.uring.submitter().register_files_update(slot, &[-1]).is_ok() {
                ring.owners.give(slot, NOBODY);
            }
        }
    }
}

/// The slot in which this ring knows the file for reading, if it does or is to. Only on the ring's thread.
pub(crate) fn slot(ring: &Arc<Handle>, file: &OpenFile) -> Option<u32> {
    let (owners, places) = (&ring.owners, &file.places);
    if owners.is_refused.load(Ordering::Relaxed) || places.is_refused.load(Ordering::Relaxed) {
        return None;
    }
    if file.tallies.reads.operations() < WORTH {
        return None;
    }
    if let Some(slot) = owners.find(places.key, places.key) {
        return Some(slot);
    }
    let slot = owners.find(places.key, NOBODY)?;
    let Ok(reading) = opened_once_more(file) else {
        places.is_refused.store(true, Ordering::Relaxed);
        return None;
    };
    if ring.uring.submitter().register_files_update(slot, &[reading.as_raw_fd()]).is_err() {
        owners.is_refused.store(true, Ordering::Relaxed);
        return None;
    }
    owners.give(slot, places.key);
    let mut rings = places.rings.lock().unwrap_or_else(PoisonError::into_inner);
    rings.retain(|(ring, _)| ring.strong_count() > 0);
    rings.push((Arc::downgrade(ring), slot));
    Some(slot)
}

/// The same file, opened for reading, as an open file of its own.
fn opened_once_more(file: &OpenFile) -> io::Result<OwnedFd> {
    let direct = if file.cache.is_direct() { libc::O_DIRECT } else { 0 };
    let path = format!("/proc/self/fd/{}", file.fd.as_raw_fd());
    let reading: OwnedFd = OpenOptions::new().read(true).custom_flags(direct).open(path)?.into();
    let (ours, found) = (fstat(&file.fd)?, fstat(&reading)?);
    // What is mounted at /proc is not ours to know.
    let is_same = (ours.st_dev, ours.st_ino, ours.st_rdev, ours.st_mode)
        == (found.st_dev, found.st_ino, found.st_rdev, found.st_mode);
    if is_same { Ok(reading) } else { Err(io::ErrorKind::NotFound.into()) }
}
