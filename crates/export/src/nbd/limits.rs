//! Limits of a server, and what it has counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use limosa_storage::Striped;

/// Limits that keep clients from each other and from the host's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Most connections at a time; a further one is closed at once.
    pub connections: usize,
    /// Time for a handshake.
    pub handshake: Duration,
    /// Time that a client may take without progress for a message that it has begun, or for replies that wait for it.
    pub stall: Duration,
    /// Most requests of a connection in flight.
    pub requests: usize,
    /// Most bytes of requests and replies of a connection in memory. A single request may exceed it.
    pub bytes: usize,
    /// Most bytes of requests and replies of all connections in memory, with the buffers that are kept for further
    /// ones. Half of it is divided among [`connections`](Self::connections); the other half, at least twice the longest
    /// request, is for those who need more.
    pub total_bytes: usize,
    /// Time that connections get to receive their last replies when the server ends.
    pub drain: Duration,
}

impl Default for Limits {
    /// 256 connections; 10 s for a handshake, 60 s for a message; 256 requests and 32 MiB of a connection; 512 MiB of
    /// all; 10 s for the end.
    fn default() -> Self {
        Self {
            connections: 256,
            handshake: Duration::from_secs(10),
            stall: Duration::from_secs(60),
            requests: 256,
            bytes: 32 << 20,
            total_bytes: 512 << 20,
            drain: Duration::from_secs(10),
        }
    }
}

macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident: $kind:ty),* $(,)?) => {
        impl Limits {
            $($(#[$doc])* #[must_use] pub fn $name(mut self, $name: $kind) -> Self {
                self.$name = $name;
                self
            })*
        }
    };
}

limits! {
    /// Sets the most connections at a time.
    connections: usize,
    /// Sets the time for a handshake.
    handshake: Duration,
    /// Sets the time for a message.
    stall: Duration,
    /// Sets the most requests of a connection in flight.
    requests: usize,
    /// Sets the most bytes of a connection in memory.
    bytes: usize,
    /// Sets the most bytes of all connections in memory.
    total_bytes: usize,
    /// Sets the time for the end.
    drain: Duration,
}

/// Counters of a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerCounters {
    /// Connections that were accepted.
    pub connections: u64,
    /// Connections that exist.
    pub active: u64,
    /// Connections that were closed because there were too many.
    pub refused: u64,
    /// Handshakes that did not end in time.
    pub handshake_timeouts: u64,
    /// Connections that were ended because their client made no progress.
    pub stalled: u64,
    /// Connections that were ended because of what the client sent.
    pub protocol_errors: u64,
    /// Calls that received bytes.
    pub receives: u64,
    /// Calls that sent bytes.
    pub sends: u64,
}

/// The counters in use.
#[derive(Debug, Default)]
pub(crate) struct Counting {
    pub(crate) connections: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) handshake_timeouts: AtomicU64,
    pub(crate) stalled: AtomicU64,
    pub(crate) protocol_errors: AtomicU64,
    pub(crate) calls: Striped<Calls>,
}

/// Calls on connections, which their threads count.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    pub(crate) receives: AtomicU64,
    pub(crate) sends: AtomicU64,
}

impl Counting {
    pub(crate) fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn counters(&self, active: usize) -> ServerCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerCounters {
            connections: of(&self.connections),
            active: active as u64,
            refused: of(&self.refused),
            handshake_timeouts: of(&self.handshake_timeouts),
            stalled: of(&self.stalled),
            protocol_errors: of(&self.protocol_errors),
            receives: self.calls.iter().map(|calls| of(&calls.receives)).sum(),
            sends: self.calls.iter().map(|calls| of(&calls.sends)).sum(),
        }
    }
}
