//! The queue for statistics: the driver gives one buffer, and fills it again whenever the device gives it back.
//!
//! A buffer has no time of its filling. The device takes it as new when it arrives, which is wrong for one that arrives
//! after a stop of the queue, or from a driver that another process had: that one may be as old as the VM's pause was
//! long. So **law: the first buffer after either is given back unread.** A request for statistics meanwhile is answered
//! by the buffer that replaces it.

use std::ops::Deref;
use std::sync::atomic::Ordering;

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes as _, GuestMemory};

use super::Balloon;
use super::queue::{BUFFERS, MoreWork, Queue, WorkBudget};
use crate::layout::{Features, QueueRole};
use crate::ring::Ring;
use crate::statistics::{ENTRIES, ENTRY, Statistics, StatisticsError};

impl Balloon {
    /// Requests new statistics from the guest. When they arrive, if ever, [`statistics`](Self::statistics) has another
    /// [`sequence`](Statistics::sequence). Never waits.
    ///
    /// # Errors
    /// There is no driver that could send any.
    pub fn request_statistics(&self) -> Result<(), StatisticsError> {
        if !self.has_driver() {
            return Err(StatisticsError::NoDriver);
        }
        if !self.acked_features().has(Features::STATS_VQ) {
            return Err(StatisticsError::NotAccepted);
        }
        if self.is_idle(QueueRole::Statistics) {
            return Err(StatisticsError::QueueStopped);
        }
        self.statistics_wanted.store(true, Ordering::Release);
        self.kick(QueueRole::Statistics);
        Ok(())
    }

    /// The last statistics of the current driver.
    pub fn statistics(&self) -> Option<Statistics> {
        self.statistics.lock().statistics
    }

    pub(super) fn process_statistics<R: Ring>(&self, state: &mut Queue, ring: &R) -> Result<MoreWork, R::Error> {
        let (mut budget, mut unread) = (WorkBudget::default(), false);
        let more = loop {
            if budget.is_spent(BUFFERS) || self.is_reset(state.epoch) {
                break MoreWork::Yes;
            }
            let Some(chain) = ring.pop()? else { break MoreWork::No };
            budget.take(&chain);
            unread = std::mem::take(&mut state.outdated);
            if !unread {
                self.read_statistics(&chain);
            }
            // It gives another one although the device still holds one: only the newer one is kept.
            if let Some(older) = state.held.replace(chain.head_index()) {
                self.counters.unexpected_buffers.refuse(1, "a second buffer for statistics");
                ring.add_used(older, 0)?;
            }
        };
        // Requested while none is held: the next buffer that is read has the requested statistics, and is not given
        // back for it.
        if !self.is_reset(state.epoch)
            && ((self.statistics_wanted.swap(false, Ordering::AcqRel) && budget.is_empty()) || unread)
            && let Some(held) = state.held
        {
            let asked_again = |_: &R::Error| self.statistics_wanted.store(true, Ordering::Release);
            ring.add_used(held, 0).inspect_err(asked_again)?;
            state.held = None;
        }
        self.leave(state, ring, more)
    }

    fn read_statistics<M>(&self, chain: &DescriptorChain<M>)
    where
        M: Deref + Clone,
        M::Target: GuestMemory + Sized,
    {
        let mut bytes = [0; ENTRIES * ENTRY];
        let mut length = 0;
        for buffer in chain.clone().readable() {
            let rest = &mut bytes[length..];
            let wanted = (buffer.len() as usize).min(rest.len());
            let Some(into) = rest.get_mut(..wanted) else { break };
            if chain.memory().read_slice(into, buffer.addr()).is_err() {
                self.counters.unreadable_buffers.refuse(1, "statistics that are not in its memory");
                break;
            }
            length += wanted;
        }
        self.take_statistics(&bytes[..length]);
    }

    fn take_statistics(&self, bytes: &[u8]) {
        let unknown = {
            let mut latest = self.statistics.lock();
            latest.sequence += 1;
            let (statistics, unknown) = Statistics::decode(bytes, latest.sequence);
            latest.statistics = Some(statistics);
            unknown
        };
        self.counters.unknown_statistics.add(unknown);
        self.counters.statistics.add(1);
    }
}
