//! A request, carried out on the export's disk.
//!
//! Law: in write-through mode a write is durable before it is acknowledged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use limosa_image::ImageError;
use limosa_page::error_with_causes;
use limosa_storage::IoVector;

use super::chain::Piece;
use super::request::{Action, ByteRange, ID_LENGTH, Status};
use crate::counters::{Outcome, RequestKind};
use crate::export::Export;
use crate::medium::Medium;

/// The disk of a device. Each queue has its own, so that threads do not share a reference count.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) export: Arc<Export>,
    pub(super) medium: Arc<Medium>,
    /// The name that the driver can read.
    pub(super) id: [u8; ID_LENGTH],
    /// Whether a failure was logged.
    pub(super) was_logged: Arc<AtomicBool>,
}

/// A request that was taken out of a ring.
#[derive(Debug)]
pub(super) struct Request {
    /// The index of its first descriptor.
    pub(super) head: u16,
    /// The number of its descriptors that hold data.
    pub(super) segments: usize,
    /// Guest address of its status.
    pub(super) status: u64,
    pub(super) action: Action,
    /// The memory that is read into or written from.
    pub(super) data: IoVector,
    /// Guest memory that is written, apart from the status.
    pub(super) writable: Vec<Piece>,
    /// Writes are durable before they are acknowledged.
    pub(super) write_through: bool,
    /// When it was taken out.
    pub(super) begun: Instant,
}

/// A request that is done.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) head: u16,
    pub(super) segments: usize,
    pub(super) status_address: u64,
    pub(super) status: Status,
    /// Bytes that were written into the guest's memory before the status.
    pub(super) written: usize,
    /// Guest memory that was written, or may have been, apart from the status.
    pub(super) writable: Vec<Piece>,
    pub(super) kind: RequestKind,
    /// Bytes that it covered.
    pub(super) length: u64,
    pub(super) begun: Instant,
}

impl Done {
    /// Returns what is counted; `now` is its end.
    pub(super) fn outcome(&self, now: Instant) -> Outcome {
        let time = now.saturating_duration_since(self.begun);
        Outcome { kind: self.kind, length: self.length, failed: self.status != Status::Ok, time }
    }
}

/// Carries out a request.
pub(super) async fn execute(target: Arc<Target>, request: Request) -> Done {
    let Request { head, segments, status: status_address, action, data, writable, write_through, begun } = request;
    let (kind, length) = action.counted(data.len() as u64);
    let (status, written) = match run(&target, &action, &data, write_through).await {
        Ok(written) => (Status::Ok, written),
        Err(error) => {
            // A guest must not fill the log.
            if !target.was_logged.swap(true, Ordering::Relaxed) {
                let (export, error) = (target.export.name(), error_with_causes(&error));
                tracing::warn!(export, error, "a request failed (further ones are only counted)");
            }
            (Status::IoError, 0)
        }
    };
    Done { head, segments, status_address, status, written, writable, kind, length, begun }
}

async fn run(target: &Target, action: &Action, data: &IoVector, write_through: bool) -> Result<usize, ImageError> {
    let (medium, length) = (&target.medium, data.len());
    let disk = medium.disk();
    let mut changes = false;
    match action {
        Action::Read { offset } => {
            if length > 0 {
                disk.read(medium.place(*offset), data.clone()).await?;
            }
            return Ok(length);
        }
        Action::Write { offset } => {
            if length > 0 {
                disk.write(medium.place(*offset), data.clone()).await?;
            }
            changes = true;
        }
        Action::Flush => disk.flush().await?,
        Action::GetId => return Ok(data.copy_from(0, &target.id)),
        Action::Discard(ranges) => {
            for ByteRange { offset, length, .. } in ranges.iter().filter(|range| range.length > 0) {
                disk.discard(medium.place(*offset), *length).await?;
            }
            changes = true;
        }
        Action::WriteZeroes(ranges) => {
            for ByteRange { offset, length, unmap } in ranges.iter().filter(|range| range.length > 0) {
                disk.write_zeroes(medium.place(*offset), *length, *unmap).await?;
            }
            changes = true;
        }
    }
    if changes && write_through {
        disk.flush().await?;
    }
    Ok(0)
}

impl Action {
    /// The kind by which it is counted, and the bytes that it covers; `data`: the bytes of its buffers.
    fn counted(&self, data: u64) -> (RequestKind, u64) {
        match self {
            Self::Read { .. } => (RequestKind::Read, data),
            Self::Write { .. } => (RequestKind::Write, data),
            Self::Flush => (RequestKind::Flush, 0),
            Self::GetId => (RequestKind::Other, 0),
            Self::Discard(ranges) | Self::WriteZeroes(ranges) => {
                (RequestKind::Zero, ranges.iter().map(|range| range.length).sum())
            }
        }
    }
}
