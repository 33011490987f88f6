//! The image's own tables: where they lie, and how those that count clusters, and the L1 table, grow.
//!
//! Law: a table is written, and durable, before anything refers to it. What grows is written at once, not by the
//! flusher.

use std::ops::Range;

use limosa_page::{broken_invariant, invariant, to_usize};
use limosa_storage::Buffer;

use super::super::counters::OperationKind;
use super::super::header_owner::REPAIR;
use super::super::overlap_check::{Overlap, TableKind};
use super::{Allocator, Dropped};
use crate::error::ImageError;
use crate::offset::{ClusterCount, HostCluster, HostOffset, length};
use crate::qcow2::format::header::REFCOUNT_TABLE_MOST;
use crate::qcow2::format::refcount_array;
use crate::qcow2::offline::check::extend;

impl Allocator {
    /// Makes a refcount block for the range of clusters that `at`, which is free, is in; `at` becomes the block.
    pub(super) async fn new_block(&self, at: HostCluster) -> Result<(), ImageError> {
        let geometry = self.context.geometry();
        let per_block = geometry.refcounts_per_block();
        let number = at.0 / per_block;
        let index = to_usize(number);
        let (table_at, entries) = self.refcounts.table_place();
        if index >= entries {
            return self.grow_table(at).await;
        }
        let host = at.begin(geometry.cluster_bits);
        self.admit_free(&self.bytes_of(&(at..at + ClusterCount::ONE))).await?;
        self.write_block(host, at.0 % per_block, ClusterCount::ONE).await?;
        // The table refers to it: its contents have to be there before.
        self.context.flush_file().await?;
        let entry = Buffer::from_slice(&host.0.to_be_bytes());
        self.context.write_table(OperationKind::RefcountWrite, table_at + number * 8, entry.into()).await?;
        self.refcounts.has_block(index, host)?;
        self.overlap_check.add(host, TableKind::RefcountBlock);
        self.pool.lock().searched_to(at + ClusterCount::ONE);
        Ok(())
    }

    /// Writes a new refcount block that counts `count` clusters once, from its number `first` on.
    async fn write_block(&self, host: HostOffset, first: u64, count: ClusterCount) -> Result<(), ImageError> {
        let geometry = self.context.geometry();
        let mut bytes = vec![0; to_usize(geometry.cluster_size())];
        for index in first..first + count.0 {
            let index = to_usize(index);
            let set = refcount_array::set(&mut bytes, geometry.refcount_order, index, 1);
            invariant(set, "a new refcount block has a place for what it counts")?;
        }
        self.context.write_table(OperationKind::RefcountWrite, host, Buffer::from_slice(&bytes).into()).await
    }

    /// Makes a longer refcount table, with blocks that count it and themselves, in clusters from `at` on, which no
    /// entry of the old one is about.
    async fn grow_table(&self, at: HostCluster) -> Result<(), ImageError> {
        let geometry = self.context.geometry();
        let (bits, per_block) = (geometry.cluster_bits, geometry.refcounts_per_block());
        let per_cluster = geometry.cluster_size() / 8;
        let (old_at, mut table) = self.refcounts.table();
        let old = table.len() as u64;
        let first_block = at.0 / per_block;
        let (mut clusters, mut blocks) = ((old + old / 2).max(first_block + 1).div_ceil(per_cluster), 0);
        loop {
            let needed = (at.0 + clusters + blocks - 1) / per_block - first_block + 1;
            let room = (first_block + needed).div_ceil(per_cluster);
            if needed == blocks && room <= clusters {
                break;
            }
            (blocks, clusters) = (needed.max(blocks), room.max(clusters));
        }
        if clusters << bits > REFCOUNT_TABLE_MOST {
            return Err(self.context.unsupported(format!(
                "its refcount table cannot be longer than {REFCOUNT_TABLE_MOST} bytes, so it cannot grow"
            )));
        }
        table.resize(to_usize(clusters * per_cluster), 0);
        let end = at + ClusterCount(blocks + clusters);
        self.admit_free(&self.bytes_of(&(at..end))).await?;
        for block in 0..blocks {
            let host = (at + ClusterCount(block)).begin(bits);
            let counted = (first_block + block) * per_block;
            let (from, to) = (at.0.max(counted), end.0.min(counted + per_block));
            self.write_block(host, from - counted, ClusterCount(to - from)).await?;
            let entry = table.get_mut(to_usize(first_block + block));
            *entry
                .ok_or_else(|| broken_invariant("a longer refcount table has an entry for each of its new blocks"))? =
                host.0;
        }
        let table_at = (at + ClusterCount(blocks)).begin(bits);
        let bytes: Vec<u8> = table.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.context.write_table(OperationKind::RefcountWrite, table_at, Buffer::from_slice(&bytes).into()).await?;
        self.context.flush_file().await?;
        let length =
            u32::try_from(clusters).map_err(|_| broken_invariant("a refcount table is within the format's limit"))?;
        // If that fails it is unknown to which table the header leads, and both are right: nothing from `at` on is
        // handed out before the search has come to `at` again, and the same has been written there.
        self.header.change(|header| header.refcount_table = (table_at, length)).await?;
        for block in 0..blocks {
            self.overlap_check.add((at + ClusterCount(block)).begin(bits), TableKind::RefcountBlock);
        }
        self.refcounts.has_table(table_at, table);
        self.pool.lock().searched_to(end);
        self.overlap_check.move_refcount_table(&self.bytes_of(&(at + ClusterCount(blocks)..end)));
        let old = old_at.cluster(bits)..old_at.cluster(bits) + ClusterCount(old / per_cluster);
        self.give_up(Dropped { clusters: old, table: false }).await
    }

    /// There is an L2 table from now on.
    pub(in super::super) fn has_l2_table(&self, at: HostOffset) {
        self.overlap_check.add(at, TableKind::L2);
    }

    /// The table that lies where contents are said to lie.
    pub(in super::super) fn overlap(&self, bytes: &Range<HostOffset>) -> Option<Overlap> {
        if self.context.has_data_file() { None } else { self.overlap_check.within(bytes, None) }
    }

    /// An error if the image's own tables lie where its contents are said to lie: the image is marked as corrupt.
    pub(in super::super) async fn admit_contents(&self, bytes: &Range<HostOffset>) -> Result<(), ImageError> {
        match self.overlap(bytes) {
            None => Ok(()),
            Some(overlap) => Err(self.contents_on(overlap, bytes.start).await),
        }
    }

    /// Contents are said to lie on a table.
    pub(in super::super) async fn contents_on(&self, overlap: Overlap, host: HostOffset) -> ImageError {
        let why = format!("an L2 entry has the disk's contents there, at {host}; {REPAIR}");
        self.header.broken(overlap.to_string(), why).await
    }

    /// Admits free clusters that are about to be used. Only within [`HeaderOwner::exclusively`].
    pub(super) async fn admit_free(&self, bytes: &Range<HostOffset>) -> Result<(), ImageError> {
        match self.overlap_check.within(bytes, None) {
            None => Ok(()),
            Some(overlap) => {
                let why = format!("its clusters are counted as free, and were about to be used; {REPAIR}");
                Err(self.header.broken_now(overlap.to_string(), why).await)
            }
        }
    }

    /// Moves the L1 table to where there is room for `entries`, as it is in the file, and tells where that is. Only
    /// within [`HeaderOwner::exclusively`].
    pub(in super::super) async fn move_l1(
        &self,
        old: Range<HostOffset>,
        entries: u64,
    ) -> Result<HostOffset, ImageError> {
        self.header.ready_for_refcounts().await?;
        // If a header could not be written before, it is known from now on to which refcount table it leads.
        self.header.change(|_| {}).await?;
        self.refcounts.write().await?;
        let geometry = self.context.geometry();
        let clusters = geometry.clusters(entries * 8);
        let mut header = self.header.now();
        let old_table = (header.refcount_table.0, header.refcount_table_bytes());
        self.refcounts.forget();
        let file = &**self.context.file();
        let extended = async {
            let first = extend::extend_beside(file, &mut header, clusters).await?;
            self.refcounts.read_table(header.refcount_table.0, header.refcount_table_bytes()).await?;
            Ok(HostCluster(first))
        };
        let first = match extended.await {
            Ok(first) => first,
            Err(error) => {
                // The file may have its old refcount table or a new one: the old one is complete, and is said to be it.
                self.pool.lock().forget_free(HostCluster(0));
                self.header.say_again().await?;
                return Err(error);
            }
        };
        let (table_at, bytes) = (header.refcount_table.0, header.refcount_table_bytes());
        if table_at != old_table.0 {
            // A failure leaves lost space.
            let _ = extend::release(file, &header, old_table.0.0, old_table.1).await;
        }
        self.refcounts.blocks().into_iter().for_each(|at| self.overlap_check.add(at, TableKind::RefcountBlock));
        self.overlap_check.move_refcount_table(&(table_at..table_at + bytes));
        self.header.has_refcount_table(header.refcount_table);
        self.pool.lock().forget_free(first);
        let at = first.begin(geometry.cluster_bits);
        let mut table =
            if old.is_empty() { Vec::new() } else { self.context.read_file(old.start, length(&old)).await? };
        table.resize(to_usize(clusters << geometry.cluster_bits), 0);
        self.context.write_table(OperationKind::L1Write, at, Buffer::from_slice(&table).into()).await?;
        self.context.flush_file().await?;
        let count = u32::try_from(entries).map_err(|_| broken_invariant("an L1 table is within the format's limit"))?;
        self.header.change(|header| header.l1 = (at, count)).await?;
        self.overlap_check.move_l1_table(&(at..at + entries * 8));
        Ok(at)
    }

    /// The L1 table lies here no more, in the file either. Only within [`HeaderOwner::exclusively`].
    pub(in super::super) async fn give_up_l1(&self, old: Range<HostOffset>) -> Result<(), ImageError> {
        if old.is_empty() {
            return Ok(());
        }
        let geometry = self.context.geometry();
        let first = old.start.cluster(geometry.cluster_bits);
        let clusters = first..first + ClusterCount(geometry.clusters(length(&old)));
        self.give_up(Dropped { clusters, table: false }).await
    }
}
