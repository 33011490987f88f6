//! Entries of the L1 and L2 tables.
//!
//! Law: every bit is looked at. An entry with a reserved bit set, or whose cluster does not lie where a cluster can, is
//! no entry; what finds one says where it was.

use super::geometry::Geometry;
use crate::offset::HostOffset;

/// Refcount of the cluster is exactly one: it may be written in place.
pub(in crate::qcow2) const COPIED: u64 = 1 << 63;
pub(in crate::qcow2) const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeros.
pub(in crate::qcow2) const ZERO: u64 = 1;
/// Bits 9 to 55: where a cluster lies.
pub(in crate::qcow2) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Properties of an image that determine the meaning of its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qcow2) struct EntryRules {
    /// The image's version: in version 2 there are no zero clusters.
    pub version: u32,
    /// Contents lie in a file of their own, whose first cluster is like any other.
    pub data_file: bool,
}

/// An entry that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(in crate::qcow2) enum EntryFault {
    /// Bits are set that have no meaning.
    #[error("{0:#018x} has reserved bits set")]
    Reserved(u64),
    /// The cluster does not begin at a cluster's boundary.
    #[error("{0:#018x} points into the middle of a cluster")]
    Unaligned(u64),
    /// A subcluster is both allocated and zero, or allocated without a cluster.
    #[error("a subcluster bitmap of {0:#018x} contradicts itself or the entry")]
    Subclusters(u64),
}

/// An entry of the L1 table: where an L2 table lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qcow2) struct L1Entry {
    /// The L2 table, if there is one.
    pub table: Option<HostOffset>,
    /// Nothing else refers to the L2 table.
    pub copied: bool,
}

impl L1Entry {
    /// From the table.
    ///
    /// # Errors
    /// [`EntryFault`].
    pub(in crate::qcow2) const fn decode(bits: u64, geometry: &Geometry) -> Result<Self, EntryFault> {
        if bits & !(COPIED | OFFSET) != 0 {
            return Err(EntryFault::Reserved(bits));
        }
        if bits & OFFSET & (geometry.cluster_size() - 1) != 0 {
            return Err(EntryFault::Unaligned(bits));
        }
        let table = if bits & OFFSET == 0 { None } else { Some(HostOffset(bits & OFFSET)) };
        Ok(Self { table, copied: bits & COPIED != 0 })
    }

    /// For the table.
    #[must_use]
    pub(in crate::qcow2) const fn encode(self) -> u64 {
        match self.table {
            None => 0,
            Some(table) => table.0 | if self.copied { COPIED } else { 0 },
        }
    }
}

/// An entry of an L2 table: where a cluster of the guest's disk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qcow2) enum L2Entry {
    /// A cluster in its own place, or none.
    Standard {
        /// Its offset; `None`: nothing is allocated.
        host: Option<HostOffset>,
        /// Nothing else refers to the cluster.
        copied: bool,
        /// The state of its subclusters.
        what: Subclusters,
    },
    /// Compressed bytes.
    Compressed {
        /// Offset of the compressed data.
        host: HostOffset,
        /// How many there are at most: up to the end of the last sector of 512 bytes.
        length: u32,
    },
}

/// The state of each of the 32 subclusters of a cluster; all are alike in an image without subclusters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::qcow2) struct Subclusters {
    /// A bit for each one with contents in the cluster.
    pub allocated: u32,
    /// A bit for each that reads as zeros.
    pub zero: u32,
}

impl Subclusters {
    /// All lie in the cluster.
    pub(in crate::qcow2) const ALLOCATED: Self = Self { allocated: u32::MAX, zero: 0 };
    /// All read as zeros.
    pub(in crate::qcow2) const ZERO: Self = Self { allocated: 0, zero: u32::MAX };
    /// None is there.
    pub(in crate::qcow2) const NONE: Self = Self { allocated: 0, zero: 0 };
}

impl L2Entry {
    /// Nothing is there.
    pub(in crate::qcow2) const NONE: Self = Self::Standard { host: None, copied: false, what: Subclusters::NONE };

    /// From the table: its first 8 bytes and, with extended entries, the 8 behind them.
    ///
    /// # Errors
    /// [`EntryFault`].
    #[expect(clippy::cast_possible_truncation, reason = "parts of 32 bits, and lengths of at most two clusters")]
    pub(in crate::qcow2) const fn decode(
        bits: u64,
        bitmap: u64,
        geometry: &Geometry,
        rules: EntryRules,
    ) -> Result<Self, EntryFault> {
        if bits & COMPRESSED != 0 {
            if bits & COPIED != 0 || (geometry.extended_l2 && bitmap != 0) {
                return Err(EntryFault::Reserved(bits));
            }
            let shift = 62 - (geometry.cluster_bits - 8);
            let host = bits & ((1 << shift) - 1);
            let sectors = (bits & !COMPRESSED) >> shift;
            let length = (sectors + 1) * 512 - (host & 511);
            return Ok(Self::Compressed { host: HostOffset(host), length: length as u32 });
        }
        let flag = if geometry.extended_l2 || rules.version < 3 { 0 } else { ZERO };
        if bits & !(COPIED | OFFSET | flag) != 0 {
            return Err(EntryFault::Reserved(bits));
        }
        if bits & OFFSET & (geometry.cluster_size() - 1) != 0 {
            return Err(EntryFault::Unaligned(bits));
        }
        let first = rules.data_file && bits & COPIED != 0;
        let host = if bits & OFFSET == 0 && !first { None } else { Some(HostOffset(bits & OFFSET)) };
        let what = if geometry.extended_l2 {
            let what = Subclusters { allocated: bitmap as u32, zero: (bitmap >> 32) as u32 };
            if what.allocated & what.zero != 0 || (host.is_none() && what.allocated != 0) {
                return Err(EntryFault::Subclusters(bitmap));
            }
            what
        } else if bits & flag != 0 {
            Subclusters::ZERO
        } else if host.is_some() {
            Subclusters::ALLOCATED
        } else {
            Subclusters::NONE
        };
        Ok(Self::Standard { host, copied: bits & COPIED != 0, what })
    }

    /// For the table: its 8 bytes, and the 8 behind them of an extended entry. What an image without subclusters cannot
    /// say (some of them) must not be asked of it.
    #[must_use]
    pub(in crate::qcow2) const fn encode(self, geometry: &Geometry) -> (u64, u64) {
        match self {
            Self::Compressed { host, length } => {
                let shift = 62 - (geometry.cluster_bits - 8);
                let sectors = ((host.0 & 511) + length as u64).div_ceil(512).saturating_sub(1);
                (COMPRESSED | sectors << shift | host.0, 0)
            }
            Self::Standard { host, copied, what } => {
                let offset = match host {
                    Some(host) => host.0 | if copied { COPIED } else { 0 },
                    None => 0,
                };
                if geometry.extended_l2 {
                    (offset, (what.zero as u64) << 32 | what.allocated as u64)
                } else {
                    (offset | if what.zero == 0 { 0 } else { ZERO }, 0)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const USUAL: Geometry = Geometry { cluster_bits: 16, refcount_order: 4, extended_l2: false };

    const RULES: EntryRules = EntryRules { version: 3, data_file: false };

    fn geometry() -> impl Strategy<Value = Geometry> {
        (Geometry::CLUSTER_BITS, 0..=6_u32, any::<bool>()).prop_map(|(cluster_bits, refcount_order, extended_l2)| {
            Geometry { cluster_bits, refcount_order, extended_l2 }
        })
    }

    #[test]
    fn the_kinds_of_clusters_are_distinguished() {
        let decode = |bits| L2Entry::decode(bits, 0, &USUAL, RULES);
        let standard = |host, copied, what| Ok(L2Entry::Standard { host, copied, what });
        assert_eq!(decode(0), Ok(L2Entry::NONE));
        assert_eq!(decode(1), standard(None, false, Subclusters::ZERO));
        assert_eq!(decode(0x5_0000), standard(Some(HostOffset(0x5_0000)), false, Subclusters::ALLOCATED));
        assert_eq!(decode(COPIED | 0x5_0001), standard(Some(HostOffset(0x5_0000)), true, Subclusters::ZERO));
        assert_eq!(decode(0x5_0200), Err(EntryFault::Unaligned(0x5_0200)));
        assert_eq!(decode(0x5_0002), Err(EntryFault::Reserved(0x5_0002)));
        assert_eq!(
            L2Entry::decode(0x5_0001, 0, &USUAL, EntryRules { version: 2, ..RULES }),
            Err(EntryFault::Reserved(0x5_0001))
        );
        let file = EntryRules { data_file: true, ..RULES };
        assert_eq!(
            L2Entry::decode(COPIED, 0, &USUAL, file),
            standard(Some(HostOffset(0)), true, Subclusters::ALLOCATED)
        );
        assert_eq!(L2Entry::decode(0, 0, &USUAL, file), Ok(L2Entry::NONE));
        // The number of compressed sectors begins at bit 54: three more than the first one.
        let compressed = L2Entry::Compressed { host: HostOffset(0x5_0010), length: 4 * 512 - 0x10 };
        assert_eq!(decode(COMPRESSED | 3 << 54 | 0x5_0010), Ok(compressed));
    }

    #[test]
    fn subclusters_that_contradict_themselves_are_refused() {
        let fine = Geometry { extended_l2: true, ..USUAL };
        let fault = |bits, bitmap| L2Entry::decode(bits, bitmap, &fine, RULES).unwrap_err();
        assert_eq!(fault(0, 1), EntryFault::Subclusters(1));
        assert_eq!(fault(0x5_0000, 1 << 32 | 1), EntryFault::Subclusters(1 << 32 | 1));
        assert_eq!(fault(0x5_0001, 1), EntryFault::Reserved(0x5_0001));
    }

    proptest! {
        #[test]
        fn an_entry_survives_a_round_trip(bits: u64, bitmap: u64, geometry in geometry(), version in 2..=3_u32, data_file: bool) {
            let rules = EntryRules { version, data_file };
            if let Ok(entry) = L2Entry::decode(bits, bitmap, &geometry, rules) {
                let (again, bitmap) = entry.encode(&geometry);
                prop_assert_eq!(L2Entry::decode(again, bitmap, &geometry, rules), Ok(entry));
            }
            if let Ok(entry) = L1Entry::decode(bits, &geometry) {
                prop_assert_eq!(L1Entry::decode(entry.encode(), &geometry), Ok(entry));
            }
        }
    }
}
