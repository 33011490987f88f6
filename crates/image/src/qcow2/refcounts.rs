//! Refcounts in memory: the refcount table as a whole, and a bounded number of slices of refcount blocks.
//!
//! Law: a refcount is raised here before anything refers to its cluster, and lowered only when nothing in the file refers to it any
//! more. Slices may therefore be written at any time.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::join_all;
use limosa_storage::Buffer;

use super::counters::Purpose;
use super::image::Inner;
use super::refcount_array;
use crate::error::ImageError;

/// Bits of a table's entry that say where the block lies.
const BLOCK: u64 = !511;
/// The fewest slices that are kept.
const FEWEST: usize = 16;

#[derive(Debug)]
pub(super) struct Refcounts {
    /// Where the refcount table lies.
    pub(super) table_at: u64,
    /// Where the blocks lie; 0: there is none, and all its refcounts are 0.
    pub(super) blocks: Vec<u64>,
    slots: HashMap<u64, Slot>,
    most: usize,
    /// The logarithm of a slice's bytes.
    bits: u32,
}

#[derive(Debug)]
struct Slot {
    bytes: Vec<u8>,
    dirty: bool,
}

/// Where a refcount stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RefcountPlace {
    /// The slice.
    pub(super) key: u64,
    /// Which one in the slice it is.
    pub(super) index: usize,
    /// How many are in the slice from it on, itself included.
    pub(super) left: u64,
}

impl Refcounts {
    pub(super) fn new(table_at: u64, table: &[u8], size: u64, bits: u32) -> Self {
        let blocks = table.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect();
        let most = usize::try_from(size >> bits).unwrap_or(usize::MAX).max(FEWEST);
        Self { table_at, blocks, slots: HashMap::new(), most, bits }
    }
}

impl Refcounts {
    /// Forgets what blocks say that differ in nothing from the file: others are about to change them there.
    pub(super) fn forget(&mut self) {
        self.slots.retain(|_, slot| slot.dirty);
    }

    /// The table lies at `table_at` now.
    pub(super) fn has_table(&mut self, table_at: u64, table: &[u8]) {
        self.table_at = table_at;
        self.blocks = table.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect();
    }
}

impl Inner {
    /// Where the refcount of a cluster stands; `None`: it has no block.
    pub(super) fn refcount_place(&self, cluster: u64) -> Result<Option<RefcountPlace>, ImageError> {
        let per_block = self.geometry.refcounts_per_block();
        let refcounts = self.refcounts.lock();
        let number = cluster / per_block;
        let Some(block) = usize::try_from(number).ok().and_then(|number| refcounts.blocks.get(number)) else {
            return Ok(None);
        };
        if *block == 0 {
            return Ok(None);
        }
        let at = *block & BLOCK;
        if at != *block || at & (self.geometry.cluster_size() - 1) != 0 {
            let table = format!("refcount table at {:#x}, entry {number}", refcounts.table_at);
            return Err(self.corrupt(table, format!("{block:#x} is not where a refcount block can lie")));
        }
        let per_slice = (8 << refcounts.bits) >> self.geometry.refcount_order;
        let inside = cluster % per_block;
        let index = usize::try_from(inside % per_slice).unwrap_or(usize::MAX);
        let key = at + inside / per_slice * (1 << refcounts.bits);
        Ok(Some(RefcountPlace { key, index, left: per_slice - inside % per_slice }))
    }

    /// Looks at a slice's bytes, reading it if need be. Only within [`Inner::exclusively`].
    pub(super) async fn refcount_slice<R>(&self, key: u64, look: impl FnOnce(&[u8]) -> R) -> Result<R, ImageError> {
        self.load_refcounts(key).await?;
        let refcounts = self.refcounts.lock();
        let bytes = refcounts.slots.get(&key).map(|slot| &slot.bytes[..]);
        Ok(look(bytes.unwrap_or_default()))
    }

    /// Changes a slice's bytes. Only within [`Inner::exclusively`].
    pub(super) async fn change_refcounts<R>(
        &self,
        key: u64,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, ImageError> {
        self.load_refcounts(key).await?;
        let mut refcounts = self.refcounts.lock();
        Ok(match refcounts.slots.get_mut(&key) {
            Some(slot) => {
                slot.dirty = true;
                change(&mut slot.bytes)
            }
            None => change(&mut []),
        })
    }

    async fn load_refcounts(&self, key: u64) -> Result<(), ImageError> {
        let full = {
            let refcounts = self.refcounts.lock();
            if refcounts.slots.contains_key(&key) {
                return Ok(());
            }
            refcounts.slots.len() >= refcounts.most
        };
        if full {
            self.write_refcounts().await?;
            self.refcounts.lock().slots.retain(|_, slot| slot.dirty);
        }
        let size = 1_usize << self.refcounts.lock().bits;
        let block = key & !(self.geometry.cluster_size() - 1);
        self.admit_table("refcount block", block, &(key..key.saturating_add(size as u64)))?;
        let buffer = Buffer::zeroed(size);
        self.counters.add(Purpose::RefcountRead, size as u64);
        self.file.read(key, buffer.clone().into()).await?;
        let slot = Slot { bytes: buffer.to_vec(), dirty: false };
        self.refcounts.lock().slots.entry(key).or_insert(slot);
        Ok(())
    }

    /// Whether any refcounts have to be written.
    pub(super) fn refcounts_differ(&self) -> bool {
        self.refcounts.lock().slots.values().any(|slot| slot.dirty)
    }

    /// Writes all slices that differ from the file. Only within [`Inner::exclusively`].
    pub(super) async fn write_refcounts(&self) -> Result<(), ImageError> {
        let mut captured = Vec::new();
        for (key, slot) in self.refcounts.lock().slots.iter_mut().filter(|(_, slot)| slot.dirty) {
            slot.dirty = false;
            captured.push((*key, slot.bytes.clone()));
        }
        let writes = captured.iter().map(|(key, bytes)| {
            self.counters.add(Purpose::RefcountWrite, bytes.len() as u64);
            self.file.write(*key, Buffer::copied(bytes).into())
        });
        let results = join_all(writes).await;
        let mut refcounts = self.refcounts.lock();
        for ((key, _), result) in captured.iter().zip(&results) {
            if let Some(slot) = refcounts.slots.get_mut(key) {
                slot.dirty |= result.is_err();
            }
        }
        drop(refcounts);
        results.into_iter().collect::<Result<(), _>>()?;
        Ok(())
    }

    /// Has `count` clusters from `first` on, whose refcounts stand in one slice, counted once. Only within [`Inner::exclusively`].
    pub(super) async fn take(&self, first: u64, count: u64) -> Result<(), ImageError> {
        let Some(place) = self.refcount_place(first)? else {
            return Err(self.corrupt(format!("refcount of cluster {first:#x}"), "it has no refcount block"));
        };
        let order = self.geometry.refcount_order;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        self.change_refcounts(place.key, |bytes| {
            for index in place.index..place.index.saturating_add(count) {
                // All are in the slice, and 1 fits into a bit.
                let _ = refcount_array::set(bytes, order, index, 1);
            }
        })
        .await
    }

    /// Lowers refcounts by one. Those that nobody refers to any more, in order: runs of clusters. Only within
    /// [`Inner::exclusively`].
    pub(super) async fn lower(self: &Arc<Self>, first: u64, count: u64) -> Result<Vec<(u64, u64)>, ImageError> {
        let order = self.geometry.refcount_order;
        let mut free: Vec<(u64, u64)> = Vec::new();
        for cluster in first..first.saturating_add(count) {
            let lowered = match self.refcount_place(cluster)? {
                None => None,
                Some(place) => {
                    self.change_refcounts(place.key, |bytes| {
                        let lowered =
                            refcount_array::get(bytes, order, place.index).and_then(|count| count.checked_sub(1));
                        lowered.filter(|count| refcount_array::set(bytes, order, place.index, *count))
                    })
                    .await?
                }
            };
            match lowered {
                Some(0) => match free.last_mut() {
                    Some((first, count)) if *first + *count == cluster => *count += 1,
                    _ => free.push((cluster, 1)),
                },
                Some(_) => {}
                None => {
                    let at = cluster << self.geometry.cluster_bits;
                    return Err(self
                        .broken_now(
                            format!("refcount of the cluster at {at:#x}"),
                            "it is 0, and the cluster was in use",
                        )
                        .await);
                }
            }
        }
        Ok(free)
    }
}
