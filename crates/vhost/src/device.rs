//! The interface of a device to the server.

use std::sync::Arc;

use crate::{FrontEnd, QueueError, Ram, Vring};

/// Whether a queue has more work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum MoreWork {
    /// The queue is processed again after the others.
    Yes,
    /// The queue is processed again when the driver or [`FrontEnd::kick`] kicks it.
    No,
}

/// A virtio device behind a vhost-user server.
///
/// It is called from two threads of the server: [`Device::process_queue`] from the one that processes queues,
/// everything else from the one that answers messages. The server holds none of its locks during any call.
///
/// **Law: what the message thread calls returns without waiting for `process_queue`, and `process_queue` without
/// waiting for a message.** A virtual CPU that reads the configuration is stopped until the reply; and the message
/// thread waits for `process_queue` to return before it replies that a ring has stopped.
pub trait Device: Send + Sync {
    /// Feature bits of the device type. `VIRTIO_F_VERSION_1`, `VIRTIO_RING_F_EVENT_IDX` and vhost-user's own bit are
    /// added.
    fn features(&self) -> u64;

    /// Maximum number of queues; at most [`MAX_QUEUES`](crate::MAX_QUEUES).
    fn num_queues(&self) -> usize;

    /// The driver has acknowledged these of [`Device::features`]. Called again after every [reset](Self::reset), before
    /// a ring runs.
    fn ack_features(&self, features: u64);

    /// Reads the configuration from `offset` on; zeros beyond its end.
    fn read_config(&self, offset: u32, into: &mut [u8]);

    /// The driver writes the configuration. Bytes that it may not write are ignored; the device counts them.
    fn write_config(&self, offset: u32, bytes: &[u8]);

    /// The guest's memory, initially or after a change. Buffers that were taken out of a ring before still refer to the
    /// memory of that time.
    fn set_memory(&self, memory: Arc<Ram>);

    /// A front end has connected; the handle can be used until [`FrontEnd::is_connected`] returns false.
    fn front_end_connected(&self, front_end: FrontEnd);

    /// Processes a queue and returns after a bounded amount of work: stopping the ring, or the server, waits for it. A
    /// buffer may have some hundred thousand descriptors, so the bound must count descriptors, not buffers.
    ///
    /// # Errors
    /// [`QueueError::Stopped`] is normal. After any other error the queue is not processed until it is set up again.
    fn process_queue(&self, queue: usize, vring: &Vring) -> Result<MoreWork, QueueError>;

    /// The driver was active before this connection, or before it was stopped in another state: it was attached to a
    /// server that was killed, or the VM was loaded. What it has written into the configuration is not written again.
    /// Called once, when that is detected: with the first of its rings that does not start at the beginning;
    /// `process_queue` may run on others.
    fn driver_resumed(&self) {}

    /// A ring has stopped. Buffers that were taken out of it and not given back belong to the driver again, which may
    /// offer them once more when the ring continues. The driver is the same, and its negotiated state remains valid:
    /// the rings of a VM that is paused are stopped. `process_queue` does not run on that queue meanwhile.
    fn queue_stopped(&self, queue: usize);

    /// The driver has gone, and with it its negotiated state and every buffer that was taken out and not given back:
    /// the front end resets the device, negotiates again, attaches another driver or has disconnected. `process_queue`
    /// does not run meanwhile, and no ring runs.
    fn reset(&self);
}
