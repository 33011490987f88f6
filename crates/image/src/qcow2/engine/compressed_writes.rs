//! Plain writes that are stored compressed: those of a server's clients.
//!
//! Law: a cluster is compressed only if one write has all of it. What a write has of a part of a cluster is written as
//! without compression, so a cluster that is written in parts is stored uncompressed, and so is the last one of a disk
//! that ends within it: the disk may grow meanwhile.
//!
//! The thread that polls the write compresses, at most [`PIECE`] bytes before it waits for the storage.

use std::ops::Range;

use limosa_page::{to_u64, to_usize};
use limosa_storage::IoVector;
use parking_lot::Mutex;

use super::context::{Context, ENCRYPTED_AND_COMPRESSED};
use super::writer::Writer;
use crate::compression::{Compress, CompressedClusters, Compressor};
use crate::error::ImageError;
use crate::offset::GuestOffset;

/// Bytes that are compressed before they are written.
const PIECE: u64 = 1 << 20;

/// Compresses what is written.
#[derive(Debug)]
pub(super) struct CompressedWrites {
    level: Option<u8>,
    /// Bytes of a cluster.
    unit: u64,
    /// Those that no thread uses at the moment: never more than there were threads at once.
    idle: Mutex<Vec<Compressor>>,
}

impl CompressedWrites {
    /// `None`: the image cannot have compressed contents. A level that its method does not have becomes the nearest
    /// one.
    pub(super) fn new(context: &Context, Compress { level }: Compress) -> Option<Self> {
        let level = level.map(|level| level.clamp(1, context.compression().highest_level()));
        let first = compressor(context, level).ok()?;
        Some(Self { level, unit: to_u64(first.unit()), idle: Mutex::new(vec![first]) })
    }

    /// Writes all of `from` at `at`.
    pub(super) async fn write(
        &self,
        context: &Context,
        writer: &Writer,
        at: GuestOffset,
        from: IoVector,
    ) -> Result<(), ImageError> {
        let end = at.0 + to_u64(from.len());
        let slice = |begin: u64, end: u64| from.slice(to_usize(begin - at.0)..to_usize(end - at.0));
        let mut begin = at.0;
        while begin < end {
            let piece = piece(begin..end, self.unit);
            let bytes = slice(begin, piece.end);
            if piece.is_whole {
                writer.write_compressed(GuestOffset(begin), self.compress(context, &bytes)?).await?;
            } else {
                writer.write(GuestOffset(begin), bytes).await?;
            }
            begin = piece.end;
        }
        Ok(())
    }

    fn compress(&self, context: &Context, bytes: &IoVector) -> Result<CompressedClusters, ImageError> {
        let idle = self.idle.lock().pop();
        let mut compressor = idle.map_or_else(|| compressor(context, self.level), Ok)?;
        let clusters = compressor.compress(bytes);
        self.idle.lock().push(compressor);
        Ok(clusters)
    }
}

/// The beginning of a write.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    end: u64,
    /// It is whole clusters.
    is_whole: bool,
}

/// The beginning of a write of a range, which is not empty, in clusters of `unit` bytes.
fn piece(range: Range<u64>, unit: u64) -> Piece {
    let border = (range.start / unit + 1).saturating_mul(unit);
    if !range.start.is_multiple_of(unit) || range.end < border {
        return Piece { end: border.min(range.end), is_whole: false };
    }
    let most = range.start.saturating_add(PIECE.max(unit));
    Piece { end: range.end.min(most) / unit * unit, is_whole: true }
}

/// A compressor for an image.
///
/// # Errors
/// [`ImageError::Unsupported`]: an image with an external data file, or with encrypted contents; no such level.
pub(super) fn compressor(context: &Context, level: Option<u8>) -> Result<Compressor, ImageError> {
    if context.has_data_file() {
        return Err(context.unsupported("an image with an external data file cannot have compressed contents"));
    }
    if context.is_encrypted() {
        return Err(context.unsupported(ENCRYPTED_AND_COMPRESSED));
    }
    let compression = context.compression();
    Compressor::new(compression, to_usize(context.geometry().cluster_size()), level).ok_or_else(|| {
        let (name, highest) = (compression.name(), compression.highest_level());
        context.unsupported(format!("compression level {}: {name} takes 1 to {highest}", level.unwrap_or_default()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_clusters_are_taken_together_and_parts_by_themselves() {
        let pieces = |range: Range<u64>| {
            let (mut at, mut found) = (range.start, Vec::new());
            while at < range.end {
                let Piece { end, is_whole } = piece(at..range.end, 64);
                assert!(at < end && end <= range.end);
                found.push((end - at, is_whole));
                at = end;
            }
            found
        };
        assert_eq!(pieces(0..128), [(128, true)]);
        assert_eq!(pieces(10..200), [(54, false), (128, true), (8, false)]);
        assert_eq!(pieces(10..20), [(10, false)]);
        assert_eq!(pieces(64..127), [(63, false)]);
        assert_eq!(pieces(0..PIECE + 100), [(PIECE, true), (64, true), (36, false)]);
    }
}
