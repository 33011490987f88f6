//! Counts of an image's storage operations, by purpose.

use std::sync::atomic::{AtomicU64, Ordering};

use limosa_storage::Striped;

/// The purpose of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationKind {
    DataRead,
    DataWrite,
    CowRead,
    CowWrite,
    Clone,
    L1Write,
    L2Read,
    L2Write,
    RefcountRead,
    RefcountWrite,
    HeaderWrite,
    WriteZeroes,
    Discard,
    Flush,
}

const PURPOSES: usize = OperationKind::Flush as usize + 1;

/// Operations of one purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationCount {
    /// How many.
    pub operations: u64,
    /// Of how many bytes together.
    pub bytes: u64,
}

/// Storage operations of an image since it was opened. A request to its backing image is counted here as one operation,
/// and there as the operations that it took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Contents read for the guest.
    pub data_reads: OperationCount,
    /// Contents written for the guest, and nothing else with them.
    pub data_writes: OperationCount,
    /// Contents read to fill a new cluster.
    pub cow_reads: OperationCount,
    /// New clusters written: with the guest's contents what has to be around them.
    pub cow_writes: OperationCount,
    /// Contents that a new cluster shares with where they were, in place of a copy.
    pub clones: OperationCount,
    /// Parts of the L1 table written.
    pub l1_writes: OperationCount,
    /// Slices of L2 tables read.
    pub l2_reads: OperationCount,
    /// L2 tables written: slices, and new tables as a whole.
    pub l2_writes: OperationCount,
    /// Slices of refcount blocks read.
    pub refcount_reads: OperationCount,
    /// Refcount blocks and parts of the refcount table written.
    pub refcount_writes: OperationCount,
    /// Changes of the header.
    pub header_writes: OperationCount,
    /// Ranges zeroed by the storage itself.
    pub zeroes: OperationCount,
    /// Ranges that the storage discarded.
    pub discards: OperationCount,
    /// Flushes of the storages.
    pub flushes: u64,
    /// Requests that were carried out with the copy of another one.
    pub joined: u64,
}

/// Counted in stripes by threads.
#[derive(Debug, Default)]
pub(super) struct Counters(Striped<Stripe>);

#[derive(Debug, Default)]
struct Stripe {
    operations: [AtomicU64; PURPOSES],
    bytes: [AtomicU64; PURPOSES],
    joined: AtomicU64,
}

impl Counters {
    pub(super) fn add(&self, purpose: OperationKind, bytes: u64) {
        let Stripe { operations, bytes: sums, .. } = self.0.own();
        // Both arrays have a place for every purpose.
        if let (Some(operations), Some(sum)) = (operations.get(purpose as usize), sums.get(purpose as usize)) {
            operations.fetch_add(1, Ordering::Relaxed);
            sum.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn joined(&self) {
        self.0.own().joined.fetch_add(1, Ordering::Relaxed);
    }

    fn sum(&self, counter: impl Fn(&Stripe) -> Option<&AtomicU64>) -> u64 {
        self.0.iter().filter_map(counter).map(|counter| counter.load(Ordering::Relaxed)).sum()
    }

    pub(super) fn counts(&self) -> Counts {
        let operations = |purpose: OperationKind| OperationCount {
            operations: self.sum(|stripe| stripe.operations.get(purpose as usize)),
            bytes: self.sum(|stripe| stripe.bytes.get(purpose as usize)),
        };
        Counts {
            data_reads: operations(OperationKind::DataRead),
            data_writes: operations(OperationKind::DataWrite),
            cow_reads: operations(OperationKind::CowRead),
            cow_writes: operations(OperationKind::CowWrite),
            clones: operations(OperationKind::Clone),
            l1_writes: operations(OperationKind::L1Write),
            l2_reads: operations(OperationKind::L2Read),
            l2_writes: operations(OperationKind::L2Write),
            refcount_reads: operations(OperationKind::RefcountRead),
            refcount_writes: operations(OperationKind::RefcountWrite),
            header_writes: operations(OperationKind::HeaderWrite),
            zeroes: operations(OperationKind::WriteZeroes),
            discards: operations(OperationKind::Discard),
            flushes: operations(OperationKind::Flush).operations,
            joined: self.sum(|stripe| Some(&stripe.joined)),
        }
    }
}
