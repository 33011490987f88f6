//! Counters of the requests to a file.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::striped::Striped;

/// Operations and bytes of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OperationCount {
    /// Operations begun.
    pub operations: u64,
    /// Their bytes in total.
    pub bytes: u64,
}

/// Requests to a file since it was opened, successful or not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileCounters {
    /// Reads.
    pub reads: OperationCount,
    /// Writes.
    pub writes: OperationCount,
    /// Ranges zeroed.
    pub zeroes: OperationCount,
    /// Ranges discarded.
    pub discards: OperationCount,
    /// Ranges allocated.
    pub allocations: OperationCount,
    /// Ranges cloned from another file, including attempts.
    pub clones: OperationCount,
    /// Flushes that reached the kernel.
    pub flushes: u64,
    /// Reads and writes that were copied because they were not aligned for direct I/O.
    pub bounced: OperationCount,
    /// Of those, writes of partial blocks: each reads the surrounding bytes first.
    pub read_modify_writes: OperationCount,
}

impl FileCounters {
    fn add(&mut self, more: Self) {
        let add = |sum: &mut OperationCount, more: OperationCount| {
            sum.operations += more.operations;
            sum.bytes += more.bytes;
        };
        add(&mut self.reads, more.reads);
        add(&mut self.writes, more.writes);
        add(&mut self.zeroes, more.zeroes);
        add(&mut self.discards, more.discards);
        add(&mut self.allocations, more.allocations);
        add(&mut self.clones, more.clones);
        self.flushes += more.flushes;
        add(&mut self.bounced, more.bounced);
        add(&mut self.read_modify_writes, more.read_modify_writes);
    }
}

/// An [`OperationCount`] with atomic fields.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    operations: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    pub(crate) fn add(&self, bytes: u64) {
        self.operations.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    fn count(&self) -> OperationCount {
        OperationCount { operations: self.operations(), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

/// [`FileCounters`] with atomic fields.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: Counter,
    pub(crate) writes: Counter,
    pub(crate) zeroes: Counter,
    pub(crate) discards: Counter,
    pub(crate) allocations: Counter,
    pub(crate) clones: Counter,
    pub(crate) flushes: Counter,
    pub(crate) bounced: Counter,
    pub(crate) merged: Counter,
}

impl Counters {
    /// The sums of all stripes.
    pub(crate) fn sum(stripes: &Striped<Self>) -> FileCounters {
        let mut sum = FileCounters::default();
        for stripe in stripes.iter() {
            sum.add(stripe.snapshot());
        }
        sum
    }

    fn snapshot(&self) -> FileCounters {
        FileCounters {
            reads: self.reads.count(),
            writes: self.writes.count(),
            zeroes: self.zeroes.count(),
            discards: self.discards.count(),
            allocations: self.allocations.count(),
            clones: self.clones.count(),
            flushes: self.flushes.count().operations,
            bounced: self.bounced.count(),
            read_modify_writes: self.merged.count(),
        }
    }
}
