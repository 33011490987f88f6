//! Requests that change the guest's data, over shared in-flight allocations.
//!
//! Bytes of clusters that the image has exclusively are written in place. A request that changes where bytes are claims
//! the clusters (or subclusters) first: a *job* (the module `in_flight`), one for any cluster at a time. The `copier`
//! writes the guest's bytes, and claims what needs new space; `copy` carries out its jobs, by a `plan`, or by `clones`.
//! The `zeroer` zeroes and discards: its jobs change entries only. Jobs of `compressed` replace whole clusters.

mod cancelled;
mod clones;
mod compressed;
mod copier;
mod copy;
mod in_flight;
mod plan;
mod zeroer;

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join_all;
use limosa_page::BrokenInvariant;
use limosa_storage::{IoVector, Striped};

use self::cancelled::CancelledRequests;
use self::compressed::CompressedWriter;
use self::copier::Copier;
use self::in_flight::InFlightAllocations;
use self::zeroer::Zeroer;
pub(super) use self::zeroer::Zeroing;
use super::cancelled_writes::CancelledWrites;
use super::owners::Owners;
use super::seams;
use crate::compression::CompressedClusters;
use crate::error::ImageError;
use crate::offset::GuestOffset;

/// Each stripe of threads has its own, whose references are counted beside it.
#[derive(Clone)]
#[repr(align(128))]
pub(super) struct Writer {
    copier: Arc<Copier>,
    zeroer: Arc<Zeroer>,
    compressed: Arc<CompressedWriter>,
    in_flight: Arc<InFlightAllocations>,
    /// Jobs that nothing waits for.
    cancelled: Arc<CancelledRequests>,
    cancelled_writes: Arc<CancelledWrites>,
}

impl Writer {
    pub(super) fn striped(owners: &Owners) -> Striped<Arc<Self>> {
        let first = Self::new(owners);
        Striped::new(|| Arc::new(Self { copier: Arc::new(first.copier.for_stripe(owners)), ..first.clone() }))
    }

    fn new(owners: &Owners) -> Self {
        let in_flight = Arc::new(InFlightAllocations::new(*owners.context.geometry(), owners.context.region()));
        let copier = Arc::new(Copier::new(owners, Arc::clone(&in_flight)));
        let zeroer = Arc::new(Zeroer::new(owners, Arc::clone(&in_flight), Arc::clone(&copier)));
        let compressed = Arc::new(CompressedWriter::new(owners, Arc::clone(&in_flight)));
        let cancelled_writes = Arc::clone(&owners.cancelled_writes);
        Self { copier, zeroer, compressed, in_flight, cancelled: Arc::default(), cancelled_writes }
    }

    /// Writes all of `from` at `at`. The future borrows nothing.
    pub(super) fn write(
        &self,
        at: GuestOffset,
        from: IoVector,
    ) -> impl Future<Output = Result<(), ImageError>> + Send + use<> {
        Arc::clone(&self.copier).write(at, from)
    }

    /// Writes whole clusters that are compressed already at `at`. The future borrows nothing.
    pub(super) fn write_compressed(
        &self,
        at: GuestOffset,
        from: CompressedClusters,
    ) -> impl Future<Output = Result<(), ImageError>> + Send + use<> {
        Arc::clone(&self.compressed).write(at, from)
    }

    /// Makes `length` bytes at `at` read as zeros. The future borrows nothing.
    pub(super) fn zero(
        &self,
        at: GuestOffset,
        length: u64,
        zeroing: Zeroing,
    ) -> impl Future<Output = Result<(), ImageError>> + Send + use<> {
        Arc::clone(&self.zeroer).zero(at, length, zeroing)
    }

    /// Writes zeros wherever a range has other contents.
    pub(super) async fn write_zeros(&self, range: Range<GuestOffset>) -> Result<(), ImageError> {
        self.zeroer.write_zeros(range).await
    }

    /// Waits for all jobs, and for writes that were cancelled. No more of them begin meanwhile.
    pub(super) async fn wait_for_jobs(&self) {
        loop {
            let jobs = self.in_flight.all();
            if jobs.is_empty() {
                break;
            }
            // Their errors went to the requests that waited for them.
            join_all(jobs).await;
        }
        self.cancelled_writes.over().await;
    }

    /// The guest's bytes that requests which were dropped may still change: those of all jobs, whoever waits for them,
    /// and of writes that were cancelled.
    pub(super) fn may_still_change(&self) -> Vec<Range<GuestOffset>> {
        [self.in_flight.ranges(), self.cancelled_writes.bytes()].concat()
    }

    /// Checks that no job and no cancelled write is left.
    pub(super) fn check_idle(&self) -> Result<(), BrokenInvariant> {
        seams::nothing_in_flight(self.in_flight.all().len(), self.cancelled_writes.len())
    }

    /// Cancels all requests in flight.
    pub(super) fn clear(&self) {
        self.in_flight.clear();
        self.cancelled.clear();
        self.cancelled_writes.clear();
    }
}
