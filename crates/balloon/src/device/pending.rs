//! Runs of pages that are given back a few at a time, so that no buffer occupies the worker for long.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use virtio_queue::DescriptorChain;

use super::work_budget::WorkBudget;
use super::{Balloon, More, Queue};
use crate::numbers;
use crate::reclaim::Reclaim;
use crate::ring::Ring;

/// Maximum number of buffers that are taken at a time.
pub(super) const BUFFERS: usize = 64;
/// Maximum number of calls that give memory back at a time.
const DISCARDS: usize = 128;

/// The rest of a buffer.
pub(super) struct Pending {
    head: u16,
    runs: VecDeque<Range<u64>>,
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

impl Balloon {
    /// Takes buffers, and gives back the ranges that `runs` finds in each before the next one is taken.
    pub(super) fn give_back<R: Ring>(
        &self,
        state: &mut Queue,
        ring: &R,
        runs: impl Fn(&mut Queue, DescriptorChain<R::Handle>) -> Vec<Range<u64>>,
    ) -> Result<More, R::Error> {
        let mut left = DISCARDS;
        let mut budget = WorkBudget::default();
        let more = loop {
            if !self.go_on(state, &mut left, ring)? || budget.is_spent(BUFFERS) {
                break More::Yes;
            }
            let Some(chain) = ring.pop()? else { break More::No };
            budget.take(&chain);
            let head = chain.head_index();
            state.pending = Some(Pending::new(head, runs(state, chain)));
        };
        self.leave(state, ring, more)
    }

    /// Continues with the rest of a buffer, and gives the buffer back when it is done. `false`: it is not done, or the
    /// device was reset.
    pub(super) fn go_on<R: Ring>(&self, state: &mut Queue, left: &mut usize, ring: &R) -> Result<bool, R::Error> {
        let epoch = state.epoch;
        let Some(pending) = &mut state.pending else { return Ok(!self.is_reset(epoch)) };
        let memory = self.guest_memory();
        while let Some(run) = pending.runs.front() {
            if *left == 0 || self.is_reset(epoch) {
                return Ok(false);
            }
            *left -= 1;
            // The memory may have been removed since the run was found in it.
            let inside =
                |memory: &Arc<dyn Reclaim>| numbers::inside(run.start, run.end - run.start, memory.ram()).is_some();
            if let Some(memory) = memory.as_ref().filter(|memory| inside(memory)) {
                self.discard(&**memory, run);
            }
            pending.runs.pop_front();
        }
        if self.is_reset(epoch) {
            return Ok(false);
        }
        // Only then is it done: a ring that has stopped continues later, and the driver waits for the buffer.
        ring.add_used(pending.head, 0)?;
        state.pending = None;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_are_left_out_of_runs_may_lie_anywhere() {
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
