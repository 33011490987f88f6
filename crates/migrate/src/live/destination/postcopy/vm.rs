//! A VM whose memory comes while it runs, over all connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hdrhistogram::Histogram;
use limosa_memory::{Fault, FaultError, FaultHandler};
use limosa_page::{AtomicPageBitmap, broken_invariant};

use super::requests::Requests;
use crate::control::Progress;
use crate::destination::DestinationStats;
use crate::error::MigrateError;
use crate::live::destination::ram::GuestRam;
use crate::pages::StreamSetup;

/// Counters from the package on.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PostcopyIncomingStats {
    /// Pages placed with contents.
    pub normal_pages: u64,
    /// Pages placed as zero.
    pub zero_pages: u64,
    /// Pages that came although they were there, and were dropped.
    pub repeated_pages: u64,
    /// Faults that were told, and those of them that were answered here: the page was known to be zero.
    pub faults: u64,
    /// Pages of faults that were answered with zeros here.
    pub local_zero_pages: u64,
    /// Requests to the source, repeated ones included.
    pub requests: u64,
    /// From the moment a fault was told to the moment its page was in place, nanoseconds; faults whose page was asked
    /// for.
    pub fault_latency: Histogram<u64>,
    /// From the package's last byte to the VM's start.
    pub load_elapsed: Duration,
    /// Connections after the first.
    pub recoveries: u32,
}

/// Counters of all threads.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) normal: AtomicU64,
    pub(super) zero: AtomicU64,
    pub(super) repeated: AtomicU64,
    pub(super) faults: AtomicU64,
    pub(super) local: AtomicU64,
    pub(super) load_nanos: AtomicU64,
}

impl Counts {
    pub(super) fn moved(&self, normal: u64, zero: u64) {
        self.normal.fetch_add(normal, Relaxed);
        self.zero.fetch_add(zero, Relaxed);
    }

    pub(super) fn repeated(&self, pages: u64) {
        self.repeated.fetch_add(pages, Relaxed);
    }
}

/// A VM whose memory comes while it runs: what lives as long as pages are missing, over all connections.
pub(super) struct PostcopyVm<'a> {
    pub(super) ram: Arc<GuestRam<'a>>,
    pub(super) faults: FaultHandler,
    pub(super) requests: Requests,
    pub(super) counts: Counts,
    /// Host pages, by block and first page, that one of the channels has in hand or has placed.
    pub(super) claimed: Vec<AtomicPageBitmap>,
    pub(super) start: StreamSetup,
    pub(super) progress: Progress,
    pub(super) answer_timeout: Option<Duration>,
    pub(super) received: DestinationStats,
    pub(super) recoveries: u32,
}

impl PostcopyVm<'_> {
    /// Makes missing pages zero from now on.
    pub(super) fn release(&self) -> Result<(), MigrateError> {
        let release = || self.faults.registration_guard().handler()?.finish();
        release().map_err(|error: FaultError| MigrateError::Sink(error.into()))
    }

    /// Answers a fault, or asks the source to.
    pub(super) fn fault(&self, fault: Fault) -> Result<(), MigrateError> {
        self.counts.faults.fetch_add(1, Relaxed);
        let known = self.ram.block_of(fault.block);
        let (index, block) =
            known.ok_or_else(|| broken_invariant("only blocks of the stream are registered for faults"))?;
        if block.received.get(fault.pages.start) {
            // It is there, or known to be zero.
            let zero = self.faults.zero(fault.block, fault.pages).map_err(|error| MigrateError::Sink(error.into()))?;
            self.counts.local.fetch_add(zero.placed.len(), Relaxed);
            return Ok(());
        }
        self.requests.wait_for(index, fault.pages, || block.received.get(fault.pages.start))
    }

    pub(super) fn stats(&self) -> PostcopyIncomingStats {
        let read = |count: &AtomicU64| count.load(Relaxed);
        PostcopyIncomingStats {
            normal_pages: read(&self.counts.normal),
            zero_pages: read(&self.counts.zero),
            repeated_pages: read(&self.counts.repeated),
            faults: read(&self.counts.faults),
            local_zero_pages: read(&self.counts.local),
            requests: self.requests.sent.load(Relaxed),
            fault_latency: self.requests.latency(),
            load_elapsed: Duration::from_nanos(read(&self.counts.load_nanos)),
            recoveries: self.recoveries,
        }
    }
}
