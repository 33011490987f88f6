//! Allocation of clusters, and their release once nothing refers to them.
//!
//! Law: a cluster is handed out once. Its refcount is 1, in memory, before it is handed out; its old references are
//! gone from the file, durably, and no request that knew them is under way. Clusters are taken ahead, in runs; those
//! that the storage proves to read as zeros are known as such until they are handed out.
//!
//! Law: nothing is written over the image's own tables, and none of their clusters is given back. Every cluster is
//! compared with them before it is written, handed out or given back; an overlap marks the image as corrupt.

mod bytes;
mod deferred_free;
mod own_tables;

use std::ops::Range;
use std::sync::Arc;

use bytes::Tail;
use futures_util::FutureExt;
use limosa_page::to_usize;

use super::context::Context;
use super::counters::OperationKind;
use super::epoch::{Epochs, Guard};
use super::header_owner::{HeaderOwner, cut_off};
use super::lengths::Lengths;
use super::locks::{Rank, RankedMutex};
use super::overlap_check::{OverlapCheck, TableKind};
use super::pool::{Pool, Run};
use super::refcounts::Refcounts;
use super::seams;
use super::shared_future::SharedFuture;
use crate::error::ImageError;
use crate::offset::{ClusterCount, HostCluster, HostOffset};
use crate::qcow2::format::refcount_array;

/// The first offset that no cluster can have: an entry has no more bits for it.
const END: u64 = 1 << 56;

/// Bytes of what a file is made longer with; no cluster is smaller.
const SECTOR: u64 = 512;

/// References to clusters that are no longer there: one for each of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Dropped {
    clusters: Range<HostCluster>,
    /// They led to an L2 table.
    table: bool,
}

/// A request that may be using clusters that it looked up.
pub(super) type InUse = Guard;

pub(super) struct Allocator {
    context: Arc<Context>,
    header: Arc<HeaderOwner>,
    refcounts: Refcounts,
    pool: RankedMutex<Pool>,
    /// Room in host clusters that have compressed contents.
    tails: RankedMutex<Vec<Tail>>,
    /// References that the tables in memory have no more, and those in the file may have.
    drops: RankedMutex<Vec<Dropped>>,
    epochs: Epochs<Dropped>,
    /// The places of the image's own tables; empty if it is only read.
    overlap_check: OverlapCheck,
    lengths: Arc<Lengths>,
}

impl Allocator {
    pub(super) fn new(
        context: Arc<Context>,
        header: Arc<HeaderOwner>,
        refcounts: Refcounts,
        overlap_check: OverlapCheck,
        lengths: Arc<Lengths>,
    ) -> Self {
        Self {
            context,
            header,
            refcounts,
            pool: Rank::Pool.mutex(Pool::default()),
            tails: Rank::Tails.mutex(Vec::new()),
            drops: Rank::Drops.mutex(Vec::new()),
            epochs: Epochs::new(),
            overlap_check,
            lengths,
        }
    }

    /// Enters an epoch, before clusters are looked up: clusters that are dropped later are not reused before it ends.
    pub(super) fn enter(&self) -> InUse {
        self.epochs.enter()
    }

    /// Before the first write; see [`HeaderOwner::begin_writing`].
    pub(super) async fn begin_writing(&self) -> Result<(), ImageError> {
        self.header.begin_writing(self.overlap_check.conflict()).await
    }

    /// Counts runs of clusters, offsets and lengths in bytes, among the image's own tables. Returns false if one of
    /// them has a table already.
    pub(super) fn take_for_bitmap(&self, runs: &[(u64, u64)]) -> bool {
        let mut ranges = runs.iter().map(|(at, bytes)| HostOffset(*at)..HostOffset(at + bytes));
        ranges.all(|range| {
            let is_free = self.overlap_check.within(&range, None).is_none();
            if is_free {
                self.overlap_check.add_all(&range, TableKind::Bitmap);
            }
            is_free
        })
    }

    fn bytes_of(&self, clusters: &Range<HostCluster>) -> Range<HostOffset> {
        let bits = self.context.geometry().cluster_bits;
        clusters.start.begin(bits)..clusters.end.begin(bits)
    }
}

/// Handing out.
impl Allocator {
    /// Allocates `count` clusters, in as few runs as possible. They are counted, and belong to the caller.
    pub(super) async fn allocate(self: &Arc<Self>, count: ClusterCount) -> Result<Vec<Run>, ImageError> {
        let mut runs: Vec<Run> = Vec::new();
        let mut need = count;
        while need > ClusterCount::NONE {
            let taken = self.pool.lock().take(need);
            if let Some(run) = taken {
                need -= run.count;
                match runs.last_mut() {
                    Some(last) if last.first + last.count == run.first && last.zeroed == run.zeroed => {
                        last.count += run.count;
                    }
                    _ => runs.push(run),
                }
                continue;
            }
            if let Err(error) = self.refill(need).await {
                self.put_back(runs);
                return Err(error);
            }
        }
        seams::allocated_all(count, runs.iter().fold(ClusterCount::NONE, |sum, run| sum + run.count))?;
        Ok(runs)
    }

    /// Clusters that were handed out, and to which nothing refers: they are handed out again.
    pub(super) fn put_back(&self, runs: Vec<Run>) {
        self.pool.lock().put_back(runs);
    }

    /// Takes back clusters to which others may still be writing: they are reused when those are done.
    pub(super) fn drop_runs(&self, runs: Vec<Run>) {
        for run in runs {
            self.drop_clusters(run.first..run.first + run.count, false);
        }
    }

    fn refill(self: &Arc<Self>, need: ClusterCount) -> SharedFuture {
        let allocator = Arc::clone(self);
        let work = async move {
            // Another request before this one may have done it.
            if allocator.pool.lock().has_ahead() {
                return Ok(());
            }
            let context = &allocator.context;
            let ahead = context.options().allocate_ahead >> context.geometry().cluster_bits;
            let want = need.max(ClusterCount(ahead));
            allocator.header.ready_for_refcounts().await?;
            let (first, count) = allocator.find_free(need, want).await?;
            let clusters = first..first + count;
            let bytes = allocator.bytes_of(&clusters);
            allocator.admit_free(&bytes).await?;
            // Bytes past the end of the file are zeros, even if the storage cannot prove it afterwards.
            let runs = allocator.proven(&clusters);
            if let Err(error) = allocator.lengthen(bytes).await {
                allocator.pool.lock().give_back(first, count);
                return Err(error);
            }
            allocator.refcounts.count_once(first, count).await?;
            allocator.pool.lock().add_ahead(runs);
            Ok(())
        };
        self.header.exclusively(work.boxed())
    }

    /// Makes the file long enough for clusters that are taken ahead, with space for them, at once: filesystems carry
    /// out writes that lengthen a file one after the other, and find space for each.
    async fn lengthen(&self, bytes: Range<HostOffset>) -> Result<(), ImageError> {
        let file = self.context.file();
        let length = match self.lengths.now(&**file)? {
            Ok(length) => length,
            Err(fault) => {
                let [table, why] = cut_off(fault);
                return Err(self.header.broken_now(table, why).await);
            }
        };
        if bytes.end.0 <= length {
            return Ok(());
        }
        let end = bytes.end.0;
        match file.allocate(bytes.start.0..end).await {
            // Entries of clusters without contents so far will lead there: to within the file. Its length is not set:
            // others may have made it longer meanwhile, and write to clusters behind its old end.
            Err(_) if self.context.geometry().extended_l2 => {
                let zeros = self.context.zeros().slice(0..to_usize(SECTOR));
                self.context.write_table(OperationKind::WriteZeroes, HostOffset(end - SECTOR), zeros.into()).await?;
            }
            // A write there finds out whether there is space for it.
            _ => {}
        }
        self.lengths.is_at_least(file.length()?);
        Ok(())
    }

    /// Up to `want` free clusters, whose refcounts are in one slice.
    async fn find_free(
        self: &Arc<Self>,
        need: ClusterCount,
        want: ClusterCount,
    ) -> Result<(HostCluster, ClusterCount), ImageError> {
        // Given back ones are used up first; a run of a request's own length is better than a longer one in parts.
        let reused = self.pool.lock().reuse(need);
        if let Some((first, count)) = reused {
            // They are counted slice by slice.
            let left = self.refcounts.address(first)?.map_or(ClusterCount::NONE, |address| address.left);
            if left == ClusterCount::NONE {
                return Err(self.context.corrupt(format!("refcount of cluster {first}"), "its refcount block is gone"));
            }
            if left < count {
                self.pool.lock().give_back(first + left, count - left);
            }
            return Ok((first, count.min(left)));
        }
        let geometry = *self.context.geometry();
        loop {
            let cursor = self.pool.lock().cursor();
            if cursor.0.saturating_add(want.0) >= END >> geometry.cluster_bits {
                return Err(self.context.unsupported("it has no room for another cluster"));
            }
            let Some(address) = self.refcounts.address(cursor)? else {
                self.new_block(cursor).await?;
                continue;
            };
            let order = geometry.refcount_order;
            let most = address.left.as_usize();
            let ahead = want.as_usize();
            let (skipped, count) = self
                .refcounts
                .look(address.slice, |bytes| {
                    let is_free = |index: &usize| refcount_array::get(bytes, order, address.index + index) == Some(0);
                    let skipped = (0..most).find(is_free).unwrap_or(most);
                    let count = (skipped..most).take(ahead).take_while(is_free).count();
                    (ClusterCount(skipped as u64), ClusterCount(count as u64))
                })
                .await?;
            self.pool.lock().searched_to(cursor + skipped + count);
            if count > ClusterCount::NONE {
                return Ok((cursor + skipped, count));
            }
        }
    }

    /// Parts of a run by whether the storage proves that they read as zeros.
    fn proven(&self, clusters: &Range<HostCluster>) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let zeros = zero_parts(&self.context, &self.bytes_of(clusters));
        for first in (clusters.start.0..clusters.end.0).map(HostCluster) {
            let bytes = self.bytes_of(&(first..first + ClusterCount::ONE));
            let zeroed = zeros.iter().any(|zero| zero.start <= bytes.start && bytes.end <= zero.end);
            match runs.last_mut() {
                Some(run) if run.zeroed == zeroed => run.count += ClusterCount::ONE,
                _ => runs.push(Run { first, count: ClusterCount::ONE, zeroed }),
            }
        }
        runs
    }
}

/// Returns the parts of a range that the storage of contents proves to read as zeros; neighbours are merged. Of
/// encrypted contents it proves nothing: the zeros of a hole are decrypted to something else.
pub(super) fn zero_parts(context: &Context, range: &Range<HostOffset>) -> Vec<Range<HostOffset>> {
    let mut zeros: Vec<Range<HostOffset>> = Vec::new();
    if context.is_encrypted() {
        return zeros;
    }
    let extents = context.data().extents(range.start.0..range.end.0).unwrap_or_default();
    for extent in extents.into_iter().filter(|extent| extent.kind.is_zero()) {
        let (start, end) = (HostOffset(extent.range.start), HostOffset(extent.range.end));
        match zeros.last_mut() {
            Some(last) if last.end >= start => last.end = last.end.max(end),
            _ => zeros.push(start..end),
        }
    }
    zeros
}
