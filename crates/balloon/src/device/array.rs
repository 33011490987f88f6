//! The queues of the balloon itself: arrays of page numbers.

use std::ops::Range;
use std::time::Instant;

use limosa_page::{to_nanos, to_usize};
use vm_memory::Bytes as _;

use super::Balloon;
use super::queue::{MoreWork, Queue};
use crate::layout::{Features, QueueRole};
use crate::numbers;
use crate::ring::Ring;

/// Maximum length of an array: 4 GiB of pages; Linux sends 256 numbers at a time.
const NUMBERS: u64 = 1 << 20;

impl Balloon {
    pub(super) fn process_arrays<R: Ring>(
        &self,
        role: QueueRole,
        state: &mut Queue,
        ring: &R,
    ) -> Result<MoreWork, R::Error> {
        let notifies = self.acked_features().has(Features::MUST_TELL_HOST);
        self.give_back(state, ring, |state, chain| {
            let Some(memory) = self.guest_memory() else { return Vec::new() };
            let runs = self.array(role, memory.ram(), chain);
            if role == QueueRole::Inflate {
                return state.ballooned.inflate(&*memory, runs, notifies);
            }
            // Pages taken out of the balloon are the guest's after the acknowledgement, also those that were still to
            // be given back.
            let mut inflating = self.inflating().lock();
            inflating.ballooned.deflate(&runs);
            if let Some(pending) = &mut inflating.pending {
                pending.leave_out(&runs);
            }
            Vec::new()
        })
    }

    /// The pages of an array, which are in `ram`.
    fn array<M>(&self, role: QueueRole, ram: &[Range<u64>], chain: virtio_queue::DescriptorChain<M>) -> Vec<Range<u64>>
    where
        M: std::ops::Deref + Clone,
        M::Target: vm_memory::GuestMemory + Sized,
    {
        let counters = &self.counters;
        let began = Instant::now();
        let buffers = chain.clone();
        let (mut length, mut unexpected) = (0u64, 0);
        for buffer in chain.clone() {
            if buffer.is_write_only() {
                unexpected += 1;
            } else {
                length += u64::from(buffer.len());
            }
        }
        counters.unexpected_buffers.refuse(unexpected, "buffers for page numbers that are not readable");
        if !length.is_multiple_of(4) {
            counters.odd_arrays.refuse(1, "an array whose length is not a multiple of 4 bytes");
            return Vec::new();
        }
        if length > NUMBERS * 4 {
            counters.long_arrays.refuse(1, "an array of more than a million page numbers");
            return Vec::new();
        }
        let mut bytes = vec![0; to_usize(length)];
        let mut rest = &mut bytes[..];
        for buffer in buffers.readable() {
            // The guest may have changed the length meanwhile.
            let wanted = (buffer.len() as usize).min(rest.len());
            let (into, behind) = rest.split_at_mut(wanted);
            if chain.memory().read_slice(into, buffer.addr()).is_err() {
                counters.unreadable_buffers.refuse(1, "an array that is not in its memory");
                return Vec::new();
            }
            rest = behind;
        }
        if !rest.is_empty() {
            counters.unreadable_buffers.refuse(1, "an array that changes while it is read");
            return Vec::new();
        }
        let mut pages = Vec::new();
        numbers::decode(&bytes, &mut pages);
        let found = numbers::runs(&mut pages, ram);
        counters.arrays.add(1);
        counters.translating_ns.add(to_nanos(began.elapsed()));
        counters.pages_outside.refuse(found.outside, "page numbers outside of its memory");
        match role {
            QueueRole::Inflate => counters.inflated_pages.add(found.pages),
            _ => counters.deflated_pages.add(found.pages),
        }
        found.runs
    }
}
