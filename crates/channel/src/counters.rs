//! Counters of a channel.
//!
//! The law of this module: counting never shows in a profile. Each direction has its own cache lines, written only by
//! the thread that uses this direction, with relaxed atomic additions next to a system call.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use limosa_page::to_nanos;

/// A snapshot of a channel's counters since its creation: calls, bytes and nanoseconds. "Out" counts writes.
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
    /// Time in these waits. Time blocked inside a system call is not measured: two clock readings per call would show
    /// in a profile.
    pub waited_ns: u64,
    /// Time held back by the rate limit.
    pub throttled_ns: u64,
    /// Bytes of memory and of files that were spliced: referenced, not copied.
    pub spliced: u64,
    /// System calls with `MSG_ZEROCOPY`.
    pub zero_copy_calls: u64,
    /// Of these, calls that the kernel reported complete.
    pub zero_copy_completed: u64,
    /// Of these, calls whose memory the kernel reported as copied after all. A report about several calls in a row
    /// describes the first of them.
    pub zero_copy_copied: u64,
    /// Calls with `MSG_ZEROCOPY` that failed, because the kernel had no room to track another one (`ENOBUFS`) or cannot
    /// pin such memory (`EFAULT`).
    pub zero_copy_refused: u64,
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
    zero_copy_calls: AtomicU64,
    zero_copy_completed: AtomicU64,
    zero_copy_copied: AtomicU64,
    zero_copy_refused: AtomicU64,
}

impl DirectionCounters {
    pub(crate) fn called(&self) {
        self.calls.fetch_add(1, Relaxed);
    }

    /// Counts a call that moved `moved` of `offered` bytes.
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
        self.waited_ns.fetch_add(to_nanos(time), Relaxed);
    }

    pub(crate) fn throttled(&self, time: Duration) {
        if !time.is_zero() {
            self.throttled_ns.fetch_add(to_nanos(time), Relaxed);
        }
    }

    /// Counts bytes that were referenced, not copied.
    pub(crate) fn spliced(&self, bytes: usize) {
        self.spliced.fetch_add(bytes as u64, Relaxed);
    }

    /// Counts a call with `MSG_ZEROCOPY`.
    pub(crate) fn zero_copy_call(&self) {
        self.zero_copy_calls.fetch_add(1, Relaxed);
    }

    /// Counts calls that the kernel reported complete, and those of them that it copied.
    pub(crate) fn zero_copy_completed(&self, calls: u64, copied: u64) {
        self.zero_copy_completed.fetch_add(calls, Relaxed);
        self.zero_copy_copied.fetch_add(copied, Relaxed);
    }

    /// Counts a call with `MSG_ZEROCOPY` that the kernel refused.
    pub(crate) fn zero_copy_refused(&self) {
        self.zero_copy_refused.fetch_add(1, Relaxed);
    }

    /// Returns the bytes moved so far: the offset that errors name.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

impl Counters {
    /// Returns the counters of two directions; fields counted by both are summed up.
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
            zero_copy_calls: out.zero_copy_calls.load(Relaxed),
            zero_copy_completed: out.zero_copy_completed.load(Relaxed),
            zero_copy_copied: out.zero_copy_copied.load(Relaxed),
            zero_copy_refused: out.zero_copy_refused.load(Relaxed),
        }
    }
}

/// Sums the counters of several channels.
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
            zero_copy_calls: sum.zero_copy_calls.wrapping_add(one.zero_copy_calls),
            zero_copy_completed: sum.zero_copy_completed.wrapping_add(one.zero_copy_completed),
            zero_copy_copied: sum.zero_copy_copied.wrapping_add(one.zero_copy_copied),
            zero_copy_refused: sum.zero_copy_refused.wrapping_add(one.zero_copy_refused),
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
