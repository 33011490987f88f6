//! Taking clusters back: references that are gone, and what was taken ahead and not used.
//!
//! Law: a refcount is lowered when the file has no reference any more, durably; a cluster is free when no request that
//! knew it is under way.

use std::ops::Range;
use std::sync::Arc;

use futures_util::FutureExt;

use super::super::counters::OperationKind;
use super::super::header_owner::REPAIR;
use super::super::overlap_check::TableKind;
use super::super::refcounts::LowerError;
use super::super::seams;
use super::{Allocator, Dropped};
use crate::error::ImageError;
use crate::offset::{ClusterCount, HostCluster, HostOffset, length};
use crate::qcow2::format::entry::L2Entry;

impl Allocator {
    pub(super) fn drop_clusters(&self, clusters: Range<HostCluster>, table: bool) {
        self.drops.lock().push(Dropped { clusters, table });
    }

    /// Notes that the tables in memory refer to these bytes once less. They are given back when the file's tables do.
    pub(super) fn drop_reference(&self, host: HostOffset, length: u64, table: bool) {
        let bits = self.context.geometry().cluster_bits;
        let last = HostOffset(host.0 + length - 1).cluster(bits);
        self.drop_clusters(host.cluster(bits)..last + ClusterCount::ONE, table);
    }

    /// The L1 table refers to this L2 table no more.
    pub(in super::super) fn drop_table(&self, at: HostOffset) {
        self.drop_reference(at, self.context.geometry().cluster_size(), true);
    }

    /// Drops the clusters of former L2 entries; fails if one of them is a table.
    pub(in super::super) async fn drop_entries(&self, entries: Vec<L2Entry>) -> Result<(), ImageError> {
        let mut dropped = Ok(());
        if self.context.has_data_file() {
            return dropped;
        }
        for old in entries {
            let (host, length) = match old {
                L2Entry::Standard { host: Some(host), .. } => (host, self.context.geometry().cluster_size()),
                L2Entry::Compressed { host, length } => (host, u64::from(length)),
                L2Entry::Standard { host: None, .. } => continue,
            };
            match self.overlap(&(host..host.saturating_add(length))) {
                None => self.drop_reference(host, length, false),
                Some(overlap) => dropped = dropped.and(Err(self.contents_on(overlap, host).await)),
            }
        }
        dropped
    }

    /// Takes all references dropped up to now, for [`Allocator::are_gone`] or [`Allocator::drop_again`].
    pub(in super::super) fn take_drops(&self) -> Vec<Dropped> {
        self.drops.take()
    }

    /// The file may still have these references.
    pub(in super::super) fn drop_again(&self, drops: Vec<Dropped>) {
        self.drops.lock().extend(drops);
    }

    /// The file has these references no more, durably. What no request can be using any more is given back.
    pub(in super::super) async fn are_gone(self: &Arc<Self>, drops: Vec<Dropped>) -> Result<(), ImageError> {
        let free = self.epochs.pass(drops);
        if free.is_empty() {
            return Ok(());
        }
        let allocator = Arc::clone(self);
        let lowered = async move {
            for dropped in free {
                allocator.give_up(dropped).await?;
            }
            Ok(())
        };
        self.header.exclusively(lowered.boxed()).await
    }

    /// References that are in the file no more: refcounts are lowered, and what nothing refers to is free. Nothing is
    /// given back in an image that is corrupt. Only within [`HeaderOwner::exclusively`].
    pub(super) async fn give_up(&self, dropped: Dropped) -> Result<(), ImageError> {
        if self.header.is_marked_corrupt() {
            return Ok(());
        }
        let bytes = self.bytes_of(&dropped.clusters);
        // A table that a snapshot has, too, is known as one until nothing has it.
        let but = dropped.table.then_some(TableKind::L2);
        if let Some(overlap) = self.overlap_check.within(&bytes, but) {
            let why = format!("it lies where something else lay that was given up, at {}; {REPAIR}", bytes.start);
            return Err(self.header.broken_now(overlap.to_string(), why).await);
        }
        let free = match self.refcounts.lower(&dropped.clusters).await {
            Ok(free) => free,
            Err(LowerError::Other(error)) => return Err(error),
            Err(LowerError::Zero(cluster)) => {
                let at = cluster.begin(self.context.geometry().cluster_bits);
                let why = "it is 0, and the cluster was in use";
                return Err(self.header.broken_now(format!("refcount of the cluster at {at}"), why).await);
            }
        };
        for clusters in free {
            if dropped.table {
                self.overlap_check.remove_l2(&clusters);
            }
            self.release(&clusters).await;
        }
        Ok(())
    }

    /// Clusters whose refcounts are 0 now, and which no request uses: they may be handed out.
    async fn release(&self, clusters: &Range<HostCluster>) {
        if self.context.options().discard {
            let bytes = self.bytes_of(clusters);
            self.context.counters().add(OperationKind::Discard, length(&bytes));
            // A storage need not take it back.
            let _ = self.context.file().discard(bytes.start.0..bytes.end.0).await;
        }
        self.pool.lock().give_back(clusters.start, clusters.end - clusters.start);
    }

    /// Refcounts that differ from the file are written, unless they are written late.
    pub(in super::super) async fn write_out(self: &Arc<Self>) -> Result<(), ImageError> {
        if self.context.is_lazy() || !self.refcounts.differ() {
            return Ok(());
        }
        let allocator = Arc::clone(self);
        self.header.exclusively(async move { allocator.refcounts.write().await }.boxed()).await
    }

    /// Checks that tables which are about to be referred to are counted, if their refcounts are in memory.
    ///
    /// No invariant of limosa's: an image whose refcounts are too low, and written late, can have a cluster given back
    /// that a table was put into meanwhile.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`]
    pub(in super::super) fn check_counted(&self, tables: &[HostOffset]) -> Result<(), ImageError> {
        let bits = self.context.geometry().cluster_bits;
        for table in tables {
            if self.refcounts.known(table.cluster(bits))? == Some(0) {
                let why = "it is used by a table and counted as free: the image's refcounts are too low";
                return Err(self.context.corrupt(format!("refcount of the cluster at {table}"), why));
            }
        }
        Ok(())
    }

    /// Returns whether references were dropped that no flush has taken.
    pub(in super::super) fn has_drops(&self) -> bool {
        !self.drops.lock().is_empty()
    }

    /// At the end, when no request is under way and everything else is in the file: gives back what was dropped and
    /// what was taken ahead, writes all refcounts, and cuts off what the file was made longer for.
    pub(in super::super) async fn give_all_back(self: &Arc<Self>) -> Result<(), ImageError> {
        let ahead = self.pool.lock().take_ahead();
        let tails = self.take_tails();
        let allocator = Arc::clone(self);
        let give_back = async move {
            let unused = ahead.into_iter().map(|run| run.first..run.first + run.count);
            let unused = unused.map(|clusters| Dropped { clusters, table: false });
            seams::no_request_inside(allocator.epochs.inside())?;
            for dropped in allocator.epochs.rest().into_iter().chain(unused).chain(tails) {
                allocator.give_up(dropped).await?;
            }
            allocator.refcounts.write().await?;
            seams::nothing_dirty(allocator.refcounts.differ())?;
            allocator.context.flush_file().await?;
            allocator.cut_back().await;
            allocator.header.refcounts_are_right().await
        };
        self.header.exclusively(give_back.boxed()).await
    }

    /// Truncates free clusters at the end of the file that were allocated ahead.
    async fn cut_back(&self) {
        let last = self.pool.lock().last_free().map(|(first, count)| self.bytes_of(&(first..first + count)));
        let (Some(free), Ok(length)) = (last, self.context.file().length()) else { return };
        let end = free.start.0.max(self.lengths.at_open());
        if end < length && length <= free.end.0 && !self.header.is_marked_corrupt() {
            // A storage need not become shorter.
            let _ = self.context.file().set_len(end).await;
        }
    }
}
