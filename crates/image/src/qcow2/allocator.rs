//! Where new clusters come from, and where those go that nothing refers to any more.
//!
//! Law: a cluster is handed out once. Its refcount is 1, in memory, before it is handed out; its old references are gone from the file,
//! durably, and no request that knew them is under way. Clusters are taken ahead, in runs; those that the storage proves to read as
//! zeros are known as such until they are handed out.
//!
//! Law: nothing is written over the image's own tables, and nothing of them given back. Every cluster that is to be written, handed out or
//! given back is looked for among them first; what finds that it would be marks the image as corrupt.

use std::ops::Range;
use std::sync::Arc;

use futures_util::FutureExt;
use limosa_storage::{Buffer, Storage};

use super::check::extend;
use super::context::Context;
use super::counters::OperationKind;
use super::entry::L2Entry;
use super::epoch::{Epochs, Guard};
use super::header::REFCOUNT_TABLE_MOST;
use super::header_owner::{HeaderOwner, REPAIR, cut_off};
use super::lengths::Lengths;
use super::locks::{Rank, RankedMutex};
use super::metadata_map::{MetadataMap, Overlap, TableKind};
use super::pool::{Pool, Run};
use super::refcount_array;
use super::refcounts::{LowerError, Refcounts};
use super::shared_future::SharedFuture;
use crate::error::ImageError;
use crate::offset::{ClusterCount, HostCluster, HostOffset, length};

/// Where no cluster can begin: an entry has no more bits for it.
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
pub(super) type InUse = Guard<Dropped>;

pub(super) struct Allocator {
    context: Arc<Context>,
    header: Arc<HeaderOwner>,
    refcounts: Refcounts,
    pool: RankedMutex<Pool>,
    /// References that the tables in memory have no more, and those in the file may have.
    drops: RankedMutex<Vec<Dropped>>,
    epochs: Arc<Epochs<Dropped>>,
    /// Where the image's own tables lie; empty if it is only read.
    metadata: MetadataMap,
    lengths: Arc<Lengths>,
}

impl Allocator {
    pub(super) fn new(
        context: Arc<Context>,
        header: Arc<HeaderOwner>,
        refcounts: Refcounts,
        metadata: MetadataMap,
        lengths: Arc<Lengths>,
    ) -> Self {
        Self {
            context,
            header,
            refcounts,
            pool: Rank::Pool.mutex(Pool::default()),
            drops: Rank::Drops.mutex(Vec::new()),
            epochs: Epochs::new(),
            metadata,
            lengths,
        }
    }

    /// Before clusters are looked up: what was dropped is not used anew before this is.
    pub(super) fn enter(&self) -> InUse {
        self.epochs.enter()
    }

    /// Before the first write; see [`HeaderOwner::begin_writing`].
    pub(super) async fn begin_writing(&self) -> Result<(), ImageError> {
        self.header.begin_writing(self.metadata.conflict()).await
    }

    fn bytes_of(&self, clusters: &Range<HostCluster>) -> Range<HostOffset> {
        let bits = self.context.geometry().cluster_bits;
        clusters.start.begin(bits)..clusters.end.begin(bits)
    }
}

/// Handing out.
impl Allocator {
    /// So many clusters, in as few runs as possible. They are counted, and belong to the caller.
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
        Ok(runs)
    }

    /// Clusters that were handed out, and to which nothing refers: they are handed out again.
    pub(super) fn put_back(&self, runs: Vec<Run>) {
        self.pool.lock().put_back(runs);
    }

    /// The same of clusters to which others may still be writing: they are used anew when those are done.
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
            // What lies behind the end of the file is zeros, whatever the storage knows of it afterwards.
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

    /// Makes the file long enough for clusters that are taken ahead, with space for them, at once: filesystems carry out writes
    /// that lengthen a file one after the other, and find space for each.
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
            // Entries of clusters without contents so far will lead there: to within the file. Its length is not set: others may have
            // made it longer meanwhile, and write to clusters behind its old end.
            Err(_) if self.context.geometry().extended_l2 => {
                let zeros = self.context.zeros().slice(0..usize::try_from(SECTOR).unwrap_or(0));
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
        let zeros = zero_parts(&**self.context.file(), &self.bytes_of(clusters));
        for first in (clusters.start.0..clusters.end.0).map(HostCluster) {
            let bytes = self.bytes_of(&(first..first + ClusterCount::ONE));
            let zeroed = zeros.iter().any(|zero| zero.start <= bytes.start.0 && bytes.end.0 <= zero.end);
            match runs.last_mut() {
                Some(run) if run.zeroed == zeroed => run.count += ClusterCount::ONE,
                _ => runs.push(Run { first, count: ClusterCount::ONE, zeroed }),
            }
        }
        runs
    }

    /// Makes a refcount block for the range of clusters that `at`, which is free, is in; `at` becomes the block.
    async fn new_block(&self, at: HostCluster) -> Result<(), ImageError> {
        let geometry = self.context.geometry();
        let per_block = geometry.refcounts_per_block();
        let number = at.0 / per_block;
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        let (table_at, entries) = self.refcounts.table_place();
        if index >= entries {
            return self.grow_table(at).await;
        }
        let host = at.begin(geometry.cluster_bits);
        self.admit_free(&self.bytes_of(&(at..at + ClusterCount::ONE))).await?;
        self.write_block(host, at.0 % per_block, ClusterCount::ONE).await?;
        // The table refers to it: its contents have to be there before.
        self.context.flush_file().await?;
        let entry = Buffer::copied(&host.0.to_be_bytes());
        self.context.write_table(OperationKind::RefcountWrite, table_at + number * 8, entry.into()).await?;
        self.refcounts.has_block(index, host);
        self.metadata.add(host, TableKind::RefcountBlock);
        self.pool.lock().searched_to(at + ClusterCount::ONE);
        Ok(())
    }

    /// Writes a new refcount block that counts `count` clusters once, from its number `first` on.
    async fn write_block(&self, host: HostOffset, first: u64, count: ClusterCount) -> Result<(), ImageError> {
        let geometry = self.context.geometry();
        let mut bytes = vec![0; usize::try_from(geometry.cluster_size()).unwrap_or(0)];
        for index in first..first + count.0 {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            // All are in the block, and 1 fits into a bit.
            let _ = refcount_array::set(&mut bytes, geometry.refcount_order, index, 1);
        }
        self.context.write_table(OperationKind::RefcountWrite, host, Buffer::copied(&bytes).into()).await
    }

    /// Makes a longer refcount table, with blocks that count it and themselves, in clusters from `at` on, which no entry of the
    /// old one is about.
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
        table.resize(usize::try_from(clusters * per_cluster).unwrap_or(0), 0);
        let end = at + ClusterCount(blocks + clusters);
        self.admit_free(&self.bytes_of(&(at..end))).await?;
        for block in 0..blocks {
            let host = (at + ClusterCount(block)).begin(bits);
            let counted = (first_block + block) * per_block;
            let (from, to) = (at.0.max(counted), end.0.min(counted + per_block));
            self.write_block(host, from - counted, ClusterCount(to - from)).await?;
            if let Some(entry) = usize::try_from(first_block + block).ok().and_then(|index| table.get_mut(index)) {
                *entry = host.0;
            }
        }
        let table_at = (at + ClusterCount(blocks)).begin(bits);
        let bytes: Vec<u8> = table.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.context.write_table(OperationKind::RefcountWrite, table_at, Buffer::copied(&bytes).into()).await?;
        self.context.flush_file().await?;
        let length = u32::try_from(clusters).unwrap_or(u32::MAX);
        // If that fails it is unknown to which table the header leads, and both are right: nothing from `at` on is handed out before
        // the search has come to `at` again, and the same has been written there.
        self.header.change(|header| header.refcount_table = (table_at, length)).await?;
        for block in 0..blocks {
            self.metadata.add((at + ClusterCount(block)).begin(bits), TableKind::RefcountBlock);
        }
        self.refcounts.has_table(table_at, table);
        self.pool.lock().searched_to(end);
        self.metadata.move_refcount_table(&self.bytes_of(&(at + ClusterCount(blocks)..end)));
        let old = old_at.cluster(bits)..old_at.cluster(bits) + ClusterCount(old / per_cluster);
        self.give_up(Dropped { clusters: old, table: false }).await
    }
}

/// Taking back.
impl Allocator {
    fn drop_clusters(&self, clusters: Range<HostCluster>, table: bool) {
        self.drops.lock().push(Dropped { clusters, table });
    }

    /// The tables refer to these bytes once less. They are given back when the file says so, too.
    fn drop_reference(&self, host: HostOffset, length: u64, table: bool) {
        let bits = self.context.geometry().cluster_bits;
        let last = HostOffset(host.0 + length - 1).cluster(bits);
        self.drop_clusters(host.cluster(bits)..last + ClusterCount::ONE, table);
    }

    /// The L1 table refers to this L2 table no more.
    pub(super) fn drop_table(&self, at: HostOffset) {
        self.drop_reference(at, self.context.geometry().cluster_size(), true);
    }

    /// What former entries of L2 tables referred to is dropped; an error if that is where a table lies.
    pub(super) async fn drop_entries(&self, entries: Vec<L2Entry>) -> Result<(), ImageError> {
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

    /// What was dropped up to now, for [`Allocator::are_gone`] or [`Allocator::drop_again`].
    pub(super) fn take_drops(&self) -> Vec<Dropped> {
        self.drops.take()
    }

    /// The file may still have these references.
    pub(super) fn drop_again(&self, drops: Vec<Dropped>) {
        self.drops.lock().extend(drops);
    }

    /// The file has these references no more, durably. What no request can be using any more is given back.
    pub(super) async fn are_gone(self: &Arc<Self>, drops: Vec<Dropped>) -> Result<(), ImageError> {
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

    /// References that are in the file no more: refcounts are lowered, and what nothing refers to is free. Nothing is given back in
    /// an image that is corrupt. Only within [`HeaderOwner::exclusively`].
    async fn give_up(&self, dropped: Dropped) -> Result<(), ImageError> {
        if self.header.is_marked_corrupt() {
            return Ok(());
        }
        let bytes = self.bytes_of(&dropped.clusters);
        // A table that a snapshot has, too, is known as one until nothing has it.
        let but = dropped.table.then_some(TableKind::L2);
        if let Some(overlap) = self.metadata.within(&bytes, but) {
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
                self.metadata.remove_l2(&clusters);
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
    pub(super) async fn write_out(self: &Arc<Self>) -> Result<(), ImageError> {
        if self.context.is_lazy() || !self.refcounts.differ() {
            return Ok(());
        }
        let allocator = Arc::clone(self);
        self.header.exclusively(async move { allocator.refcounts.write().await }.boxed()).await
    }

    /// At the end, when no request is under way and everything else is in the file: gives back what was dropped and what was taken ahead,
    /// writes all refcounts, and cuts off what the file was made longer for.
    pub(super) async fn give_all_back(self: &Arc<Self>) -> Result<(), ImageError> {
        let ahead = self.pool.lock().take_ahead();
        let allocator = Arc::clone(self);
        let give_back = async move {
            let unused = ahead.into_iter().map(|run| run.first..run.first + run.count);
            let unused = unused.map(|clusters| Dropped { clusters, table: false });
            for dropped in allocator.epochs.rest().into_iter().chain(unused) {
                allocator.give_up(dropped).await?;
            }
            allocator.refcounts.write().await?;
            allocator.context.flush_file().await?;
            allocator.cut_back().await;
            allocator.header.refcounts_are_right().await
        };
        self.header.exclusively(give_back.boxed()).await
    }

    /// Cuts off what is free, as far as the file ends with it and was made longer for it.
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

/// Where the image's own tables lie.
impl Allocator {
    /// There is an L2 table from now on.
    pub(super) fn has_l2_table(&self, at: HostOffset) {
        self.metadata.add(at, TableKind::L2);
    }

    /// The table that lies where contents are said to lie.
    pub(super) fn overlap(&self, bytes: &Range<HostOffset>) -> Option<Overlap> {
        if self.context.has_data_file() { None } else { self.metadata.within(bytes, None) }
    }

    /// An error if the image's own tables lie where its contents are said to lie: the image is marked as corrupt.
    pub(super) async fn admit_contents(&self, bytes: &Range<HostOffset>) -> Result<(), ImageError> {
        match self.overlap(bytes) {
            None => Ok(()),
            Some(overlap) => Err(self.contents_on(overlap, bytes.start).await),
        }
    }

    /// Contents are said to lie on a table.
    pub(super) async fn contents_on(&self, overlap: Overlap, host: HostOffset) -> ImageError {
        let why = format!("an L2 entry has the disk's contents there, at {host}; {REPAIR}");
        self.header.broken(overlap.to_string(), why).await
    }

    /// Clusters that are said to be free, and are to be used. Only within [`HeaderOwner::exclusively`].
    async fn admit_free(&self, bytes: &Range<HostOffset>) -> Result<(), ImageError> {
        match self.metadata.within(bytes, None) {
            None => Ok(()),
            Some(overlap) => {
                let why = format!("its clusters are counted as free, and were about to be used; {REPAIR}");
                Err(self.header.broken_now(overlap.to_string(), why).await)
            }
        }
    }

    /// Moves the L1 table to where there is room for `entries`, as it is in the file, and tells where that is. Only within
    /// [`HeaderOwner::exclusively`].
    pub(super) async fn move_l1(&self, old: Range<HostOffset>, entries: u64) -> Result<HostOffset, ImageError> {
        self.header.ready_for_refcounts().await?;
        // If a header could not be written before, it is known from now on to which refcount table it leads.
        self.header.change(|_| {}).await?;
        self.refcounts.write().await?;
        let geometry = self.context.geometry();
        let clusters = geometry.clusters(entries * 8);
        let mut header = self.header.now();
        self.refcounts.forget();
        let file = &**self.context.file();
        let first = match extend::extend(file, &mut header, clusters).await {
            Ok(first) => HostCluster(first),
            Err(error) => {
                // The file may have its old refcount table or a new one: the old one is complete, and is said to be it.
                self.header.change(|_| {}).await?;
                self.pool.lock().forget_free(HostCluster(0));
                return Err(error);
            }
        };
        let (table_at, bytes) = (header.refcount_table.0, header.refcount_table_bytes());
        self.refcounts.read_table(table_at, bytes).await?;
        self.refcounts.blocks().into_iter().for_each(|at| self.metadata.add(at, TableKind::RefcountBlock));
        self.metadata.move_refcount_table(&(table_at..table_at + bytes));
        self.header.has_refcount_table(header.refcount_table);
        self.pool.lock().forget_free(first);
        let at = first.begin(geometry.cluster_bits);
        let mut table =
            if old.is_empty() { Vec::new() } else { self.context.read_file(old.start, length(&old)).await? };
        table.resize(usize::try_from(clusters << geometry.cluster_bits).unwrap_or(0), 0);
        self.context.write_table(OperationKind::L1Write, at, Buffer::copied(&table).into()).await?;
        self.context.flush_file().await?;
        let count = u32::try_from(entries).unwrap_or(u32::MAX);
        self.header.change(|header| header.l1 = (at, count)).await?;
        self.metadata.move_l1_table(&(at..at + entries * 8));
        Ok(at)
    }

    /// The L1 table lies here no more, in the file either. Only within [`HeaderOwner::exclusively`].
    pub(super) async fn give_up_l1(&self, old: Range<HostOffset>) -> Result<(), ImageError> {
        if old.is_empty() {
            return Ok(());
        }
        let geometry = self.context.geometry();
        let first = old.start.cluster(geometry.cluster_bits);
        let clusters = first..first + ClusterCount(geometry.clusters(length(&old)));
        self.give_up(Dropped { clusters, table: false }).await
    }
}

/// What of a range a storage proves to read as zeros; neighbours are one.
pub(super) fn zero_parts(storage: &dyn Storage, range: &Range<HostOffset>) -> Vec<Range<u64>> {
    let mut zeros: Vec<Range<u64>> = Vec::new();
    let extents = storage.extents(range.start.0..range.end.0).unwrap_or_default();
    for extent in extents.into_iter().filter(|extent| extent.kind.is_zero()) {
        match zeros.last_mut() {
            Some(last) if last.end >= extent.range.start => last.end = last.end.max(extent.range.end),
            _ => zeros.push(extent.range),
        }
    }
    zeros
}
