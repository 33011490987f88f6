//! The places of an image's own tables, and the requests that may not touch them.
//!
//! Law: no cluster is two things. Nothing is handed out, written as contents, given back or discarded where the header,
//! the encryption header, the L1 table, an L2 table, the refcount table, a refcount block, the snapshots or the bitmaps
//! lie. An image whose tables lie on each other is not written at all. So each table is changed by its owner, and by
//! nothing else.
//!
//! Tables that the header leads to are known from the beginning; L2 tables and refcount blocks are added as they are
//! created. A lookup of other clusters takes no lock: a filter has one bit for each hash of a cluster's number. A bit
//! that is set for another cluster costs a lookup, and nothing more.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_page::to_usize;

use super::locks::{Rank, RankedRwLock};
use crate::offset::{ClusterCount, HostCluster, HostOffset};
use crate::qcow2::format::header::Header;
use crate::qcow2::format::snapshot_table::Snapshot;

/// Bits of the filter for each cluster that is known at the beginning, or may become a table later.
const BITS_EACH: u64 = 16;
/// The fewest bits of the filter, and the most: 128 KiB.
const FILTER: (u64, u64) = (1 << 12, 1 << 20);
/// The most clusters of tables that are longer than one that get bits; if there are more, every look is a real one.
const FILTERED_MOST: u64 = 1 << 20;

/// A table of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub(super) enum TableKind {
    #[strum(to_string = "header")]
    Header,
    /// The LUKS header with the key material: without it all contents are lost.
    #[strum(to_string = "encryption header")]
    Encryption,
    #[strum(to_string = "L1 table")]
    L1,
    #[strum(to_string = "refcount table")]
    Refcounts,
    /// The snapshot table, or a snapshot's L1 table.
    #[strum(to_string = "snapshot table or L1 table of a snapshot")]
    Snapshots,
    #[strum(to_string = "bitmap directory")]
    BitmapDirectory,
    /// The table or bits of a bitmap that follows the disk.
    #[strum(to_string = "bitmap")]
    Bitmap,
    #[strum(to_string = "L2 table")]
    L2,
    #[strum(to_string = "refcount block")]
    RefcountBlock,
}

/// A table that overlaps another structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Overlap {
    pub(super) table: TableKind,
    /// Offset of the table in the file.
    pub(super) at: HostOffset,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.table, self.at)
    }
}

/// The places of all tables.
#[derive(Debug)]
pub(super) struct OverlapCheck {
    cluster_bits: u32,
    filter: Box<[AtomicU64]>,
    places: RankedRwLock<Places>,
    /// Two tables that overlap, found when the image was opened.
    conflict: Option<(Overlap, Overlap)>,
}

/// All in numbers of clusters.
#[derive(Debug, Default)]
struct Places {
    /// Tables that the header or the snapshot table lead to: first cluster, and the cluster past the end. They do not
    /// overlap.
    ranges: BTreeMap<HostCluster, (HostCluster, TableKind)>,
    /// L2 tables and refcount blocks.
    single: HashMap<HostCluster, TableKind>,
}

impl Places {
    /// The first table in a range, except tables of the kind `but`.
    fn within(&self, clusters: &Range<HostCluster>, but: Option<TableKind>) -> Option<(HostCluster, TableKind)> {
        let range = self.ranges.range(..clusters.end).next_back().filter(|(_, (end, _))| *end > clusters.start);
        let range = range.map(|(first, (_, table))| (*first, *table));
        let mut all = each(clusters);
        let single = || all.find_map(|cluster| self.single.get(&cluster).map(|table| (cluster, *table)));
        range.filter(|(_, table)| Some(*table) != but).or_else(|| {
            let mut single = single;
            loop {
                match single()? {
                    (_, table) if Some(table) == but => {}
                    found => return Some(found),
                }
            }
        })
    }
}

/// The clusters of a range, one by one.
fn each(clusters: &Range<HostCluster>) -> impl Iterator<Item = HostCluster> + use<> {
    (clusters.start.0..clusters.end.0).map(HostCluster)
}

impl Default for OverlapCheck {
    fn default() -> Self {
        Self::new(0, Vec::new(), [], [], 0)
    }
}

impl OverlapCheck {
    /// `ranges`: tables that may be longer than a cluster, in bytes of the file; `l2` and `blocks`: offsets of L2
    /// tables and refcount blocks. `more`: the number of them that may be added.
    pub(super) fn new(
        cluster_bits: u32,
        ranges: Vec<(TableKind, Range<HostOffset>)>,
        l2: impl IntoIterator<Item = HostOffset>,
        blocks: impl IntoIterator<Item = HostOffset>,
        more: u64,
    ) -> Self {
        let mut places = Places::default();
        let mut conflict = None;
        let overlap = |(first, table): (HostCluster, TableKind)| Overlap { table, at: first.begin(cluster_bits) };
        let mut sorted: Vec<(HostCluster, HostCluster, TableKind)> = ranges
            .into_iter()
            .filter(|(_, bytes)| !bytes.is_empty())
            .map(|(table, bytes)| (bytes.start.cluster(cluster_bits), bytes.end.cluster_end(cluster_bits), table))
            .collect();
        sorted.sort_unstable_by_key(|(first, ..)| *first);
        let mut last: Option<(HostCluster, HostCluster, TableKind)> = None;
        for (first, end, table) in sorted {
            match &mut last {
                Some((begin, until, before)) if first < *until => {
                    // Snapshots are not written: they may lie on each other.
                    if (*before, table) != (TableKind::Snapshots, TableKind::Snapshots) {
                        conflict = conflict.or(Some((overlap((first, table)), overlap((*begin, *before)))));
                    }
                    *until = end.max(*until);
                }
                _ => {
                    if let Some((begin, until, before)) = last.replace((first, end, table)) {
                        places.ranges.insert(begin, (until, before));
                    }
                }
            }
        }
        places.ranges.extend(last.map(|(begin, until, before)| (begin, (until, before))));
        let single = l2.into_iter().map(|at| (at, TableKind::L2));
        let single = single.chain(blocks.into_iter().map(|at| (at, TableKind::RefcountBlock)));
        for (at, table) in single {
            let cluster = at.cluster(cluster_bits);
            // Several entries of the L1 table may lead to one L2 table: it is an L2 table all the same.
            let but = Some(TableKind::L2).filter(|l2| *l2 == table);
            match places.within(&(cluster..cluster + ClusterCount::ONE), but) {
                Some(other) => conflict = conflict.or(Some((overlap((cluster, table)), overlap(other)))),
                None => drop(places.single.insert(cluster, table)),
            }
        }
        let long: u64 = places.ranges.iter().map(|(first, (end, _))| (*end - *first).0).fold(0, u64::saturating_add);
        let wanted = (long.min(FILTERED_MOST) + places.single.len() as u64).saturating_add(more);
        let bits = wanted.saturating_mul(BITS_EACH).clamp(FILTER.0, FILTER.1).next_power_of_two();
        let filter: Box<[AtomicU64]> =
            (0..bits / 64).map(|_| AtomicU64::new(if long > FILTERED_MOST { u64::MAX } else { 0 })).collect();
        let tables = Self { cluster_bits, filter, places: Rank::OverlapCheck.rw_lock(Places::default()), conflict };
        if long <= FILTERED_MOST {
            places
                .ranges
                .iter()
                .flat_map(|(first, (end, _))| each(&(*first..*end)))
                .for_each(|cluster| tables.note(cluster));
        }
        places.single.keys().for_each(|cluster| tables.note(*cluster));
        Self { places: Rank::OverlapCheck.rw_lock(places), ..tables }
    }

    /// Of an image that is opened. Its snapshot table ends at `snapshots_end`.
    pub(super) fn of(
        header: &Header,
        l2: impl IntoIterator<Item = HostOffset>,
        blocks: impl IntoIterator<Item = HostOffset>,
        snapshots: &[Snapshot],
        snapshots_end: HostOffset,
    ) -> Self {
        let of = |table, at: HostOffset, bytes: u64| (table, at..at.saturating_add(bytes));
        let mut ranges = vec![
            of(TableKind::Header, HostOffset(0), 1 << header.cluster_bits),
            of(TableKind::L1, header.l1.0, u64::from(header.l1.1) * 8),
            of(TableKind::Refcounts, header.refcount_table.0, header.refcount_table_bytes()),
        ];
        if !snapshots.is_empty() {
            ranges.push((TableKind::Snapshots, header.snapshots.0..snapshots_end));
        }
        let of_snapshot = |snapshot: &Snapshot| of(TableKind::Snapshots, snapshot.l1.0, u64::from(snapshot.l1.1) * 8);
        ranges.extend(snapshots.iter().map(of_snapshot));
        ranges.extend(header.extensions.encryption.map(|(at, bytes)| of(TableKind::Encryption, at, bytes)));
        ranges.extend(header.bitmaps().map(|bitmaps| of(TableKind::BitmapDirectory, bitmaps.directory, bitmaps.size)));
        let more = header.geometry().l1_entries(header.size).saturating_mul(2);
        Self::new(header.cluster_bits, ranges, l2, blocks, more)
    }

    /// Two tables that overlap: the image must not be written.
    pub(super) const fn conflict(&self) -> Option<(Overlap, Overlap)> {
        self.conflict
    }

    /// The clusters that a range of bytes touches.
    const fn clusters_of(&self, bytes: &Range<HostOffset>) -> Range<HostCluster> {
        bytes.start.cluster(self.cluster_bits)..bytes.end.cluster_end(self.cluster_bits)
    }

    /// The filter's word and bit for a cluster.
    fn bit(&self, cluster: HostCluster) -> (usize, u64) {
        // The upper bits of the product are the mixed ones.
        let hash = cluster.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let word = to_usize(hash >> 6) & self.filter.len().wrapping_sub(1);
        (word, 1 << (hash & 63))
    }

    fn note(&self, cluster: HostCluster) {
        let (word, bit) = self.bit(cluster);
        if let Some(word) = self.filter.get(word) {
            word.fetch_or(bit, Ordering::Release);
        }
    }

    /// Adds a table of one cluster.
    pub(super) fn add(&self, at: HostOffset, table: TableKind) {
        let cluster = at.cluster(self.cluster_bits);
        self.places.write().single.insert(cluster, table);
        self.note(cluster);
    }

    /// Adds a table of some clusters.
    pub(super) fn add_all(&self, bytes: &Range<HostOffset>, table: TableKind) {
        each(&self.clusters_of(bytes)).for_each(|cluster| self.add(cluster.begin(self.cluster_bits), table));
    }

    /// Removes L2 tables.
    pub(super) fn remove_l2(&self, clusters: &Range<HostCluster>) {
        let mut places = self.places.write();
        for cluster in each(clusters) {
            if places.single.get(&cluster) == Some(&TableKind::L2) {
                places.single.remove(&cluster);
            }
        }
    }

    /// New place of the refcount table, in bytes.
    pub(super) fn move_refcount_table(&self, to: &Range<HostOffset>) {
        self.move_only(TableKind::Refcounts, to);
    }

    /// New place of the L1 table, in bytes.
    pub(super) fn move_l1_table(&self, to: &Range<HostOffset>) {
        self.move_only(TableKind::L1, to);
    }

    fn move_only(&self, only: TableKind, to: &Range<HostOffset>) {
        let clusters = self.clusters_of(to);
        let mut places = self.places.write();
        places.ranges.retain(|_, (_, table)| *table != only);
        places.ranges.insert(clusters.start, (clusters.end, only));
        drop(places);
        each(&clusters).for_each(|cluster| self.note(cluster));
    }

    /// The first table that overlaps a range of bytes of the file, except tables of the kind `but`.
    pub(super) fn within(&self, bytes: &Range<HostOffset>, but: Option<TableKind>) -> Option<Overlap> {
        let clusters = self.clusters_of(bytes);
        let set = |cluster| {
            let (word, bit) = self.bit(cluster);
            self.filter.get(word).is_some_and(|word| word.load(Ordering::Acquire) & bit != 0)
        };
        if !each(&clusters).any(set) {
            return None;
        }
        let places = self.places.read();
        let (first, table) = places.within(&clusters, but)?;
        Some(Overlap { table, at: first.begin(self.cluster_bits) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const K: u64 = 1 << 10;

    fn bytes(range: &Range<u64>) -> Range<HostOffset> {
        HostOffset(range.start)..HostOffset(range.end)
    }

    fn map(ranges: &[(TableKind, Range<u64>)], l2: &[u64], blocks: &[u64]) -> OverlapCheck {
        let ranges = ranges.iter().map(|(table, range)| (*table, bytes(range))).collect();
        let hosts = |all: &[u64]| all.iter().copied().map(HostOffset).collect::<Vec<_>>();
        OverlapCheck::new(16, ranges, hosts(l2), hosts(blocks), 10)
    }

    /// Clusters of 64 KiB: header, refcount table at 64 KiB, L1 table at 192 KiB, of two clusters; a block at 128 KiB,
    /// an L2 table at 320 KiB.
    fn tables() -> OverlapCheck {
        let ranges = [
            (TableKind::L1, 192 * K..260 * K),
            (TableKind::Header, 0..64 * K),
            (TableKind::Refcounts, 64 * K..128 * K),
            (TableKind::Snapshots, 0..0),
        ];
        map(&ranges, &[320 * K, 320 * K], &[128 * K])
    }

    #[test]
    fn what_lies_on_a_table_or_touches_its_last_cluster_is_found() {
        let tables = tables();
        assert_eq!(tables.conflict(), None);
        let found = |range: Range<u64>| tables.within(&bytes(&range), None).map(|found| (found.table, found.at.0 / K));
        assert_eq!(found(0..1), Some((TableKind::Header, 0)));
        assert_eq!(found(100 * K..101 * K), Some((TableKind::Refcounts, 64)));
        assert_eq!(found(128 * K..129 * K), Some((TableKind::RefcountBlock, 128)));
        assert_eq!(found(300 * K..310 * K), Some((TableKind::L1, 192)));
        assert_eq!(found(383 * K..1 << 40), Some((TableKind::L2, 320)));
        assert_eq!(found(384 * K..(384 + 4096) * K), None);
        assert_eq!(tables.within(&bytes(&(320 * K..384 * K)), Some(TableKind::L2)), None);
        assert_eq!(tables.within(&bytes(&(320 * K..384 * K)), Some(TableKind::L1)).unwrap().table, TableKind::L2);
    }

    #[test]
    fn tables_come_and_go() {
        let tables = tables();
        tables.add(HostOffset(640 * K), TableKind::L2);
        tables.move_refcount_table(&bytes(&(704 * K..832 * K)));
        let found = |at: u64| tables.within(&bytes(&(at * K..(at + 64) * K)), None).map(|found| found.table);
        assert_eq!((found(64), found(640), found(768)), (None, Some(TableKind::L2), Some(TableKind::Refcounts)));
        tables.remove_l2(&(HostCluster(10)..HostCluster(11)));
        tables.remove_l2(&(HostCluster(2)..HostCluster(3)));
        assert_eq!((found(640), found(128)), (None, Some(TableKind::RefcountBlock)));
    }

    #[test]
    fn tables_on_each_other_are_found_at_the_beginning() {
        let conflict = |ranges: &[(TableKind, Range<u64>)], l2: &[u64], blocks: &[u64]| {
            map(ranges, l2, blocks).conflict().map(|(one, other)| (one.table, other.table))
        };
        let (l1, snapshot) = ((TableKind::L1, 64 * K..129 * K), (TableKind::Snapshots, 128 * K..256 * K));
        assert_eq!(conflict(&[l1.clone(), snapshot.clone()], &[], &[]), Some((TableKind::Snapshots, TableKind::L1)));
        assert_eq!(conflict(&[snapshot.clone(), snapshot], &[], &[]), None);
        assert_eq!(conflict(std::slice::from_ref(&l1), &[128 * K], &[]), Some((TableKind::L2, TableKind::L1)));
        assert_eq!(conflict(&[], &[128 * K], &[128 * K]), Some((TableKind::RefcountBlock, TableKind::L2)));
        assert_eq!(conflict(&[], &[], &[128 * K, 128 * K]), Some((TableKind::RefcountBlock, TableKind::RefcountBlock)));
        assert_eq!(conflict(&[], &[128 * K, 128 * K], &[]), None);
    }

    #[test]
    fn tables_as_long_as_no_filter_is_are_found_all_the_same() {
        let tables = OverlapCheck::new(9, vec![(TableKind::Snapshots, bytes(&(1 << 20..1 << 50)))], [], [], 0);
        assert!(tables.within(&bytes(&(1 << 49..(1 << 49) + 1)), None).is_some());
        assert!(tables.within(&bytes(&(0..512)), None).is_none());
    }

    proptest! {
        #[test]
        fn the_filter_hides_nothing(clusters in prop::collection::vec(0_u64..1 << 47, 1..200), others in prop::collection::vec(0_u64..1 << 47, 1..50)) {
            let tables = OverlapCheck::new(16, Vec::new(), clusters.iter().map(|cluster| HostOffset(cluster << 16)), [], 0);
            for cluster in clusters.iter().chain(&others) {
                let found = tables.within(&bytes(&(cluster << 16..(cluster + 1) << 16)), None);
                prop_assert_eq!(found.is_some(), clusters.contains(cluster));
            }
        }
    }
}
