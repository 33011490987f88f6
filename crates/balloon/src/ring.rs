//! The device's view of a queue, independent of its owner.

use std::ops::Deref;

use parking_lot::Mutex;

use virtio_queue::{DescriptorChain, Error as QueueError, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::GuestMemory;

/// A queue of the guest, as the device sees it.
pub trait Ring {
    /// The memory with its buffers.
    type Memory: GuestMemory;
    /// The handle by which a chain holds that memory.
    type Handle: Deref<Target = Self::Memory> + Clone;

    /// Why a ring cannot be processed.
    type Error: std::error::Error;

    /// Takes the next chain that the driver has made available.
    ///
    /// # Errors
    /// The ring is not in guest memory, or is invalid.
    fn pop(&self) -> Result<Option<DescriptorChain<Self::Handle>>, Self::Error>;

    /// Gives a chain back.
    ///
    /// # Errors
    /// As [`pop`](Self::pop).
    fn add_used(&self, head: u16, length: u32) -> Result<(), Self::Error>;

    /// Interrupts the driver if it requests that for buffers that were given back.
    ///
    /// # Errors
    /// As [`pop`](Self::pop).
    fn notify(&self) -> Result<(), Self::Error>;

    /// Whether the error only means that the ring has stopped, as when the VM is paused: everything that came over it
    /// so far remains valid, and the rest comes when it continues. By default no error means that.
    fn is_stopped_error(_error: &Self::Error) -> bool {
        false
    }
}

/// A queue over `virtio-queue`, for VMMs that manage their queues themselves.
pub struct VirtioQueueRing<M, N> {
    queue: Mutex<Queue>,
    memory: M,
    interrupt: N,
}

impl<M, N> VirtioQueueRing<M, N>
where
    M: Deref + Clone,
    M::Target: GuestMemory + Sized,
    N: Fn(),
{
    /// A queue that the driver has set up in `memory`; `interrupt` notifies the driver of buffers that were given back.
    pub fn new(queue: Queue, memory: M, interrupt: N) -> Self {
        Self { queue: Mutex::new(queue), memory, interrupt }
    }

    /// The queue, for example to save it or to switch its notifications. It must not be held while the device works on
    /// it.
    pub fn queue(&self) -> impl std::ops::DerefMut<Target = Queue> + '_ {
        // Nothing panics while it is held.
        self.queue.lock()
    }
}

impl<M, N> Ring for VirtioQueueRing<M, N>
where
    M: Deref + Clone,
    M::Target: GuestMemory + Sized,
    N: Fn(),
{
    type Memory = M::Target;
    type Handle = M;
    type Error = QueueError;

    fn pop(&self) -> Result<Option<DescriptorChain<M>>, QueueError> {
        Ok(self.queue().iter(self.memory.clone())?.next())
    }

    fn add_used(&self, head: u16, length: u32) -> Result<(), QueueError> {
        self.queue().add_used(&*self.memory, head, length)
    }

    fn notify(&self) -> Result<(), QueueError> {
        let wanted = self.queue().needs_notification(&*self.memory)?;
        if wanted {
            (self.interrupt)();
        }
        Ok(())
    }
}
