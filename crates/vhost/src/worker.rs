//! The thread that processes queues.
//!
//! It waits for kicks (epoll) and has the device process one queue after the other, a bounded amount of work at a time.
//! Laws: no lock is held while the device works; a ring that does not run is not processed; and a thread that stops a
//! ring can wait until the device has left it ([`Worker::wait_until_idle`]).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;

use crate::fault::{FaultKind, Faults};
use crate::notifier::Notifier;
use crate::{Device, FrontEnd, MoreWork, QueueError, Vring};

/// The epoll data of the descriptor that wakes; that of a queue is its index.
const WAKE: u64 = u64::MAX;

/// One ring and what belongs to it.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) vring: Vring,
    kick: Mutex<Option<Notifier>>,
    error: Mutex<Option<Notifier>>,
    /// It is invalid, and is not processed until it is set up again.
    pub(crate) broken: AtomicBool,
}

/// The rings of one connection, and the device that processes them.
pub(crate) struct Worker {
    device: Arc<dyn Device>,
    front_end: FrontEnd,
    rings: Vec<Ring>,
    faults: Arc<Faults>,
    epoll: OwnedFd,
    ends: AtomicBool,
    /// The queue that the device is processing.
    at: Mutex<Option<usize>>,
    left: Condvar,
}

impl Worker {
    /// A worker with this number of rings, not set up yet.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        front_end: FrontEnd,
        queues: usize,
        faults: Arc<Faults>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, front_end.wake(), epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let ring = || Ring {
            vring: Vring::idle(),
            kick: Mutex::new(None),
            error: Mutex::new(None),
            broken: AtomicBool::new(false),
        };
        let rings = (0..queues).map(|_| ring()).collect();
        let (at, left, ends) = (Mutex::new(None), Condvar::new(), AtomicBool::new(false));
        Ok(Self { device, front_end, rings, faults, epoll, ends, at, left })
    }

    /// All rings.
    pub(crate) fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// Sets the queue's kick descriptor.
    pub(crate) fn set_kick(&self, queue: usize, kick: Option<Notifier>) -> io::Result<()> {
        let Some(ring) = self.rings.get(queue) else { return Ok(()) };
        let mut place = ring.kick.lock();
        if let Some(before) = place.take() {
            // It is no longer in the set if its other end has been closed.
            let _ = epoll::delete(&self.epoll, &before);
        }
        if let Some(kick) = kick {
            let name = epoll::EventData::new_u64(queue as u64);
            epoll::add(&self.epoll, &kick, name, epoll::EventFlags::IN)?;
            *place = Some(kick);
        }
        Ok(())
    }

    /// Sets the descriptor that is notified when the ring is invalid.
    pub(crate) fn set_error(&self, queue: usize, error: Option<Notifier>) {
        if let Some(ring) = self.rings.get(queue) {
            *ring.error.lock() = error;
        }
    }

    /// Returns when the device is not processing that queue. The caller has ensured that it does not begin again.
    pub(crate) fn wait_until_idle(&self, queue: usize) {
        self.left.wait_while(&mut self.at.lock(), |at| *at == Some(queue));
    }

    /// Makes [`run`](Self::run) return.
    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(self.front_end.wake(), &1_u64.to_ne_bytes());
    }

    /// Processes the queues until [`end`](Self::end) is called.
    pub(crate) fn run(&self) {
        let mut pending = 0_u64;
        while !self.ends.load(Ordering::SeqCst) {
            pending |= self.take_kicks(pending == 0);
            pending = self.process_queues(pending);
        }
    }

    /// The queues that were kicked, one bit each; waits for one if `may_wait` is set.
    pub(crate) fn take_kicks(&self, may_wait: bool) -> u64 {
        let mut events = Vec::with_capacity(self.rings.len() + 1);
        let zero = rustix::fs::Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, spare_capacity(&mut events), (!may_wait).then_some(&zero)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                // No front end or guest can make it fail; without it no queue is processed any more.
                self.faults.note(FaultKind::Device, &format_args!("epoll_wait: {errno}"));
                self.ends.store(true, Ordering::SeqCst);
            }
        }
        let mut kicked = 0;
        for event in events {
            let name = event.data.u64();
            if name == WAKE {
                kicked |= self.front_end.take_kicked();
                continue;
            }
            let Some((index, ring)) =
                usize::try_from(name).ok().and_then(|index| Some((index, self.rings.get(index)?)))
            else {
                continue;
            };
            let mut place = ring.kick.lock();
            if let Some(kick) = &*place {
                if !kick.drain() {
                    // Its other end is closed: it would remain readable forever.
                    let _ = epoll::delete(&self.epoll, kick);
                    *place = None;
                }
                kicked |= 1 << index;
            }
        }
        kicked
    }

    /// Processes each of these queues once. Returns those that have more work.
    pub(crate) fn process_queues(&self, queues: u64) -> u64 {
        let mut again = 0;
        for (index, ring) in self.rings.iter().enumerate() {
            if queues & (1 << index) != 0 && self.process(index, ring) == MoreWork::Yes {
                again |= 1 << index;
            }
        }
        again
    }

    fn process(&self, index: usize, ring: &Ring) -> MoreWork {
        *self.at.lock() = Some(index);
        // Only now: a thread that stops the ring checks `at` after it has stopped the ring.
        let more = if ring.vring.is_running() && !ring.broken.load(Ordering::SeqCst) {
            self.process_queue(index, &ring.vring)
        } else {
            Ok(MoreWork::No)
        };
        let more = match more {
            Ok(more) => more,
            Err(QueueError::Stopped) => MoreWork::No,
            Err(error) => {
                ring.broken.store(true, Ordering::SeqCst);
                self.front_end.set_idle(index, true);
                let kind = if matches!(error, QueueError::Broken(_)) { FaultKind::Ring } else { FaultKind::Device };
                self.faults
                    .note(kind, &format_args!("queue {index}: {error}; it is not processed until it is set up again"));
                if let Some(error) = &*ring.error.lock() {
                    error.notify();
                }
                MoreWork::No
            }
        };
        // After the reports of an invalid ring: they are about the ring as it was set up at that time.
        *self.at.lock() = None;
        self.left.notify_all();
        more
    }

    fn process_queue(&self, index: usize, vring: &Vring) -> Result<MoreWork, QueueError> {
        vring.disable_notification()?;
        if self.device.process_queue(index, vring)? == MoreWork::Yes {
            return Ok(MoreWork::Yes);
        }
        // Buffers that came since the device last took one are processed now. Buffers that it left on purpose wait for
        // the next kick.
        let Some(next) = vring.enable_notification()? else { return Ok(MoreWork::No) };
        vring.disable_notification()?;
        let more = self.device.process_queue(index, vring)?;
        let left = vring.enable_notification()?;
        Ok(if left.is_some_and(|left| left != next) { MoreWork::Yes } else { more })
    }
}
