//! Refcounts in memory: the refcount table as a whole, and a bounded number of slices of refcount blocks.
//!
//! Law: a refcount is raised here before anything refers to its cluster, and lowered only when nothing in the file
//! refers to it any more. Slices may therefore be written at any time. Everything that changes refcounts is carried out
//! within [`HeaderOwner::exclusively`](super::header_owner::HeaderOwner::exclusively).

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use limosa_page::{BrokenInvariant, broken_invariant, invariant, to_usize};
use limosa_storage::{Buffer, IoVector};

use super::context::Context;
use super::counters::OperationKind;
use super::locks::{Rank, RankedMutex};
use crate::error::ImageError;
use crate::offset::{ClusterCount, HostCluster, HostOffset};
use crate::qcow2::format::refcount_array;

/// Bits of a table's entry that say where the block lies.
const BLOCK: u64 = !511;
/// Changes of refcounts are one at a time, and only they make room.
const STAYS: &str = "a slice of refcounts that was loaded stays until it is used";
/// The fewest slices that are kept.
const FEWEST: usize = 16;

pub(super) struct Refcounts {
    context: Arc<Context>,
    cache: RankedMutex<Cache>,
    /// The most slices that are kept.
    most: usize,
}

struct Cache {
    /// Offset of the refcount table.
    table_at: HostOffset,
    /// Offsets of the blocks; 0: no block, and all its refcounts are 0.
    blocks: Vec<u64>,
    slots: HashMap<HostOffset, Slot>,
}

struct Slot {
    bytes: Vec<u8>,
    dirty: bool,
}

/// The place of a refcount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RefcountAddress {
    /// The slice.
    pub(super) slice: HostOffset,
    /// Its index in the slice.
    pub(super) index: usize,
    /// How many are in the slice from it on, itself included.
    pub(super) left: ClusterCount,
}

/// Why a refcount was not lowered.
#[derive(Debug)]
pub(super) enum LowerError {
    /// It is 0 already.
    Zero(HostCluster),
    Other(ImageError),
}

impl From<ImageError> for LowerError {
    fn from(error: ImageError) -> Self {
        Self::Other(error)
    }
}

fn words(table: &[u8]) -> Vec<u64> {
    table.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect()
}

impl Refcounts {
    pub(super) fn new(context: Arc<Context>, table_at: HostOffset, table: &[u8]) -> Self {
        let most = to_usize((context.options().cache_size / 4) >> context.slice_bits());
        let cache = Cache { table_at, blocks: words(table), slots: HashMap::new() };
        Self { context, cache: Rank::Refcounts.mutex(cache), most: most.max(FEWEST) }
    }

    /// Returns the offset of the refcount table, and its entries.
    pub(super) fn table(&self) -> (HostOffset, Vec<u64>) {
        let cache = self.cache.lock();
        (cache.table_at, cache.blocks.clone())
    }

    /// Returns the offset of the refcount table, and the number of its entries.
    pub(super) fn table_place(&self) -> (HostOffset, usize) {
        let cache = self.cache.lock();
        (cache.table_at, cache.blocks.len())
    }

    /// Returns the offsets of the refcount blocks.
    pub(super) fn blocks(&self) -> Vec<HostOffset> {
        self.cache.lock().blocks.iter().copied().filter(|at| *at != 0).map(HostOffset).collect()
    }

    /// An entry of the table leads to this block now.
    pub(super) fn has_block(&self, index: usize, at: HostOffset) -> Result<(), BrokenInvariant> {
        let mut cache = self.cache.lock();
        let block = cache.blocks.get_mut(index);
        *block.ok_or_else(|| broken_invariant("the refcount table has an entry for a new block"))? = at.0;
        Ok(())
    }

    /// The table lies here now, and has these entries.
    pub(super) fn has_table(&self, table_at: HostOffset, blocks: Vec<u64>) {
        let mut cache = self.cache.lock();
        cache.table_at = table_at;
        cache.blocks = blocks;
    }

    /// Forgets what blocks say that differ in nothing from the file: others are about to change them there.
    pub(super) fn forget(&self) {
        self.cache.lock().slots.retain(|_, slot| slot.dirty);
    }

    /// Takes the table from the file, where others have changed it.
    pub(super) async fn read_table(&self, at: HostOffset, length: u64) -> Result<(), ImageError> {
        let table = self.context.read_file(at, length).await?;
        self.has_table(at, words(&table));
        Ok(())
    }

    /// Returns the place of a cluster's refcount; `None`: it has no block.
    pub(super) fn address(&self, cluster: HostCluster) -> Result<Option<RefcountAddress>, ImageError> {
        let geometry = self.context.geometry();
        let per_block = geometry.refcounts_per_block();
        let cache = self.cache.lock();
        let number = cluster.0 / per_block;
        let Some(block) = usize::try_from(number).ok().and_then(|number| cache.blocks.get(number)) else {
            return Ok(None);
        };
        if *block == 0 {
            return Ok(None);
        }
        let at = HostOffset(*block & BLOCK);
        if at.0 != *block || at.within(geometry.cluster_size()) != 0 {
            let table = format!("refcount table at {}, entry {number}", cache.table_at);
            return Err(self.context.corrupt(table, format!("{block:#x} is not where a refcount block can lie")));
        }
        let slice_size = 1 << self.context.slice_bits();
        let per_slice = (8 * slice_size) >> geometry.refcount_order;
        let inside = cluster.0 % per_block;
        let index = to_usize(inside % per_slice);
        let slice = at + inside / per_slice * slice_size;
        Ok(Some(RefcountAddress { slice, index, left: ClusterCount(per_slice - inside % per_slice) }))
    }

    /// Looks at a slice's bytes, reading it if need be.
    pub(super) async fn look<R>(&self, slice: HostOffset, look: impl FnOnce(&[u8]) -> R) -> Result<R, ImageError> {
        self.load(slice).await?;
        let cache = self.cache.lock();
        let slot = cache.slots.get(&slice).ok_or_else(|| broken_invariant(STAYS))?;
        Ok(look(&slot.bytes))
    }

    /// Returns the refcount of a cluster if it is in memory, in a slice that the file does not have yet.
    pub(super) fn known(&self, cluster: HostCluster) -> Result<Option<u64>, ImageError> {
        let Some(address) = self.address(cluster)? else { return Ok(None) };
        let order = self.context.geometry().refcount_order;
        let cache = self.cache.lock();
        let slot = cache.slots.get(&address.slice).filter(|slot| slot.dirty);
        Ok(slot.and_then(|slot| refcount_array::get(&slot.bytes, order, address.index)))
    }

    /// Changes a slice's bytes.
    async fn change<R>(&self, slice: HostOffset, change: impl FnOnce(&mut [u8]) -> R) -> Result<R, ImageError> {
        self.load(slice).await?;
        let mut cache = self.cache.lock();
        let slot = cache.slots.get_mut(&slice).ok_or_else(|| broken_invariant(STAYS))?;
        slot.dirty = true;
        Ok(change(&mut slot.bytes))
    }

    async fn load(&self, slice: HostOffset) -> Result<(), ImageError> {
        let full = {
            let cache = self.cache.lock();
            if cache.slots.contains_key(&slice) {
                return Ok(());
            }
            cache.slots.len() >= self.most
        };
        if full {
            self.write().await?;
            self.forget();
        }
        let size = 1 << self.context.slice_bits();
        let block = slice.align_down(self.context.geometry().cluster_size());
        let part = slice..slice.saturating_add(size);
        let bytes = self.context.read_table(OperationKind::RefcountRead, "refcount block", block, part).await?;
        self.cache.lock().slots.entry(slice).or_insert(Slot { bytes, dirty: false });
        Ok(())
    }

    /// Whether any refcounts have to be written.
    pub(super) fn differ(&self) -> bool {
        self.cache.lock().slots.values().any(|slot| slot.dirty)
    }

    /// Writes all slices that differ from the file.
    pub(super) async fn write(&self) -> Result<(), ImageError> {
        let mut captured: Vec<(HostOffset, IoVector)> = Vec::new();
        for (slice, slot) in self.cache.lock().slots.iter_mut().filter(|(_, slot)| slot.dirty) {
            slot.dirty = false;
            captured.push((*slice, Buffer::from_slice(&slot.bytes).into()));
        }
        let writes = captured
            .iter()
            .map(|(at, bytes)| self.context.write_table(OperationKind::RefcountWrite, *at, bytes.clone()));
        let results = futures_util::future::join_all(writes).await;
        let mut cache = self.cache.lock();
        for ((slice, _), result) in captured.iter().zip(&results) {
            if let Some(slot) = cache.slots.get_mut(slice) {
                slot.dirty |= result.is_err();
            }
        }
        drop(cache);
        results.into_iter().collect()
    }

    /// Has `count` clusters from `first` on, whose refcounts are in one slice, counted once.
    pub(super) async fn count_once(&self, first: HostCluster, count: ClusterCount) -> Result<(), ImageError> {
        let Some(address) = self.address(first)? else {
            return Err(self.context.corrupt(format!("refcount of cluster {first}"), "it has no refcount block"));
        };
        let order = self.context.geometry().refcount_order;
        let count = count.as_usize();
        let all = address.index..address.index.saturating_add(count);
        let are_free = |bytes: &[u8]| all.clone().all(|index| refcount_array::get(bytes, order, index) == Some(0));
        if !self.look(address.slice, are_free).await? {
            return Err(self.context.corrupt(format!("refcount of cluster {first}"), "it was 0, and is not any more"));
        }
        let set = |bytes: &mut [u8]| all.clone().all(|index| refcount_array::set(bytes, order, index, 1));
        let counted = self.change(address.slice, set).await?;
        Ok(invariant(counted, "clusters that are counted at once have their refcounts in one slice")?)
    }

    /// Raises the refcount of a cluster that is in use by `by`.
    pub(super) async fn raise(&self, cluster: HostCluster, by: u64) -> Result<(), ImageError> {
        let order = self.context.geometry().refcount_order;
        let Some(RefcountAddress { slice, index, .. }) = self.address(cluster)? else {
            return Err(self.context.corrupt(format!("refcount of cluster {cluster}"), "it has no refcount block"));
        };
        let raise = |bytes: &mut [u8]| {
            let count = refcount_array::get(bytes, order, index).filter(|count| *count > 0);
            let raised = count.and_then(|count| count.checked_add(by));
            raised.is_some_and(|raised| refcount_array::set(bytes, order, index, raised))
        };
        if self.change(slice, raise).await? {
            return Ok(());
        }
        let why = format!("it cannot be raised by {by}: it is 0, and the cluster was in use, or is too high");
        Err(self.context.corrupt(format!("refcount of cluster {cluster}"), why))
    }

    /// Lowers refcounts by one: those clusters that nothing refers to any more, in order.
    pub(super) async fn lower(&self, clusters: &Range<HostCluster>) -> Result<Vec<Range<HostCluster>>, LowerError> {
        let order = self.context.geometry().refcount_order;
        let mut free: Vec<Range<HostCluster>> = Vec::new();
        for cluster in (clusters.start.0..clusters.end.0).map(HostCluster) {
            let lowered = match self.address(cluster)? {
                None => None,
                Some(RefcountAddress { slice, index, .. }) => {
                    self.change(slice, |bytes| {
                        let lowered = refcount_array::get(bytes, order, index).and_then(|count| count.checked_sub(1));
                        lowered.filter(|count| refcount_array::set(bytes, order, index, *count))
                    })
                    .await?
                }
            };
            match lowered {
                Some(0) => match free.last_mut() {
                    Some(run) if run.end == cluster => run.end += ClusterCount::ONE,
                    _ => free.push(cluster..cluster + ClusterCount::ONE),
                },
                Some(_) => {}
                None => return Err(LowerError::Zero(cluster)),
            }
        }
        Ok(free)
    }
}
