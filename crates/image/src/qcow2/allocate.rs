//! Where new clusters come from.
//!
//! Law: a cluster is handed out once. Its refcount is 1, in memory, before anybody gets it; its old references are gone from the file,
//! durably, and nobody who knew them is under way. Clusters are taken ahead, in runs; those that the storage proves to read as
//! zeros are known as such until they are handed out.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use limosa_storage::{Buffer, Storage};

use super::counters::Purpose;
use super::header::REFCOUNT_TABLE_MOST;
use super::image::{Dropped, Inner};
use super::locks::RankedMutex;
use super::overlap::Table;
use super::refcount_array;
use super::slices::Flight;
use crate::error::ImageError;
use crate::offset::HostOffset;

/// Where no cluster can begin: an entry has no more bits for it.
const END: u64 = 1 << 56;
/// The most runs of given-back clusters that are remembered; the rest is found again by looking through the refcounts.
const REMEMBERED: usize = 1 << 16;

/// Bytes of what a file is made longer with; no cluster is smaller.
const SECTOR: u64 = 512;

/// Clusters next to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// The first one's number.
    pub(super) first: u64,
    pub(super) count: u64,
    /// The storage proves that they read as zeros.
    pub(super) zeroed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Pool {
    /// Taken ahead.
    ahead: VecDeque<Run>,
    /// Below `cursor`, and free: first ones and how many.
    free: BTreeMap<u64, u64>,
    /// Where the search for free clusters goes on.
    cursor: u64,
}

impl Pool {
    /// Takes up to `want` clusters out of what was taken ahead.
    fn take(&mut self, want: u64) -> Option<Run> {
        let front = self.ahead.front_mut()?;
        let run = Run { count: front.count.min(want), ..*front };
        front.first += run.count;
        front.count -= run.count;
        if front.count == 0 {
            self.ahead.pop_front();
        }
        Some(run)
    }

    /// Takes up to `want` free clusters that were given back: a run that is long enough, or any.
    fn reuse(&mut self, want: u64) -> Option<(u64, u64)> {
        let fits = self.free.iter().take(64).find(|(_, count)| **count >= want);
        let (first, count) = fits.or_else(|| self.free.first_key_value()).map(|(first, count)| (*first, *count))?;
        self.free.remove(&first);
        let taken = count.min(want);
        if taken < count {
            self.free.insert(first + taken, count - taken);
        }
        Some((first, taken))
    }

    /// From cluster `first` on it is found out anew which clusters are free, from the refcounts.
    pub(super) fn forget_free(&mut self, first: u64) {
        self.free.split_off(&first);
        if let Some((before, count)) = self.free.iter_mut().next_back() {
            *count = (*count).min(first - before);
        }
        self.cursor = self.cursor.min(first);
    }

    /// These are free now.
    pub(super) fn give_back(&mut self, first: u64, count: u64) {
        if first >= self.cursor {
            return;
        }
        if self.free.len() >= REMEMBERED {
            self.forget_free(0);
            return;
        }
        let (mut first, mut count) = (first, count);
        if let Some((before, length)) = self.free.range(..first).next_back().map(|(a, b)| (*a, *b))
            && before + length == first
        {
            self.free.remove(&before);
            (first, count) = (before, length + count);
        }
        if let Some(length) = self.free.remove(&(first + count)) {
            count += length;
        }
        self.free.insert(first, count);
    }
}

impl Inner {
    /// Does something to refcounts or the header after everything else that was begun before; one at a time. Whoever waits drives
    /// what stands before him, too. Nothing within may wait for it again.
    pub(super) fn exclusively(self: &Arc<Self>, work: BoxFuture<'static, Result<(), ImageError>>) -> Flight {
        behind(&self.last, work)
    }

    /// So many clusters, as few runs as there are. They are counted, and belong to whoever asked.
    pub(super) async fn allocate(self: &Arc<Self>, count: u64) -> Result<Vec<Run>, ImageError> {
        let mut runs: Vec<Run> = Vec::new();
        let mut need = count;
        while need > 0 {
            if let Some(run) = self.pool.lock().take(need) {
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

    /// Clusters that were handed out, and to which nothing refers: others may have them.
    pub(super) fn put_back(&self, runs: Vec<Run>) {
        let mut pool = self.pool.lock();
        for run in runs.into_iter().rev() {
            pool.ahead.push_front(Run { zeroed: false, ..run });
        }
    }

    /// All that was taken ahead.
    pub(super) fn all_ahead(&self) -> Vec<Run> {
        std::mem::take(&mut self.pool.lock().ahead).into()
    }

    fn refill(self: &Arc<Self>, need: u64) -> Flight {
        let inner = Arc::clone(self);
        let work = async move {
            // Somebody before us may have done it.
            if !inner.pool.lock().ahead.is_empty() {
                return Ok(());
            }
            let want = need.max(inner.options.allocate_ahead >> inner.geometry.cluster_bits);
            inner.ready_for_refcounts().await?;
            let (first, count) = inner.find_free(need, want).await?;
            let bytes = inner.bytes_of(first, count);
            inner.admit_free(&bytes).await?;
            // What lies behind the end of the file is zeros, whatever the storage knows of it afterwards.
            let runs = inner.proven(first, count);
            if let Err(error) = inner.lengthen(bytes).await {
                inner.pool.lock().give_back(first, count);
                return Err(error);
            }
            inner.take(first, count).await?;
            inner.pool.lock().ahead.extend(runs);
            Ok(())
        };
        self.exclusively(work.boxed())
    }

    /// Makes the file long enough for clusters that are taken ahead, with space for them, at once: filesystems carry out writes
    /// that lengthen a file one after the other, and find space for each.
    async fn lengthen(&self, bytes: Range<u64>) -> Result<(), ImageError> {
        let length = match self.length_now()? {
            Ok(length) => length,
            Err([table, why]) => return Err(self.broken_now(table, why).await),
        };
        if bytes.end <= length {
            return Ok(());
        }
        let end = bytes.end;
        match self.file.allocate(bytes).await {
            // Entries of clusters without contents so far will lead there: to within the file. Its length is not set: others may have
            // made it longer meanwhile, who write to clusters behind its old end.
            Err(_) if self.geometry.extended_l2 => {
                self.counters.add(Purpose::WriteZeroes, SECTOR);
                let zeros = self.zeros.slice(0..usize::try_from(SECTOR).unwrap_or(0));
                self.file.write(end - SECTOR, zeros.into()).await?;
            }
            // Whoever writes there finds out whether there is space for him.
            _ => {}
        }
        self.longest.fetch_max(self.file.length()?, Ordering::AcqRel);
        Ok(())
    }

    pub(super) fn bytes_of(&self, first: u64, count: u64) -> Range<u64> {
        first << self.geometry.cluster_bits..(first + count) << self.geometry.cluster_bits
    }

    /// Up to `want` free clusters.
    async fn find_free(self: &Arc<Self>, need: u64, want: u64) -> Result<(u64, u64), ImageError> {
        // Given back ones are used up first; a run of a request's own length is better than a longer one in parts.
        let reused = self.pool.lock().reuse(need);
        if let Some((first, count)) = reused {
            // They are counted slice by slice.
            let left = self.refcount_place(first)?.map_or(0, |place| place.left);
            if left == 0 {
                return Err(self.corrupt(format!("refcount of cluster {first:#x}"), "its refcount block is gone"));
            }
            if left < count {
                self.pool.lock().give_back(first + left, count - left);
            }
            return Ok((first, count.min(left)));
        }
        loop {
            let cursor = self.pool.lock().cursor;
            if cursor.saturating_add(want) >= END >> self.geometry.cluster_bits {
                let what = "it has no room for another cluster".to_owned();
                return Err(ImageError::Unsupported { image: Arc::clone(&self.name), what });
            }
            let Some(place) = self.refcount_place(cursor)? else {
                self.new_block(cursor).await?;
                continue;
            };
            let order = self.geometry.refcount_order;
            let most = usize::try_from(place.left).unwrap_or(usize::MAX);
            let ahead = usize::try_from(want).unwrap_or(usize::MAX);
            let (skipped, count) = self
                .refcount_slice(place.key, |bytes| {
                    let is_free = |index: &usize| refcount_array::get(bytes, order, place.index + index) == Some(0);
                    let skipped = (0..most).find(is_free).unwrap_or(most);
                    (skipped as u64, (skipped..most).take(ahead).take_while(is_free).count() as u64)
                })
                .await?;
            self.pool.lock().cursor = cursor + skipped + count;
            if count > 0 {
                return Ok((cursor + skipped, count));
            }
        }
    }

    /// Parts of a run by whether the storage proves that they read as zeros.
    fn proven(&self, first: u64, count: u64) -> Vec<Run> {
        let bits = self.geometry.cluster_bits;
        let mut runs: Vec<Run> = Vec::new();
        let zeros = zero_parts(&*self.file, self.bytes_of(first, count));
        for cluster in first..first + count {
            let bytes = self.bytes_of(cluster, 1);
            let zeroed = zeros.iter().any(|zero| zero.start <= bytes.start && bytes.end <= zero.end);
            match runs.last_mut() {
                Some(run) if run.zeroed == zeroed => run.count += 1,
                _ => runs.push(Run { first: bytes.start >> bits, count: 1, zeroed }),
            }
        }
        runs
    }

    /// Makes a refcount block for the range of clusters that `at`, which is free, is in; `at` becomes the block.
    async fn new_block(self: &Arc<Self>, at: u64) -> Result<(), ImageError> {
        let per_block = self.geometry.refcounts_per_block();
        let number = at / per_block;
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        let (table_at, entries) = {
            let refcounts = self.refcounts.lock();
            (refcounts.table_at, refcounts.blocks.len())
        };
        if index >= entries {
            return self.grow_table(at).await;
        }
        let host = at << self.geometry.cluster_bits;
        self.admit_free(&self.bytes_of(at, 1)).await?;
        self.write_block(host, at % per_block, 1).await?;
        // The table refers to it: its contents have to be there before.
        self.flush_file().await?;
        self.counters.add(Purpose::RefcountWrite, 8);
        self.file.write(table_at + number * 8, Buffer::copied(&host.to_be_bytes()).into()).await?;
        if let Some(block) = self.refcounts.lock().blocks.get_mut(index) {
            *block = host;
        }
        self.metadata.add(host, Table::RefcountBlock);
        self.pool.lock().cursor = at + 1;
        Ok(())
    }

    /// Writes a new refcount block that counts `count` clusters once, from number `first` of its own on.
    async fn write_block(&self, host: u64, first: u64, count: u64) -> Result<(), ImageError> {
        let mut bytes = vec![0; usize::try_from(self.geometry.cluster_size()).unwrap_or(0)];
        for index in first..first + count {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            // All are in the block, and 1 fits into a bit.
            let _ = refcount_array::set(&mut bytes, self.geometry.refcount_order, index, 1);
        }
        self.counters.add(Purpose::RefcountWrite, bytes.len() as u64);
        Ok(self.file.write(host, Buffer::copied(&bytes).into()).await?)
    }

    /// Makes a longer refcount table, with blocks that count it and themselves, in clusters from `at` on, which no entry of the
    /// old one is about.
    async fn grow_table(self: &Arc<Self>, at: u64) -> Result<(), ImageError> {
        let (bits, per_block) = (self.geometry.cluster_bits, self.geometry.refcounts_per_block());
        let per_cluster = self.geometry.cluster_size() / 8;
        let (old_at, mut table) = {
            let refcounts = self.refcounts.lock();
            (refcounts.table_at, refcounts.blocks.clone())
        };
        let old = table.len() as u64;
        let first_block = at / per_block;
        let (mut clusters, mut blocks) = ((old + old / 2).max(first_block + 1).div_ceil(per_cluster), 0);
        loop {
            let needed = (at + clusters + blocks - 1) / per_block - first_block + 1;
            let room = (first_block + needed).div_ceil(per_cluster);
            if needed == blocks && room <= clusters {
                break;
            }
            (blocks, clusters) = (needed.max(blocks), room.max(clusters));
        }
        if clusters << bits > REFCOUNT_TABLE_MOST {
            let what =
                format!("its refcount table cannot be longer than {REFCOUNT_TABLE_MOST} bytes, so it cannot grow");
            return Err(ImageError::Unsupported { image: Arc::clone(&self.name), what });
        }
        table.resize(usize::try_from(clusters * per_cluster).unwrap_or(0), 0);
        let end = at + blocks + clusters;
        self.admit_free(&self.bytes_of(at, end - at)).await?;
        for block in 0..blocks {
            let host = (at + block) << bits;
            let counted = (first_block + block) * per_block;
            let (from, to) = (at.max(counted), end.min(counted + per_block));
            self.write_block(host, from - counted, to - from).await?;
            if let Some(entry) = usize::try_from(first_block + block).ok().and_then(|index| table.get_mut(index)) {
                *entry = host;
            }
        }
        let table_at = (at + blocks) << bits;
        let bytes: Vec<u8> = table.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.counters.add(Purpose::RefcountWrite, bytes.len() as u64);
        self.file.write(table_at, Buffer::copied(&bytes).into()).await?;
        self.flush_file().await?;
        let length = u32::try_from(clusters).unwrap_or(u32::MAX);
        // If that fails nobody knows to which table the header leads, and both are right: nothing from `at` on is handed out before
        // somebody has come to `at` again, and written the same there.
        self.change_header(|header| header.refcount_table = (HostOffset(table_at), length)).await?;
        for block in 0..blocks {
            self.metadata.add((at + block) << bits, Table::RefcountBlock);
        }
        {
            let mut refcounts = self.refcounts.lock();
            refcounts.table_at = table_at;
            refcounts.blocks = table;
        }
        self.pool.lock().cursor = end;
        self.metadata.move_refcount_table(&self.bytes_of(at + blocks, clusters));
        self.give_up(Dropped { first: old_at >> bits, count: old / per_cluster, table: false }).await
    }

    /// Clusters whose refcounts are 0 now, and which nobody uses: others may have them.
    pub(super) async fn release(&self, free: Vec<(u64, u64)>) {
        for (first, count) in free {
            if self.options.discard {
                let bytes = self.bytes_of(first, count);
                self.counters.add(Purpose::Discard, bytes.end - bytes.start);
                // Whether the storage takes it back is its affair.
                let _ = self.file.discard(bytes).await;
            }
            self.pool.lock().give_back(first, count);
        }
    }
}

/// Work that begins when what was begun before it is over. Whoever waits for it drives that, too.
pub(super) fn behind(last: &RankedMutex<Option<Flight>>, work: BoxFuture<'static, Result<(), ImageError>>) -> Flight {
    let mut last = last.lock();
    let before = last.take();
    let flight: Flight = async move {
        if let Some(before) = before {
            let _ = before.await;
        }
        work.await
    }
    .boxed()
    .shared();
    *last = Some(flight.clone());
    flight
}

impl Inner {
    /// Cuts off what is free, as far as the file ends with it and was made longer for it.
    pub(super) async fn cut_back(&self) {
        let last = self.pool.lock().free.last_key_value().map(|(first, count)| self.bytes_of(*first, *count));
        let (Some(free), Ok(length)) = (last, self.file.length()) else { return };
        let end = free.start.max(self.length_at_open);
        if end < length && length <= free.end && !self.marked_corrupt.load(Ordering::Acquire) {
            // Whether the storage can become shorter is its affair.
            let _ = self.file.set_len(end).await;
        }
    }
}

/// What of a range a storage proves to read as zeros; neighbours are one.
pub(super) fn zero_parts(storage: &dyn Storage, range: Range<u64>) -> Vec<Range<u64>> {
    let mut zeros: Vec<Range<u64>> = Vec::new();
    for extent in storage.extents(range).unwrap_or_default().into_iter().filter(|extent| extent.kind.is_zero()) {
        match zeros.last_mut() {
            Some(last) if last.end >= extent.range.start => last.end = last.end.max(extent.range.end),
            _ => zeros.push(extent.range),
        }
    }
    zeros
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_back_clusters_grow_together_and_are_used_by_who_fits() {
        let mut pool = Pool { cursor: 100, ..Pool::default() };
        for (first, count) in [(10, 2), (14, 1), (12, 2), (50, 8), (120, 3)] {
            pool.give_back(first, count);
        }
        assert_eq!(pool.free, BTreeMap::from([(10, 5), (50, 8)]));
        assert_eq!(pool.reuse(6), Some((50, 6)));
        assert_eq!(pool.reuse(6), Some((10, 5)));
        assert_eq!(pool.reuse(1), Some((56, 1)));
        assert_eq!(pool.reuse(2), Some((57, 1)));
        assert_eq!(pool.reuse(1), None);
    }

    #[test]
    fn free_clusters_across_the_end_of_a_slice_of_refcounts_are_used_anew() {
        use limosa_storage::block_on;
        use limosa_storage::testing::SparseMemory;

        use crate::disk::Disk;
        use crate::offset::GuestOffset;
        use crate::qcow2::create::{CreateOptions, create};
        use crate::qcow2::image::{Parts, Qcow2, Qcow2Options};

        let file: Arc<dyn Storage> = Arc::new(SparseMemory::file("image", 4 << 20));
        let options = CreateOptions { size: 1 << 20, cluster_size: 512, ..CreateOptions::default() };
        let header = block_on(create(&*file, None, &options)).unwrap();
        let options = Qcow2Options { allocate_ahead: 0, ..Qcow2Options::default() };
        let disk = block_on(Qcow2::open(Parts { file, data_file: None, backing: None, header }, options)).unwrap();
        let (at, length) = (GuestOffset(0), 512 << 10);
        block_on(async {
            disk.write(at, Buffer::copied(&vec![1; length]).into()).await?;
            disk.discard(at, length as u64).await?;
            disk.flush().await?;
            // 256 refcounts are in a slice: some requests want clusters of both sides.
            let bytes = Buffer::copied(&vec![2; length]);
            disk.write(at, bytes.into()).await?;
            let found = Buffer::zeroed(length);
            disk.read(at, found.clone().into()).await?;
            assert!(found.to_vec().iter().all(|byte| *byte == 2));
            disk.close().await
        })
        .unwrap();
    }

    #[test]
    fn what_was_taken_ahead_is_handed_out_in_order() {
        let mut pool = Pool::default();
        pool.ahead.push_back(Run { first: 5, count: 3, zeroed: true });
        assert_eq!(pool.take(2), Some(Run { first: 5, count: 2, zeroed: true }));
        assert_eq!(pool.take(2), Some(Run { first: 7, count: 1, zeroed: true }));
        assert_eq!(pool.take(2), None);
    }
}
