//! Times of giving back memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use limosa_balloon::{GuestRam, Reclaim};
use limosa_memory::MemoryError;
use limosa_page::PAGE_SIZE;

use crate::measure::{Measured, millis, nanoseconds};

/// By how much memory is given back at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pieces {
    /// As much as is next to each other.
    Runs,
    /// A page.
    Pages,
}

/// How much was given back, and the time it took, by the clock of the caller.
#[derive(Debug, Default)]
pub(super) struct Discards {
    per_page: AtomicU64,
    calls: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Discards {
    /// From here on, in those pieces.
    pub(super) fn begin(&self, pieces: Pieces) {
        self.per_page.store(u64::from(pieces == Pieces::Pages), Ordering::SeqCst);
        for counter in [&self.calls, &self.bytes, &self.nanoseconds] {
            counter.store(0, Ordering::SeqCst);
        }
    }

    /// How long it took since.
    pub(super) fn took(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::SeqCst))
    }

    /// With what it took since.
    pub(super) fn end(&self, measured: Measured) -> Measured {
        let read = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        measured
            .with("discards", read(&self.calls))
            .with("discarded_mib", read(&self.bytes) >> 20)
            .with("discarding_ms", millis(self.took()))
    }
}

/// A guest's memory.
#[derive(Debug)]
pub(super) struct Timed {
    pub(super) ram: GuestRam,
    pub(super) discards: Arc<Discards>,
}

impl Reclaim for Timed {
    fn ram(&self) -> &[Range<u64>] {
        self.ram.ram()
    }

    fn host_page_size(&self, index: usize) -> u64 {
        self.ram.host_page_size(index)
    }

    fn discard(&self, run: &Range<u64>) -> Result<u64, MemoryError> {
        let per_page = self.discards.per_page.load(Ordering::SeqCst) != 0;
        let step = if per_page { PAGE_SIZE } else { (run.end - run.start).max(1) };
        let (mut at, mut bytes, mut calls) = (run.start, 0, 0);
        let began = Instant::now();
        while at < run.end {
            let piece = at..at.saturating_add(step).min(run.end);
            at = piece.end;
            bytes += self.ram.discard(&piece)?;
            calls += 1;
        }
        self.discards.nanoseconds.fetch_add(nanoseconds(began.elapsed()), Ordering::SeqCst);
        self.discards.calls.fetch_add(calls, Ordering::SeqCst);
        self.discards.bytes.fetch_add(bytes, Ordering::SeqCst);
        Ok(bytes)
    }
}

/// Returns the bytes of a guest's memory that are inflated, or touched and freed: all but an eighth.
pub(super) fn taken(memory: u64) -> u64 {
    memory / 8 * 7
}
