//! What a channel did, counted where it happens.
//!
//! The law of this module: counting is never seen in a profile. Each direction has cache lines of its own, written only
//! by the thread that uses this direction, with relaxed atomic additions next to a system call.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use limosa_page::to_nanos;

/// A snapshot of what a channel did since it was made. Calls, bytes and nanoseconds; "out" is what was put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// System calls that write, also those that moved nothing.
    pub calls_out: u64,
    /// System calls that read, also those that moved nothing.
    pub calls_in: u64,
    /// Bytes written.
    pub bytes_out: u64,
    /// Bytes read.
    pub bytes_in: u64,
    /// Calls that moved some, but fewer bytes than they offered or asked for.
    pub partial: u64,
    /// Calls that a signal interrupted before a byte moved.
    pub interrupted: u64,
    /// Waits for the peer in `poll`, where the descriptor does not block by itself.
    pub waits: u64,
    /// Time in these waits. Time blocked inside a read or write call is not measured: two clock readings per call would
    /// be seen.
    pub waited_ns: u64,
    /// Time held back by the rate limit.
    pub throttled_ns: u64,
    /// Bytes of memory and of files that were spliced: referenced, not copied.
    pub spliced: u64,
    /// Calls that lent memory by `MSG_ZEROCOPY`.
    pub lent: u64,
    /// Of these, calls that the kernel has finished.
    pub lent_completed: u64,
    /// Of these, calls whose memory the kernel has copied after all, by its word; a word about several calls in a row
    /// speaks of the first of them.
    pub lent_copied: u64,
    /// Calls that lent nothing, because the kernel had no room to remember another loan (`ENOBUFS`) or cannot lend such
    /// memory (`EFAULT`).
    pub starved: u64,
    /// Bytes put that the kernel has sealed ([`crate::KernelTls`]).
    pub sealed_by_kernel: u64,
    /// Bytes that the kernel has opened.
    pub opened_by_kernel: u64,
}

/// One direction's counters. 128 bytes: processors fetch cache lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct DirectionCounters {
    calls: AtomicU64,
    bytes: AtomicU64,
    partial: AtomicU64,
    interrupted: AtomicU64,
    waits: AtomicU64,
    waited_ns: AtomicU64,
    throttled_ns: AtomicU64,
    spliced: AtomicU64,
    lent: AtomicU64,
    completed: AtomicU64,
    copied: AtomicU64,
    starved: AtomicU64,
}

impl DirectionCounters {
    pub(crate) fn called(&self) {
        self.calls.fetch_add(1, Relaxed);
    }

    /// `moved` of `offered` bytes went through one call.
    pub(crate) fn moved(&self, moved: usize, offered: usize) {
        self.bytes.fetch_add(moved as u64, Relaxed);
        if moved != 0 && moved < offered {
            self.partial.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn interrupted(&self) {
        self.interrupted.fetch_add(1, Relaxed);
    }

    pub(crate) fn waited(&self, time: Duration) {
        self.waits.fetch_add(1, Relaxed);
        self.waited_ns.fetch_add(nanoseconds(time), Relaxed);
    }

    pub(crate) fn throttled(&self, time: Duration) {
        if !time.is_zero() {
            self.throttled_ns.fetch_add(nanoseconds(time), Relaxed);
        }
    }

    /// Bytes that were referenced, not copied.
    pub(crate) fn spliced(&self, bytes: usize) {
        self.spliced.fetch_add(bytes as u64, Relaxed);
    }

    /// A call has lent memory.
    pub(crate) fn lent(&self) {
        self.lent.fetch_add(1, Relaxed);
    }

    /// The kernel has finished calls that had lent memory, and copied that of some of them.
    pub(crate) fn completed(&self, calls: u64, copied: u64) {
        self.completed.fetch_add(calls, Relaxed);
        self.copied.fetch_add(copied, Relaxed);
    }

    /// There was no room to remember another loan.
    pub(crate) fn starved(&self) {
        self.starved.fetch_add(1, Relaxed);
    }

    /// Bytes moved so far: the offset that errors name.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    to_nanos(time)
}

impl Counters {
    /// The two directions as they are now; fields counted by both are summed up.
    pub(crate) fn of(out: &DirectionCounters, inward: &DirectionCounters) -> Self {
        let both = |field: fn(&DirectionCounters) -> &AtomicU64| {
            field(out).load(Relaxed).wrapping_add(field(inward).load(Relaxed))
        };
        Self {
            calls_out: out.calls.load(Relaxed),
            calls_in: inward.calls.load(Relaxed),
            bytes_out: out.bytes(),
            bytes_in: inward.bytes(),
            partial: both(|counters| &counters.partial),
            interrupted: both(|counters| &counters.interrupted),
            waits: both(|counters| &counters.waits),
            waited_ns: both(|counters| &counters.waited_ns),
            throttled_ns: both(|counters| &counters.throttled_ns),
            spliced: out.spliced.load(Relaxed),
            lent: out.lent.load(Relaxed),
            lent_completed: out.completed.load(Relaxed),
            lent_copied: out.copied.load(Relaxed),
            starved: out.starved.load(Relaxed),
            // Set by the caller.
            sealed_by_kernel: 0,
            opened_by_kernel: 0,
        }
    }
}

/// Of several channels together.
impl std::iter::Sum for Counters {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            calls_out: sum.calls_out.wrapping_add(one.calls_out),
            calls_in: sum.calls_in.wrapping_add(one.calls_in),
            bytes_out: sum.bytes_out.wrapping_add(one.bytes_out),
            bytes_in: sum.bytes_in.wrapping_add(one.bytes_in),
            partial: sum.partial.wrapping_add(one.partial),
            interrupted: sum.interrupted.wrapping_add(one.interrupted),
            waits: sum.waits.wrapping_add(one.waits),
            waited_ns: sum.waited_ns.wrapping_add(one.waited_ns),
            throttled_ns: sum.throttled_ns.wrapping_add(one.throttled_ns),
            spliced: sum.spliced.wrapping_add(one.spliced),
            lent: sum.lent.wrapping_add(one.lent),
            lent_completed: sum.lent_completed.wrapping_add(one.lent_completed),
            lent_copied: sum.lent_copied.wrapping_add(one.lent_copied),
            starved: sum.starved.wrapping_add(one.starved),
            sealed_by_kernel: sum.sealed_by_kernel.wrapping_add(one.sealed_by_kernel),
            opened_by_kernel: sum.opened_by_kernel.wrapping_add(one.opened_by_kernel),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directions_share_no_cache_line() {
        assert_eq!((align_of::<DirectionCounters>(), size_of::<DirectionCounters>() % 128), (128, 0));
    }

    #[test]
    fn only_an_incomplete_transfer_counts_as_partial() {
        let (out, inward) = (DirectionCounters::default(), DirectionCounters::default());
        out.moved(0, 10);
        out.moved(10, 10);
        inward.moved(3, 10);
        let counters = Counters::of(&out, &inward);
        assert_eq!((counters.partial, counters.bytes_out, counters.bytes_in), (1, 10, 3));
    }
}
