//! A ring that the driver and the device share, as a device sees it.
//!
//! A split virtqueue (virtio 1.2, 2.7) over [`virtio_queue`], with what vhost-user adds: it is stopped, set up anew and started
//! while others look at it. Every call takes the ring's own lock for its duration alone, so none is ever held while a device
//! works. What is not running gives nothing and takes nothing.
//!
//! **Law: a buffer is with the device from [`Vring::pop`] to [`Vring::add_used`], and given back at most once.** Buffers that
//! are still with the device when the ring stops are no longer its: they go back to the driver's list if they are the last ones
//! that were taken, so that whoever runs the ring next gets them again.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, fstat};
use rustix::net::{SendFlags, send};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use crate::{QueueError, Ram};

/// The descriptors of one buffer, read from the guest's memory as they are asked for.
pub type Chain = DescriptorChain<Arc<GuestMemoryMmap>>;

/// `VRING_AVAIL_F_NO_INTERRUPT`: the driver does not want to be called.
const NO_INTERRUPT: u16 = 1;

/// A ring.
#[derive(Debug)]
pub struct Vring {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    ram: Option<Arc<Ram>>,
    /// It may be looked at: set up, started and enabled.
    runs: bool,
    call: Option<Bell>,
    /// What the device has: in the order in which it was taken, by the place in the ring of available buffers.
    taken: VecDeque<(u16, u16)>,
}

impl Vring {
    /// A ring that runs: `queue` as it was set up, the memory it is in, and what is written to when the driver is to be called
    /// (an eventfd or a socket).
    pub fn running(queue: Queue, ram: Arc<Ram>, call: Option<OwnedFd>) -> Self {
        let state = State { queue, ram: Some(ram), runs: true, call: call.map(Bell::new), taken: VecDeque::new() };
        Self { state: Mutex::new(state) }
    }

    /// Takes the next buffer, if there is one.
    ///
    /// # Errors
    /// The ring does not run, or makes no sense.
    pub fn pop(&self) -> Result<Option<Chain>, QueueError> {
        let mut state = self.lock();
        let ram = state.running()?;
        let place = state.queue.next_avail();
        let chain = state.queue.iter(ram.memory().clone())?.next();
        if let Some(chain) = &chain {
            let head = chain.head_index();
            if head >= state.queue.size() || state.taken.len() >= usize::from(state.queue.size()) {
                return Err(virtio_queue::Error::InvalidDescriptorIndex.into());
            }
            state.taken.push_back((place, head));
        }
        Ok(chain)
    }

    /// Gives a buffer back, by the index of its first descriptor; `length` bytes of it were written.
    ///
    /// # Errors
    /// The ring does not run, the buffer is not with the device, or the ring makes no sense.
    pub fn add_used(&self, head: u16, length: u32) -> Result<(), QueueError> {
        let mut state = self.lock();
        let ram = state.running()?;
        let at = state.taken.iter().position(|&(_, taken)| taken == head).ok_or(QueueError::NotTaken { head })?;
        state.taken.remove(at);
        Ok(state.queue.add_used(&**ram.memory(), head, length)?)
    }

    /// Whether the driver wants to be called for what was given back. To be asked once and then acted on: the driver is said
    /// to be called by then.
    ///
    /// # Errors
    /// The ring does not run, or makes no sense.
    pub fn needs_notification(&self) -> Result<bool, QueueError> {
        self.lock().needs_notification()
    }

    /// Calls the driver if it wants that; says whether it was called.
    ///
    /// # Errors
    /// The ring does not run, or makes no sense.
    pub fn notify(&self) -> Result<bool, QueueError> {
        let mut state = self.lock();
        let wanted = state.needs_notification()?;
        if wanted && let Some(call) = &state.call {
            call.ring();
        }
        Ok(wanted)
    }

    /// Descriptors of the ring.
    pub fn size(&self) -> u16 {
        self.lock().queue.size()
    }

    /// How many buffers the device has.
    pub fn taken(&self) -> usize {
        self.lock().taken.len()
    }

    /// Whether it runs.
    pub fn runs(&self) -> bool {
        self.lock().runs
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn running(&self) -> Result<Arc<Ram>, QueueError> {
        match &self.ram {
            Some(ram) if self.runs => Ok(ram.clone()),
            _ => Err(QueueError::Stopped),
        }
    }

    fn needs_notification(&mut self) -> Result<bool, QueueError> {
        let ram = self.running()?;
        let memory = &**ram.memory();
        if !self.queue.needs_notification(memory)? {
            return Ok(false);
        }
        if self.queue.event_idx_enabled() {
            return Ok(true);
        }
        // Without event indexes the driver says it by a flag, which `virtio_queue` does not look at.
        let flags = memory.load::<u16>(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed);
        Ok(u16::from_le(flags.map_err(virtio_queue::Error::GuestMemory)?) & NO_INTERRUPT == 0)
    }
}

/// What is written to so that somebody else takes notice: an eventfd, or a socket (user-mode Linux).
#[derive(Debug)]
pub(crate) struct Bell {
    descriptor: OwnedFd,
    socket: bool,
}

impl Bell {
    /// Nothing that the other end does or does not do keeps a write waiting: what is not a socket is made non-blocking.
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        let kind = fstat(&descriptor).map(|status| FileType::from_raw_mode(status.st_mode));
        let socket = matches!(kind, Ok(FileType::Socket));
        if !socket {
            let _ = rustix::io::ioctl_fionbio(&descriptor, true);
        }
        Self { descriptor, socket }
    }

    /// Eight bytes. A bell that is full rings; one that nobody listens to is not our loss.
    pub(crate) fn ring(&self) {
        let one = 1_u64.to_ne_bytes();
        let _ = if self.socket {
            send(self.descriptor.as_fd(), &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        } else {
            rustix::io::write(&self.descriptor, &one)
        };
    }
}
