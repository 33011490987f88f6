//! The interface of a device to the server.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::task::Context;

use crate::worker::QueueThread;
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

/// The requests of a queue that are in flight, after they were polled.
#[derive(Debug)]
#[must_use]
pub struct Requests {
    /// Whether some are still in flight. Stopping the ring waits for them.
    pub in_flight: bool,
    /// Whether [`Device::process_queue`] left buffers in the ring for something other than room. The queue is polled
    /// again in each [turn](QueueThread::turn); stopping the ring does not wait for it.
    pub waits: bool,
    /// Whether there is room for buffers that [`Device::process_queue`] left in the ring; or why buffers could not be
    /// given back.
    pub ring: Result<MoreWork, QueueError>,
}

impl Requests {
    /// No request is in flight.
    pub const NONE: Self = Self { in_flight: false, waits: false, ring: Ok(MoreWork::No) };
}

/// A virtio device behind a vhost-user server.
///
/// The queues are spread over [`Device::num_threads`] threads, which call [`Device::process_queue`] and
/// [`Device::poll_requests`], those of one queue always from the same thread. Everything else is called from the thread
/// that answers messages. The server holds none of its locks during any call.
///
/// A device either completes a buffer inside `process_queue`, or keeps it; a buffer that it keeps is a request in
/// flight if `poll_requests` says so, and otherwise waits for something that may never come (a balloon's statistics).
///
/// **Law: what the message thread calls returns without waiting for a queue's thread, and a queue's thread continues
/// without waiting for a message.** A virtual CPU that reads the configuration is stopped until the reply; and before
/// the message thread replies that a ring has stopped, it waits for `process_queue` to return.
///
/// **Law: a ring that stops is drained first.** No buffer is taken out of it any more, requests in flight are completed
/// and given back, and only then is the front end told. So no request writes to memory that the front end has taken
/// away, and none is lost or executed twice. It waits for the device's requests only: a device must complete them
/// without the driver's help.
pub trait Device: Send + Sync {
    /// Feature bits of the device type. `VIRTIO_F_VERSION_1`, `VIRTIO_RING_F_EVENT_IDX` and vhost-user's own bit are
    /// added.
    fn features(&self) -> u64;

    /// Maximum number of queues; at most [`MAX_QUEUES`](crate::MAX_QUEUES).
    fn num_queues(&self) -> usize;

    /// Number of threads that process the queues; at least one, and at most one for each queue, are started.
    fn num_threads(&self) -> usize {
        1
    }

    /// Processes the queues of a thread until [`Turn::Ended`](crate::Turn::Ended). A device that has requests in flight
    /// waits here for them and for kicks in one place: it alternates between [`QueueThread::turn`] and waiting.
    fn run_queues(&self, thread: &mut QueueThread<'_>) {
        thread.run();
    }

    /// Whether the device [marks](Vring::mark_written) all that it writes to the guest's memory. Without it a VM with
    /// this device cannot migrate while it runs.
    fn marks_written_memory(&self) -> bool {
        false
    }

    /// Whether the device can wait for memory that has not come: whoever touches it, a thread or the kernel for it, is
    /// stopped until it comes. Without it a VM with this device cannot come by postcopy. A device that discards memory
    /// must not say so.
    fn waits_for_memory(&self) -> bool {
        false
    }

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

    /// Whether a front end that has connected is served; its socket. One that is not is disconnected.
    fn accepts(&self, _front_end: BorrowedFd<'_>) -> bool {
        true
    }

    /// A front end has connected; the handle can be used until [`FrontEnd::is_connected`] returns false.
    fn front_end_connected(&self, front_end: FrontEnd);

    /// Processes a queue and returns after a bounded amount of work: stopping the ring, or the server, waits for it. A
    /// buffer may have some hundred thousand descriptors, so the bound must count descriptors, not buffers.
    ///
    /// # Errors
    /// [`QueueError::Stopped`] is normal. After any other error the queue is not processed until it is set up again.
    fn process_queue(&self, queue: usize, vring: &Vring) -> Result<MoreWork, QueueError>;

    /// Polls the requests of a queue that are in flight, and gives back the buffers of those that are done. It is
    /// called after `process_queue`, and in each [turn](QueueThread::turn) while requests are in flight or the queue
    /// [waits](Requests::waits); also of a ring that is being drained, or is invalid. It begins requests that
    /// `process_queue` has prepared, and has them, and what the queue waits for, wake the task of `context`.
    fn poll_requests(&self, _queue: usize, _vring: &Vring, _context: &mut Context<'_>) -> Requests {
        Requests::NONE
    }

    /// The driver was active before this connection, or before it was stopped in another state: it was attached to a
    /// server that was killed, or the VM was loaded. What it has written into the configuration is not written again.
    /// Called once, when that is detected: with the first of its rings that does not start at the beginning;
    /// `process_queue` may run on others.
    fn driver_resumed(&self) {}

    /// A ring has stopped, and no request of it is in flight. Buffers that were taken out of it and not given back
    /// belong to the driver again, which may offer them once more when the ring continues. The driver is the same, and
    /// its negotiated state remains valid: the rings of a VM that is paused are stopped. `process_queue` does not run
    /// on that queue meanwhile.
    fn queue_stopped(&self, queue: usize);

    /// The driver has gone, and with it its negotiated state and every buffer that was taken out and not given back:
    /// the front end resets the device, negotiates again, attaches another driver or has disconnected. `process_queue`
    /// does not run meanwhile, and no ring runs.
    fn reset(&self);
}
