//! Whether two disks have the same contents.
//!
//! Law: what both know to be zero is not read; what one of them knows to be zero is read of the other only. The
//! difference that is named is the first one, however many requests are under way.
//!
//! A disk that is longer than the other is the same if the rest of it is zeros.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_lock::Mutex;
use futures_util::TryStreamExt;
use futures_util::future::try_join;
use futures_util::stream::FuturesUnordered;
use limosa_storage::{Buffer, IoVector};

use super::convert::{SECTOR, index};
use super::operation::{DiskOperation, OperationError, Progress, ProgressObserver};
use crate::disk::{BlockStatus, Disk, MapEntry};
use crate::offset::GuestOffset;
use crate::setters::setters;

/// How to compare.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CompareOptions {
    /// Reads of each disk under way at the same time.
    pub max_in_flight: usize,
    /// Bytes that are read at once.
    pub chunk_size: u64,
    /// Whether allocation and length have to be the same, too.
    pub strict: bool,
}

setters!(CompareOptions { max_in_flight: usize, chunk_size: u64, strict: bool });

impl Default for CompareOptions {
    fn default() -> Self {
        Self { max_in_flight: 8, chunk_size: 1 << 20, strict: false }
    }
}

/// The verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// They are the same.
    Same,
    /// Contents differ first there: the beginning of a sector of 512 bytes.
    ContentsDiffer(GuestOffset),
    /// Asked for strictly: something is allocated, or zero, in another way there.
    AllocationDiffers(GuestOffset),
    /// Asked for strictly: they are not of one length.
    LengthDiffers,
}

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Comparison {
    /// The verdict.
    pub verdict: Verdict,
    /// Whether they are of one length, in whole sectors.
    pub same_length: bool,
    /// Bytes read of both together.
    pub bytes_read: u64,
}

/// A failure of one of the two disks.
#[derive(Debug, thiserror::Error)]
#[error("{image}: cannot be compared")]
#[non_exhaustive]
pub struct CompareError {
    /// The disk: a path.
    pub image: Arc<str>,
    /// The failure.
    pub source: OperationError,
}

/// The reads that a run needs in which each disk is of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// Nothing: both are zero.
    Nothing,
    /// One of them, which has to be zeros.
    Zeros(Side),
    /// Both.
    Both,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    One,
    Other,
}

/// The reads that are needed, by the maps of both.
fn need(one: BlockStatus, other: BlockStatus) -> Need {
    match (one.is_zero(), other.is_zero()) {
        (true, true) => Need::Nothing,
        (true, false) => Need::Zeros(Side::Other),
        (false, true) => Need::Zeros(Side::One),
        (false, false) => Need::Both,
    }
}

/// Whether two runs are allocated in the same way: the same kind, and both or neither somewhere in a file as they are.
fn allocated_alike(one: &MapEntry, other: &MapEntry) -> bool {
    one.kind == other.kind && one.host.is_some() == other.host.is_some()
}

/// Compares two disks.
///
/// # Errors
/// [`CompareError`].
pub async fn compare(
    one: &dyn Disk,
    other: &dyn Disk,
    options: &CompareOptions,
    watch: ProgressObserver<'_>,
) -> Result<Comparison, CompareError> {
    let whole = |disk: &dyn Disk| {
        let len = disk.len().checked_next_multiple_of(SECTOR);
        len.ok_or_else(|| CompareError { image: Arc::clone(disk.name()), source: OperationError::TooLarge })
    };
    let (one_len, other_len) = (whole(one)?, whole(other)?);
    let same_length = one_len == other_len;
    if options.strict && !same_length {
        return Ok(Comparison { verdict: Verdict::LengthDiffers, same_length, bytes_read: 0 });
    }
    let total = one_len.max(other_len);
    let work = Work {
        disks: [one, other],
        options,
        total,
        feed: Mutex::new(Feed { at: 0, runs: [None, None], differs: false }),
        first: parking_lot::Mutex::new(None),
        done: AtomicU64::new(0),
        bytes_read: AtomicU64::new(0),
        watch,
    };
    let workers: FuturesUnordered<_> = (0..options.max_in_flight.max(1)).map(|_| work.worker()).collect();
    workers.try_collect::<()>().await?;
    let first = *work.first.lock();
    let verdict = first.map_or(Verdict::Same, |(_, verdict)| verdict);
    Ok(Comparison { verdict, same_length, bytes_read: work.bytes_read.into_inner() })
}

struct Work<'a> {
    disks: [&'a dyn Disk; 2],
    options: &'a CompareOptions,
    total: u64,
    feed: Mutex<Feed>,
    /// The first difference found so far.
    first: parking_lot::Mutex<Option<(u64, Verdict)>>,
    done: AtomicU64,
    bytes_read: AtomicU64,
    watch: ProgressObserver<'a>,
}

/// The part of the disks that is left.
struct Feed {
    at: u64,
    /// The current run of each disk: its end, and its kind.
    runs: [Option<(u64, MapEntry)>; 2],
    /// A worker found a difference: nothing behind it matters.
    differs: bool,
}

impl Work<'_> {
    fn failed(&self, side: usize, source: OperationError) -> CompareError {
        let image = self.disks.get(side).map_or_else(|| "".into(), |disk| Arc::clone(disk.name()));
        CompareError { image, source }
    }

    async fn worker(&self) -> Result<(), CompareError> {
        let mut buffers = None;
        while let Some((range, need)) = self.next().await? {
            let length = range.end - range.start;
            if need != Need::Nothing {
                let piece = index(self.options.chunk_size.max(SECTOR));
                let [one, other] = buffers.get_or_insert_with(|| [Buffer::zeroed(piece), Buffer::zeroed(piece)]);
                let (one, other) = (one.slice(0..index(length)), other.slice(0..index(length)));
                let inside = match need {
                    Need::Both => {
                        try_join(self.read(0, &range, &one), self.read(1, &range, &other)).await?;
                        if one.same_as(&other) {
                            None
                        } else {
                            first_sector(&one, |at, sector| !sector.same_as(&other.slice(at)))
                        }
                    }
                    Need::Zeros(side) => {
                        self.read(usize::from(side == Side::Other), &range, &one).await?;
                        if one.is_zero() { None } else { first_sector(&one, |_, sector| !sector.is_zero()) }
                    }
                    Need::Nothing => None,
                };
                if let Some(inside) = inside {
                    let at = range.start + inside;
                    self.differs(at, Verdict::ContentsDiffer(GuestOffset(at)));
                    self.feed.lock().await.differs = true;
                    return Ok(());
                }
            }
            let done = self.done.fetch_add(length, Ordering::Relaxed) + length;
            let moved = self.bytes_read.load(Ordering::Relaxed);
            if let ControlFlow::Break(()) = (self.watch)(Progress { done, total: self.total, moved }) {
                return Err(self.failed(0, OperationError::Stopped));
            }
        }
        Ok(())
    }

    /// The next run that is not known to be the same.
    async fn next(&self) -> Result<Option<(Range<u64>, Need)>, CompareError> {
        let mut feed = self.feed.lock().await;
        let at = feed.at;
        if feed.differs || at >= self.total {
            return Ok(None);
        }
        for side in [0, 1] {
            if feed.runs.get(side).is_some_and(|run| run.as_ref().is_none_or(|(end, _)| *end <= at)) {
                let run = self.map(side, at).await?;
                if let Some(place) = feed.runs.get_mut(side) {
                    *place = Some(run);
                }
            }
        }
        let [Some((one_end, one)), Some((other_end, other))] = &feed.runs else { return Ok(None) };
        if self.options.strict && !allocated_alike(one, other) {
            self.differs(at, Verdict::AllocationDiffers(GuestOffset(at)));
            feed.differs = true;
            return Ok(None);
        }
        let need = need(one.kind, other.kind);
        let mut end = (*one_end).min(*other_end);
        if need != Need::Nothing {
            end = end.min(at + self.options.chunk_size.max(SECTOR));
        }
        feed.at = end;
        Ok(Some((at..end, need)))
    }

    /// Up to where a disk is alike, and what it is there. Behind its end it is zeros.
    async fn map(&self, side: usize, at: u64) -> Result<(u64, MapEntry), CompareError> {
        let disk = self.disks.get(side).filter(|disk| at < disk.len());
        let Some(disk) = disk else {
            let nothing = MapEntry { length: self.total - at, kind: BlockStatus::Unallocated, depth: 0, host: None };
            return Ok((self.total, nothing));
        };
        let left = disk.len() - at;
        match disk.map(GuestOffset(at), left).await {
            Ok(mapped) => Ok((at + mapped.length.clamp(1, left), mapped)),
            Err(error) => Err(self.failed(side, OperationError::at(DiskOperation::Mapping, at)(error))),
        }
    }

    async fn read(&self, side: usize, range: &Range<u64>, into: &Buffer) -> Result<(), CompareError> {
        self.bytes_read.fetch_add(range.end - range.start, Ordering::Relaxed);
        let Some(disk) = self.disks.get(side) else { return Ok(()) };
        let read = disk.read(GuestOffset(range.start), IoVector::from(into.clone())).await;
        read.map_err(|error| self.failed(side, OperationError::at(DiskOperation::Reading, range.start)(error)))
    }

    fn differs(&self, at: u64, verdict: Verdict) {
        let mut first = self.first.lock();
        if first.is_none_or(|(found, _)| at < found) {
            *first = Some((at, verdict));
        }
    }
}

/// The beginning of the first sector that satisfies `is_it`.
fn first_sector(buffer: &Buffer, is_it: impl Fn(Range<usize>, Buffer) -> bool) -> Option<u64> {
    let sector = index(SECTOR);
    let found = (0..buffer.len()).step_by(sector).find(|&at| {
        let range = at..at + sector;
        is_it(range.clone(), buffer.slice(range))
    });
    found.map(|at| at as u64)
}

#[cfg(test)]
mod tests;
