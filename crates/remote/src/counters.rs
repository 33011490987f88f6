//! Figures of an object that is read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Figures of a [`RemoteObject`](crate::RemoteObject), since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteCounters {
    /// Requests to the store: what it charges for. Retries and hedges are among them.
    pub requests: u64,
    /// Bytes of the object received from the store.
    pub bytes: u64,
    /// Requests that repeated a failed one.
    pub retries: u64,
    /// Second requests for what a first one was slow to bring.
    pub hedges: u64,
    /// Hedges that were faster than the first request.
    pub hedges_won: u64,
    /// Blocks that reads found in memory.
    pub memory_hits: u64,
    /// Blocks that came from the cache on local disk.
    pub cache_hits: u64,
    /// Blocks that came from the store because a read asked for them.
    pub demanded: u64,
    /// Blocks that came from the store ahead of reads.
    pub prefetched: u64,
}

/// The figures of an object, also after it is closed.
#[derive(Debug, Clone)]
pub struct RemoteFigures(pub(crate) Arc<Tally>);

impl RemoteFigures {
    /// Returns them as they are now.
    #[must_use]
    pub fn counters(&self) -> RemoteCounters {
        self.0.snapshot()
    }
}

impl std::ops::AddAssign for RemoteCounters {
    fn add_assign(&mut self, other: Self) {
        let Self { requests, bytes, retries, hedges, hedges_won, memory_hits, cache_hits, demanded, prefetched } =
            other;
        self.requests += requests;
        self.bytes += bytes;
        self.retries += retries;
        self.hedges += hedges;
        self.hedges_won += hedges_won;
        self.memory_hits += memory_hits;
        self.cache_hits += cache_hits;
        self.demanded += demanded;
        self.prefetched += prefetched;
    }
}

/// Figures in the making.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) requests: Arc<Count>,
    pub(crate) bytes: Count,
    pub(crate) retries: Count,
    pub(crate) hedges: Count,
    pub(crate) hedges_won: Count,
    pub(crate) memory_hits: Count,
    pub(crate) cache_hits: Count,
    pub(crate) demanded: Count,
    pub(crate) prefetched: Count,
}

impl Tally {
    pub(crate) fn snapshot(&self) -> RemoteCounters {
        RemoteCounters {
            requests: self.requests.get(),
            bytes: self.bytes.get(),
            retries: self.retries.get(),
            hedges: self.hedges.get(),
            hedges_won: self.hedges_won.get(),
            memory_hits: self.memory_hits.get(),
            cache_hits: self.cache_hits.get(),
            demanded: self.demanded.get(),
            prefetched: self.prefetched.get(),
        }
    }
}

/// A number that several threads raise.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
