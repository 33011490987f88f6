//! The state of a queue between calls, and how much of it is processed before the others are.
//!
//! **Law: the work on a queue is bounded by the amount that is read, not by the number of buffers.** A ring has some
//! ten thousand buffers at most, but one of them may have as many descriptors in an indirect table, and an array a
//! million numbers: a bound on buffers alone would allow billions of words before another queue is processed or the
//! ring can be stopped.

use std::collections::VecDeque;
use std::ops::{Deref, Range};

use virtio_queue::DescriptorChain;
use vm_memory::GuestMemory;

use super::ballooned::Ballooned;

/// Maximum number of buffers that are taken at a time.
pub(super) const BUFFERS: usize = 64;
/// Number of descriptors, and of words in their readable memory, after which no further buffer is taken. Four times
/// what Linux puts into as many arrays as are taken at a time; a single buffer has up to a million.
const WORDS: u64 = 1 << 16;

/// Whether a queue has more work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoreWork {
    /// The queue must be processed again after the others.
    Yes,
    /// The queue has no work until the driver or [`Transport::kick`](super::Transport::kick) kicks it.
    No,
}

/// The state of a queue between calls.
#[derive(Default)]
pub(super) struct Queue {
    /// The number of its driver.
    pub(super) epoch: u64,
    /// Pages of a buffer that is not done.
    pub(super) pending: Option<Pending>,
    /// The buffer for statistics, which the device holds.
    pub(super) held: Option<u16>,
    /// The time at which the next buffer for statistics was filled is unknown.
    pub(super) outdated: bool,
    /// The pages in the balloon; only for the queue for inflating.
    pub(super) ballooned: Ballooned,
}

/// The rest of a buffer.
pub(super) struct Pending {
    pub(super) head: u16,
    pub(super) runs: VecDeque<Range<u64>>,
}

impl Pending {
    pub(super) fn new(head: u16, runs: Vec<Range<u64>>) -> Self {
        Self { head, runs: runs.into() }
    }

    /// Leaves out the ranges in `out`; both are ascending and not adjacent.
    pub(super) fn leave_out(&mut self, out: &[Range<u64>]) {
        let mut out = out.iter().peekable();
        let mut left = VecDeque::with_capacity(self.runs.len());
        for mut run in std::mem::take(&mut self.runs) {
            while out.next_if(|out| out.end <= run.start).is_some() {}
            while let Some(first) = out.peek().filter(|out| out.start < run.end) {
                if run.start < first.start {
                    left.push_back(run.start..first.start);
                }
                run.start = first.end.min(run.end);
                if first.end > run.end {
                    break;
                }
                out.next();
            }
            if !run.is_empty() {
                left.push_back(run);
            }
        }
        self.runs = left;
    }
}

/// The amount that was read of a queue in one call of [`Balloon::process_queue`](super::Balloon::process_queue).
#[derive(Debug, Default)]
pub(super) struct WorkBudget {
    buffers: usize,
    words: u64,
}

impl WorkBudget {
    /// Whether it is used up: by this number of buffers, or by the words in fewer.
    pub(super) fn is_spent(&self, buffers: usize) -> bool {
        self.buffers >= buffers || self.words >= WORDS
    }

    /// Counts a buffer that was taken.
    pub(super) fn take<M>(&mut self, chain: &DescriptorChain<M>)
    where
        M: Deref + Clone,
        M::Target: GuestMemory,
    {
        self.buffers += 1;
        for buffer in chain.clone() {
            self.words += 1 + if buffer.is_write_only() { 0 } else { u64::from(buffer.len() / 4) };
        }
    }

    /// Whether no buffer was taken.
    pub(super) fn is_empty(&self) -> bool {
        self.buffers == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_are_left_out_of_runs_may_be_anywhere() {
        let cases = [
            (vec![], vec![10..20, 30..40]),
            (vec![0..10, 20..30, 40..50], vec![10..20, 30..40]),
            (vec![12..14, 16..18], vec![10..12, 14..16, 18..20, 30..40]),
            (vec![15..35], vec![10..15, 35..40]),
            (vec![0..12, 18..32, 38..60], vec![12..18, 32..38]),
            (vec![5..50], vec![]),
        ];
        for (out, left) in cases {
            let mut pending = Pending::new(0, vec![10..20, 30..40]);
            pending.leave_out(&out);
            assert_eq!(pending.runs, left, "{out:?}");
        }
    }
}
