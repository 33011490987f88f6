//! A bitmap that is in use, stored again where it was.
//!
//! Law: until all of it is durable its entry says that it is in use, so that nobody relies on what a cut leaves.

use limosa_page::{PageBitmap, broken_invariant, to_usize};
use limosa_storage::{Buffer, Storage};

use super::bits::{Place, places};
use super::save::is_stored;
use crate::error::ImageError;
use crate::qcow2::format::bitmap_directory::Entry;
use crate::qcow2::format::header::Header;
use crate::qcow2::offline::check::extend::{extend, release_all};
use crate::qcow2::offline::check::tables;

/// Stores the bits of a bitmap that is in use in the file, and says so in its entry, durably. Its table has as many
/// entries as the bits need, and nothing else has its clusters.
///
/// # Errors
/// [`ImageError::Corrupt`]: its table cannot be; what the storage says.
pub(in crate::qcow2) async fn rewrite(
    storage: &dyn Storage,
    header: &mut Header,
    mut entry: Entry,
    bits: &PageBitmap,
) -> Result<(), ImageError> {
    let size = header.geometry().cluster_size();
    let bytes = bits.to_le_bytes();
    let places = places(storage, header, &entry.bitmap).await?;
    let parts: Vec<_> = bytes.chunks(to_usize(size)).collect();
    if parts.len() != places.len() {
        return Err(broken_invariant("the table of a bitmap that is stored again is as long as before").into());
    }
    let lacks_place = |(part, place): &(&&[u8], &Place)| is_stored(part) && !matches!(place, Place::At(_));
    let wanted = parts.iter().zip(&places).filter(lacks_place).count() as u64;
    let mut next = if wanted == 0 { 0 } else { extend(storage, header, wanted).await? * size };
    let (mut table, mut free) = (Vec::new(), Vec::new());
    for (part, place) in parts.into_iter().zip(places) {
        let at = match place {
            Place::At(at) if is_stored(&part) => at,
            Place::At(at) => {
                free.push((at, size));
                0
            }
            Place::Zeros | Place::Ones if is_stored(&part) => {
                next += size;
                next - size
            }
            Place::Zeros | Place::Ones => 0,
        };
        if at > 0 {
            let buffer = Buffer::zeroed(to_usize(size));
            buffer.copy_from(0, part);
            storage.write(at, buffer.into()).await?;
        }
        table.extend(at.to_be_bytes());
    }
    // What the table leads to is there before it, and counted.
    storage.flush().await?;
    tables::put(storage, entry.bitmap.table.0.0, &table).await?;
    storage.flush().await?;
    entry.bitmap.in_use = false;
    entry.write_flags(storage).await?;
    storage.flush().await?;
    release_all(storage, header, &free).await
}
