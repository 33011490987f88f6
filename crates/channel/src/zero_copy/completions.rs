//! Completions of `MSG_ZEROCOPY` sends.
//!
//! The kernel numbers the successful calls with `MSG_ZEROCOPY` from 0 in 32 bits that wrap, and reports them in
//! inclusive ranges in any order (kernel docs: `networking/msg_zerocopy`, "Notification parsing"). This module makes no
//! system calls.

use std::collections::BTreeMap;

use limosa_page::{BrokenInvariant, invariant};

/// Minimum numbers of calls and of reports that show whether a path copies. A report about several calls in a row
/// describes only the first one (net/core/skbuff.c, `skb_zerocopy_notify_extend`), so one report alone shows nothing
/// about a path.
const VERDICT: (u64, u64) = (16, 4);

/// A range of completed calls, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    /// The first call's number.
    pub(crate) first: u32,
    /// The last call's number.
    pub(crate) last: u32,
    /// The kernel copied after all.
    pub(crate) copied: bool,
}

/// The calls that were made, and those of them that are complete.
#[derive(Debug, Default)]
pub(crate) struct Completions {
    /// Calls that were made.
    sent: u64,
    /// All calls before this one are complete.
    done: u64,
    /// Complete ranges behind it: first call and the one behind the last.
    ahead: BTreeMap<u64, u64>,
    /// Complete calls, and those of them that were copied.
    completed: u64,
    copied: u64,
    /// Reports of the kernel, and those that say that it copied.
    reported: u64,
    reported_copied: u64,
}

/// The kernel reported a call that was not made, or reported one twice.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unexpected;

impl Completions {
    /// Notes a call that moved bytes.
    pub(crate) fn sent(&mut self) {
        self.sent += 1;
    }

    /// Returns the number of incomplete calls.
    pub(crate) fn outstanding(&self) -> u64 {
        self.sent - self.completed
    }

    /// Asserts that the kernel references no more memory.
    pub(crate) fn settled(&self) -> Result<(), BrokenInvariant> {
        invariant(self.outstanding() == 0 && self.ahead.is_empty(), "no page is referenced after a flush")
    }

    /// Notes a report of the kernel.
    pub(crate) fn take(&mut self, report: Completion) -> Result<(), Unexpected> {
        // Fewer than 2^31 calls can be in flight: each of them holds kernel memory.
        let distance = report.first.wrapping_sub(low(self.done));
        let first = self.done + u64::from(distance);
        let end = first + u64::from(report.last.wrapping_sub(report.first)) + 1;
        let before = self.ahead.range(..end).next_back();
        if end > self.sent || before.is_some_and(|(_, before)| *before > first) {
            return Err(Unexpected);
        }
        self.completed += end - first;
        self.reported += 1;
        if report.copied {
            self.copied += end - first;
            self.reported_copied += 1;
        }
        self.ahead.insert(first, end);
        while let Some(range) = self.ahead.first_entry().filter(|range| *range.key() == self.done) {
            self.done = range.remove();
        }
        Ok(())
    }

    /// Forgets all incomplete calls: the connection is gone.
    pub(crate) fn forget(&mut self) {
        (self.done, self.completed) = (self.sent, self.sent);
        self.ahead.clear();
    }

    /// Whether enough reports show that this path copies everything.
    pub(crate) fn only_copies(&self) -> bool {
        let (calls, reports) = VERDICT;
        self.completed >= calls && self.reported >= reports && self.reported_copied == self.reported
    }

    /// Returns the number of complete calls, and of those that were copied.
    pub(crate) fn totals(&self) -> (u64, u64) {
        (self.completed, self.copied)
    }
}

/// Returns the low 32 bits, the part that the kernel keeps.
fn low(number: u64) -> u32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(begun: u64, calls: u64) -> Completions {
        Completions { sent: begun + calls, done: begun, completed: begun, ..Completions::default() }
    }

    fn range(begun: u64, first: u64, end: u64, copied: bool) -> Completion {
        Completion { first: low(begun + first), last: low(begun + end - 1), copied }
    }

    proptest! {
        #[test]
        fn ranges_in_any_order_are_done_when_all_have_come(
            lengths in prop::collection::vec((1..40_u64, any::<bool>()), 1..40),
            order in any::<u64>(),
            // Also where the kernel's counter wraps.
            begun in prop_oneof![Just(0_u64), Just(u64::from(u32::MAX) - 20), 0..1_u64 << 40],
        ) {
            let mut ranges = Vec::new();
            let mut at = 0;
            for (length, copied) in &lengths {
                ranges.push(range(begun, at, at + length, *copied));
                at += length;
            }
            let mut completions = after(begun, at);
            let copied: u64 = lengths.iter().filter(|(_, copied)| *copied).map(|(length, _)| length).sum();
            let mut seed = order;
            while !ranges.is_empty() {
                prop_assert!(completions.outstanding() > 0);
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let next = ranges.swap_remove(usize::try_from(seed >> 33).unwrap() % ranges.len());
                prop_assert_eq!(completions.take(next), Ok(()));
                // No call completes twice.
                prop_assert_eq!(completions.take(next), Err(Unexpected));
            }
            prop_assert_eq!((completions.outstanding(), completions.done), (0, begun + at));
            prop_assert_eq!(completions.totals(), (begun + at, copied));
            prop_assert!(completions.ahead.is_empty());
        }

        #[test]
        fn only_completions_of_calls_that_were_made_are_accepted(
            sent in 0..200_u64,
            reported in prop::collection::vec((any::<u32>(), any::<u32>()), 0..20),
            near in prop::collection::vec((0..300_u32, 0..50_u32), 0..60),
        ) {
            let mut completions = after(0, sent);
            let near = near.into_iter().map(|(first, length)| (first, first + length));
            for (first, last) in reported.into_iter().chain(near) {
                let before = completions.completed;
                let taken = completions.take(Completion { first, last, copied: false });
                prop_assert!(taken.is_ok() || completions.completed == before);
                prop_assert!(completions.completed <= sent && completions.done <= completions.completed);
            }
        }
    }

    #[test]
    fn a_path_is_known_to_copy_when_the_kernel_has_said_so_of_sixteen_calls_in_four_words() {
        let mut completions = after(0, 100);
        completions.take(range(0, 0, 13, true)).unwrap();
        for call in 13..16 {
            assert!(!completions.only_copies());
            completions.take(range(0, call, call + 1, true)).unwrap();
        }
        assert!(completions.only_copies());
        completions.take(range(0, 16, 17, false)).unwrap();
        assert!(!completions.only_copies());
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "no page is referenced after a flush")]
    fn a_send_under_way_after_a_flush_is_a_broken_invariant() {
        let mut completions = Completions::default();
        assert_eq!(completions.settled(), Ok(()));
        completions.sent();
        let _ = completions.settled();
    }
}
