//! Sizes of an image's structures, and the places of entries.

use std::fmt;
use std::ops::Range;

use limosa_page::to_usize;

use crate::offset::GuestOffset;

/// The sizes that an image was created with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// The logarithm of a cluster's bytes: 9 to 21.
    pub cluster_bits: u32,
    /// The logarithm of a refcount's bits: 0 to 6.
    pub refcount_order: u32,
    /// Whether L2 entries are of 16 bytes, with a bitmap of 32 subclusters.
    pub extended_l2: bool,
}

/// The number of an entry of the L1 table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::qcow2) struct L1Index(pub(in crate::qcow2) u64);

/// The place of the L2 entry of an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qcow2) struct EntryIndex {
    /// The entry in the L1 table.
    pub(in crate::qcow2) l1: L1Index,
    /// The entry in the L2 table.
    pub(in crate::qcow2) l2: u32,
}

impl fmt::Display for L1Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Geometry {
    /// The smallest and the largest cluster, as logarithms of bytes.
    pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
    /// Subclusters of a cluster of an image with extended L2 entries.
    pub const SUBCLUSTERS: u32 = 32;

    /// Bytes of a cluster.
    #[must_use]
    pub const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of an L2 entry.
    #[must_use]
    pub const fn l2_entry_size(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// Entries of an L2 table, which is one cluster.
    #[must_use]
    pub const fn l2_entries(&self) -> u64 {
        self.cluster_size() / self.l2_entry_size()
    }

    /// Bytes of guest disk that an L2 table is about.
    #[must_use]
    pub const fn l2_covers(&self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// Bytes that are allocated on their own: a subcluster, or the cluster if it has none.
    #[must_use]
    pub const fn subcluster_size(&self) -> u64 {
        if self.extended_l2 { self.cluster_size() / Self::SUBCLUSTERS as u64 } else { self.cluster_size() }
    }

    /// The end of where compressed clusters can be: their entries have no more bits for it.
    pub(in crate::qcow2) const fn compressed_limit(&self) -> u64 {
        1 << (62 - (self.cluster_bits - 8))
    }

    /// Number of clusters that a range touches.
    pub(in crate::qcow2) const fn clusters_touched(&self, range: &Range<GuestOffset>) -> usize {
        let cluster = self.cluster_size();
        to_usize(range.end.0.div_ceil(cluster) - range.start.0 / cluster)
    }

    /// Bits of the subclusters of the cluster at `at` that begin in a range; all bits if it has no subclusters.
    pub(in crate::qcow2) fn subclusters_in(&self, range: &Range<GuestOffset>, at: GuestOffset) -> u32 {
        if !self.extended_l2 {
            return u32::MAX;
        }
        let unit = self.subcluster_size();
        let begins = |bit: &u32| range.contains(&(at + u64::from(*bit) * unit));
        (0..Self::SUBCLUSTERS).filter(begins).fold(0, |bits, bit| bits | 1 << bit)
    }

    /// Bits of a refcount.
    #[must_use]
    pub const fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// The largest refcount.
    #[must_use]
    pub const fn refcount_max(&self) -> u64 {
        u64::MAX >> (64 - self.refcount_bits())
    }

    /// Refcounts in a refcount block, which is one cluster.
    #[must_use]
    pub const fn refcounts_per_block(&self) -> u64 {
        (self.cluster_size() * 8) >> self.refcount_order
    }

    /// The number of clusters for these bytes.
    #[must_use]
    pub const fn clusters(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }

    /// Entries of the L1 table for a disk of these bytes.
    #[must_use]
    pub const fn l1_entries(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.l2_covers())
    }

    /// Returns the place of an offset's entry.
    #[expect(clippy::cast_possible_truncation, reason = "an entry's number is below 2^21")]
    pub(in crate::qcow2) const fn index(&self, at: GuestOffset) -> EntryIndex {
        let l2 = (at.0 >> self.cluster_bits & (self.l2_entries() - 1)) as u32;
        EntryIndex { l1: L1Index(at.0 / self.l2_covers()), l2 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_found_in_its_tables() {
        let usual = Geometry { cluster_bits: 16, refcount_order: 4, extended_l2: false };
        assert_eq!((usual.l2_entries(), usual.l2_covers(), usual.refcounts_per_block()), (8192, 512 << 20, 32768));
        assert_eq!(usual.index(GuestOffset((512 << 20) + (3 << 16) + 5)), EntryIndex { l1: L1Index(1), l2: 3 });
        assert_eq!(usual.refcount_max(), 0xffff);
        let fine = Geometry { cluster_bits: 9, refcount_order: 6, extended_l2: true };
        assert_eq!((fine.l2_entries(), fine.subcluster_size(), fine.refcounts_per_block()), (32, 16, 64));
        assert_eq!(fine.refcount_max(), u64::MAX);
        assert_eq!(fine.l1_entries(32 * 512 + 1), 2);
    }
}
