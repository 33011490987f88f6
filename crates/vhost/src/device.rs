//! What a device is behind the server.

use std::sync::Arc;

use crate::{FrontEnd, QueueError, Ram, Vring};

/// Whether a queue has more to do than was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum More {
    /// The queue is looked at again, after the others had their turn.
    Yes,
    /// The queue is looked at again when the driver kicks it, or [`FrontEnd::kick`] does.
    No,
}

/// A virtio device behind a vhost-user server.
///
/// It is called from two threads of the server: [`Device::work`] from the one that looks after queues, everything else from the
/// one that answers messages. The server holds no lock of its own during any call.
///
/// **Law: what the message thread calls returns without waiting for `work`, and `work` without waiting for a message.** A guest
/// that reads the configuration stands still until it is answered; and the message thread waits for `work` to return before it
/// says that a ring has stopped.
pub trait Device: Send + Sync {
    /// Feature bits of the device type. `VIRTIO_F_VERSION_1`, `VIRTIO_RING_F_EVENT_IDX` and vhost-user's own bit are added.
    fn features(&self) -> u64;

    /// How many queues there may be; at most [`MAX_QUEUES`](crate::MAX_QUEUES).
    fn queues(&self) -> usize;

    /// What the driver has accepted of [`Device::features`]. Called again after every [reset](Self::reset), before a ring runs.
    fn accepted(&self, features: u64);

    /// The configuration's bytes from `offset` on; zeros beyond its end.
    fn read_config(&self, offset: u32, into: &mut [u8]);

    /// The driver writes its configuration. What lies outside of what it may write is ignored; the device counts it.
    fn write_config(&self, offset: u32, bytes: &[u8]);

    /// The guest's memory, or a changed one. What was taken out of a ring before still refers to the memory of then.
    fn memory(&self, memory: Arc<Ram>);

    /// A front end has connected; the handle is of use until [`FrontEnd::is_connected`] says no.
    fn attached(&self, front_end: FrontEnd);

    /// Looks at a queue and returns after a bounded amount of work: whoever stops the ring, or the server, waits for it. A buffer
    /// may have some hundred thousand descriptors, so what has to be counted is descriptors, and not buffers.
    ///
    /// # Errors
    /// [`QueueError::Stopped`] is nothing to worry about. After any other one the queue is left alone until it is set up anew.
    fn work(&self, queue: usize, vring: &Vring) -> Result<More, QueueError>;

    /// The driver has been at work before this connection, or before it was stopped in another state: a server that was killed had
    /// it, or the VM was loaded. What it has written into the configuration is not written again. Called once, when it shows:
    /// with the first of its rings that starts amid its work; `work` may run on others.
    fn inherited(&self) {}

    /// A ring has stopped, and what was taken out of it and not given back is the driver's again, which may offer it once more
    /// when the ring goes on. The driver is still the same, and all that it has said holds: a VM that is stopped for a while
    /// has its rings stopped. `work` does not run on that queue meanwhile.
    fn stopped(&self, queue: usize);

    /// The driver is gone, and with it what it has said and every buffer that was taken out and not given back: the front end
    /// resets the device, negotiates anew, brings another driver or has gone. `work` does not run meanwhile, and no ring runs.
    fn reset(&self);
}
