//! The source of a conversion: one disk or several, one after the other.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::try_join_all;
use limosa_page::to_usize;
use limosa_storage::{Buffer, IoVector, Storage};
use rustix::io::Errno;

use super::plan::{Content, Span};
use crate::disk::{BlockStatus, Disk};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};
use crate::operations::operation::{DiskOperation, OperationError};

/// Bytes of a sector: a disk whose length is no multiple of it ends with zeros.
pub(crate) const SECTOR: u64 = 512;

/// Error numbers of storage that is gone as a whole (`ESHUTDOWN`: an NBD server that is shutting down), and of a host
/// without memory.
const GONE: [Errno; 7] =
    [Errno::SHUTDOWN, Errno::NODEV, Errno::NXIO, Errno::STALE, Errno::NOTCONN, Errno::BADF, Errno::NOMEM];

/// Disks, one after the other.
#[derive(Debug)]
pub(crate) struct Source {
    parts: Vec<Part>,
    len: u64,
}

/// The place of uncompressed contents.
#[derive(Debug)]
pub(super) struct HostRange {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) at: HostOffset,
    /// How many of them, in bytes.
    pub(super) length: u64,
}

#[derive(Debug)]
struct Part {
    disk: Arc<dyn Disk>,
    /// Its beginning and end, rounded up to a whole sector.
    range: Range<u64>,
    /// The first byte of the disk that belongs to it.
    start: u64,
    /// Bytes of the disk that belong to it.
    len: u64,
}

/// Contents of the source that the target has already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shared {
    /// Files at the top of the source's chain that the target does not share.
    pub(super) layers: u32,
    /// Bytes of the target, or of its backing image, before the conversion: what follows reads as zeros there.
    pub(super) length: u64,
}

impl Source {
    /// `window`: the part of each disk that is used, as much of it as the disk has.
    pub(crate) fn new(disks: &[Arc<dyn Disk>], window: Option<&Range<u64>>) -> Result<Self, OperationError> {
        let mut parts = Vec::with_capacity(disks.len());
        let mut at = 0_u64;
        for disk in disks {
            let end = window.map_or(u64::MAX, |window| window.end).min(disk.len());
            let start = window.map_or(0, |window| window.start).min(end);
            let len = end - start;
            let whole = len.checked_next_multiple_of(SECTOR).and_then(|whole| at.checked_add(whole));
            let end = whole.ok_or(OperationError::TooLarge)?;
            parts.push(Part { disk: Arc::clone(disk), range: at..end, start, len });
            at = end;
        }
        Ok(Self { parts, len: at })
    }

    /// Bytes of all of them.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the kind of the bytes from `at` on. `shared`: the target has contents of the source already.
    pub(crate) async fn map(&self, at: u64, shared: Option<Shared>) -> Result<Span, ImageError> {
        let Some(part) = self.parts.iter().find(|part| part.range.contains(&at)) else {
            return Ok(Span { range: at..self.len.max(at), content: Content::Zero });
        };
        let inside = at - part.range.start;
        if inside >= part.len {
            return Ok(Span { range: at..part.range.end, content: Content::Zero });
        }
        let most = part.len - inside;
        let mapped = part.disk.map(GuestOffset(part.start + inside), most).await?;
        let mut length = mapped.length.clamp(1, most);
        let content = match (mapped.kind, shared) {
            (_, Some(shared)) if mapped.depth >= shared.layers => Content::Below,
            (BlockStatus::Data | BlockStatus::Compressed, _) => Content::Data,
            // The target has nothing there either.
            (_, Some(shared)) if at >= shared.length => Content::Below,
            (_, Some(shared)) => {
                length = length.min(shared.length - at);
                Content::Zero
            }
            _ => Content::Zero,
        };
        Ok(Span { range: at..at + length, content })
    }

    /// The place of the beginning of a range of contents; `None`: it has no plain place.
    pub(super) async fn place(&self, range: &Range<u64>) -> Result<Option<HostRange>, ImageError> {
        let Some(part) = self.parts.iter().find(|part| part.range.contains(&range.start)) else { return Ok(None) };
        let inside = range.start - part.range.start;
        let most = part.len.min(range.end - part.range.start).saturating_sub(inside);
        if most == 0 {
            return Ok(None);
        }
        let mapped = part.disk.map(GuestOffset(part.start + inside), most).await?;
        let storage = part.disk.storage(mapped.depth).filter(|_| mapped.kind == BlockStatus::Data);
        let place = |(_, at)| Some(HostRange { storage: storage?, at, length: mapped.length.clamp(1, most) });
        Ok(mapped.host.and_then(place))
    }

    /// Fills a buffer with what is in a range. With `lost`, sectors that cannot be read become zeros and are named
    /// there.
    pub(crate) async fn read(
        &self,
        range: &Range<u64>,
        into: &Buffer,
        lost: Option<&mut Vec<Range<u64>>>,
    ) -> Result<(), OperationError> {
        let first = self.parts.iter().filter(|part| part.range.end > range.start && part.range.start < range.end);
        let mut failed = Vec::new();
        let salvage = lost.is_some();
        let reads = first.map(|part| async move {
            let begin = range.start.max(part.range.start);
            let own_end = range.end.min(part.range.start + part.len).max(begin);
            let place = |from: u64, to: u64| into.slice(index(from - range.start)..index(to - range.start));
            place(own_end, range.end.min(part.range.end)).clear();
            let mut bad = Vec::new();
            let whole = if begin < own_end { part.read(begin, place(begin, own_end)).await } else { Ok(()) };
            match whole {
                Ok(()) => {}
                Err(error) if !salvage => return Err(OperationError::at(DiskOperation::Reading, begin)(error)),
                Err(error) if is_salvageable(&error) => {
                    let done = part.salvage(begin..own_end, place, &mut bad).await;
                    done.map_err(|(at, error)| OperationError::at(DiskOperation::Reading, at)(error))?;
                }
                Err(error) => return Err(OperationError::at(DiskOperation::Reading, begin)(error)),
            }
            Ok(bad)
        });
        for bad in try_join_all(reads).await? {
            failed.extend(bad);
        }
        if let Some(lost) = lost {
            lost.extend(failed);
        }
        Ok(())
    }
}

impl Part {
    /// Reads what can be read of a range that cannot be read as a whole, half by half. Sectors that cannot be read
    /// become zeros, and are named in order. Fails where nothing that follows could be read, either.
    async fn salvage(
        &self,
        range: Range<u64>,
        place: impl Fn(u64, u64) -> Buffer,
        bad: &mut Vec<Range<u64>>,
    ) -> Result<(), (u64, ImageError)> {
        // What has not been looked at, the first of it last, and whether it may be readable.
        let mut halves = vec![(range, false)];
        while let Some((range, is_worth_it)) = halves.pop() {
            if is_worth_it {
                match self.read(range.start, place(range.start, range.end)).await {
                    Ok(()) => continue,
                    Err(error) if is_salvageable(&error) => {}
                    Err(error) => return Err((range.start, error)),
                }
            }
            let Some(middle) = middle(&range) else {
                place(range.start, range.end).clear();
                bad.push(range);
                continue;
            };
            halves.push((middle..range.end, true));
            halves.push((range.start..middle, true));
        }
        Ok(())
    }

    async fn read(&self, at: u64, into: Buffer) -> Result<(), ImageError> {
        self.disk.read(GuestOffset(self.start + (at - self.range.start)), IoVector::from(into)).await
    }
}

/// Whether the source itself reports that it cannot read this: what else it has can still be read. A source that is
/// gone, such as a server whose connection is lost, reports nothing: all of the rest would become zeros.
pub(crate) fn is_salvageable(error: &ImageError) -> bool {
    match error {
        ImageError::Corrupt { .. } | ImageError::Truncated { .. } => true,
        ImageError::Storage(error) => Errno::from_io_error(&error.source).is_some_and(|number| !GONE.contains(&number)),
        _ => false,
    }
}

/// The end of a sector in the middle of a range; `None`: the range is within one.
fn middle(range: &Range<u64>) -> Option<u64> {
    let half = range.start.midpoint(range.end) / SECTOR * SECTOR;
    let middle = if half > range.start { half } else { (range.start / SECTOR + 1) * SECTOR };
    (middle < range.end).then_some(middle)
}

/// A place in a buffer.
pub(crate) fn index(bytes: u64) -> usize {
    to_usize(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_halved_between_sectors() {
        assert_eq!(middle(&(0..1024)), Some(512));
        assert_eq!(middle(&(512..(1 << 20))), Some(1 << 19));
        assert_eq!(middle(&(600..1500)), Some(1024));
        assert_eq!([0..512, 600..1024, 0..1].map(|range| middle(&range)), [None; 3]);
    }
}
