//! The layout of a new image.
//!
//! Header, refcount table, refcount blocks, L1 table, encryption header, L2 tables, contents: one behind the other,
//! without a gap, so that contents that are allocated at once are contiguous and the refcount of every cluster up to
//! the end is one.

use crate::offset::HostOffset;
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::{L1_MOST, REFCOUNT_TABLE_MOST};

/// The places of a new image's parts, in clusters from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qcow2) struct Layout {
    pub(in crate::qcow2) geometry: Geometry,
    /// Clusters of the refcount table, which begins behind the header.
    pub(in crate::qcow2) refcount_table: u64,
    /// Refcount blocks, which begin behind it.
    pub(in crate::qcow2) refcount_blocks: u64,
    /// Entries of the L1 table, which begins behind those.
    pub(in crate::qcow2) l1_entries: u64,
    /// Clusters of the encryption header with its key material, which begins behind it.
    pub(in crate::qcow2) encryption: u64,
    /// L2 tables, which begin behind that: at most as many as the L1 table has entries.
    pub(in crate::qcow2) l2_tables: u64,
    /// Clusters of contents, which begin behind those.
    pub(in crate::qcow2) contents: u64,
}

/// Why there is no layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(in crate::qcow2) enum TooLarge {
    #[error("a disk of {0} bytes needs a larger L1 table than can be; larger clusters make it smaller")]
    L1(u64),
    #[error("the image would need a larger refcount table than can be; larger clusters make it smaller")]
    Refcounts,
}

impl Layout {
    /// Of a disk of `size` bytes; `tables`: with L2 tables for all of it; `contents`: with clusters for all of it;
    /// `encryption`: bytes of the encryption header.
    pub(in crate::qcow2) fn new(
        geometry: Geometry,
        size: u64,
        tables: bool,
        contents: bool,
        encryption: u64,
    ) -> Result<Self, TooLarge> {
        let l2_tables = if tables { geometry.l1_entries(size) } else { 0 };
        let contents = if contents { geometry.clusters(size) } else { 0 };
        Self::with(geometry, size, l2_tables, contents, encryption)
    }

    /// Of a disk of `size` bytes, with this number of L2 tables and of clusters of contents.
    pub(in crate::qcow2) fn with(
        geometry: Geometry,
        size: u64,
        l2_tables: u64,
        contents: u64,
        encryption: u64,
    ) -> Result<Self, TooLarge> {
        let l1_entries = geometry.l1_entries(size);
        if l1_entries > u64::from(L1_MOST) || i64::try_from(size).is_err() {
            return Err(TooLarge::L1(size));
        }
        let encryption = geometry.clusters(encryption);
        let (refcount_table, refcount_blocks) = (1, 1);
        let mut layout =
            Self { geometry, refcount_table, refcount_blocks, l1_entries, encryption, l2_tables, contents };
        // The refcounts count themselves, too: both grow until they reach.
        loop {
            let blocks = layout.clusters().div_ceil(geometry.refcounts_per_block());
            let table = geometry.clusters(blocks * 8);
            if table * geometry.cluster_size() > REFCOUNT_TABLE_MOST {
                return Err(TooLarge::Refcounts);
            }
            if blocks <= layout.refcount_blocks && table <= layout.refcount_table {
                return Ok(layout);
            }
            layout.refcount_blocks = blocks.max(layout.refcount_blocks);
            layout.refcount_table = table.max(layout.refcount_table);
        }
    }

    pub(in crate::qcow2) const fn refcount_table_at(&self) -> HostOffset {
        self.at(1)
    }

    pub(in crate::qcow2) const fn refcount_blocks_at(&self) -> HostOffset {
        self.at(1 + self.refcount_table)
    }

    pub(in crate::qcow2) const fn l1_at(&self) -> HostOffset {
        self.at(1 + self.refcount_table + self.refcount_blocks)
    }

    pub(in crate::qcow2) const fn encryption_at(&self) -> HostOffset {
        HostOffset(self.l1_at().0 + self.geometry.clusters(self.l1_entries * 8) * self.geometry.cluster_size())
    }

    pub(in crate::qcow2) const fn l2_at(&self) -> HostOffset {
        HostOffset(self.encryption_at().0 + self.encryption * self.geometry.cluster_size())
    }

    pub(in crate::qcow2) const fn contents_at(&self) -> HostOffset {
        HostOffset(self.l2_at().0 + self.l2_tables * self.geometry.cluster_size())
    }

    /// All clusters.
    pub(in crate::qcow2) const fn clusters(&self) -> u64 {
        (self.contents_at().0 >> self.geometry.cluster_bits) + self.contents
    }

    /// Returns the end of the image.
    pub(in crate::qcow2) const fn end(&self) -> HostOffset {
        self.at(self.clusters())
    }

    const fn at(&self, cluster: u64) -> HostOffset {
        HostOffset(cluster << self.geometry.cluster_bits)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const USUAL: Geometry = Geometry { cluster_bits: 16, refcount_order: 4, extended_l2: false };

    #[test]
    fn an_empty_image_has_four_clusters() {
        let layout = Layout::new(USUAL, 1 << 30, false, false, 0).unwrap();
        assert_eq!(
            (layout.refcount_table_at(), layout.refcount_blocks_at()),
            (HostOffset(0x1_0000), HostOffset(0x2_0000))
        );
        assert_eq!((layout.l1_at(), layout.l1_entries, layout.end()), (HostOffset(0x3_0000), 2, HostOffset(0x4_0000)));
        assert_eq!(Layout::new(USUAL, 0, true, true, 0).unwrap().end(), HostOffset(0x3_0000));
    }

    #[test]
    fn an_image_that_is_all_there_has_its_contents_in_one_piece() {
        let layout = Layout::new(USUAL, 100 << 20, true, true, 0).unwrap();
        assert_eq!((layout.l2_at(), layout.contents_at()), (HostOffset(0x4_0000), HostOffset(0x5_0000)));
        assert_eq!(layout.clusters(), 1605);
    }

    #[test]
    fn what_no_table_reaches_is_refused() {
        let small = Geometry { cluster_bits: 9, ..USUAL };
        assert!(Layout::new(small, 128 << 30, false, false, 0).is_ok());
        let size = (128 << 30) + 1;
        assert_eq!(Layout::new(small, size, false, false, 0), Err(TooLarge::L1(size)));
        let wide = Geometry { refcount_order: 6, ..small };
        assert_eq!(Layout::new(wide, 128 << 30, true, true, 0), Err(TooLarge::Refcounts));
        assert_eq!(Layout::new(USUAL, u64::MAX, false, false, 0), Err(TooLarge::L1(u64::MAX)));
    }

    proptest! {
        #[test]
        fn refcounts_reach_as_far_as_the_image_and_no_block_is_left_over(
            cluster_bits in Geometry::CLUSTER_BITS,
            refcount_order in 0..=6_u32,
            size in 0_u64..1 << 44,
            tables: bool,
            contents: bool,
            encryption in 0_u64..4 << 20,
        ) {
            let geometry = Geometry { cluster_bits, refcount_order, extended_l2: false };
            if let Ok(layout) = Layout::new(geometry, size, tables, contents, encryption) {
                let each = geometry.refcounts_per_block();
                prop_assert!(layout.refcount_blocks * each >= layout.clusters());
                prop_assert!((layout.refcount_blocks - 1) * each < layout.clusters());
                prop_assert!(layout.refcount_table * geometry.cluster_size() >= layout.refcount_blocks * 8);
            }
        }
    }
}
