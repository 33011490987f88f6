//! Clusters at the end of the file, for tables that need more room.
//!
//! Law: clusters have their refcounts, durably, before anything refers to them; a cut leaves leaks.

use std::collections::BTreeMap;

use limosa_page::{to_u64, to_usize};
use limosa_storage::Storage;

use super::examine::Bounds;
use super::roots;
use super::stored::{Block, Stored};
use super::tables;
use crate::error::ImageError;
use crate::offset::HostOffset;
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::{Header, REFCOUNT_TABLE_MOST};
use crate::qcow2::format::refcount_array;

/// Bytes that a storage writes as a whole or not at all.
const SECTOR: u64 = 512;

/// The tables that new clusters need, in clusters from the first of them on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    /// Clusters of a larger refcount table; 0: the present one suffices.
    table: u64,
    /// The numbers of new refcount blocks, which follow the table.
    blocks: Vec<u64>,
    /// The first cluster past all of it.
    end: u64,
}

impl Plan {
    /// The plan for `wanted` clusters from `first` on. `there` tells whether a block exists; the table has `entries`.
    fn of(first: u64, wanted: u64, there: impl Fn(u64) -> bool, entries: u64, geometry: &Geometry) -> Self {
        let (per_block, per_cluster) = (geometry.refcounts_per_block(), geometry.cluster_size() / 8);
        let (mut table, mut blocks) = (0, Vec::new());
        loop {
            let end = first + wanted + table + blocks.len() as u64;
            let numbers = first / per_block..end.div_ceil(per_block);
            let larger = if numbers.end > entries { numbers.end.div_ceil(per_cluster) } else { 0 };
            let missing: Vec<_> = numbers.filter(|number| !there(*number)).collect();
            if (larger, &missing) == (table, &blocks) {
                return Self { table, blocks, end };
            }
            (table, blocks) = (larger.max(table), missing);
        }
    }
}

/// Takes `wanted` contiguous clusters, and returns the first one's number. The header changes if the refcount table has
/// to grow.
pub(in crate::qcow2) async fn extend(
    storage: &dyn Storage,
    header: &mut Header,
    wanted: u64,
) -> Result<u64, ImageError> {
    let old = (header.refcount_table.0, header.refcount_table_bytes());
    let first = extend_beside(storage, header, wanted).await?;
    if header.refcount_table.0 != old.0 {
        // What a failure leaves of the old table is lost space; to say that nothing was extended would have the caller
        // go back to it.
        let _ = release(storage, header, old.0.0, old.1).await;
    }
    Ok(first)
}

/// Takes clusters as [`extend`] does, but a replaced refcount table stays counted, so that the caller can return to it.
pub(in crate::qcow2) async fn extend_beside(
    storage: &dyn Storage,
    header: &mut Header,
    wanted: u64,
) -> Result<u64, ImageError> {
    let geometry = header.geometry();
    let (each, bits, size) = (geometry.refcounts_per_block(), geometry.cluster_bits, geometry.cluster_size());
    let bounds = Bounds { geometry, version: header.version, data_file: false, file: storage.length()? };
    let mut stored = Stored::new(storage, header, bounds);
    let first = end_of_use(storage, header, &mut stored).await?;
    admit(storage, header, first << bits, &bounds).await?;
    let entries = header.refcount_table_bytes() / 8;

    let mut missing = Vec::new();
    let most = (first + wanted).div_ceil(each) + 2 + wanted / each;
    for number in first / each..most {
        match stored.block(number).await? {
            Block::None => missing.push(number),
            Block::Unusable => return Err(broken(storage, number)),
            Block::Here(at, _) if bounds.outside(*at, size) => return Err(broken(storage, number)),
            Block::Here(..) => {}
        }
    }
    let there = |number: u64| number < most && missing.binary_search(&number).is_err();
    let plan = Plan::of(first, wanted, there, entries, &geometry);
    if plan.table << bits > REFCOUNT_TABLE_MOST {
        let why = format!("{} clusters are more than refcounts can be kept for", plan.end);
        return Err(roots::corrupt(storage.name(), "refcount table".into(), why));
    }

    // Blocks, old ones with more in them and new ones.
    let table_at = first + wanted;
    let blocks_at = table_at + plan.table;
    for number in first / each..plan.end.div_ceil(each) {
        let new = plan.blocks.binary_search(&number).ok().map(|place| (blocks_at + place as u64) << bits);
        let (at, mut bytes) = match (stored.block(number).await?, new) {
            (_, Some(at)) => (at, vec![0; to_usize(size)]),
            (Block::Here(at, bytes), None) => (*at, bytes.clone()),
            _ => return Err(broken(storage, number)),
        };
        for cluster in first.max(number * each)..plan.end.min((number + 1) * each) {
            let index = to_usize(cluster % each);
            if !refcount_array::set(&mut bytes, geometry.refcount_order, index, 1) {
                return Err(broken(storage, number));
            }
        }
        tables::put(storage, at, &bytes).await?;
    }
    storage.flush().await?;
    if plan.table == 0 {
        // A block's own refcount is in it or in one that comes later, so the last one is there first. A sector is written
        // as a whole or not at all.
        let mut sectors: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
        for (number, block) in plan.blocks.iter().zip(blocks_at..) {
            sectors.entry(number * 8 / SECTOR).or_default().push((number * 8 % SECTOR / 8, block << bits));
        }
        for (turn, (sector, entries)) in sectors.into_iter().rev().enumerate() {
            if turn > 0 {
                storage.flush().await?;
            }
            let at = header.refcount_table.0.0 + sector * SECTOR;
            let mut bytes = tables::bytes(storage, at, SECTOR).await?;
            for (place, entry) in entries {
                tables::set_number(&mut bytes, to_usize(place), entry)?;
            }
            tables::put(storage, at, &bytes).await?;
        }
        storage.flush().await?;
        return Ok(first);
    }
    let mut table = Vec::new();
    for (from, length) in tables::pieces(header.refcount_table.0.0, entries * 8, bounds.file) {
        table.extend(tables::bytes(storage, from, length).await?);
    }
    table.resize(to_usize(plan.table << bits), 0);
    for (place, number) in plan.blocks.iter().enumerate() {
        tables::set_number(&mut table, to_usize(*number), (blocks_at + to_u64(place)) << bits)?;
    }
    tables::put(storage, table_at << bits, &table).await?;
    storage.flush().await?;
    header.refcount_table = (HostOffset(table_at << bits), tables::narrow(plan.table)?);
    header.write_fields(storage).await?;
    storage.flush().await?;
    Ok(first)
}

/// Whether no table lies where the refcounts say that nothing is, from `end` on.
async fn admit(storage: &dyn Storage, header: &Header, end: u64, bounds: &Bounds) -> Result<(), ImageError> {
    let refuse = |table: String| {
        let why = format!("refcounts say that nothing is there or behind {end:#x}; check and repair the image");
        Err(roots::corrupt(storage.name(), table, why))
    };
    let (l1, refcounts) = (u64::from(header.l1.1) * 8, header.refcount_table_bytes());
    let directory = header.bitmaps().map_or((0, 0), |bitmaps| (bitmaps.directory.0, bitmaps.size));
    let snapshots = (header.snapshots.0.0, u64::from(header.snapshots.1));
    let tables = [
        ("L1 table", (header.l1.0.0, l1)),
        ("refcount table", (header.refcount_table.0.0, refcounts)),
        ("snapshot table", snapshots),
        ("bitmap directory", directory),
    ];
    for (name, (at, bytes)) in tables {
        if bytes > 0 && at.saturating_add(bytes) > end {
            return refuse(format!("{name} at {at:#x}"));
        }
    }
    for (name, at, bytes, offset) in [
        ("L2 table", header.l1.0.0, l1, crate::qcow2::format::entry::OFFSET),
        ("refcount block", header.refcount_table.0.0, refcounts, u64::MAX << 9),
    ] {
        let mut behind = None;
        tables::entries(storage, at, bytes, bounds.file, |_, entry| {
            behind = behind.or(Some(entry & offset).filter(|at| *at >= end));
            Ok::<(), ImageError>(())
        })
        .await?;
        if let Some(at) = behind {
            return refuse(format!("{name} at {at:#x}"));
        }
    }
    Ok(())
}

/// Gives clusters back to which nothing refers any more, durably: each is counted once less.
pub(in crate::qcow2) async fn release(
    storage: &dyn Storage,
    header: &Header,
    at: u64,
    bytes: u64,
) -> Result<(), ImageError> {
    release_all(storage, header, &[(at, bytes)]).await
}

/// Gives several runs of clusters back, as [`release`] does: each an offset and a length in bytes.
pub(in crate::qcow2) async fn release_all(
    storage: &dyn Storage,
    header: &Header,
    runs: &[(u64, u64)],
) -> Result<(), ImageError> {
    for (at, bytes) in runs.iter().filter(|(_, bytes)| *bytes > 0) {
        count_less(storage, header, *at, *bytes).await?;
    }
    Ok(storage.flush().await?)
}

/// Whether all clusters of these runs are counted once: each an offset and a length in bytes.
///
/// # Errors
/// What the storage says.
pub(in crate::qcow2) async fn are_counted_once(
    storage: &dyn Storage,
    header: &Header,
    runs: &[(u64, u64)],
) -> Result<bool, ImageError> {
    let geometry = header.geometry();
    let bounds = Bounds { geometry, version: header.version, data_file: false, file: storage.length()? };
    let mut stored = Stored::new(storage, header, bounds);
    for (at, bytes) in runs {
        for cluster in at >> geometry.cluster_bits..geometry.clusters(at + bytes) {
            if stored.get(cluster).await? != Some(1) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

async fn count_less(storage: &dyn Storage, header: &Header, at: u64, bytes: u64) -> Result<(), ImageError> {
    let geometry = header.geometry();
    let (each, order) = (geometry.refcounts_per_block(), geometry.refcount_order);
    let bounds = Bounds { geometry, version: header.version, data_file: false, file: storage.length()? };
    let mut stored = Stored::new(storage, header, bounds);
    let clusters = at >> geometry.cluster_bits..geometry.clusters(at + bytes);
    for number in clusters.start / each..clusters.end.div_ceil(each) {
        let Block::Here(at, block) = stored.block(number).await? else { return Err(broken(storage, number)) };
        let mut changed = block.clone();
        for cluster in clusters.start.max(number * each)..clusters.end.min((number + 1) * each) {
            let index = to_usize(cluster % each);
            let less = refcount_array::get(&changed, order, index).and_then(|count| count.checked_sub(1));
            if !less.is_some_and(|count| refcount_array::set(&mut changed, order, index, count)) {
                return Err(broken(storage, number));
            }
        }
        tables::put(storage, *at, &changed).await?;
    }
    Ok(())
}

/// The first cluster behind all that have a refcount.
async fn end_of_use(storage: &dyn Storage, header: &Header, stored: &mut Stored<'_>) -> Result<u64, ImageError> {
    let each = header.geometry().refcounts_per_block();
    let at = header.refcount_table.0.0;
    let pieces: Vec<_> = tables::pieces(at, header.refcount_table_bytes(), storage.length()?).collect();
    for (from, length) in pieces.into_iter().rev() {
        let piece = tables::bytes(storage, from, length).await?;
        let used: Vec<_> = ((from - at) / 8..).zip(tables::numbers(&piece)).filter(|(_, entry)| *entry != 0).collect();
        for (number, _) in used.into_iter().rev() {
            match stored.block(number).await? {
                Block::Unusable => return Err(broken(storage, number)),
                Block::Here(_, bytes) if bytes.iter().any(|byte| *byte != 0) => {}
                _ => continue,
            }
            for cluster in (number * each..(number + 1) * each).rev() {
                if stored.get(cluster).await?.is_some_and(|refcount| refcount > 0) {
                    return Ok(cluster + 1);
                }
            }
        }
    }
    Err(broken(storage, 0))
}

fn broken(storage: &dyn Storage, number: u64) -> ImageError {
    let why = "it cannot be used; check and repair the image".into();
    roots::corrupt(storage.name(), format!("refcount block {number}"), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_take_blocks_and_a_table_along_where_there_are_none() {
        let there = |number: u64| number < 2;
        // 64 refcounts in a block, 64 entries in a cluster of the table.
        let small = Geometry { cluster_bits: 9, refcount_order: 6, extended_l2: false };
        let plan = |first, wanted| Plan::of(first, wanted, there, 64, &small);
        assert_eq!(plan(100, 10), Plan { table: 0, blocks: vec![], end: 110 });
        assert_eq!(plan(100, 28), Plan { table: 0, blocks: vec![], end: 128 });
        assert_eq!(plan(100, 29), Plan { table: 0, blocks: vec![2], end: 130 });
        // With its block it does not fit any more.
        assert_eq!(plan(190, 2), Plan { table: 0, blocks: vec![2, 3], end: 194 });
        let full = Plan::of(4000, 96, |number| number < 64, 64, &small);
        assert_eq!(full, Plan { table: 0, blocks: vec![], end: 4096 });
        let larger = Plan::of(4000, 97, |number| number < 64, 64, &small);
        assert_eq!(larger, Plan { table: 2, blocks: vec![64], end: 4100 });
    }
}
