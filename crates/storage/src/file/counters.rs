//! What was asked of a file, counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// Operations and bytes of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Operations that were begun.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What was asked of a file since it was opened, whether it succeeded or not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FileCounters {
    /// Reads, of whatever alignment.
    pub reads: Count,
    /// Writes.
    pub writes: Count,
    /// Ranges that were made to read as zeros.
    pub zeroes: Count,
    /// Ranges given back.
    pub discards: Count,
    /// Ranges for which space was made sure of.
    pub allocations: Count,
    /// Ranges that were cloned from another file, or were to be.
    pub clones: Count,
    /// Flushes that the kernel was asked for.
    pub flushes: u64,
    /// Reads and writes that were copied, because they were not aligned for direct I/O.
    pub bounced: Count,
    /// Those of them that were writes of parts of blocks: each reads what surrounds it first.
    pub merged: Count,
}

/// A [`Count`] that many threads add to.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    operations: AtomicU64,
    bytes: AtomicU64,
}

impl Tally {
    pub(crate) fn add(&self, bytes: u64) {
        self.operations.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    fn count(&self) -> Count {
        Count { operations: self.operations(), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

/// [`FileCounters`] that many threads add to.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    pub(crate) reads: Tally,
    pub(crate) writes: Tally,
    pub(crate) zeroes: Tally,
    pub(crate) discards: Tally,
    pub(crate) allocations: Tally,
    pub(crate) clones: Tally,
    pub(crate) flushes: Tally,
    pub(crate) bounced: Tally,
    pub(crate) merged: Tally,
}

impl Tallies {
    pub(crate) fn counters(&self) -> FileCounters {
        FileCounters {
            reads: self.reads.count(),
            writes: self.writes.count(),
            zeroes: self.zeroes.count(),
            discards: self.discards.count(),
            allocations: self.allocations.count(),
            clones: self.clones.count(),
            flushes: self.flushes.count().operations,
            bounced: self.bounced.count(),
            merged: self.merged.count(),
        }
    }
}
