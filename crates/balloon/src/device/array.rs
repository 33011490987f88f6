//! The queues of the balloon itself: arrays of page numbers.

use std::sync::atomic::Ordering;
use std::time::Instant;

use vm_memory::Bytes as _;

use super::{Balloon, More, Queue};
use crate::layout::Role;
use crate::numbers;
use crate::ring::Ring;

/// Most numbers of an array. 4 GiB of pages; Linux sends 256 numbers at a time.
const NUMBERS: u64 = 1 << 20;

impl Balloon {
    pub(super) fn work_on_arrays<R: Ring>(&self, role: Role, state: &mut Queue, ring: &R) -> Result<More, R::Error> {
        self.give_back(state, ring, |chain| self.array(role, chain))
    }

    /// What is to be given back for an array.
    fn array<M>(&self, role: Role, chain: virtio_queue::DescriptorChain<M>) -> Vec<std::ops::Range<u64>>
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
        counters.unexpected_buffers.refuse(unexpected, "buffers for page numbers that cannot be read");
        if !length.is_multiple_of(4) {
            counters.odd_arrays.refuse(1, "an array that is no whole number of page numbers");
            return Vec::new();
        }
        if length > NUMBERS * 4 {
            counters.long_arrays.refuse(1, "an array of more than a million page numbers");
            return Vec::new();
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        let mut rest = &mut bytes[..];
        for buffer in buffers.readable() {
            // The guest may have written another length there meanwhile.
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
        let Some(memory) = self.guest_memory() else { return Vec::new() };
        let found = numbers::runs(&mut pages, memory.ram());
        counters.arrays.add(1);
        counters.translating_ns.add(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        counters.pages_outside.refuse(found.outside, "page numbers of no memory");
        match role {
            Role::Inflate => counters.inflated_pages.add(found.pages),
            _ => counters.deflated_pages.add(found.pages),
        }
        let epoch = self.epoch.load(Ordering::Acquire);
        let mut ballooned = self.lock(&self.ballooned);
        let changed =
            found.runs.into_iter().filter_map(|run| ballooned.change(epoch, &*memory, run, role == Role::Inflate));
        changed.collect()
    }
}
