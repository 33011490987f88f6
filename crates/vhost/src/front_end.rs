//! A device's handle to the front end that it is attached to.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::message;

/// A handle to a front end, cheap to clone. None of its calls blocks.
#[derive(Clone, Debug)]
pub struct FrontEnd {
    state: Arc<FrontEndState>,
}

#[derive(Debug)]
struct FrontEndState {
    connected: AtomicBool,
    /// The socket for requests to the front end (`VHOST_USER_SET_BACKEND_REQ_FD`).
    channel: Mutex<Option<OwnedFd>>,
    /// One bit for each queue that waits to be processed.
    kicked: AtomicU64,
    /// One bit for each queue that has run and does not run now.
    idle: AtomicU64,
    /// The descriptors that wake the threads of the queues; queue `n` belongs to thread `n` modulo their number.
    wakes: Vec<OwnedFd>,
}

impl FrontEnd {
    /// A handle to a front end that is connected.
    ///
    /// # Errors
    /// The kernel has no eventfd left.
    pub fn new() -> std::io::Result<Self> {
        Self::with_threads(1)
    }

    /// A handle to a front end that is connected, whose queues this number of threads process.
    pub(crate) fn with_threads(threads: usize) -> std::io::Result<Self> {
        let wake = |_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wakes = (0..threads.max(1)).map(wake).collect::<Result<_, Errno>>()?;
        let state = FrontEndState {
            connected: AtomicBool::new(true),
            channel: Mutex::new(None),
            kicked: AtomicU64::new(0),
            idle: AtomicU64::new(0),
            wakes,
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// Whether the front end is still connected.
    pub fn is_connected(&self) -> bool {
        self.state.connected.load(Ordering::SeqCst)
    }

    /// Whether a queue has run and does not run now: the front end has stopped or disabled it, or it is invalid. This
    /// may also be the only sign of a driver whose module is unloaded. (A queue that has not run yet is about to.)
    pub fn is_queue_stopped(&self, queue: usize) -> bool {
        self.state.idle.load(Ordering::SeqCst) & bit(queue) != 0
    }

    /// Records whether a queue that has run is idle.
    pub(crate) fn set_idle(&self, queue: usize, idle: bool) {
        if idle {
            self.state.idle.fetch_or(bit(queue), Ordering::SeqCst);
        } else {
            self.state.idle.fetch_and(!bit(queue), Ordering::SeqCst);
        }
    }

    /// Notifies the driver that the configuration has changed; the change must be visible to
    /// [`Device::read_config`](crate::Device::read_config) before. Returns whether the front end has a channel for it.
    ///
    /// If the channel is full, nothing is added to it: the front end has then not read an older message of this kind,
    /// and what it reads of the configuration after that message is the change too.
    pub fn config_changed(&self) -> bool {
        let channel = self.channel();
        let Some(socket) = channel.as_ref() else { return false };
        let report = send(socket, &message::config_change(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        matches!(report, Ok(_) | Err(Errno::AGAIN))
    }

    /// Has the queue's thread process it, as if the driver had kicked it. The number of a queue that does not exist is
    /// ignored.
    pub fn kick(&self, queue: usize) {
        self.state.kicked.fetch_or(bit(queue), Ordering::SeqCst);
        let wakes = &self.state.wakes;
        if let Some(wake) = queue.checked_rem(wakes.len()).and_then(|thread| wakes.get(thread)) {
            notify(wake);
        }
    }

    /// Wakes all threads, which then look at their state.
    pub(crate) fn wake_all(&self) {
        self.state.wakes.iter().for_each(notify);
    }

    /// Sets the socket for requests to the front end.
    pub(crate) fn set_channel(&self, socket: OwnedFd) {
        let before = self.channel().replace(socket);
        // Not under the lock: closing a socket may linger, and a notification of a change would wait for it.
        drop(before);
    }

    /// The front end has disconnected.
    pub(crate) fn disconnect(&self) {
        self.state.connected.store(false, Ordering::SeqCst);
        let before = self.channel().take();
        drop(before);
    }

    /// The descriptors that are readable when a queue of their thread waits to be processed, or the thread must look at
    /// its state.
    pub(crate) fn wakes(&self) -> &[OwnedFd] {
        &self.state.wakes
    }

    /// Takes the queues of a thread that wait to be processed, one bit each.
    pub(crate) fn take_kicked(&self, thread: usize) -> u64 {
        let wakes = &self.state.wakes;
        if let Some(wake) = wakes.get(thread) {
            let mut count = [0; 8];
            let _ = rustix::io::read(wake, &mut count);
        }
        let own = (thread..64).step_by(wakes.len()).fold(0, |own, queue| own | bit(queue));
        self.state.kicked.fetch_and(!own, Ordering::SeqCst) & own
    }

    fn channel(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.state.channel.lock()
    }
}

fn notify(wake: &OwnedFd) {
    // A full eventfd wakes, too.
    let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
}

/// The bit of a queue; 0 for a number that is too large.
pub(crate) fn bit(queue: usize) -> u64 {
    u32::try_from(queue).map_or(0, |queue| 1_u64.unbounded_shl(queue))
}
