//! Bitmaps and their directory, written to new places.
//!
//! Law: at any moment the header leads to the old directory or to the new one, and what either leads to is whole. Bits,
//! tables and the directory go to clusters that nothing refers to, durably; then the header changes
//! ([`replace_header`]); then what nothing refers to any more is given back. A cut leaves leaked clusters.

use std::sync::Arc;

use limosa_page::{PageBitmap, broken_invariant, to_u64, to_usize};
use limosa_storage::{Buffer, Storage};

use super::bits::space;
use crate::error::ImageError;
use crate::offset::HostOffset;
use crate::qcow2::format::bitmap_directory::{Bitmap, Entry};
use crate::qcow2::format::extension::BitmapsExtension;
use crate::qcow2::format::feature::Features;
use crate::qcow2::format::header::Header;
use crate::qcow2::offline::check::extend::{are_counted_once, extend, release_all};
use crate::qcow2::offline::check::tables;
use crate::qcow2::offline::header_change::{can_replace_header, replace_header};

/// A bitmap that stays, or is new.
#[derive(Debug, Clone)]
pub(in crate::qcow2) struct Kept {
    pub(in crate::qcow2) entry: Entry,
    /// Its new bits; `None`: those that are stored.
    pub(in crate::qcow2) bits: Option<PageBitmap>,
}

/// Whether a cluster of a bitmap has a set bit: others are not stored.
pub(super) fn is_stored(part: &&[u8]) -> bool {
    part.iter().any(|byte| *byte != 0)
}

/// Has the image have these bitmaps and no others, durably. `gone`: bitmaps as they are stored, whose bits and table
/// are not used any more. Of a damaged one the clusters are leaked.
///
/// # Errors
/// [`ImageError::Unsupported`]: as [`admit`]; what the storage says.
pub(in crate::qcow2) async fn save(
    storage: &dyn Storage,
    header: &mut Header,
    mut kept: Vec<Kept>,
    gone: &[Bitmap],
) -> Result<(), ImageError> {
    let mut free: Vec<_> = header.bitmaps().iter().map(|old| (old.directory.0, old.size)).collect();
    for bitmap in gone {
        match space_to_free(storage, header, bitmap).await {
            Ok(runs) => free.extend(runs),
            Err(error @ ImageError::Corrupt { .. }) => {
                let (image, bitmap) = (&**storage.name(), &bitmap.name);
                tracing::warn!(image, bitmap, %error, "it is damaged: its clusters are leaked");
            }
            Err(error) => return Err(error),
        }
    }
    let mut room = Room::take(storage, header, &kept).await?;
    for Kept { entry, bits } in &mut kept {
        let Some(bits) = bits else { continue };
        entry.bitmap.table = room.put_bits(storage, bits).await?;
    }
    let mut directory = Vec::new();
    for kept in &kept {
        directory.extend(kept.entry.encode()?);
    }
    let old = header.clone();
    let directory = if directory.is_empty() {
        None
    } else {
        let (count, size) = (tables::narrow(to_u64(kept.len()))?, to_u64(directory.len()));
        Some(BitmapsExtension { count, directory: room.put(storage, &directory).await?, size })
    };
    lead_to(header, directory);
    storage.flush().await?;
    replace_header(storage, &old, header.clone()).await?;
    release_all(storage, header, &free).await
}

/// Refuses bitmaps that could not be stored, because the header has no room to lead to their directory, or to change to
/// one that leads to none if there are not to be `any`.
///
/// # Errors
/// [`ImageError::Unsupported`].
pub(in crate::qcow2) fn admit(image: &Arc<str>, header: &Header, any: bool) -> Result<(), ImageError> {
    let mut new = header.clone();
    // As long as any other.
    lead_to(&mut new, any.then_some(BitmapsExtension { count: 1, directory: HostOffset(0), size: 0 }));
    can_replace_header(image, header, new)
}

fn lead_to(header: &mut Header, directory: Option<BitmapsExtension>) {
    let flag = if directory.is_some() { Features::BITMAPS } else { 0 };
    header.features.autoclear = header.features.autoclear & !Features::BITMAPS | flag;
    header.extensions.bitmaps = directory;
}

/// The runs of bytes that a bitmap had for itself.
async fn space_to_free(storage: &dyn Storage, header: &Header, bitmap: &Bitmap) -> Result<Vec<(u64, u64)>, ImageError> {
    let runs = space(storage, header, bitmap).await?;
    if are_counted_once(storage, header, &runs).await? {
        return Ok(runs);
    }
    let table = format!("table of bitmap {:?} at {}", bitmap.name, bitmap.table.0);
    let why = "something else may have its clusters, too".to_owned();
    Err(ImageError::Corrupt { image: Arc::clone(storage.name()), table, why })
}

/// Clusters that were taken for what is written, handed out one after the other.
struct Room {
    cluster_size: u64,
    next: u64,
    end: u64,
}

impl Room {
    async fn take(storage: &dyn Storage, header: &mut Header, kept: &[Kept]) -> Result<Self, ImageError> {
        let geometry = header.geometry();
        let size = geometry.cluster_size();
        let (mut wanted, mut directory) = (0, 0);
        for Kept { entry, bits } in kept {
            directory += to_u64(entry.encode()?.len());
            if let Some(bits) = bits {
                let bytes = bits.to_le_bytes();
                let clusters = bytes.chunks(to_usize(size));
                wanted += geometry.clusters(to_u64(clusters.len()) * 8) + to_u64(clusters.filter(is_stored).count());
            }
        }
        wanted += geometry.clusters(directory);
        let next = if wanted == 0 { 0 } else { extend(storage, header, wanted).await? << geometry.cluster_bits };
        Ok(Self { cluster_size: size, next, end: next + wanted * size })
    }

    /// Writes bytes to the next clusters, and zeros to what is left of them.
    async fn put(&mut self, storage: &dyn Storage, bytes: &[u8]) -> Result<HostOffset, ImageError> {
        let at = self.next;
        self.next += to_u64(bytes.len()).next_multiple_of(self.cluster_size);
        if self.next > self.end {
            return Err(broken_invariant("clusters are taken for all that is written of bitmaps").into());
        }
        let buffer = Buffer::zeroed(to_usize(self.next - at));
        buffer.copy_from(0, bytes);
        storage.write(at, buffer.into()).await?;
        Ok(HostOffset(at))
    }

    /// Writes the bits of a bitmap and its table, and returns the table.
    async fn put_bits(&mut self, storage: &dyn Storage, bits: &PageBitmap) -> Result<(HostOffset, u32), ImageError> {
        let mut table = Vec::new();
        for cluster in bits.to_le_bytes().chunks(to_usize(self.cluster_size)) {
            let at = if is_stored(&cluster) { self.put(storage, cluster).await? } else { HostOffset(0) };
            table.extend(at.0.to_be_bytes());
        }
        let entries = tables::narrow(to_u64(table.len() / 8))?;
        Ok((self.put(storage, &table).await?, entries))
    }
}
