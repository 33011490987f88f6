//! References of the header's tables: L1 tables of the active state and of the snapshots, tables of the bitmaps.

use std::sync::Arc;

use limosa_storage::Storage;

use super::tables;
use crate::error::ImageError;
use crate::qcow2::format::field::Fields;
use crate::qcow2::format::header::Header;

/// Bytes of a snapshot's entry whose places are fixed.
pub(super) const SNAPSHOT_FIXED: u64 = 40;
/// The most bytes of extra data in a snapshot's entry: QEMU's limit.
pub(super) const SNAPSHOT_EXTRA_MOST: u64 = 1024;
/// The longest snapshot table in bytes: QEMU's limit.
const SNAPSHOTS_BYTES_MOST: u64 = 64 << 20;
/// Extra data that every snapshot's entry of version 3 has: the size of the VM's state, and of the disk.
pub(super) const SNAPSHOT_EXTRA_LEAST: u64 = 16;
/// Bytes of a bitmap's entry whose places are fixed.
const BITMAP_FIXED: u64 = 24;

/// The kind of bitmap that there is: of what was written.
const BITMAP_DIRTY: u8 = 1;
/// The flag of a bitmap that is not up to date.
const BITMAP_IN_USE: u32 = 1;
/// The flag of a bitmap that a writer is to keep up.
const BITMAP_AUTO: u32 = 2;
/// The longest name of a bitmap: QEMU's limit.
const BITMAP_NAME_MOST: u64 = 1023;
/// The most bytes that a bitmap may take: QEMU's limit.
pub(super) const BITMAP_BYTES_MOST: u64 = 512 << 20;
/// How many bytes of disk a bit may be about, as logarithms: QEMU's limits.
const BITMAP_GRANULARITY: std::ops::RangeInclusive<u8> = 9..=31;

/// An L1 table.
#[derive(Debug, Clone, Copy)]
pub(super) struct L1Table {
    pub(super) at: u64,
    pub(super) entries: u32,
    /// `None`: the active one.
    pub(super) snapshot: Option<u32>,
}

impl L1Table {
    pub(super) const fn bytes(&self) -> u64 {
        self.entries as u64 * 8
    }

    /// For people.
    pub(super) fn name(&self) -> String {
        match self.snapshot {
            None => format!("L1 table at {:#x}", self.at),
            Some(number) => format!("L1 table of snapshot {number} at {:#x}", self.at),
        }
    }
}

/// A snapshot's entry in the snapshot table.
#[derive(Debug, Clone, Copy)]
pub(super) struct SnapshotEntry {
    pub(super) at: u64,
    pub(super) extra: u64,
    /// Bytes of its name and its ID.
    pub(super) names: u64,
    pub(super) l1: L1Table,
}

/// The snapshot table, up to the first entry with an impossible length.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshots {
    pub(super) entries: Vec<SnapshotEntry>,
    /// Bytes of the whole table.
    pub(super) bytes: u64,
}

/// The table of a bitmap.
#[derive(Debug, Clone, Copy)]
pub(super) struct BitmapTable {
    pub(super) at: u64,
    pub(super) entries: u32,
}

impl BitmapTable {
    pub(super) const fn bytes(&self) -> u64 {
        self.entries as u64 * 8
    }
}

/// Reads the snapshot table's lengths and places.
pub(super) async fn snapshots(storage: &dyn Storage, header: &Header) -> Result<Snapshots, ImageError> {
    let (start, count) = header.snapshots;
    let mut found = Snapshots::default();
    let mut at = start.0;
    for number in 0..count {
        let begin = at;
        let fields = tables::bytes(storage, begin, SNAPSHOT_FIXED).await?;
        let extra = u64::from(u32_at(&fields, 36));
        let names = u64::from(u16_at(&fields, 12)) + u64::from(u16_at(&fields, 14));
        let bytes = (SNAPSHOT_FIXED + extra + names).next_multiple_of(8);
        let l1 = L1Table { at: u64_at(&fields, 0), entries: u32_at(&fields, 8), snapshot: Some(number) };
        found.entries.push(SnapshotEntry { at: begin, extra, names, l1 });
        at = begin.checked_add(bytes).filter(|end| end - start.0 <= SNAPSHOTS_BYTES_MOST).ok_or_else(|| {
            let table = format!("snapshot table at {start}, entry {number}");
            corrupt(storage.name(), table, format!("the table would be longer than {SNAPSHOTS_BYTES_MOST} bytes"))
        })?;
        // The last entry needs nothing behind it.
        found.bytes = begin - start.0 + SNAPSHOT_FIXED + extra + names;
    }
    Ok(found)
}

/// Reads the bitmap directory. `Err`: the fault that makes it unreadable.
pub(super) async fn bitmaps(
    storage: &dyn Storage,
    header: &Header,
) -> Result<Result<Vec<BitmapTable>, String>, ImageError> {
    let Some(extension) = header.bitmaps() else { return Ok(Ok(Vec::new())) };
    let (start, size) = (extension.directory.0, extension.size);
    let mut found = Vec::new();
    let mut at = 0;
    while at < size {
        let fields = tables::bytes(storage, start + at, BITMAP_FIXED).await?;
        let extra = u64::from(u32_at(&fields, 20));
        let name = u64::from(u16_at(&fields, 18));
        let bytes = (BITMAP_FIXED + extra + name).next_multiple_of(8);
        let number = found.len();
        if number as u64 == u64::from(extension.count) {
            return Ok(Err(format!("more bitmaps than the {number} that the header says there are")));
        }
        if at + bytes > size {
            return Ok(Err(format!("bitmap {number} does not end within the directory of {size} bytes")));
        }
        let table = BitmapTable { at: u64_at(&fields, 0), entries: u32_at(&fields, 8) };
        if let Some(why) = bitmap_fault(&fields, table, name, extra, header) {
            return Ok(Err(format!("bitmap {number}: {why}")));
        }
        found.push(table);
        at += bytes;
    }
    if found.len() as u64 != u64::from(extension.count) {
        return Ok(Err(format!("{} bitmaps; the header says {}", found.len(), extension.count)));
    }
    Ok(Ok(found))
}

/// Why a bitmap's entry in the directory cannot be.
fn bitmap_fault(fields: &[u8], table: BitmapTable, name: u64, extra: u64, header: &Header) -> Option<String> {
    let geometry = header.geometry();
    let (flags, kind, granularity) = (u32_at(fields, 12), Fields(fields).u8(16), Fields(fields).u8(17));
    if table.at == 0 || table.at & (geometry.cluster_size() - 1) != 0 || table.entries == 0 {
        return Some(format!("a table of {} entries at {:#x}", table.entries, table.at));
    }
    if u64::from(table.entries) << geometry.cluster_bits > BITMAP_BYTES_MOST {
        return Some(format!("a table of {} clusters; {BITMAP_BYTES_MOST} bytes are the most", table.entries));
    }
    if kind != BITMAP_DIRTY || flags & !(BITMAP_IN_USE | BITMAP_AUTO) != 0 {
        return Some(format!("of kind {kind}, with flags {flags:#x}"));
    }
    if !(1..=BITMAP_NAME_MOST).contains(&name) || extra != 0 || !BITMAP_GRANULARITY.contains(&granularity) {
        return Some(format!("{name} bytes of name, {extra} of extra data, granularity 2^{granularity}"));
    }
    // One in use is not up to date, and is not read.
    let bytes = header.size.div_ceil(1 << granularity).div_ceil(8);
    let wanted = geometry.clusters(bytes);
    (flags & BITMAP_IN_USE == 0 && wanted != u64::from(table.entries))
        .then(|| format!("a table of {} entries, where the disk's size needs {wanted}", table.entries))
}

pub(super) fn corrupt(image: &Arc<str>, table: String, why: String) -> ImageError {
    ImageError::Corrupt { image: Arc::clone(image), table, why }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |field| u16::from_be_bytes(*field))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |field| u32::from_be_bytes(*field))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |field| u64::from_be_bytes(*field))
}
