//! Bringing kept epochs from a log to the image.
//!
//! What is adjacent on the disk is one write, wherever it is in the log: an image then has fewer clusters to fill up.

use std::sync::Arc;

use futures_util::future::try_join_all;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use limosa_page::to_usize;
use limosa_storage::{Buffer, Storage};

use super::format::{Contents, Entry};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

/// The most bytes that are written at a time.
const PIECE: u64 = 1 << 20;
/// Writes at a time.
const WRITES: usize = 16;
/// The least bytes that the kernel is asked to copy, or to share.
const COPIED: u64 = 64 << 10;

/// A change of the image.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    /// Zeros.
    Zero { start: u64, length: u64, unmap: bool },
    /// Bytes of the log, by offset and length, one after the other.
    Write { start: u64, length: u64, parts: Vec<(u64, u64)> },
}

/// Brings entries to the image, which do not overlap and are in ascending order. Returns the bytes of contents among
/// them.
pub(super) async fn apply(log: &Arc<dyn Storage>, image: &dyn Disk, entries: &[Entry]) -> Result<u64, ImageError> {
    let changes = changes(entries).into_iter().map(|change| apply_one(log, image, change));
    stream::iter(changes).buffer_unordered(WRITES).try_fold(0_u64, |sum, bytes| async move { Ok(sum + bytes) }).await
}

/// The changes that bring entries to the image.
fn changes(entries: &[Entry]) -> Vec<Change> {
    let mut changes = Vec::new();
    for Entry { start, length, contents } in entries.iter().flat_map(pieces) {
        let part = match contents {
            Contents::Zero { unmap } => {
                changes.push(Change::Zero { start, length, unmap });
                continue;
            }
            Contents::Written(at) => (at, length),
        };
        match changes.last_mut() {
            Some(Change::Write { start: first, length: before, parts })
                if *first + *before == start && *before + length <= PIECE =>
            {
                *before += length;
                parts.push(part);
            }
            _ => changes.push(Change::Write { start, length, parts: vec![part] }),
        }
    }
    changes
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

async fn apply_one(log: &Arc<dyn Storage>, image: &dyn Disk, change: Change) -> Result<u64, ImageError> {
    let (start, length, parts) = match change {
        Change::Zero { start, length, unmap } => {
            return image.write_zeroes(GuestOffset(start), length, unmap).await.map(|()| 0);
        }
        Change::Write { start, length, parts } => (GuestOffset(start), length, parts),
    };
    if let [(at, _)] = *parts
        && length >= COPIED
        && log.file().is_some()
        && image.copy_from(start, log, HostOffset(at), length).await?
    {
        return Ok(length);
    }
    let buffer = Buffer::zeroed(to_usize(length));
    let mut begin = 0;
    let reads = parts.iter().map(|(at, length)| {
        let end = begin + to_usize(*length);
        let part = buffer.slice(begin..end);
        begin = end;
        log.read(*at, part.into())
    });
    try_join_all(reads).await?;
    image.write(start, buffer.into()).await?;
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_adjacent_is_one_write_of_bounded_length() {
        let entry = |start, length, contents| Entry { start, length, contents };
        let written = Contents::Written;
        let entries = [
            entry(0, 512, written(5000)),
            entry(512, 512, written(1000)),
            entry(1024, 512, Contents::Zero { unmap: true }),
            entry(1536, 512, written(2000)),
            entry(4096, PIECE + 512, written(1 << 30)),
            entry(PIECE + 4608, 512, written(0)),
        ];
        let write = |start, length, parts: &[(u64, u64)]| Change::Write { start, length, parts: parts.to_vec() };
        let wanted = [
            write(0, 1024, &[(5000, 512), (1000, 512)]),
            Change::Zero { start: 1024, length: 512, unmap: true },
            write(1536, 512, &[(2000, 512)]),
            write(4096, PIECE, &[(1 << 30, PIECE)]),
            write(PIECE + 4096, 1024, &[((1 << 30) + PIECE, 512), (0, 512)]),
        ];
        assert_eq!(changes(&entries), wanted);
    }
}
