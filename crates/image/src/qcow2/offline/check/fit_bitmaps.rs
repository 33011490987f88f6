//! Bitmaps of a disk that becomes longer or shorter.
//!
//! Law: while it is under way the header does not speak of them. A cut costs the bitmaps, on which then nothing relies,
//! and nothing else.

use std::sync::Arc;

use limosa_page::to_usize;
use limosa_storage::Storage;

use super::extend::{extend, release};
use super::roots::BITMAP_BYTES_MOST;
use super::tables;
use crate::error::ImageError;
use crate::qcow2::format::bitmap_directory::{self, Entry};
use crate::qcow2::format::entry::OFFSET;
use crate::qcow2::format::feature::Features;
use crate::qcow2::format::header::Header;

/// Has the header say no more that there are bitmaps, durably: whether there are any. They keep their clusters.
///
/// # Errors
/// [`ImageError::Unsupported`]: one of them was not put away, or would be too large for a disk of `size` bytes.
pub(in crate::qcow2) async fn lay_aside(
    storage: &dyn Storage,
    header: &mut Header,
    size: u64,
) -> Result<bool, ImageError> {
    if header.bitmaps().is_none() {
        return Ok(false);
    }
    let geometry = header.geometry();
    for bitmap in bitmap_directory::read(storage, header).await? {
        let name = &bitmap.name;
        let what = if bitmap.in_use {
            format!("its bitmap {name:?} was not put away by who used it: remove it before the image is resized")
        } else if bitmap.table_entries(size, &geometry) << geometry.cluster_bits > BITMAP_BYTES_MOST {
            format!("its bitmap {name:?} would be longer than {BITMAP_BYTES_MOST} bytes: remove it before")
        } else {
            continue;
        };
        return Err(ImageError::Unsupported { image: Arc::clone(storage.name()), what });
    }
    header.features.autoclear &= !Features::BITMAPS;
    header.write_fields(storage).await?;
    storage.flush().await?;
    Ok(true)
}

/// Fits the bitmaps to the disk that was of `old` bytes and is of another size now, and has the header speak of them
/// again, durably. What is new of the disk is not marked in them, as the stock tool has it, but where the cluster of a
/// bitmap said in one word that all is.
pub(in crate::qcow2) async fn put_back(storage: &dyn Storage, header: &mut Header, old: u64) -> Result<(), ImageError> {
    let mut with = header.clone();
    with.features.autoclear |= Features::BITMAPS;
    for entry in bitmap_directory::entries(storage, &with).await? {
        fit(storage, header, &entry, old).await?;
    }
    storage.flush().await?;
    header.features.autoclear |= Features::BITMAPS;
    header.write_fields(storage).await?;
    Ok(storage.flush().await?)
}

async fn fit(storage: &dyn Storage, header: &mut Header, entry: &Entry, old: u64) -> Result<(), ImageError> {
    let geometry = header.geometry();
    let (at, had) = (entry.bitmap.table.0.0, u64::from(entry.bitmap.table.1));
    let wanted = entry.bitmap.table_entries(header.size, &geometry);
    if header.size < old {
        clear_behind(storage, header, entry, wanted).await?;
    }
    let (mut place, room) = (at, geometry.clusters(had * 8));
    if geometry.clusters(wanted * 8) > room {
        let clusters = geometry.clusters(wanted * 8);
        place = extend(storage, header, clusters).await? << geometry.cluster_bits;
        let mut table = tables::bytes(storage, at, had * 8).await?;
        table.resize(to_usize(clusters << geometry.cluster_bits), 0);
        tables::put(storage, place, &table).await?;
    } else if wanted > had {
        tables::put(storage, at + had * 8, &vec![0; to_usize((wanted - had) * 8)]).await?;
    }
    if (place, wanted) == (at, had) {
        return Ok(());
    }
    let count = tables::narrow(wanted)?;
    tables::put(storage, entry.at, &[&place.to_be_bytes()[..], &count.to_be_bytes()].concat()).await?;
    storage.flush().await?;
    if place != at {
        release(storage, header, at, had * 8).await?;
    }
    Ok(())
}

/// Clears the bits about what is behind the disk's end in the last of the bitmap's clusters that stay.
async fn clear_behind(storage: &dyn Storage, header: &Header, entry: &Entry, wanted: u64) -> Result<(), ImageError> {
    let Some(last) = wanted.checked_sub(1) else { return Ok(()) };
    let size = header.geometry().cluster_size();
    let at = tables::number(storage, entry.bitmap.table.0.0 + last * 8).await? & OFFSET;
    if at == 0 {
        return Ok(());
    }
    let bits = header.size.div_ceil(1 << entry.bitmap.granularity_bits) - last * size * 8;
    let mut bytes = tables::bytes(storage, at, size).await?;
    let begin = to_usize(bits / 8);
    if let Some((first, rest)) = bytes.get_mut(begin..).and_then(<[u8]>::split_first_mut) {
        // Of a byte the lowest bit is about what comes first.
        *first &= (1 << (bits % 8)) - 1;
        rest.fill(0);
    }
    Ok(tables::put(storage, at, &bytes).await?)
}
