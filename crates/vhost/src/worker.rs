//! The rings of a connection, and the threads that process them.
//!
//! Queue `n` belongs to thread `n` modulo the number of threads. A thread waits for kicks (epoll) and for requests of
//! the device that are in flight, and has the device process one queue after the other ([`QueueThread`]).
//! Laws: no lock is held while the device works; a ring that does not run is not processed; and a thread that stops a
//! ring can wait until the device has left it and has none of its requests in flight ([`Worker::wait_until_idle`]).

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

use parking_lot::{Condvar, Mutex};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;

use crate::fault::{FaultKind, Faults};
use crate::front_end::bit;
use crate::notifier::Notifier;
use crate::{Device, FrontEnd, MoreWork, QueueError, Requests, Vring};

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

/// The state of a thread that others see. Aligned, so that no two threads share a cache line.
#[repr(align(128))]
struct ThreadState {
    epoll: Arc<OwnedFd>,
    /// Queues that the device is processing, or has requests of in flight: one bit each.
    busy: Mutex<u64>,
    fewer: Condvar,
}

/// The rings of one connection, and the device that processes them.
pub(crate) struct Worker {
    device: Arc<dyn Device>,
    front_end: FrontEnd,
    rings: Vec<Ring>,
    faults: Arc<Faults>,
    threads: Vec<ThreadState>,
    ends: AtomicBool,
}

impl Worker {
    /// A worker with this number of rings, not set up yet, and as many threads as the front end's handle wakes.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        front_end: FrontEnd,
        queues: usize,
        faults: Arc<Faults>,
    ) -> io::Result<Self> {
        let thread = |wake: &OwnedFd| {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            epoll::add(&epoll, wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
            Ok::<_, io::Error>(ThreadState { epoll: Arc::new(epoll), busy: Mutex::new(0), fewer: Condvar::new() })
        };
        let threads = front_end.wakes().iter().map(thread).collect::<io::Result<_>>()?;
        let ring = || Ring {
            vring: Vring::idle(),
            kick: Mutex::new(None),
            error: Mutex::new(None),
            broken: AtomicBool::new(false),
        };
        let rings = (0..queues).map(|_| ring()).collect();
        Ok(Self { device, front_end, rings, faults, threads, ends: AtomicBool::new(false) })
    }

    /// All rings.
    pub(crate) fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// The threads that process them.
    pub(crate) fn threads(&self) -> impl Iterator<Item = QueueThread<'_>> {
        (0..).zip(&self.threads).map(|(number, thread)| QueueThread {
            worker: self,
            thread,
            number,
            pending: 0,
            in_flight: 0,
            waiting: 0,
        })
    }

    /// The thread of a queue.
    fn thread_of(&self, queue: usize) -> Option<&ThreadState> {
        self.threads.get(queue.checked_rem(self.threads.len())?)
    }

    /// Sets the queue's kick descriptor.
    pub(crate) fn set_kick(&self, queue: usize, kick: Option<Notifier>) -> io::Result<()> {
        let (Some(ring), Some(thread)) = (self.rings.get(queue), self.thread_of(queue)) else { return Ok(()) };
        let mut place = ring.kick.lock();
        if let Some(before) = place.take() {
            // It is no longer in the set if its other end has been closed.
            let _ = epoll::delete(&thread.epoll, &before);
        }
        if let Some(kick) = kick {
            let name = epoll::EventData::new_u64(queue as u64);
            epoll::add(&thread.epoll, &kick, name, epoll::EventFlags::IN)?;
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

    /// Returns when the device is not processing that queue, and has none of its requests in flight. The caller has
    /// ensured that it does not begin again.
    pub(crate) fn wait_until_idle(&self, queue: usize) {
        if let Some(thread) = self.thread_of(queue) {
            thread.fewer.wait_while(&mut thread.busy.lock(), |busy| *busy & bit(queue) != 0);
        }
    }

    /// Ends the threads.
    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::SeqCst);
        self.front_end.wake_all();
    }

    /// Marks the ring as invalid if processing it failed, and reports that.
    fn judge(&self, index: usize, ring: &Ring, result: Result<MoreWork, QueueError>) -> MoreWork {
        let error = match result {
            Ok(more) => return more,
            Err(QueueError::Stopped) => return MoreWork::No,
            Err(error) => error,
        };
        if !ring.broken.swap(true, Ordering::SeqCst) {
            self.front_end.set_idle(index, true);
            let kind = if error.is_of_driver() { FaultKind::Ring } else { FaultKind::Device };
            self.faults
                .note(kind, &format_args!("queue {index}: {error}; it is not processed until it is set up again"));
            if let Some(error) = &*ring.error.lock() {
                error.notify();
            }
        }
        MoreWork::No
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

/// The state of a thread after a [turn](QueueThread::turn).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Turn {
    /// A queue has more work: the thread takes the next turn without waiting.
    Again,
    /// The thread waits for a kick or for a request of the device.
    Wait,
    /// The connection has ended, and the thread with it.
    Ended,
}

/// The queues of one thread of a connection: given to [`Device::run_queues`], which is the thread's whole life.
pub struct QueueThread<'a> {
    worker: &'a Worker,
    thread: &'a ThreadState,
    number: usize,
    /// Queues that have work, one bit each.
    pending: u64,
    /// Queues with requests in flight, one bit each.
    in_flight: u64,
    /// Queues that the device has left buffers in, until it is woken: one bit each.
    waiting: u64,
}

impl fmt::Debug for QueueThread<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueThread").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Drop for QueueThread<'_> {
    /// The thread ends, also by a panic: no other one waits for it any more.
    fn drop(&mut self) {
        *self.thread.busy.lock() = 0;
        self.thread.fewer.notify_all();
    }
}

impl QueueThread<'_> {
    /// Processes the queues of a device without requests in flight until the connection ends.
    pub fn run(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        let mut may_wait = true;
        loop {
            self.take_kicks_or_wait(may_wait);
            match self.turn(&mut context) {
                Turn::Again => may_wait = false,
                Turn::Wait => may_wait = true,
                Turn::Ended => return,
            }
        }
    }

    /// A descriptor that is readable when there are kicks to [take](Self::take_kicks), or the connection has ended.
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.thread.epoll)
    }

    /// Takes the kicks that have come, for the next turn. It does not wait.
    pub fn take_kicks(&mut self) {
        self.take_kicks_or_wait(false);
    }

    /// Looks for buffers that no kick has announced yet. Queues that have requests in flight, or wait, may leave
    /// buffers in their rings on purpose, and are not looked at. Returns whether a queue has work.
    pub fn find_work(&mut self) -> bool {
        let (worker, others) = (self.worker, self.in_flight | self.waiting);
        let own = worker.rings.iter().enumerate().skip(self.number).step_by(worker.threads.len());
        for (index, ring) in own.filter(|(index, _)| others & bit(*index) == 0) {
            if !ring.broken.load(Ordering::SeqCst) && ring.vring.has_available() {
                self.pending |= bit(index);
            }
        }
        self.pending != 0
    }

    /// Processes each queue that has work once, and polls the device's requests in flight, which wake the task of
    /// `context` when they can continue.
    pub fn turn(&mut self, context: &mut Context<'_>) -> Turn {
        if self.worker.ends.load(Ordering::SeqCst) {
            return Turn::Ended;
        }
        let wanted = self.take_pending();
        self.process(wanted, context);
        if self.pending == 0 { Turn::Wait } else { Turn::Again }
    }

    /// Returns whether the device has requests of the thread's queues in flight.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        self.in_flight != 0
    }

    /// The queues that have work, one bit each.
    pub(crate) fn take_pending(&mut self) -> u64 {
        std::mem::take(&mut self.pending)
    }

    /// Processes each of these queues of the thread once, and polls requests in flight.
    pub(crate) fn process(&mut self, wanted: u64, context: &mut Context<'_>) {
        let worker = self.worker;
        let concerned = wanted | self.in_flight | self.waiting;
        let own = worker.rings.iter().enumerate().skip(self.number).step_by(worker.threads.len());
        for (index, ring) in own.filter(|(index, _)| concerned & bit(*index) != 0) {
            if self.process_one(index, ring, wanted & bit(index) != 0, context) == MoreWork::Yes {
                self.pending |= bit(index);
            }
        }
    }

    fn process_one(&mut self, index: usize, ring: &Ring, wanted: bool, context: &mut Context<'_>) -> MoreWork {
        let worker = self.worker;
        if self.in_flight & bit(index) == 0 {
            *self.thread.busy.lock() |= bit(index);
        }
        // Only now: a thread that stops the ring looks at `busy` after it has begun to drain the ring.
        let runs = wanted && ring.vring.is_running() && !ring.broken.load(Ordering::SeqCst);
        let begun = if runs { worker.process_queue(index, &ring.vring) } else { Ok(MoreWork::No) };
        let begun = worker.judge(index, ring, begun);
        let Requests { in_flight, waits, ring: given_back } = worker.device.poll_requests(index, &ring.vring, context);
        let more = worker.judge(index, ring, given_back);
        self.waiting = if waits { self.waiting | bit(index) } else { self.waiting & !bit(index) };
        if in_flight {
            self.in_flight |= bit(index);
        } else {
            self.in_flight &= !bit(index);
            // After the reports of an invalid ring: they are about the ring as it was set up at that time.
            *self.thread.busy.lock() &= !bit(index);
            self.thread.fewer.notify_all();
        }
        if begun == MoreWork::Yes { MoreWork::Yes } else { more }
    }

    /// Takes the kicks that have come; waits for one if `may_wait` is set.
    fn take_kicks_or_wait(&mut self, may_wait: bool) {
        let worker = self.worker;
        let mut events = Vec::with_capacity(worker.rings.len() + 1);
        let zero = rustix::fs::Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.thread.epoll, spare_capacity(&mut events), (!may_wait).then_some(&zero)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                // No front end or guest can make it fail; without it no queue is processed any more.
                worker.faults.note(FaultKind::Device, &format_args!("epoll_wait: {errno}"));
                worker.end();
            }
        }
        for event in events {
            let name = event.data.u64();
            if name == WAKE {
                self.pending |= worker.front_end.take_kicked(self.number);
                continue;
            }
            let Some((index, ring)) =
                usize::try_from(name).ok().and_then(|index| Some((index, worker.rings.get(index)?)))
            else {
                continue;
            };
            let mut place = ring.kick.lock();
            if let Some(kick) = &*place {
                if !kick.drain() {
                    // Its other end is closed: it would remain readable forever.
                    let _ = epoll::delete(&self.thread.epoll, kick);
                    *place = None;
                }
                self.pending |= bit(index);
            }
        }
    }
}
