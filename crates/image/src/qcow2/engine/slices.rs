//! L2 tables in memory: a bounded number of slices.
//!
//! Law: a slice that differs from the file stays until it has been written, and one that is being written stays until
//! that is over; so what is read from the file is never older than what was here. Locks are held for a look or a
//! change, never across an `await`.
//!
//! Each stripe of threads knows slices that it has looked at, and finds entries in them without the lock of a shard. So
//! a read, or a write to a cluster that is there, takes no lock that threads of other stripes take, as long as its
//! stripe knows the slice.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use limosa_page::to_usize;
use limosa_storage::Striped;
use parking_lot::{Mutex, MutexGuard};

use super::locks::{Rank, RankedGuard, RankedMutex};
use super::shared_future::SharedFuture;
use super::slice::{NoLook, SharedWord, Slice};
use crate::offset::HostOffset;

/// The most shards; fewer if the cache is small.
const SHARDS: usize = 16;
/// The fewest slices, even if less was asked for: requests in flight must not evict each other's all the time.
const FEWEST: usize = 32;
/// Slices that a stripe knows at most. Of 4 KiB they describe up to 1 GiB of a disk with clusters of 64 KiB. It may
/// keep them in memory after they had to go, until it looks for others.
const KNOWN: usize = 32;
/// Spreads offsets, which have zeros at their end, over the places (Fibonacci hashing).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

pub(super) struct Slices {
    shards: Box<[RankedMutex<Shard>]>,
    /// A lock of these is the last that a thread takes.
    known: Striped<Mutex<Known>>,
    /// Slices in a shard at most.
    most: usize,
    /// The logarithm of a slice's bytes.
    bits: u32,
    dirty: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    slots: HashMap<HostOffset, Slot>,
    /// In the order in which they are looked at when one has to go.
    order: VecDeque<HostOffset>,
    /// Slices that are being read.
    loading: HashMap<HostOffset, SharedFuture>,
}

struct Slot {
    slice: Arc<Slice>,
    dirty: bool,
    writing: bool,
}

/// Slices that were looked at: each has one place where it can be.
#[derive(Default)]
struct Known([Option<(HostOffset, Arc<Slice>)>; KNOWN]);

/// A slice to be written: where, and its bytes as they were.
pub(super) struct CapturedSlice {
    pub(super) at: HostOffset,
    pub(super) bytes: Vec<u8>,
}

/// Every slice of a shard has to be written first.
pub(super) struct Full(pub(super) Box<[u64]>);

impl Slices {
    /// For slices of `1 << bits` bytes, together at most about `size` bytes.
    pub(super) fn new(size: u64, bits: u32) -> Self {
        let most = to_usize(size >> bits).max(FEWEST);
        let shards = (most / FEWEST).clamp(1, SHARDS);
        let shard = |_| Rank::Slices.mutex(Shard::default());
        Self {
            shards: (0..shards).map(shard).collect(),
            known: Striped::default(),
            most: most / shards,
            bits,
            dirty: AtomicUsize::new(0),
        }
    }

    /// Bytes of a slice.
    pub(super) const fn slice_size(&self) -> u64 {
        1 << self.bits
    }

    fn shard(&self, key: HostOffset) -> RankedGuard<MutexGuard<'_, Shard>> {
        let index = to_usize(key.0 >> self.bits) % self.shards.len();
        let [first, ..] = &*self.shards else { unreachable!("there is at least one shard") };
        self.shards.get(index).unwrap_or(first).lock()
    }

    /// Copies words of a slice from `at` on, as they are at one moment: as many as there are, and as fit. Returns how
    /// many; `None` if the slice is not here.
    pub(super) fn copy(&self, key: HostOffset, at: usize, into: &mut [u64]) -> Option<usize> {
        if let Some(count) = self.copy_known(key, at, into) {
            return Some(count);
        }
        let shard = self.shard(key);
        let slice = Arc::clone(&shard.slots.get(&key)?.slice);
        let count = slice.copy_unchanged(at, into);
        drop(shard);
        self.with_known(key, |place| {
            if place.as_ref().is_none_or(|(_, known)| !Arc::ptr_eq(known, &slice)) {
                *place = Some((key, slice));
            }
        });
        Some(count)
    }

    /// The same, if the thread's stripe knows the slice.
    fn copy_known(&self, key: HostOffset, at: usize, into: &mut [u64]) -> Option<usize> {
        let copied = self.with_known(key, |place| {
            let (_, slice) = place.as_ref().filter(|(known, _)| *known == key)?;
            let copied = slice.copy(at, into);
            if copied == Err(NoLook::Gone) {
                *place = None;
            }
            copied.ok()
        });
        copied.flatten()
    }

    fn with_known<R>(
        &self,
        key: HostOffset,
        look: impl FnOnce(&mut Option<(HostOffset, Arc<Slice>)>) -> R,
    ) -> Option<R> {
        let place = (key.0 >> self.bits).wrapping_mul(SPREAD) >> 32;
        let mut known = self.known.own().lock();
        known.0.get_mut(to_usize(place) % KNOWN).map(look)
    }

    /// Whether a slice is here.
    pub(super) fn has(&self, key: HostOffset) -> bool {
        self.get(key, |_| ()).is_some()
    }

    /// Looks at a slice, if it is here. Nobody changes it meanwhile.
    pub(super) fn get<R>(&self, key: HostOffset, look: impl FnOnce(&[SharedWord]) -> R) -> Option<R> {
        let shard = self.shard(key);
        let slice = &shard.slots.get(&key)?.slice;
        slice.touch();
        Some(look(slice.words()))
    }

    /// Changes a slice, if it is here.
    pub(super) fn change<R>(&self, key: HostOffset, change: impl FnOnce(&[SharedWord]) -> R) -> Option<R> {
        let mut shard = self.shard(key);
        let slot = shard.slots.get_mut(&key)?;
        if !slot.dirty {
            slot.dirty = true;
            self.dirty.fetch_add(1, Ordering::Relaxed);
        }
        Some(slot.slice.change(change))
    }

    /// Whether enough slices are dirty for a flush.
    pub(super) fn needs_flush(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) > self.most * self.shards.len() / 2
    }

    /// Returns whether any slice differs from the file.
    pub(super) fn differ(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) > 0
    }

    /// Keeps a slice that was read; what is here already stays.
    pub(super) fn insert(&self, key: HostOffset, words: Box<[u64]>) -> Result<(), Full> {
        let mut shard = self.shard(key);
        let shard = &mut *shard;
        if shard.slots.contains_key(&key) {
            return Ok(());
        }
        let mut looked = 0;
        while shard.slots.len() >= self.most {
            // Everything is passed over at most once for having been looked at; others look all the while.
            looked += 1;
            if looked > 2 * self.most {
                return Err(Full(words));
            }
            let Some(oldest) = shard.order.pop_front() else { return Err(Full(words)) };
            let again = looked > self.most;
            match shard.slots.get(&oldest) {
                // All three: each look counts once.
                Some(slot) if (slot.slice.pass_over() && !again) | slot.dirty | slot.writing => {
                    shard.order.push_back(oldest);
                }
                _ => {
                    if let Some(slot) = shard.slots.remove(&oldest) {
                        slot.slice.gone();
                    }
                }
            }
        }
        shard.slots.insert(key, Slot { slice: Arc::new(Slice::new(&words)), dirty: false, writing: false });
        shard.order.push_back(key);
        Ok(())
    }

    /// Returns the offsets of a table's slices.
    fn keys(&self, table: HostOffset, length: u64) -> impl Iterator<Item = HostOffset> {
        (table.0..table.0.saturating_add(length)).step_by(1 << self.bits).map(HostOffset)
    }

    /// Forgets the slices of a table whose cluster gets other contents.
    pub(super) fn forget(&self, table: HostOffset, length: u64) {
        for key in self.keys(table, length) {
            let mut shard = self.shard(key);
            if let Some(slot) = shard.slots.remove(&key) {
                slot.slice.gone();
                shard.order.retain(|other| *other != key);
                if slot.dirty {
                    self.dirty.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// The readings of a table's slices that were begun, and are not over.
    pub(super) fn loading_within(&self, table: HostOffset, length: u64) -> Vec<SharedFuture> {
        self.keys(table, length).filter_map(|key| self.shard(key).loading.get(&key).cloned()).collect()
    }

    /// The reading of a slice, which is begun if it is not under way.
    pub(super) fn loading(&self, key: HostOffset, begin: impl FnOnce() -> SharedFuture) -> SharedFuture {
        self.shard(key).loading.entry(key).or_insert_with(begin).clone()
    }

    /// The reading of a slice is over.
    pub(super) fn loaded(&self, key: HostOffset) {
        let future = self.shard(key).loading.remove(&key);
        drop(future);
    }

    /// Copies of all slices that differ from the file: they are being written from now on, until [`Slices::written`].
    pub(super) fn capture(&self) -> Vec<CapturedSlice> {
        let mut captured = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock();
            for (at, slot) in shard.slots.iter_mut().filter(|(_, slot)| slot.dirty) {
                slot.dirty = false;
                slot.writing = true;
                self.dirty.fetch_sub(1, Ordering::Relaxed);
                let words = slot.slice.words().iter().map(|word| word.load(Ordering::Relaxed));
                captured.push(CapturedSlice { at: *at, bytes: words.flat_map(u64::to_be_bytes).collect() });
            }
        }
        captured.sort_unstable_by_key(|slice| slice.at);
        captured
    }

    /// These were written, or could not be.
    pub(super) fn written(&self, keys: impl IntoIterator<Item = HostOffset>, fine: bool) {
        for key in keys {
            if let Some(slot) = self.shard(key).slots.get_mut(&key) {
                slot.writing = false;
                if !fine && !slot.dirty {
                    slot.dirty = true;
                    self.dirty.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Cancels all reads in flight.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            let futures = std::mem::take(&mut shard.lock().loading);
            drop(futures);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(word: u64) -> Box<[u64]> {
        vec![word; 64].into()
    }

    /// The first word of a slice.
    fn word(slices: &Slices, key: u64) -> Option<u64> {
        let mut word = [0];
        slices.copy(HostOffset(key), 0, &mut word).map(|count| {
            assert_eq!(count, 1);
            word[0]
        })
    }

    #[test]
    fn a_slice_that_differs_from_the_file_stays_until_it_is_written() {
        let slices = Slices::new(0, 9);
        for key in 0..FEWEST as u64 {
            assert!(slices.insert(HostOffset(key * 512), words(key)).is_ok());
            slices.change(HostOffset(key * 512), |words| words[0].store(7, Ordering::Relaxed)).unwrap();
        }
        assert!(slices.needs_flush());
        let Err(Full(back)) = slices.insert(HostOffset(1 << 20), words(9)) else { panic!("there was room") };
        let captured = slices.capture();
        assert_eq!(captured.len(), FEWEST);
        assert_eq!(
            (captured[1].at, &captured[1].bytes[..16]),
            (HostOffset(512), &[0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 1][..])
        );
        let Err(Full(back)) = slices.insert(HostOffset(1 << 20), back) else {
            panic!("one that was being written went")
        };
        slices.written(captured[1..].iter().map(|slice| slice.at), true);
        slices.written([HostOffset(0)], false);
        assert!(slices.insert(HostOffset(1 << 20), back).is_ok());
        assert_eq!(word(&slices, 0), Some(7));
        assert_eq!(slices.capture().len(), 1);
    }

    #[test]
    fn there_is_room_again_however_often_there_was_none() {
        let slices = Slices::new(0, 9);
        for key in 0..FEWEST as u64 {
            assert!(slices.insert(HostOffset(key * 512), words(key)).is_ok());
        }
        for _ in 0..2 * FEWEST {
            for key in 0..FEWEST as u64 {
                slices.change(HostOffset(key * 512), |words| words[0].store(7, Ordering::Relaxed)).unwrap();
            }
            assert!(slices.insert(HostOffset(1 << 20), words(9)).is_err());
            let captured = slices.capture();
            slices.written(captured.iter().map(|slice| slice.at), true);
        }
        assert!(slices.insert(HostOffset(1 << 20), words(9)).is_ok());
        assert_eq!(word(&slices, 1 << 20), Some(9));
    }

    #[test]
    fn a_stripe_does_not_find_a_slice_that_had_to_go() {
        let slices = Slices::new(0, 9);
        assert!(slices.insert(HostOffset(0), words(1)).is_ok());
        assert_eq!(word(&slices, 0), Some(1));
        slices.forget(HostOffset(0), 512);
        assert_eq!(word(&slices, 0), None);
        assert!(slices.insert(HostOffset(0), words(2)).is_ok());
        slices.change(HostOffset(0), |words| words[0].store(3, Ordering::Relaxed)).unwrap();
        assert_eq!(word(&slices, 0), Some(3));
        // Others come until it is evicted.
        for key in 1..3 * FEWEST as u64 {
            let captured = slices.capture();
            slices.written(captured.iter().map(|slice| slice.at), true);
            assert!(slices.insert(HostOffset(key * 512), words(key)).is_ok());
        }
        assert_eq!(word(&slices, 0), None);
    }

    #[test]
    fn what_is_here_is_not_replaced_by_what_was_read() {
        let slices = Slices::new(1 << 20, 12);
        assert!(slices.insert(HostOffset(4096), words(1)).is_ok() && slices.insert(HostOffset(4096), words(2)).is_ok());
        assert_eq!(word(&slices, 4096), Some(1));
        slices.forget(HostOffset(0), 65536);
        assert_eq!(word(&slices, 4096), None);
    }
}
