//! The bits of a stored bitmap.
//!
//! Law: a bitmap that is in use is not read, and one whose table cannot be is refused as a whole: a bit that is missing
//! would be a change that a backup leaves out.

use std::sync::Arc;

use limosa_page::{PageBitmap, broken_invariant, to_u64, to_usize};
use limosa_storage::Storage;

use crate::error::ImageError;
use crate::qcow2::format::bitmap_directory::{BITS_MOST, BYTES_MOST, Bitmap};
use crate::qcow2::format::entry::OFFSET;
use crate::qcow2::format::header::Header;
use crate::qcow2::offline::check::tables;

/// The entry of a cluster whose bits are all set.
const ONES: u64 = 1;

/// Where a cluster of a bitmap is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Zeros,
    Ones,
    At(u64),
}

fn corrupt(storage: &dyn Storage, bitmap: &Bitmap, why: String) -> ImageError {
    let table = format!("table of bitmap {:?} at {}", bitmap.name, bitmap.table.0);
    ImageError::Corrupt { image: Arc::clone(storage.name()), table, why }
}

/// The entries of a bitmap's table.
pub(super) async fn places(storage: &dyn Storage, header: &Header, bitmap: &Bitmap) -> Result<Vec<Place>, ImageError> {
    let file = storage.length()?;
    let (at, entries) = (bitmap.table.0.0, u64::from(bitmap.table.1));
    if entries > header.geometry().clusters(BYTES_MOST) || at.saturating_add(entries * 8) > file {
        return Err(corrupt(storage, bitmap, format!("its {entries} entries are not in the file")));
    }
    let mut places = Vec::new();
    for (from, length) in tables::pieces(at, entries * 8, file) {
        for entry in tables::numbers(&tables::bytes(storage, from, length).await?) {
            let place = match entry {
                0 => Place::Zeros,
                ONES => Place::Ones,
                at if at & OFFSET == at && at & (header.geometry().cluster_size() - 1) == 0 && at < file => {
                    Place::At(at)
                }
                other => {
                    let why = format!("entry {} is {other:#x}", places.len());
                    return Err(corrupt(storage, bitmap, why));
                }
            };
            places.push(place);
        }
    }
    Ok(places)
}

/// Refuses a bitmap whose table is not as long as its bits need.
///
/// # Errors
/// [`ImageError::Corrupt`].
pub(in crate::qcow2) fn has_its_length(
    storage: &dyn Storage,
    header: &Header,
    bitmap: &Bitmap,
) -> Result<(), ImageError> {
    let (bits, wanted) = (bitmap.bits(header.size), bitmap.table_entries(header.size, &header.geometry()));
    if bits > BITS_MOST || u64::from(bitmap.table.1) != wanted {
        let why = format!("{} entries, where {bits} bits need {wanted}", bitmap.table.1);
        return Err(corrupt(storage, bitmap, why));
    }
    Ok(())
}

/// Reads the bits of a bitmap.
///
/// # Errors
/// [`ImageError::Unsupported`]: it is in use; [`ImageError::Corrupt`]: its table cannot be; what the storage says.
pub(in crate::qcow2) async fn load(
    storage: &dyn Storage,
    header: &Header,
    bitmap: &Bitmap,
) -> Result<PageBitmap, ImageError> {
    let (bits, geometry) = (bitmap.bits(header.size), header.geometry());
    if bitmap.in_use {
        let what = format!("bitmap {:?} was not stored by who used it: it can only be removed", bitmap.name);
        return Err(ImageError::Unsupported { image: Arc::clone(storage.name()), what });
    }
    has_its_length(storage, header, bitmap)?;
    let mut bytes = vec![0; to_usize(PageBitmap::byte_len(bits))];
    let each = to_usize(geometry.cluster_size());
    for (cluster, place) in bytes.chunks_mut(each).zip(places(storage, header, bitmap).await?) {
        match place {
            Place::Zeros => {}
            Place::Ones => cluster.fill(0xff),
            Place::At(at) => cluster.copy_from_slice(&tables::bytes(storage, at, to_u64(cluster.len())).await?),
        }
    }
    PageBitmap::from_le_bytes(bits, &bytes).map_err(|_| broken_invariant("a bitmap has its length").into())
}

/// The runs of bytes of the file that a bitmap takes, its table first.
///
/// # Errors
/// [`ImageError::Corrupt`]: its table cannot be; what the storage says.
pub(in crate::qcow2) async fn space(
    storage: &dyn Storage,
    header: &Header,
    bitmap: &Bitmap,
) -> Result<Vec<(u64, u64)>, ImageError> {
    let size = header.geometry().cluster_size();
    let mut runs = vec![(bitmap.table.0.0, u64::from(bitmap.table.1) * 8)];
    for place in places(storage, header, bitmap).await? {
        let Place::At(at) = place else { continue };
        match runs.last_mut() {
            Some((first, bytes)) if runs_on(*first, *bytes, at) => *bytes += size,
            _ => runs.push((at, size)),
        }
    }
    Ok(runs)
}

/// Whether a run of whole clusters ends where the next one begins.
const fn runs_on(first: u64, bytes: u64, next: u64) -> bool {
    first + bytes == next
}
