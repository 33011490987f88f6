//! The queue of free-page lists.

use std::time::Instant;

use vm_memory::Bytes as _;

use super::Balloon;
use super::hint_list::HintList;
use super::queue::{BUFFERS, MoreWork, Pending, Queue, WorkBudget};
use crate::hint::IdMeaning;
use crate::numbers;
use crate::ring::Ring;

impl Balloon {
    /// The list that was requested last.
    pub fn hint_list(&self) -> HintList {
        let hinting = self.hinting.lock();
        HintList { state: hinting.handshake.state(), ..hinting.list }
    }

    pub(super) fn process_hints<R: Ring>(&self, state: &mut Queue, ring: &R) -> Result<MoreWork, R::Error> {
        // A command that is given from here on may have buffers before it that are taken without being counted.
        let given = self.hinting.lock().handshake.unannounced();
        let (mut budget, mut left) = (WorkBudget::default(), 0);
        // A buffer that could not be given back because the ring had stopped.
        self.go_on(state, &mut left, ring)?;
        let more = loop {
            if budget.is_spent(4 * BUFFERS) || self.is_reset(state.epoch) {
                break MoreWork::Yes;
            }
            let Some(chain) = ring.pop()? else { break MoreWork::No };
            budget.take(&chain);
            state.pending = Some(Pending::new(chain.head_index(), Vec::new()));
            self.hint(chain);
            self.go_on(state, &mut left, ring)?;
        };
        let more = self.leave(state, ring, more)?;
        if more == MoreWork::No
            && let Some(given) = given
            && self.change_hint(|hinting| hinting.handshake.announce(given))
        {
            self.config_changed();
        }
        Ok(more)
    }

    fn hint<M>(&self, chain: virtio_queue::DescriptorChain<M>)
    where
        M: std::ops::Deref + Clone,
        M::Target: vm_memory::GuestMemory + Sized,
    {
        let memory = chain.clone();
        for buffer in chain {
            if buffer.is_write_only() {
                self.block(buffer.addr().0, buffer.len().into());
                continue;
            }
            let mut id = [0; 4];
            if buffer.len() != 4 {
                self.counters.unexpected_buffers.refuse(1, "a command id that does not have four bytes");
            } else if memory.memory().read_slice(&mut id, buffer.addr()).is_err() {
                self.counters.unreadable_buffers.refuse(1, "a command id that is not in its memory");
            } else {
                self.id(u32::from_le_bytes(id));
            }
        }
    }

    fn id(&self, id: u32) {
        let complete = {
            let mut hinting = self.hinting.lock();
            match hinting.handshake.id(id) {
                IdMeaning::Begin => {
                    hinting.list.last_buffer_at = Some(Instant::now());
                    None
                }
                IdMeaning::Complete => {
                    hinting.list.last_buffer_at = Some(Instant::now());
                    hinting.list.complete = true;
                    self.config.set_hint_command(hinting.handshake.command());
                    hinting.sink.take()
                }
                IdMeaning::Stale => {
                    // A list that is stopped ends with such an id, so it is not a fault of the driver.
                    self.counters.stale_ids.add(1);
                    None
                }
            }
        };
        if let Some(sink) = complete {
            self.counters.hint_lists.add(1);
            sink.complete();
        }
    }

    fn block(&self, address: u64, length: u64) {
        let memory = self.guest_memory();
        let ram = memory.as_ref().map_or(&[][..], |memory| memory.ram());
        let Some(block) = numbers::inside(address, length, ram) else {
            self.counters.blocks_outside.refuse(1, "free blocks that are not pages of its memory");
            return;
        };
        let sink = {
            let mut hinting = self.hinting.lock();
            if hinting.handshake.takes_blocks() {
                hinting.list.blocks += 1;
                hinting.list.bytes += length;
                hinting.list.last_buffer_at = Some(Instant::now());
                hinting.sink.clone()
            } else {
                None
            }
        };
        match sink {
            Some(sink) => {
                self.counters.hinted_blocks.add(1);
                self.counters.hinted_bytes.add(length);
                sink.add_range(block);
            }
            None => self.counters.stale_hints.add(1),
        }
    }
}
