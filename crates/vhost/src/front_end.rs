//! What a device may ask of the front end that it is attached to.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::message;

/// A handle to a front end, cheap to clone. None of its calls waits.
#[derive(Clone, Debug)]
pub struct FrontEnd {
    state: Arc<FrontEndState>,
}

#[derive(Debug)]
struct FrontEndState {
    connected: AtomicBool,
    /// Where requests to the front end go (`VHOST_USER_SET_BACKEND_REQ_FD`).
    channel: Mutex<Option<OwnedFd>>,
    /// One bit for each queue that somebody wants looked at.
    kicked: AtomicU64,
    /// One bit for each queue that ran and does not now.
    idle: AtomicU64,
    wake: OwnedFd,
}

impl FrontEnd {
    /// A handle of somebody who is connected.
    ///
    /// # Errors
    /// The kernel has no eventfd for it.
    pub fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let state = FrontEndState {
            connected: AtomicBool::new(true),
            channel: Mutex::new(None),
            kicked: AtomicU64::new(0),
            idle: AtomicU64::new(0),
            wake,
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// Whether the connection still stands.
    pub fn is_connected(&self) -> bool {
        self.state.connected.load(Ordering::SeqCst)
    }

    /// Whether a queue ran and does not now: the front end has stopped or disabled it, or it makes no sense. Also a driver whose
    /// module is unloaded may leave no other trace than that. (One that has not run yet is about to.)
    pub fn is_idle(&self, queue: usize) -> bool {
        self.state.idle.load(Ordering::SeqCst) & bit(queue) != 0
    }

    /// A queue runs, or has run and does not.
    pub(crate) fn set_idle(&self, queue: usize, idle: bool) {
        if idle {
            self.state.idle.fetch_or(bit(queue), Ordering::SeqCst);
        } else {
            self.state.idle.fetch_and(!bit(queue), Ordering::SeqCst);
        }
    }

    /// Tells the driver that the configuration has changed; the change is to be visible to
    /// [`Device::read_config`](crate::Device::read_config) before. Says whether there was a way to tell.
    ///
    /// If the channel is full, nothing is added to it: the front end has then not read an older message of this kind, and what
    /// it reads of the configuration after that message is the change too.
    pub fn config_changed(&self) -> bool {
        let channel = self.channel();
        let Some(socket) = channel.as_ref() else { return false };
        let told = send(socket, &message::config_change(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        matches!(told, Ok(_) | Err(Errno::AGAIN))
    }

    /// Has the worker look at a queue, as if the driver had kicked it. A queue that there is not is ignored.
    pub fn kick(&self, queue: usize) {
        self.state.kicked.fetch_or(bit(queue), Ordering::SeqCst);
        // An eventfd that is full wakes, too.
        let _ = rustix::io::write(&self.state.wake, &1_u64.to_ne_bytes());
    }

    /// Where requests to the front end go from now on.
    pub(crate) fn set_channel(&self, socket: OwnedFd) {
        let before = self.channel().replace(socket);
        // Not under the lock: a socket may linger when it is closed, and whoever tells of a change would wait for it.
        drop(before);
    }

    /// The connection is gone.
    pub(crate) fn disconnect(&self) {
        self.state.connected.store(false, Ordering::SeqCst);
        let before = self.channel().take();
        drop(before);
    }

    /// What is readable when somebody wants a queue looked at, or the worker to look around.
    pub(crate) fn wake(&self) -> &OwnedFd {
        &self.state.wake
    }

    /// The queues that somebody wants looked at, a bit each; none the next time.
    pub(crate) fn take_kicked(&self) -> u64 {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.state.wake, &mut count);
        self.state.kicked.swap(0, Ordering::SeqCst)
    }

    fn channel(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.state.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The bit of a queue; none of one that there cannot be.
fn bit(queue: usize) -> u64 {
    u32::try_from(queue).ok().and_then(|queue| 1_u64.checked_shl(queue)).unwrap_or(0)
}
