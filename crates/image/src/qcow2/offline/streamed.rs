//! A qcow2 image that is written in one pass.
//!
//! Law: all tables are in front of the contents, and the contents are in the order of the disk, without a gap. What has
//! contents has to be known before the first byte is written: [`WantedClusters`].

use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use limosa_page::{to_u64, to_usize};
use limosa_storage::{Buffer, Storage};

use super::create::{CreateOptions, refcount_block};
use super::layout::Layout;
use crate::error::{CreateOptionsError, ImageError};
use crate::offset::HostOffset;
use crate::qcow2::format::entry::{L1Entry, L2Entry, Subclusters};
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::{Header, L1_MOST};

/// The clusters of a disk that get contents: a bit for each, in a piece for each L2 table that has any.
#[derive(Debug)]
pub(crate) struct WantedClusters {
    geometry: Geometry,
    size: u64,
    tables: Vec<Option<Box<[u64]>>>,
    /// L2 tables and clusters that there are.
    counts: (u64, u64),
}

impl WantedClusters {
    /// None, of a disk of `size` bytes.
    ///
    /// # Errors
    /// [`ImageError::Options`]: no image with these options can have such a disk.
    pub(crate) fn new(options: &CreateOptions, size: u64, name: &Arc<str>) -> Result<Self, ImageError> {
        options.check().map_err(|source| ImageError::options(Arc::clone(name), source))?;
        let geometry = options.geometry();
        let entries = geometry.l1_entries(size);
        if entries > u64::from(L1_MOST) || i64::try_from(size).is_err() {
            return Err(ImageError::options(Arc::clone(name), CreateOptionsError::TooLarge(size)));
        }
        Ok(Self { geometry, size, tables: vec![None; to_usize(entries)], counts: (0, 0) })
    }

    /// Adds the clusters that a range of the disk touches.
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        let each = self.geometry.l2_entries();
        let (mut cluster, end) = (range.start >> self.geometry.cluster_bits, self.geometry.clusters(range.end));
        while cluster < end {
            if let Some(table) = self.tables.get_mut(to_usize(cluster / each)) {
                let bits = table.get_or_insert_with(|| {
                    self.counts.0 += 1;
                    vec![0; to_usize(each.div_ceil(64))].into()
                });
                let index = cluster % each;
                if let Some(word) = bits.get_mut(to_usize(index / 64)) {
                    self.counts.1 += u64::from(*word >> (index % 64) & 1 == 0);
                    *word |= 1 << (index % 64);
                }
            }
            cluster += 1;
        }
    }

    /// Whether the cluster of this byte is one of them.
    pub(crate) fn contains(&self, at: u64) -> bool {
        let (cluster, each) = (at >> self.geometry.cluster_bits, self.geometry.l2_entries());
        let table = self.tables.get(to_usize(cluster / each)).and_then(Option::as_ref);
        let index = cluster % each;
        table.and_then(|bits| bits.get(to_usize(index / 64))).is_some_and(|word| *word >> (index % 64) & 1 != 0)
    }

    /// A place from `at` on before which none of them begins: `at`, or the next L2 table's first cluster.
    pub(crate) fn next(&self, at: u64) -> u64 {
        let covers = self.geometry.l2_covers();
        let has_none = |at: u64| matches!(self.tables.get(to_usize(at / covers)), Some(None));
        let mut next = at;
        while has_none(next) {
            next = (next / covers + 1) * covers;
        }
        next
    }
}

/// The tables of an image whose contents follow them.
#[derive(Debug)]
pub(crate) struct StreamedImage {
    layout: Layout,
    header: Vec<u8>,
}

impl StreamedImage {
    /// An image with these clusters.
    ///
    /// # Errors
    /// [`ImageError::Options`]: there can be no such image.
    pub(crate) fn new(options: &CreateOptions, wanted: &WantedClusters, name: &Arc<str>) -> Result<Self, ImageError> {
        options.check().map_err(|source| ImageError::options(Arc::clone(name), source))?;
        let too_large = |_| ImageError::options(Arc::clone(name), CreateOptionsError::TooLarge(wanted.size));
        let (tables, clusters) = wanted.counts;
        let layout = Layout::with(options.geometry(), wanted.size, tables, clusters, 0).map_err(too_large)?;
        let header = options.header(&layout)?.encode(name)?;
        Ok(Self { layout, header })
    }

    /// Bytes of the image, contents included.
    pub(crate) const fn len(&self) -> u64 {
        self.layout.end().0
    }

    /// Writes all that is in front of the contents.
    ///
    /// # Errors
    /// Those of `into`.
    pub(crate) fn write_tables(&self, wanted: &WantedClusters, into: &mut dyn Write) -> io::Result<()> {
        let layout = &self.layout;
        let geometry = &layout.geometry;
        let cluster = geometry.cluster_size();
        let mut sink = Sink { into, at: 0 };
        sink.put(&self.header)?;
        sink.fill(layout.refcount_table_at())?;
        for block in 0..layout.refcount_blocks {
            sink.put(&(layout.refcount_blocks_at().0 + block * cluster).to_be_bytes())?;
        }
        sink.fill(layout.refcount_blocks_at())?;
        for block in 0..layout.refcount_blocks {
            sink.put(&refcount_block(layout, block))?;
        }
        sink.fill(layout.l1_at())?;
        let mut tables = layout.l2_at().0;
        let mut l1 = Vec::with_capacity(wanted.tables.len() * 8);
        for table in &wanted.tables {
            let table = table.as_ref().map(|_| HostOffset(tables));
            tables += if table.is_some() { cluster } else { 0 };
            l1.extend(L1Entry { table, copied: true }.encode().to_be_bytes());
        }
        sink.put(&l1)?;
        sink.fill(layout.l2_at())?;
        let mut contents = layout.contents_at().0;
        for bits in wanted.tables.iter().flatten() {
            let mut l2 = Vec::with_capacity(to_usize(cluster));
            for index in 0..geometry.l2_entries() {
                let is_wanted = bits.get(to_usize(index / 64)).is_some_and(|word| *word >> (index % 64) & 1 != 0);
                let host = Some(HostOffset(contents));
                let there = L2Entry::Standard { host, copied: true, what: Subclusters::ALLOCATED };
                let (entry, bitmap) = if is_wanted { there } else { L2Entry::NONE }.encode(geometry);
                contents += if is_wanted { cluster } else { 0 };
                l2.extend(entry.to_be_bytes());
                if geometry.extended_l2 {
                    l2.extend(bitmap.to_be_bytes());
                }
            }
            sink.put(&l2)?;
        }
        debug_assert!(contents == layout.end().0, "each cluster of contents has a place");
        sink.fill(layout.contents_at())
    }
}

/// Bytes in order.
struct Sink<'a> {
    into: &'a mut dyn Write,
    at: u64,
}

impl Sink<'_> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.into.write_all(bytes)?;
        self.at += to_u64(bytes.len());
        Ok(())
    }

    /// Writes zeros up to the next part.
    fn fill(&mut self, to: HostOffset) -> io::Result<()> {
        debug_assert!(self.at <= to.0, "a part of the image is longer than its place");
        let missing = to.0.saturating_sub(self.at);
        io::copy(&mut io::Read::take(io::repeat(0), missing), &mut self.into)?;
        self.at = to.0;
        Ok(())
    }
}

/// Returns the offset of an image's last L2 table; 0: it has none. Entries that cannot be are left out: the image is
/// refused when they are used.
///
/// # Errors
/// What the storage says.
pub(crate) async fn last_table(storage: &dyn Storage, header: &Header) -> Result<u64, ImageError> {
    let (at, entries) = header.l1;
    let bytes = Buffer::zeroed(to_usize(u64::from(entries) * 8));
    storage.read(at.0, bytes.clone().into()).await?;
    let geometry = header.geometry();
    let bytes = bytes.to_vec();
    let (words, _) = bytes.as_chunks::<8>();
    let tables = words.iter().filter_map(|word| L1Entry::decode(u64::from_be_bytes(*word), &geometry).ok()?.table);
    Ok(tables.map(|table| table.0).max().unwrap_or(0))
}
