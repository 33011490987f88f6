//! Bringing kept epochs from a log to the image.

use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use limosa_page::to_usize;
use limosa_storage::{Buffer, Storage};

use super::format::{Contents, Entry};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

/// The most bytes that are read at a time.
const PIECE: u64 = 1 << 20;
/// Pieces at a time.
const PIECES: usize = 16;
/// The least bytes that the kernel is asked to copy, or to share.
const COPIED: u64 = 64 << 10;

/// Brings entries that do not overlap to the image. Returns the bytes of contents among them.
pub(super) async fn apply(log: &Arc<dyn Storage>, image: &dyn Disk, entries: &[Entry]) -> Result<u64, ImageError> {
    let pieces = entries.iter().flat_map(pieces).map(|piece| apply_one(log, image, piece));
    stream::iter(pieces).buffer_unordered(PIECES).try_fold(0_u64, |sum, bytes| async move { Ok(sum + bytes) }).await
}

/// The pieces of an entry: zeros are one.
fn pieces(entry: &Entry) -> impl Iterator<Item = Entry> + use<> {
    let Entry { start, length, contents } = *entry;
    let piece = if matches!(contents, Contents::Written(_)) { PIECE } else { length.max(1) };
    (0..length.div_ceil(piece)).map(move |number| {
        let skipped = number * piece;
        let contents = match contents {
            Contents::Written(at) => Contents::Written(at + skipped),
            zero @ Contents::Zero { .. } => zero,
        };
        Entry { start: start + skipped, length: piece.min(length - skipped), contents }
    })
}

async fn apply_one(log: &Arc<dyn Storage>, image: &dyn Disk, piece: Entry) -> Result<u64, ImageError> {
    let Entry { start, length, contents } = piece;
    match contents {
        Contents::Zero { unmap } => image.write_zeroes(GuestOffset(start), length, unmap).await.map(|()| 0),
        Contents::Written(at) => {
            if length >= COPIED
                && log.file().is_some()
                && image.copy_from(GuestOffset(start), log, HostOffset(at), length).await?
            {
                return Ok(length);
            }
            let buffer = Buffer::zeroed(to_usize(length));
            log.read(at, buffer.clone().into()).await?;
            image.write(GuestOffset(start), buffer.into()).await?;
            Ok(length)
        }
    }
}
