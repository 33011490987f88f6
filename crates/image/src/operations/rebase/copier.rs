//! Copies into an overlay what its new backing file does not have.
//!
//! Law: what the overlay has itself is neither read nor written, and what is known to be zero in both backing files is
//! not read. What differs is written in whole units of the overlay, so that nothing around it is copied on write.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_lock::Mutex;
use futures_util::TryStreamExt;
use futures_util::future::try_join;
use futures_util::stream::FuturesUnordered;
use limosa_page::to_u64;
use limosa_storage::{Buffer, IoVector};

use super::{RebaseCounters, RebaseOptions};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::offset::GuestOffset;
use crate::operations::convert::{SECTOR, index};
use crate::operations::operation::{DiskOperation, OperationError, Progress, ProgressObserver};

/// A part of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// It is the overlay's own, comes from the same file, or is zeros over both backing files.
    Leave(Range<u64>),
    /// It comes from the backing file, and has to be compared.
    Compare(Range<u64>, Zeros),
}

/// The backing files that are known to be zero in a part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Zeros {
    old: bool,
    new: bool,
}

/// The change of a part of the overlay that would read as something else over the new backing file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// It gets the old contents.
    Write,
    /// They are zeros, which it says from now on.
    Zero,
}

/// Copies an overlay's old contents where its new backing file has others.
pub(super) struct Copier<'a> {
    /// The overlay over its old backing file, [padded](super::padded::Padded).
    overlay: &'a dyn Disk,
    new: Option<&'a dyn Disk>,
    /// Depth in the overlay's chain from where on bytes come from the new backing file, too.
    shared_from: u32,
    options: &'a RebaseOptions,
    /// Bytes that are written as a whole.
    unit: u64,
    /// Bytes that are compared at once.
    piece: u64,
    at: Mutex<u64>,
    done: AtomicU64,
    moved: AtomicU64,
    watch: ProgressObserver<'a>,
}

impl<'a> Copier<'a> {
    pub(super) fn new(
        overlay: &'a dyn Disk,
        new: Option<&'a Arc<dyn Disk>>,
        shared_from: Option<u32>,
        options: &'a RebaseOptions,
        watch: ProgressObserver<'a>,
    ) -> Result<Self, ImageError> {
        let compressor = options.compress.then(|| overlay.compressor(None)).transpose()?;
        let cluster = compressor.map_or(SECTOR, |compressor| to_u64(compressor.unit()));
        let unit = overlay.allocation_unit().max(cluster).max(SECTOR);
        let piece = options.chunk_size.max(unit).next_multiple_of(unit);
        Ok(Self {
            overlay,
            new: new.map(|new| &**new),
            shared_from: shared_from.unwrap_or(u32::MAX),
            options,
            unit,
            piece,
            at: Mutex::new(0),
            done: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            watch,
        })
    }

    /// Copies, with as many requests in flight as the options say. What was written is not durable yet.
    pub(super) async fn run(&self) -> Result<RebaseCounters, OperationError> {
        let workers: FuturesUnordered<_> = (0..self.options.max_in_flight.max(1)).map(|_| self.worker()).collect();
        let mut counters = RebaseCounters::default();
        workers
            .try_for_each(|part| {
                counters.add(&part);
                std::future::ready(Ok(()))
            })
            .await?;
        Ok(counters)
    }

    async fn worker(&self) -> Result<RebaseCounters, OperationError> {
        let mut counters = RebaseCounters::default();
        let mut buffers = None;
        while let Some(step) = self.next().await? {
            let length = match step {
                Step::Leave(range) => range.end - range.start,
                Step::Compare(range, zeros) => {
                    let piece = index(self.piece);
                    let [old, new] = buffers.get_or_insert_with(|| [Buffer::zeroed(piece), Buffer::zeroed(piece)]);
                    self.compare(&range, zeros, [&*old, &*new], &mut counters).await?;
                    range.end - range.start
                }
            };
            let done = self.done.fetch_add(length, Ordering::Relaxed) + length;
            let moved = self.moved.load(Ordering::Relaxed);
            if let ControlFlow::Break(()) = (self.watch)(Progress { done, total: self.overlay.len(), moved }) {
                return Err(OperationError::Stopped);
            }
        }
        Ok(counters)
    }

    /// The next part of the disk.
    async fn next(&self) -> Result<Option<Step>, OperationError> {
        let mut next = self.at.lock().await;
        let (at, total) = (*next, self.overlay.len());
        if at >= total {
            return Ok(None);
        }
        let (end, depth, old_zero) = self.map(Some(self.overlay), at, total).await?;
        let step = if self.keeps(depth) {
            Step::Leave(at..end)
        } else {
            let new = if old_zero { self.map(self.new, at, total).await? } else { (at, 0, false) };
            match whole(end.min(new.0), total, self.unit) {
                both if old_zero && new.2 && both > at => Step::Leave(at..both),
                _ => self.piece(at, total).await?,
            }
        };
        let (Step::Leave(range) | Step::Compare(range, _)) = &step;
        *next = range.end;
        Ok(Some(step))
    }

    /// Whether bytes from this far down the overlay's chain read the same over the new backing file.
    const fn keeps(&self, depth: u32) -> bool {
        depth == 0 || depth >= self.shared_from
    }

    /// A piece from `at` on that is not the overlay's own.
    async fn piece(&self, at: u64, total: u64) -> Result<Step, OperationError> {
        let most = (at / self.piece + 1).saturating_mul(self.piece).min(total);
        let (mut end, mut zeros) = (at, Zeros { old: true, new: true });
        while end < most {
            let (next, depth, zero) = self.map(Some(self.overlay), end, most).await?;
            if self.keeps(depth) {
                break;
            }
            (end, zeros.old) = (next, zeros.old && zero);
        }
        let mut looked = at;
        while looked < end && zeros.new {
            let (next, _, zero) = self.map(self.new, looked, end).await?;
            (looked, zeros.new) = (next, zero);
        }
        Ok(Step::Compare(at..end, zeros))
    }

    /// Up to where a disk is alike from `at` on, how far down, and whether it is zeros there. Past its end it is zeros.
    async fn map(&self, disk: Option<&dyn Disk>, at: u64, end: u64) -> Result<(u64, u32, bool), OperationError> {
        let Some(disk) = disk.filter(|disk| at < disk.len()) else { return Ok((end, 0, true)) };
        let most = end.min(disk.len()) - at;
        let found = disk.map(GuestOffset(at), most).await.map_err(OperationError::at(DiskOperation::Mapping, at))?;
        Ok((at + found.length.clamp(1, most), found.depth, found.kind.is_zero()))
    }

    /// Writes into the overlay what differs in a part of the disk.
    async fn compare(
        &self,
        range: &Range<u64>,
        zeros: Zeros,
        buffers: [&Buffer; 2],
        counters: &mut RebaseCounters,
    ) -> Result<(), OperationError> {
        let [old, new] = buffers.map(|buffer| buffer.slice(0..index(range.end - range.start)));
        let overlay = (!zeros.old).then_some(self.overlay);
        try_join(read(overlay, range, &old), read(self.new.filter(|_| !zeros.new), range, &new)).await?;
        counters.bytes_read += (range.end - range.start) * (u64::from(!zeros.old) + u64::from(!zeros.new));
        let place = |part: &Range<u64>| index(part.start - range.start)..index(part.end - range.start);
        let change = |part: &Range<u64>| {
            let old = old.slice(place(part));
            (!old.same_as(&new.slice(place(part)))).then(|| if old.is_zero() { Change::Zero } else { Change::Write })
        };
        for (part, change) in changes(range, self.unit, change) {
            let (at, length) = (GuestOffset(part.start), part.end - part.start);
            match change {
                Change::Zero => {
                    let zeroed = self.overlay.write_zeroes(at, length, true).await;
                    zeroed.map_err(OperationError::at(DiskOperation::Zeroing, at.0))?;
                    counters.bytes_zeroed += length;
                }
                Change::Write => {
                    let written = self.write(&part, old.slice(place(&part))).await;
                    written.map_err(OperationError::at(DiskOperation::Writing, at.0))?;
                    counters.bytes_written += length;
                    self.moved.fetch_add(length, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

impl Copier<'_> {
    /// Writes into the overlay; compressed, if that is asked for, what is of whole clusters.
    async fn write(&self, part: &Range<u64>, from: Buffer) -> Result<(), ImageError> {
        let place = |part: &Range<u64>, of: &Range<u64>| {
            let bytes = from.slice(index(of.start - part.start)..index(of.end - part.start));
            (GuestOffset(of.start), IoVector::from(bytes))
        };
        let clusters = if self.options.compress { whole_units(part, self.overlay.len(), self.unit) } else { 0..0 };
        if clusters.is_empty() {
            let (at, bytes) = place(part, part);
            return self.overlay.write(at, bytes).await;
        }
        let (at, bytes) = place(part, &clusters);
        let packed = self.overlay.compressor(None)?.compress(&bytes);
        self.overlay.write_compressed(at, packed).await?;
        for rest in [part.start..clusters.start, clusters.end..part.end] {
            if !rest.is_empty() {
                let (at, bytes) = place(part, &rest);
                self.overlay.write(at, bytes).await?;
            }
        }
        Ok(())
    }
}

/// Reads a part of a disk; past its end, and without one, there are zeros.
async fn read(disk: Option<&dyn Disk>, range: &Range<u64>, into: &Buffer) -> Result<(), OperationError> {
    let has = disk.map_or(0, |disk| disk.len()).clamp(range.start, range.end) - range.start;
    into.slice(index(has)..into.len()).clear();
    match disk.filter(|_| has > 0) {
        Some(disk) => {
            let read = disk.read(GuestOffset(range.start), IoVector::from(into.slice(0..index(has)))).await;
            read.map_err(OperationError::at(DiskOperation::Reading, range.start))
        }
        None => Ok(()),
    }
}

/// The end of the whole units before `end`, or of the disk.
const fn whole(end: u64, total: u64, unit: u64) -> u64 {
    if end >= total { total } else { end / unit * unit }
}

/// The whole units in a part of a disk of `total` bytes; its last one need not be whole.
fn whole_units(part: &Range<u64>, total: u64, unit: u64) -> Range<u64> {
    part.start.next_multiple_of(unit)..whole(part.end, total, unit)
}

/// The changes of the units of a range, neighbours together.
fn changes(range: &Range<u64>, unit: u64, change: impl Fn(&Range<u64>) -> Option<Change>) -> Vec<(Range<u64>, Change)> {
    let mut found: Vec<(Range<u64>, Change)> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let part = at..(at / unit + 1).saturating_mul(unit).min(range.end);
        at = part.end;
        let Some(change) = change(&part) else { continue };
        match found.last_mut() {
            Some((last, same)) if last.end == part.start && *same == change => last.end = part.end,
            _ => found.push((part, change)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use limosa_storage::block_on;

    use super::*;
    use crate::disk::BlockStatus;
    use crate::test_disk::{Asked, Part, TestDisk};

    const K4: u64 = 4096;

    fn changed(overlay: &TestDisk, new: &[Part], shared_from: Option<u32>) -> (Vec<Asked>, RebaseCounters) {
        let new: Option<Arc<dyn Disk>> = (!new.is_empty()).then(|| Arc::new(TestDisk::new(new)) as _);
        let options = RebaseOptions::default().max_in_flight(1);
        let before = overlay.bytes();
        let copier = Copier::new(overlay, new.as_ref(), shared_from, &options, &|_| ControlFlow::Continue(())).unwrap();
        let counters = block_on(copier.run()).unwrap();
        assert!(overlay.bytes() == before);
        let changes = overlay.asked().into_iter().filter(|asked| !matches!(asked, Asked::Read(_)));
        (changes.collect(), counters)
    }

    fn overlay() -> TestDisk {
        TestDisk::new(&[
            (K4, BlockStatus::Data, 0, 1),
            (K4, BlockStatus::Data, 1, 2),
            (K4, BlockStatus::Data, 1, 3),
            (K4, BlockStatus::Unallocated, 1, 0),
            (K4, BlockStatus::Unallocated, 1, 0),
        ])
    }

    #[test]
    fn what_differs_is_written_and_zeros_are_said() {
        let new = [(2 * K4, BlockStatus::Data, 0, 2), (K4, BlockStatus::Data, 0, 9), (K4, BlockStatus::Data, 0, 7)];
        let (changes, counters) = changed(&overlay(), &new, None);
        assert_eq!(changes, [Asked::Write(2 * K4..3 * K4), Asked::Zero(3 * K4..4 * K4)]);
        assert_eq!((counters.bytes_written, counters.bytes_zeroed), (K4, K4));
    }

    #[test]
    fn without_a_new_backing_file_all_contents_are_copied_and_zeros_are_not() {
        let (changes, counters) = changed(&overlay(), &[], None);
        assert_eq!(changes, [Asked::Write(K4..3 * K4)]);
        assert_eq!(counters.bytes_zeroed, 0);
    }

    #[test]
    fn nothing_is_read_that_is_shared_or_zero_in_both() {
        let overlay = TestDisk::new(&[(K4, BlockStatus::Data, 2, 1), (8 * K4, BlockStatus::Unallocated, 1, 0)]);
        let (changes, counters) = changed(&overlay, &[(9 * K4, BlockStatus::Zero, 0, 0)], Some(2));
        assert_eq!((changes, counters), (vec![], RebaseCounters::default()));
        assert_eq!(overlay.asked(), []);
    }

    #[test]
    fn a_unit_differs_as_a_whole() {
        use Change::{Write, Zero};

        let differ = |range, written: &[u64], zero: &[u64]| {
            let any = |of: &[u64], part: &Range<u64>| of.iter().any(|at| part.contains(at));
            changes(&range, 1024, |part| any(written, part).then_some(Write).or(any(zero, part).then_some(Zero)))
        };
        assert_eq!(differ(0..4096, &[5, 1023, 1024, 4000], &[]), [(0..2048, Write), (3072..4096, Write)]);
        assert_eq!(differ(512..4096, &[600], &[1024, 2048]), [(512..1024, Write), (1024..3072, Zero)]);
        assert_eq!(differ(0..4096, &[], &[]), []);
        assert_eq!([whole(5000, 9000, 4096), whole(9000, 9000, 4096)], [4096, 9000]);
        assert_eq!(whole_units(&(100..9000), 9000, 4096), 4096..9000);
        assert_eq!(whole_units(&(0..8999), 9000, 4096), 0..8192);
        assert!(whole_units(&(100..5000), 9000, 4096).is_empty());
    }
}
