//! Files that are registered with rings.
//!
//! **Law: a registered file holds no lock, and is registered no longer than its storage exists.** A ring keeps
//! registered files open; after its process is killed this lasts 20 to 30 ms, until the kernel has destroyed the ring.
//! A locked file would stay locked that long, and the next process could not open the image. So a file is reopened for
//! its rings, read-only, and this open file has no locks. Writes use the locked file: a write in flight when the
//! process is killed keeps the lock until it is complete.
//!
//! Dropping a file empties its slots, on any thread. No reads of it are in flight then, because requests keep the file
//! open.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::fstat;

use crate::ring::handle::Handle;

/// Maximum number of registered files of a ring; most chains of images have fewer.
pub(crate) const SLOTS: u32 = 64;
/// The owner of a free slot.
const NO_OWNER: u64 = 0;

/// Owners of the slots of a ring. The ring's thread assigns slots; dropping a file frees them.
pub(crate) struct Owners {
    keys: [AtomicU64; SLOTS as usize],
    /// Whether the kernel refuses a file table for this ring.
    is_refused: AtomicBool,
}

impl Owners {
    pub(crate) fn new(has_table: bool) -> Self {
        Self { keys: [const { AtomicU64::new(NO_OWNER) }; SLOTS as usize], is_refused: AtomicBool::new(!has_table) }
    }

    /// The first slot of `owner`, searched from the home slot of `key`.
    fn find(&self, key: u64, owner: u64) -> Option<u32> {
        #[expect(clippy::cast_possible_truncation, reason = "it is less than SLOTS")]
        let home = (key % u64::from(SLOTS)) as u32;
        (0..SLOTS).map(|step| (home + step) % SLOTS).find(|slot| self.owner(*slot) == owner)
    }

    fn owner(&self, slot: u32) -> u64 {
        self.keys.get(slot as usize).map_or(NO_OWNER, |key| key.load(Ordering::Acquire))
    }

    fn assign(&self, slot: u32, owner: u64) {
        if let Some(key) = self.keys.get(slot as usize) {
            key.store(owner, Ordering::Release);
        }
    }
}

/// Registrations of a file with rings.
#[derive(Debug)]
pub(crate) struct Registrations {
    /// Key of the file, unique in this process for all time.
    key: u64,
    rings: Mutex<Vec<(Weak<Handle>, u32)>>,
    /// Whether it could not be reopened.
    is_refused: AtomicBool,
}

impl Default for Registrations {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(NO_OWNER + 1);
        Self { key: NEXT.fetch_add(1, Ordering::Relaxed), rings: Mutex::default(), is_refused: AtomicBool::new(false) }
    }
}

impl Drop for Registrations {
    fn drop(&mut self) {
        for (ring, slot) in self.rings.get_mut().drain(..) {
            // A forked child has copies of the handles, and must not change its parent's rings.
            let Some(ring) = ring.upgrade().filter(|ring| ring.is_ours()) else { continue };
            if ring.uring.submitter().register_files_update(slot, &[-1]).is_ok() {
                ring.owners.assign(slot, NO_OWNER);
            }
        }
    }
}

impl Registrations {
    /// Returns the slot in which this ring has the file `fd` registered for reading, and registers it if it is not.
    pub(crate) fn slot(&self, ring: &Arc<Handle>, fd: BorrowedFd<'_>, is_direct: bool) -> Option<u32> {
        let owners = &ring.owners;
        if owners.is_refused.load(Ordering::Relaxed) || self.is_refused.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(slot) = owners.find(self.key, self.key) {
            return Some(slot);
        }
        let slot = owners.find(self.key, NO_OWNER)?;
        let Ok(reading) = reopen(fd, is_direct) else {
            self.is_refused.store(true, Ordering::Relaxed);
            return None;
        };
        if ring.uring.submitter().register_files_update(slot, &[reading.as_raw_fd()]).is_err() {
            owners.is_refused.store(true, Ordering::Relaxed);
            return None;
        }
        owners.assign(slot, self.key);
        let mut rings = self.rings.lock();
        rings.retain(|(ring, _)| ring.strong_count() > 0);
        rings.push((Arc::downgrade(ring), slot));
        Some(slot)
    }
}

/// Reopens a file read-only, with a separate open file description.
fn reopen(fd: BorrowedFd<'_>, is_direct: bool) -> io::Result<OwnedFd> {
    let direct = if is_direct { libc::O_DIRECT } else { 0 };
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let reading: OwnedFd = OpenOptions::new().read(true).custom_flags(direct).open(path)?.into();
    let (ours, found) = (fstat(fd)?, fstat(&reading)?);
    // /proc may not be the proc filesystem: check that it is the same file.
    let is_same = (ours.st_dev, ours.st_ino, ours.st_rdev, ours.st_mode)
        == (found.st_dev, found.st_ino, found.st_rdev, found.st_mode);
    if is_same { Ok(reading) } else { Err(io::ErrorKind::NotFound.into()) }
}
