//! Giving runs of pages back a few at a time, so that no buffer occupies the worker for long.

use std::ops::Range;
use std::sync::Arc;

use virtio_queue::DescriptorChain;

use super::Balloon;
use super::queue::{BUFFERS, MoreWork, Pending, Queue, WorkBudget};
use crate::numbers;
use crate::reclaim::Reclaim;
use crate::ring::Ring;

/// Maximum number of calls that give memory back at a time.
const DISCARDS: usize = 128;

impl Balloon {
    /// Takes buffers, and gives back the ranges that `runs` finds in each before the next one is taken.
    pub(super) fn give_back<R: Ring>(
        &self,
        state: &mut Queue,
        ring: &R,
        runs: impl Fn(&mut Queue, DescriptorChain<R::Handle>) -> Vec<Range<u64>>,
    ) -> Result<MoreWork, R::Error> {
        let mut left = DISCARDS;
        let mut budget = WorkBudget::default();
        let more = loop {
            if !self.go_on(state, &mut left, ring)? || budget.is_spent(BUFFERS) {
                break MoreWork::Yes;
            }
            let Some(chain) = ring.pop()? else { break MoreWork::No };
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
