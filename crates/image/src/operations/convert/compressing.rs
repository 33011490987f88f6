//! Compressing what is converted, by the worker that has read it, before its turn to write has come.
//!
//! Law: only whole clusters are compressed. Where a target's backing image has a part of a cluster, all of it is read
//! and written; where the sources end within a cluster of a longer target, that cluster is written as it is.

use std::ops::Range;

use limosa_page::to_u64;
use limosa_storage::{Buffer, IoVector};

use super::plan::{Action, Span, whole_units};
use crate::compression::{Compress, CompressedClusters, Compressor};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::offset::GuestOffset;
use crate::operations::operation::{DiskOperation, OperationError};

/// A worker's compressor, if the target is compressed.
pub(super) struct Compressing {
    compressor: Option<Compressor>,
}

/// Bytes that are ready to be written.
pub(super) enum Write {
    Plain(Buffer),
    Compressed(CompressedClusters),
}

impl Compressing {
    pub(super) fn new(target: &dyn Disk, compress: Option<Compress>) -> Result<Self, ImageError> {
        let compressor = compress.map(|compress| target.compressor(compress.level)).transpose()?;
        Ok(Self { compressor })
    }

    /// The spans of a piece that is read and written: whole clusters.
    pub(super) fn spans(&self, spans: &[Span]) -> Vec<Span> {
        self.compressor.as_ref().map_or_else(|| spans.to_vec(), |compressor| whole_units(spans, unit(compressor)))
    }

    /// The bytes that an action writes into a target of `end` bytes; `None`: it writes none.
    pub(super) fn write(&mut self, action: &Action, end: u64, place: impl Fn(&Range<u64>) -> Buffer) -> Option<Write> {
        let Action::Write(range) = action else { return None };
        let is_whole =
            |unit: u64| range.start.is_multiple_of(unit) && (range.end.is_multiple_of(unit) || range.end == end);
        let compressor = self.compressor.as_mut().filter(|compressor| is_whole(unit(compressor)));
        Some(match compressor {
            Some(compressor) => Write::Compressed(compressor.compress(&place(range).into())),
            None => Write::Plain(place(range)),
        })
    }
}

fn unit(compressor: &Compressor) -> u64 {
    to_u64(compressor.unit())
}

impl Write {
    /// Bytes that are stored for it.
    pub(super) fn stored_len(&self) -> u64 {
        match self {
            Self::Plain(bytes) => to_u64(bytes.len()),
            Self::Compressed(clusters) => clusters.stored_len(),
        }
    }

    /// Writes it at `at`.
    pub(super) async fn carry_out(self, target: &dyn Disk, at: u64) -> Result<(), OperationError> {
        let written = match self {
            Self::Plain(bytes) => target.write(GuestOffset(at), IoVector::from(bytes)).await,
            Self::Compressed(clusters) => target.write_compressed(GuestOffset(at), clusters).await,
        };
        written.map_err(OperationError::at(DiskOperation::Writing, at))
    }
}
