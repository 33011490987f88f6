//! Rebuilding the refcounts, where they cannot be repaired in place.
//!
//! Law: the new refcount table, its blocks and, if need be, a new snapshot table are written behind everything that is
//! referred to, and made durable; then one write of the header's fields puts them in the place of the old ones. Until
//! then the image is as it was.

use std::sync::Arc;

use limosa_page::{broken_invariant, invariant, to_u64, to_usize};
use limosa_storage::Storage;

use super::report::CheckOptions;
use super::report::Findings;
use super::roots::{self, SNAPSHOT_EXTRA_LEAST, SNAPSHOT_EXTRA_MOST, SNAPSHOT_FIXED, u32_at};
use super::tables;
use super::walk::{Image, Pass, What, l1_gone};
use crate::error::ImageError;
use crate::offset::HostOffset;
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::{Header, REFCOUNT_TABLE_MOST};
use crate::qcow2::format::refcount_array;

/// The places of the new parts, in clusters.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Layout {
    /// The snapshot table, if there is a new one.
    snapshots: std::ops::Range<u64>,
    /// The refcount table.
    table: std::ops::Range<u64>,
    /// The blocks: which refcounts each is about, as its number in the table.
    blocks: Vec<u64>,
}

impl Layout {
    /// Where they lie if everything that is referred to ends before cluster `start`: `used` are the numbers of the
    /// blocks that have refcounts already, in order.
    fn plan(start: u64, snapshots: u64, used: &[u64], per_block: u64, entries_per_cluster: u64) -> Self {
        let (mut table, mut blocks) = (1, Vec::new());
        loop {
            let begin = start + snapshots + table;
            let end = begin + blocks.len() as u64;
            let mut wanted = used.to_vec();
            wanted.extend(start / per_block..end.div_ceil(per_block));
            wanted.sort_unstable();
            wanted.dedup();
            let clusters = wanted.last().map_or(1, |last| (last + 1).div_ceil(entries_per_cluster));
            if wanted.len() == blocks.len() && clusters == table {
                return Self { snapshots: start..start + snapshots, table: start + snapshots..begin, blocks: wanted };
            }
            // Both only ever grow with each other, so this comes to an end.
            (table, blocks) = (clusters.max(table), wanted);
            if blocks.len() as u64 > u64::from(u32::MAX) {
                return Self { snapshots: start..start, table: start..start, blocks };
            }
        }
    }

    const fn end(&self) -> u64 {
        self.table.end + self.blocks.len() as u64
    }
}

/// Makes new refcounts, and a new snapshot table if the old one's entries are wrong; or only has the header say that
/// there are no more snapshots than the file has.
pub(super) async fn rebuild(
    storage: &dyn Storage,
    header: &mut Header,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let order = header.refcount_order;
    rebuild_as(storage, header, order, options).await
}

/// As [`rebuild`], with refcounts of 2^`order` bits.
///
/// # Errors
/// [`ImageError::Unsupported`]: a cluster has more references than such a refcount can say.
pub(in crate::qcow2) async fn rebuild_as(
    storage: &dyn Storage,
    header: &mut Header,
    order: u32,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let image = Image::open(storage, header, options).await?;
    let geometry = image.bounds.geometry;
    let (size, bits) = (geometry.cluster_size(), geometry.cluster_bits);
    let new = Geometry { refcount_order: order, ..geometry };
    let each = new.refcounts_per_block();
    if let Some(count) = cut_off(&image) {
        // Before the file becomes longer. Otherwise they would end within it, and lie on what others refer to, for a
        // repair that follows one that was cut short.
        header.snapshots = (if count > 0 { header.snapshots.0 } else { HostOffset(0) }, count);
        header.write_fields(storage).await?;
        return Ok(storage.flush().await?);
    }
    let snapshots = snapshot_table(&image).await?;
    let what = What { refcounts: false, snapshot_table: snapshots.is_none(), ..What::ALL };

    // What there is, old refcounts included: nothing of it is written over before the header changes.
    let (mut start, mut used) = (1, Vec::new());
    for window in image.windows() {
        let all = image.count(&window, What::ALL, false, &mut Findings::new(0)).await?;
        let kept = image.count(&window, what, false, &mut Findings::new(0)).await?;
        for cluster in window.start..window.end {
            if all.counts.get(cluster).is_some_and(|count| count > 0) {
                start = start.max(cluster + 1);
            }
            // What no refcount table reaches is found out before the list of blocks is as long as that.
            if start / each > REFCOUNT_TABLE_MOST / 8 {
                return Err(too_far(storage, start.div_ceil(each) * 8));
            }
            let count = kept.counts.get(cluster).unwrap_or(0);
            if count > new.refcount_max() {
                let bits = new.refcount_bits();
                let what =
                    format!("cluster {cluster} has {count} references, which a refcount of {bits} bits cannot say");
                return Err(ImageError::Unsupported { image: Arc::clone(storage.name()), what });
            }
            if count > 0 && used.last() != Some(&(cluster / each)) {
                used.push(cluster / each);
            }
        }
    }
    let needed = snapshots.as_ref().map_or(0, |(bytes, _)| geometry.clusters(bytes.len() as u64));
    let layout = Layout::plan(start, needed, &used, each, size / 8);
    let table_bytes = (layout.table.end - layout.table.start) << bits;
    if table_bytes > REFCOUNT_TABLE_MOST || layout.table.is_empty() {
        return Err(too_far(storage, table_bytes));
    }

    if let Some((bytes, _)) = &snapshots {
        let mut whole = bytes.clone();
        whole.resize(to_usize(needed << bits), 0);
        for (at, piece) in ((layout.snapshots.start << bits)..).step_by(1 << 20).zip(whole.chunks(1 << 20)) {
            tables::put(storage, at, piece).await?;
        }
    }
    write_blocks(&image, &new, &layout, what).await?;
    let mut table = vec![0; to_usize(table_bytes)];
    for (place, number) in layout.blocks.iter().enumerate() {
        let entry = (layout.table.end + place as u64) << bits;
        tables::set_number(&mut table, to_usize(*number), entry)?;
    }
    tables::put(storage, layout.table.start << bits, &table).await?;
    storage.flush().await?;

    let clusters = tables::narrow(layout.table.end - layout.table.start)?;
    let refcount_table = (HostOffset(layout.table.start << bits), clusters);
    let place = snapshots.map(|(bytes, count)| {
        let at = if bytes.is_empty() { 0 } else { layout.snapshots.start << bits };
        (HostOffset(at), count)
    });
    header.refcount_order = order;
    header.refcount_table = refcount_table;
    header.snapshots = place.unwrap_or(header.snapshots);
    header.write_fields(storage).await?;
    storage.flush().await?;
    Ok(())
}

fn too_far(storage: &dyn Storage, bytes: u64) -> ImageError {
    let why = format!("new refcounts need a table of {bytes} bytes; {REFCOUNT_TABLE_MOST} is the most");
    roots::corrupt(storage.name(), "refcount table".into(), why)
}

/// Writes the blocks, one after the other, with what was counted and the new parts themselves.
async fn write_blocks(image: &Image<'_>, geometry: &Geometry, layout: &Layout, what: What) -> Result<(), ImageError> {
    let each = geometry.refcounts_per_block();
    let size = to_usize(geometry.cluster_size());
    let new = layout.snapshots.start..layout.end();
    let mut windows = image.windows();
    let mut window: Option<(std::ops::Range<u64>, Pass)> = None;
    for (place, number) in layout.blocks.iter().enumerate() {
        let mut block = vec![0; size];
        for cluster in number * each..(number + 1) * each {
            while window.as_ref().is_none_or(|(range, _)| cluster >= range.end) {
                let Some(range) = windows.next() else { break };
                if cluster < range.end {
                    let pass = image.count(&range, what, false, &mut Findings::new(0)).await?;
                    window = Some((range, pass));
                }
            }
            // Behind the last window nothing is in use.
            let counted = window.as_ref().and_then(|(_, pass)| pass.counts.get(cluster)).unwrap_or(0);
            let refcount = if new.contains(&cluster) { 1 } else { counted };
            let index = to_usize(cluster % each);
            let set = refcount == 0 || refcount_array::set(&mut block, geometry.refcount_order, index, refcount);
            invariant(set, "a count fits into its refcount")?;
        }
        let at = (layout.table.end + place as u64) << geometry.cluster_bits;
        tables::put(image.storage, at, &block).await?;
    }
    Ok(())
}

/// The number of entries of the snapshot table before the first one that ends behind the file. `None`: none does.
fn cut_off(image: &Image<'_>) -> Option<u32> {
    let ends_behind =
        |entry: &roots::SnapshotEntry| entry.at + SNAPSHOT_FIXED + entry.extra + entry.names > image.bounds.file;
    (0..).zip(&image.snapshots.entries).find(|(_, entry)| ends_behind(entry)).map(|(count, _)| count)
}

/// The snapshot table as it should be, and how many snapshots it has; `None` if it is.
async fn snapshot_table(image: &Image<'_>) -> Result<Option<(Vec<u8>, u32)>, ImageError> {
    let (header, bounds) = (image.header, &image.bounds);
    let least = if header.version > 2 { SNAPSHOT_EXTRA_LEAST } else { 0 };
    let gone = |entry: &roots::SnapshotEntry| l1_gone(&entry.l1, bounds);
    let wrong = |entry: &roots::SnapshotEntry| gone(entry) || !(least..=SNAPSHOT_EXTRA_MOST).contains(&entry.extra);
    if !image.snapshots.entries.iter().any(wrong) {
        return Ok(None);
    }
    let (mut table, mut count) = (Vec::new(), 0);
    for entry in image.snapshots.entries.iter().filter(|entry| !gone(entry)) {
        let mut fields = tables::bytes(image.storage, entry.at, SNAPSHOT_FIXED).await?;
        let kept = entry.extra.min(SNAPSHOT_EXTRA_MOST);
        let mut extra = tables::bytes(image.storage, entry.at + SNAPSHOT_FIXED, kept).await?;
        if kept < least {
            // The size of the VM's state stands in a field of 32 bits, too; the disk's was the image's.
            let state = u64::from(u32_at(&fields, 32)).to_be_bytes();
            let known = if kept < 8 { state } else { extra.first_chunk().copied().unwrap_or(state) };
            extra = [known, header.size.to_be_bytes()].concat();
        }
        let length = tables::narrow(to_u64(extra.len()))?;
        let field = fields.get_mut(36..40).ok_or_else(|| broken_invariant("a snapshot's entry is read whole"))?;
        field.copy_from_slice(&length.to_be_bytes());
        table.extend(fields);
        table.extend(extra);
        table.extend(tables::bytes(image.storage, entry.at + SNAPSHOT_FIXED + entry.extra, entry.names).await?);
        table.resize(table.len().next_multiple_of(8), 0);
        count += 1;
    }
    Ok(Some((table, count)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn new_refcounts_are_about_themselves_too() {
        // 64 refcounts a block: the last one of the first block is the new block's own.
        let layout = Layout::plan(62, 0, &[0], 64, 64);
        assert_eq!(layout, Layout { snapshots: 62..62, table: 62..63, blocks: vec![0] });
        let layout = Layout::plan(63, 0, &[0], 64, 64);
        assert_eq!(layout, Layout { snapshots: 63..63, table: 63..64, blocks: vec![0, 1] });
        let layout = Layout::plan(62, 3, &[0], 64, 64);
        assert_eq!(layout, Layout { snapshots: 62..65, table: 65..66, blocks: vec![0, 1] });
    }

    proptest! {
        #[test]
        fn every_new_cluster_has_a_refcount(start in 1_u64..100_000, snapshots in 0_u64..100, order in 6_u32..20) {
            let (per_block, entries) = (1 << order, 64);
            let used: Vec<_> = (0..start.div_ceil(per_block)).collect();
            let layout = Layout::plan(start, snapshots, &used, per_block, entries);
            prop_assert!((start..layout.end()).all(|cluster| layout.blocks.contains(&(cluster / per_block))));
            prop_assert!(used.iter().all(|number| layout.blocks.contains(number)));
            let last = *layout.blocks.last().unwrap();
            prop_assert!(last < (layout.table.end - layout.table.start) * entries);
        }
    }
}
