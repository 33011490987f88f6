//! The progress of a running engine: for progress bars and for answers to `query-migrate`.
//!
//! Relaxed atomics: a reader sees numbers that may be a few microseconds apart from one another, and the engine pays
//! one uncontended addition for a batch of pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// The phase of a job. The names are QEMU's migration states where it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Nothing has moved yet.
    Setup = 0,
    /// Pages move while the VM runs at the source.
    Active = 1,
    /// The VM is stopped; device state moves.
    Device = 2,
    /// The guest runs at the destination; pages follow.
    PostcopyActive = 3,
    /// Checkpoints follow each other; the VM runs at the source between them.
    Colo = 4,
    /// All has been handed over; the other side has yet to confirm, or the file is yet to be made durable.
    Completing = 5,
    /// Done.
    Completed = 6,
}

impl Phase {
    fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Setup,
            1 => Self::Active,
            2 => Self::Device,
            3 => Self::PostcopyActive,
            4 => Self::Colo,
            5 => Self::Completing,
            _ => Self::Completed,
        }
    }
}

#[derive(Debug, Default)]
struct Numbers {
    phase: AtomicU8,
    total_pages: AtomicU64,
    normal_pages: AtomicU64,
    zero_pages: AtomicU64,
    resent_pages: AtomicU64,
    hinted_pages: AtomicU64,
    requests: AtomicU64,
    bytes: AtomicU64,
}

/// Shared counters of a running job. Cheap to clone; clones count into the same numbers.
#[derive(Debug, Clone, Default)]
pub struct Progress(Arc<Numbers>);

/// One reading of [`Progress`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct ProgressReading {
    /// The phase of the job.
    #[serde(skip)]
    pub phase: Phase,
    /// Pages of the job: of all RAM blocks when receiving, those with contents when sending.
    pub total_pages: u64,
    /// Pages moved with contents, resent ones included.
    pub normal_pages: u64,
    /// Pages moved as zero.
    pub zero_pages: u64,
    /// Pages that came again because the guest wrote to them.
    pub resent_pages: u64,
    /// Pages that did not move because the guest has said that they are free.
    pub hinted_pages: u64,
    /// Pages that the destination's guest asked for.
    pub requests: u64,
    /// Bytes of page contents moved.
    pub bytes: u64,
}

impl Progress {
    /// Counters at zero, in [`Phase::Setup`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads all numbers.
    pub fn read(&self) -> ProgressReading {
        let numbers = &*self.0;
        ProgressReading {
            phase: Phase::from_u8(numbers.phase.load(Relaxed)),
            total_pages: numbers.total_pages.load(Relaxed),
            normal_pages: numbers.normal_pages.load(Relaxed),
            zero_pages: numbers.zero_pages.load(Relaxed),
            resent_pages: numbers.resent_pages.load(Relaxed),
            hinted_pages: numbers.hinted_pages.load(Relaxed),
            requests: numbers.requests.load(Relaxed),
            bytes: numbers.bytes.load(Relaxed),
        }
    }

    /// Moves on to a later phase; never back.
    pub fn set_phase(&self, phase: Phase) {
        self.0.phase.fetch_max(phase as u8, Relaxed);
    }

    /// Sets the number of pages of the job.
    pub fn expect_pages(&self, total: u64) {
        self.0.total_pages.store(total, Relaxed);
    }

    /// Counts a batch that has moved.
    pub fn add_moved(&self, batch: MovedPages) {
        let numbers = &*self.0;
        numbers.normal_pages.fetch_add(batch.normal, Relaxed);
        numbers.zero_pages.fetch_add(batch.zero, Relaxed);
        numbers.resent_pages.fetch_add(batch.resent, Relaxed);
        numbers.bytes.fetch_add(batch.normal.saturating_mul(limosa_page::PAGE_SIZE), Relaxed);
    }

    /// Counts pages that do not move because they are free.
    pub fn add_hinted(&self, pages: u64) {
        self.0.hinted_pages.fetch_add(pages, Relaxed);
    }

    /// Counts a page that the destination asked for.
    pub fn add_requested(&self, pages: u64) {
        self.0.requests.fetch_add(pages, Relaxed);
    }

    /// Takes over the numbers of another program that does the work (QEMU writing a file by itself).
    pub fn set_reading(&self, reading: &ProgressReading) {
        let numbers = &*self.0;
        self.set_phase(reading.phase);
        numbers.total_pages.store(reading.total_pages, Relaxed);
        numbers.normal_pages.store(reading.normal_pages, Relaxed);
        numbers.zero_pages.store(reading.zero_pages, Relaxed);
        numbers.resent_pages.store(reading.resent_pages, Relaxed);
        numbers.hinted_pages.store(reading.hinted_pages, Relaxed);
        numbers.bytes.store(reading.bytes, Relaxed);
    }
}

/// A batch of pages, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MovedPages {
    /// With contents.
    pub normal: u64,
    /// As zero.
    pub zero: u64,
    /// Of both, those that had moved before.
    pub resent: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_never_goes_back() {
        let progress = Progress::new();
        progress.set_phase(Phase::Device);
        progress.set_phase(Phase::Active);
        assert_eq!(progress.read().phase, Phase::Device);
    }

    #[test]
    fn batches_add_up_and_bytes_count_contents_only() {
        let progress = Progress::new();
        progress.add_moved(MovedPages { normal: 3, zero: 5, resent: 1 });
        progress.add_moved(MovedPages { normal: 1, zero: 0, resent: 0 });
        let reading = progress.read();
        assert_eq!((reading.normal_pages, reading.zero_pages, reading.resent_pages), (4, 5, 1));
        assert_eq!(reading.bytes, 4 * 4096);
    }
}
