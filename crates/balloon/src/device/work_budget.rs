//! How much of a queue is looked at before others have their turn.
//!
//! **Law: what bounds a look at a queue is how much is read in it, not in how many buffers.** A ring has some ten thousand
//! buffers at most, but one of them may have as many descriptors again in a table of its own, and an array a million numbers: who
//! counts buffers only would read billions of words before anybody else, who wants to stop the ring maybe, is heard.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::GuestMemory;

/// Descriptors, and words of what can be read in them, after which no other buffer is taken. Four times what Linux puts into as
/// many arrays as are taken at a time; a single buffer has up to a million.
const WORDS: u64 = 1 << 16;

/// How much was read of a queue in one call of [`Balloon::work`](super::Balloon::work).
#[derive(Debug, Default)]
pub(super) struct WorkBudget {
    buffers: usize,
    words: u64,
}

impl WorkBudget {
    /// Whether enough was taken: so many buffers, or so much in fewer.
    pub(super) fn is_spent(&self, buffers: usize) -> bool {
        self.buffers >= buffers || self.words >= WORDS
    }

    /// A buffer was taken.
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

    /// Whether nothing was taken.
    pub(super) fn is_empty(&self) -> bool {
        self.buffers == 0
    }
}
