//! How much of a queue is processed before the others are.
//!
//! **Law: the work on a queue is bounded by the amount that is read, not by the number of buffers.** A ring has some
//! ten thousand buffers at most, but one of them may have as many descriptors in an indirect table, and an array a
//! million numbers: a bound on buffers alone would allow billions of words before another queue is processed or the
//! ring can be stopped.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::GuestMemory;

/// Number of descriptors, and of words in their readable memory, after which no further buffer is taken. Four times
/// what Linux puts into as many arrays as are taken at a time; a single buffer has up to a million.
const WORDS: u64 = 1 << 16;

/// How much was read of a queue in one call of [`Balloon::process_queue`](super::Balloon::process_queue).
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
