//! A ring, as a device sees it.
//!
//! A split virtqueue (virtio 1.2, 2.7) over [`virtio_queue`], with what vhost-user adds: it is stopped, set up again
//! and started while the device uses it. Every call takes the ring's lock only for its duration, so none is held while
//! a device works. A ring that is being drained takes buffers back and gives none; one that has stopped does neither.
//!
//! **Law: a buffer is with the device from [`Vring::pop`] to [`Vring::add_used`], and given back at most once.** When
//! the ring is torn down, the device loses the buffers that it still has: if they are the last ones that were taken,
//! they are available again, and the next setup of the ring continues with them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use limosa_page::{BrokenInvariant, invariant};
use parking_lot::{Mutex, MutexGuard};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{Address as _, Bytes as _, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::dirty_log::DirtyLog;
use crate::inflight::InflightRing;
use crate::notifier::Notifier;
use crate::{QueueError, Ram};

/// The descriptors of one buffer, read from the guest's memory as they are asked for.
pub type Chain = DescriptorChain<Arc<GuestMemoryMmap>>;

/// `VRING_AVAIL_F_NO_INTERRUPT`: the driver does not want to be called.
const NO_INTERRUPT: u16 = 1;

/// Most descriptors of a ring (virtio 1.2, 2.7).
const MAX_QUEUE_SIZE: u16 = 32768;

/// Where a ring is in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: GuestAddress,
    pub(crate) available: GuestAddress,
    pub(crate) used: GuestAddress,
}

/// How a ring is set up.
#[derive(Debug)]
pub(crate) struct RingSetup {
    /// Descriptors, a power of two.
    pub(crate) size: u16,
    pub(crate) addresses: RingAddresses,
    /// Index of the first buffer to be taken.
    pub(crate) base: u16,
    pub(crate) event_index: bool,
    pub(crate) inflight: Option<InflightRing>,
}

/// The phase of a ring that is set up. It goes from `Running` to `Draining` to `Stopped`, and from each to `Running`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Buffers are neither taken out nor given back.
    Stopped,
    /// Buffers are given back, and none is taken out.
    Draining,
    /// Buffers are taken out and given back.
    Running,
}

/// The dirty log of a ring.
#[derive(Clone, Debug)]
pub(crate) struct RingLog {
    pub(crate) log: Arc<DirtyLog>,
    /// The address at which writes to the used ring are logged; `None`: they are not.
    pub(crate) used: Option<u64>,
}

/// A ring.
#[derive(Debug)]
pub struct Vring {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    /// `None`: the ring is not set up.
    ram: Option<Arc<Ram>>,
    phase: Phase,
    call: Option<Notifier>,
    /// The buffers that the device has, in the order in which they were taken: index in the available ring, and head.
    /// Buffers that the previous server had taken have no index.
    taken: VecDeque<(Option<u16>, u16)>,
    inflight: Option<InflightRing>,
    resubmission: Option<Resubmission>,
    log: Option<RingLog>,
}

/// Buffers that are processed again, because the server that had taken them was killed: as a separate ring, since the
/// entries of the driver's ring may have been overwritten.
#[derive(Debug)]
struct Resubmission {
    queue: Queue,
    memory: Arc<GuestMemoryMmap>,
    /// Number of buffers in it.
    count: u16,
}

impl Vring {
    /// A ring that runs: `queue` as it was set up, the memory it is in, and the descriptor for calls of the driver (an
    /// eventfd or a socket).
    pub fn new_running(queue: Queue, ram: Arc<Ram>, call: Option<OwnedFd>) -> Self {
        let state = State {
            queue,
            ram: Some(ram),
            phase: Phase::Running,
            call: call.map(Notifier::new),
            taken: VecDeque::new(),
            inflight: None,
            resubmission: None,
            log: None,
        };
        Self { state: Mutex::new(state) }
    }

    /// A ring that is not set up.
    pub(crate) fn idle() -> Self {
        let state = State {
            queue: Queue::default(),
            ram: None,
            phase: Phase::Stopped,
            call: None,
            taken: VecDeque::new(),
            inflight: None,
            resubmission: None,
            log: None,
        };
        Self { state: Mutex::new(state) }
    }

    /// Sets it up again; buffers that were taken out before are forgotten. Returns whether a
    /// driver has used it before: buffers were given back or are in flight, or it does not begin at 0.
    pub(crate) fn set_up(&self, setup: RingSetup, ram: &Arc<Ram>) -> Result<bool, QueueError> {
        let queue = queue_at(&setup, ram)?;
        let used = queue.used_idx(&**ram.memory(), Ordering::Acquire)?.0;
        let mut inflight = setup.inflight;
        let heads = inflight.as_mut().map(|inflight| inflight.take_up(used)).transpose()?.unwrap_or_default();
        let is_known = used != 0 || setup.base != 0 || !heads.is_empty();
        let resubmission =
            if heads.is_empty() { None } else { Some(resubmission(&heads, &setup.addresses, setup.size, ram)?) };
        let mut state = self.lock();
        state.queue = queue;
        state.queue.set_next_used(used);
        if let Some(resubmission) = &resubmission {
            state.queue.set_next_avail(used.wrapping_add(resubmission.count));
        }
        state.taken.clear();
        (state.inflight, state.resubmission) = (inflight, resubmission);
        state.ram = Some(ram.separate());
        // The previous server may have been stopped or killed between giving a buffer back and the call.
        if used != 0
            && let Some(call) = &state.call
        {
            call.notify();
        }
        Ok(is_known)
    }

    /// The memory, and with it the ring's addresses, has changed; nothing else has.
    pub(crate) fn remap(&self, addresses: RingAddresses, ram: &Arc<Ram>) -> Result<(), QueueError> {
        let mut state = self.lock();
        let setup = RingSetup {
            size: state.queue.size(),
            addresses,
            base: state.queue.next_avail(),
            event_index: state.queue.event_idx_enabled(),
            inflight: None,
        };
        let mut queue = queue_at(&setup, ram)?;
        queue.set_next_used(state.queue.next_used());
        state.queue = queue;
        state.ram = Some(ram.separate());
        // The device may have been stopped between giving a buffer back and the call, and the new queue does not know
        // of it.
        if let Some(call) = &state.call {
            call.notify();
        }
        Ok(())
    }

    /// Sets what the ring does once it is set up; buffers that were taken out remain so.
    pub(crate) fn set_phase(&self, phase: Phase) {
        self.lock().phase = phase;
    }

    /// Sets the log of what is written to the guest's memory, while its VM migrates.
    pub(crate) fn set_log(&self, log: Option<RingLog>) {
        self.lock().log = log;
    }

    /// Marks ranges of guest memory, addresses and lengths, that the device has written for buffers of this ring. To be
    /// called after they were written, and before the buffers are given back. If the VM does not migrate, nothing is
    /// done.
    pub fn mark_written(&self, ranges: impl IntoIterator<Item = (u64, u64)>) {
        // Under the lock: a log that is replaced is read by nobody once that was answered.
        if let Some(log) = &self.lock().log {
            ranges.into_iter().for_each(|(address, length)| log.log.mark(address, length));
        }
    }

    /// The memory that the ring and its buffers are in.
    ///
    /// # Errors
    /// The ring does not run, and is not being drained.
    pub fn memory(&self) -> Result<Arc<Ram>, QueueError> {
        self.lock().usable()
    }

    /// Sets the descriptor for calls of the driver. The driver is called at once if the ring is set up: an earlier call
    /// may have gone to the previous descriptor, which is no longer read, and is not repeated.
    pub(crate) fn set_call(&self, call: Option<Notifier>) {
        let mut state = self.lock();
        state.call = call;
        if state.ram.is_some()
            && let Some(call) = &state.call
        {
            call.notify();
        }
    }

    /// Ends the setup of the ring. Returns the index of the buffer with which the next setup continues; `None` if it
    /// was not set up.
    pub(crate) fn tear_down(&self) -> Option<u16> {
        let mut state = self.lock();
        state.ram.take()?;
        let mut next = state.queue.next_avail();
        while let Some(&(index, head)) = state.taken.back() {
            if index != Some(next.wrapping_sub(1)) {
                break;
            }
            next = next.wrapping_sub(1);
            state.taken.pop_back();
            if let Some(inflight) = &state.inflight {
                inflight.untaken(head);
            }
        }
        // Other buffers that were taken are lost unless there is an in-flight area.
        state.taken.clear();
        state.resubmission = None;
        state.inflight = None;
        Some(next)
    }

    /// Takes the next available buffer, if there is one.
    ///
    /// # Errors
    /// The ring does not run, or is invalid.
    pub fn pop(&self) -> Result<Option<Chain>, QueueError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let ram = state.running()?;
        if let Some(resubmission) = &mut state.resubmission {
            if let Some(chain) = resubmission.queue.iter(resubmission.memory.clone())?.next() {
                // It is already marked as in flight, with its number in the order.
                state.taken.push_back((None, chain.head_index()));
                return Ok(Some(chain));
            }
            state.resubmission = None;
        }
        let index = state.queue.next_avail();
        let chain = state.queue.iter(ram.memory().clone())?.next();
        if let Some(chain) = &chain {
            let head = chain.head_index();
            if head >= state.queue.size() || state.taken.len() >= usize::from(state.queue.size()) {
                return Err(virtio_queue::Error::InvalidDescriptorIndex.into());
            }
            if let Some(inflight) = &mut state.inflight {
                inflight.taken(head);
            }
            state.taken.push_back((Some(index), head));
        }
        Ok(chain)
    }

    /// Gives a buffer back, by the index of its first descriptor; `length` bytes of it were written.
    ///
    /// # Errors
    /// The ring does not run and is not being drained, the device does not have the buffer, or the ring is invalid.
    pub fn add_used(&self, head: u16, length: u32) -> Result<(), QueueError> {
        self.add_used_all(&[(head, length)])
    }

    /// Gives buffers back, in this order: indexes of their first descriptors, and how many bytes of each were written.
    ///
    /// # Errors
    /// As for [`Vring::add_used`]; those before the one that failed were given back.
    pub fn add_used_all(&self, buffers: &[(u16, u32)]) -> Result<(), QueueError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let ram = state.usable()?;
        let given_back = buffers.iter().try_for_each(|&(head, length)| state.give_back(&ram, head, length));
        state.mark_used_ring();
        given_back
    }

    /// Whether the driver wants a call for the buffers that were given back. The caller must act on the result: the
    /// next query assumes that the driver was called.
    ///
    /// # Errors
    /// The ring does not run, or is invalid.
    pub fn needs_notification(&self) -> Result<bool, QueueError> {
        self.lock().needs_notification()
    }

    /// Calls the driver if it wants a call; returns whether it was called.
    ///
    /// # Errors
    /// The ring does not run, or is invalid.
    pub fn notify(&self) -> Result<bool, QueueError> {
        let mut state = self.lock();
        let wanted = state.needs_notification()?;
        if wanted && let Some(call) = &state.call {
            call.notify();
        }
        Ok(wanted)
    }

    /// Whether it runs, and the driver has made buffers available that were not taken.
    pub(crate) fn has_available(&self) -> bool {
        let state = self.lock();
        let Ok(ram) = state.running() else { return false };
        let index = state.queue.avail_idx(&**ram.memory(), Ordering::Acquire);
        index.is_ok_and(|index| index.0 != state.queue.next_avail())
    }

    /// Number of descriptors of the ring.
    pub fn size(&self) -> u16 {
        self.lock().queue.size()
    }

    /// Number of buffers that the device has.
    pub fn taken_count(&self) -> usize {
        self.lock().taken.len()
    }

    /// Whether it runs.
    pub fn is_running(&self) -> bool {
        self.lock().running().is_ok()
    }

    /// Tells the driver that kicks are not needed for now.
    pub(crate) fn disable_notification(&self) -> Result<(), QueueError> {
        let mut state = self.lock();
        let ram = state.running()?;
        let disabled = state.queue.disable_notification(&**ram.memory());
        state.mark_used_ring();
        Ok(disabled?)
    }

    /// Tells the driver to kick again; returns the index of the next buffer if there is one already.
    pub(crate) fn enable_notification(&self) -> Result<Option<u16>, QueueError> {
        let mut state = self.lock();
        let ram = state.running()?;
        let more = state.queue.enable_notification(&**ram.memory());
        state.mark_used_ring();
        let more = more? || state.resubmission.is_some();
        Ok(more.then(|| state.queue.next_avail()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    fn running(&self) -> Result<Arc<Ram>, QueueError> {
        match &self.ram {
            Some(ram) if self.phase == Phase::Running => Ok(ram.clone()),
            _ => Err(QueueError::Stopped),
        }
    }

    /// The memory of a ring that takes buffers back.
    fn usable(&self) -> Result<Arc<Ram>, QueueError> {
        match &self.ram {
            Some(ram) if self.phase != Phase::Stopped => Ok(ram.clone()),
            _ => Err(QueueError::Stopped),
        }
    }

    /// Marks the used ring, in which something was written: a few pages at most.
    fn mark_used_ring(&self) {
        if let Some(RingLog { log, used: Some(used) }) = &self.log {
            // Flags, index, entries, and the index of the event.
            log.mark(*used, 6 + 8 * u64::from(self.queue.size()));
        }
    }

    fn give_back(&mut self, ram: &Ram, head: u16, length: u32) -> Result<(), QueueError> {
        let at = self.taken.iter().position(|&(_, taken)| taken == head).ok_or(QueueError::NotTaken { head })?;
        self.taken.remove(at);
        if let Some(inflight) = &self.inflight {
            inflight.giving(head);
        }
        let before = self.queue.next_used();
        self.queue.add_used(&**ram.memory(), head, length)?;
        one_entry(before, self.queue.next_used())?;
        if let Some(inflight) = &self.inflight {
            inflight.given(head, self.queue.next_used());
        }
        Ok(())
    }

    fn needs_notification(&mut self) -> Result<bool, QueueError> {
        let ram = self.usable()?;
        let memory = &**ram.memory();
        if !self.queue.needs_notification(memory)? {
            return Ok(false);
        }
        if self.queue.event_idx_enabled() {
            return Ok(true);
        }
        // Without event indexes the driver sets a flag, which `virtio_queue` does not check.
        let flags = memory.load::<u16>(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed);
        Ok(u16::from_le(flags.map_err(virtio_queue::Error::GuestMemory)?) & NO_INTERRUPT == 0)
    }
}

/// Asserts that giving a buffer back took one entry of the used ring, so that their number is that of the buffers.
fn one_entry(before: u16, after: u16) -> Result<(), BrokenInvariant> {
    invariant(after.wrapping_sub(before) == 1, "a buffer that is given back is one entry of the used ring")
}

/// The queue as set up, if it is valid and in memory.
fn queue_at(setup: &RingSetup, ram: &Ram) -> Result<Queue, QueueError> {
    let mut queue = Queue::new(MAX_QUEUE_SIZE)?;
    queue.try_set_size(setup.size)?;
    queue.try_set_desc_table_address(setup.addresses.descriptors)?;
    queue.try_set_avail_ring_address(setup.addresses.available)?;
    queue.try_set_used_ring_address(setup.addresses.used)?;
    queue.set_event_idx(setup.event_index);
    queue.set_next_avail(setup.base);
    queue.set_ready(true);
    // Address 0 is how `virtio_queue` marks a ring that is not set up.
    if setup.addresses.available.0 == 0 || !queue.is_valid(&**ram.memory()) {
        return Err(virtio_queue::Error::FindMemoryRegion.into());
    }
    Ok(queue)
}

/// An available ring with those heads, in a page above the guest's memory that only this process sees; the descriptors
/// are the driver's.
fn resubmission(heads: &[u16], addresses: &RingAddresses, size: u16, ram: &Ram) -> Result<Resubmission, QueueError> {
    // Flags, index, the heads, and the event index, which is not read.
    let length = (6 + 2 * usize::from(size)).next_multiple_of(4096);
    let end = ram.regions().last().map_or(0, |region| region.guest_address + region.length);
    let start = GuestAddress(end).checked_align_up(4096).ok_or(virtio_queue::Error::AddressOverflow)?;
    let lost = |why: String| QueueError::Device(format!("no memory for buffers that are processed again: {why}"));
    let region = GuestRegionMmap::from_range(start, length, None).map_err(|error| lost(error.to_string()))?;
    let memory = ram.memory().insert_region(Arc::new(region)).map_err(|error| lost(error.to_string()))?;
    let count = u16::try_from(heads.len()).map_err(|_| virtio_queue::Error::InvalidSize)?;
    let words: Vec<u8> = [0, count].iter().chain(heads).flat_map(|word| word.to_le_bytes()).collect();
    memory.write_slice(&words, start).map_err(virtio_queue::Error::GuestMemory)?;
    let mut queue = Queue::new(MAX_QUEUE_SIZE)?;
    queue.try_set_size(size)?;
    queue.try_set_desc_table_address(addresses.descriptors)?;
    queue.try_set_avail_ring_address(start)?;
    queue.set_ready(true);
    Ok(Resubmission { queue, memory: Arc::new(memory), count })
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    fn the_index_of_the_used_ring_wraps() {
        assert_eq!(one_entry(u16::MAX, 0), Ok(()));
    }

    #[test]
    #[should_panic(expected = "a buffer that is given back is one entry of the used ring")]
    fn a_buffer_that_takes_two_entries_is_a_broken_invariant() {
        let _ = one_entry(7, 9);
    }
}
