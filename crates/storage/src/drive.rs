//! Runs a future on a thread that has no async runtime.
//!
//! **Law: a thread in [`block_on`] sleeps only when nothing can make progress, and then in one system call, which
//! submits the gathered requests, waits, and reaps completions.** File requests that its future polls go into the
//! thread's own ring. It returns with none in flight, so a future may move to another thread afterwards, or be dropped,
//! without this thread's help. Waits for descriptors ([`Pollable`](crate::Pollable)) share that sleep.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
#[cfg(not(loom))]
use std::thread::{self, Thread};

use rustix::event::{EventfdFlags, eventfd};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(loom)]
use loom::thread::{self, Thread};

use crate::request::Work;
use crate::ring::{Completed, InFlight, Ring};
use crate::watch::{Watch, Watches};

/// Consecutive polls after which gathered requests are submitted although more may follow.
const GATHERED: u32 = 16;

/// After a wake-up that came during a blocking call and had to wait for it: sleeps during which no blocking call is
/// made.
const BACKOFF: u32 = 1000;

/// The current state of a thread in [`block_on`].
mod state {
    /// It polls, and will look for wake-ups before it sleeps.
    pub(super) const AWAKE: u32 = 0;
    /// It was woken.
    pub(super) const WOKEN: u32 = 1;
    /// It sleeps without a ring.
    pub(super) const PARKED: u32 = 2;
    /// It sleeps in its ring, or in poll(2).
    pub(super) const IN_RING: u32 = 3;
    /// It is in a blocking call that a wake-up cannot interrupt.
    pub(super) const IN_CALL: u32 = 4;
}

/// Wakes a thread that is in [`block_on`].
pub(crate) struct ThreadWaker {
    state: AtomicU32,
    thread: Thread,
    /// Ends a sleep in the ring.
    event: OnceLock<OwnedFd>,
}

impl ThreadWaker {
    /// Returns the descriptor that becomes readable when the thread is woken during a sleep in its ring or in poll(2);
    /// the first call creates it.
    pub(crate) fn event(&self) -> std::io::Result<&OwnedFd> {
        match self.event.get() {
            Some(event) => Ok(event),
            None => {
                let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
                Ok(self.event.get_or_init(|| event))
            }
        }
    }

    fn transition(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        match self.state.swap(state::WOKEN, Ordering::AcqRel) {
            state::PARKED => self.thread.unpark(),
            state::IN_RING => {
                if let Some(event) = self.event.get() {
                    // It fails only if it is readable already.
                    _ = rustix::io::write(event, &1u64.to_ne_bytes());
                }
            }
            _ => {}
        }
    }
}

thread_local! {
    static DRIVER: Rc<Driver> = Rc::new(Driver::new());
}

/// State of a thread that drives futures.
struct Driver {
    /// Nesting depth of calls of [`block_on`].
    depth: Cell<u32>,
    wake: Arc<ThreadWaker>,
    waker: Waker,
    ring: RefCell<Option<Ring>>,
    /// Whether the kernel refused this thread a ring.
    ring_refused: Cell<bool>,
    /// Sleeps that must be interruptible before a blocking call may be made again.
    backoff: Cell<u32>,
    watches: RefCell<Watches>,
}

impl Driver {
    fn new() -> Self {
        let wake = Arc::new(ThreadWaker {
            state: AtomicU32::new(state::AWAKE),
            thread: thread::current(),
            event: OnceLock::new(),
        });
        let waker = Waker::from(Arc::clone(&wake));
        Self {
            depth: Cell::new(0),
            wake,
            waker,
            ring: RefCell::new(None),
            ring_refused: Cell::new(false),
            backoff: Cell::new(0),
            watches: RefCell::default(),
        }
    }

    fn run<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let mut context = Context::from_waker(&self.waker);
        let _inside = Inside::enter(self);
        let mut polls = 0;
        loop {
            self.wake.state.store(state::AWAKE, Ordering::Release);
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            polls += 1;
            if polls % GATHERED == 0 {
                self.submit();
            }
            while self.wake.state.load(Ordering::Acquire) == state::AWAKE {
                self.sleep();
                polls = 0;
            }
        }
    }

    /// Sleeps until something happened.
    fn sleep(&self) {
        self.write_small();
        let watching = self.watches.borrow_mut().purge();
        let (has_requests, should_block) = self
            .ring
            .borrow()
            .as_ref()
            .map_or((false, false), |ring| (ring.has_requests(), ring.should_block(watching)));
        let backoff = self.backoff.get();
        self.backoff.set(backoff.saturating_sub(1));
        if should_block && backoff == 0 {
            if self.wake.transition(state::AWAKE, state::IN_CALL) && self.with_ring(Ring::block) {
                self.backoff.set(BACKOFF);
            }
        } else if has_requests {
            if self.wake.transition(state::AWAKE, state::IN_RING) {
                self.submit_and_reap(true);
            }
        } else if watching && let Ok(event) = self.wake.event() {
            if self.wake.transition(state::AWAKE, state::IN_RING) {
                let woken = self.watches.borrow_mut().sleep(event.as_fd());
                self.wake.transition(state::IN_RING, state::AWAKE);
                woken.into_iter().for_each(Waker::wake);
            }
        } else if self.wake.transition(state::AWAKE, state::PARKED) {
            thread::park();
            self.wake.transition(state::PARKED, state::AWAKE);
        }
    }

    /// Executes gathered requests that are only short calls. If there were any, their tasks are woken.
    fn write_small(&self) {
        if self.ring.borrow().as_ref().is_some_and(Ring::has_gathered) {
            self.with_ring(Ring::write_small);
        }
    }

    /// Submits gathered requests, and wakes the tasks whose requests are complete.
    fn submit(&self) {
        self.write_small();
        if self.ring.borrow().as_ref().is_some_and(Ring::has_requests) {
            self.submit_and_reap(false);
        }
    }

    /// Submits gathered requests, waits for a completion if `wait` is set, and wakes the tasks whose requests are
    /// complete. While it waits the ring polls the descriptors that are waited for.
    fn submit_and_reap(&self, wait: bool) {
        let polls = if wait { self.watches.borrow_mut().for_ring(false) } else { Vec::new() };
        self.with_ring(|ring| {
            polls.iter().for_each(|poll| ring.poll(*poll));
            ring.submit_and_reap(wait)
        });
    }

    /// Ends the ring's polls of descriptors.
    fn end_polls(&self) {
        while self.watches.borrow().are_in_ring() {
            let polls = self.watches.borrow_mut().for_ring(true);
            self.with_ring(|ring| {
                polls.iter().for_each(|poll| ring.poll(*poll));
                ring.submit_and_reap(true)
            });
        }
        let ended = self.watches.borrow_mut().finish_all();
        ended.into_iter().for_each(Waker::wake);
    }

    /// Calls `call` with the ring, and wakes the tasks whose requests are complete. Returns whether the thread was
    /// woken meanwhile.
    fn with_ring(&self, call: impl FnOnce(&mut Ring) -> Completed) -> bool {
        let mut done = {
            let mut ring = self.ring.borrow_mut();
            let Some(ring) = ring.as_mut() else { return false };
            call(ring)
        };
        let is_woken = ![state::IN_RING, state::IN_CALL].iter().any(|from| self.wake.transition(*from, state::AWAKE));
        let ready: Vec<_> = {
            let mut watches = self.watches.borrow_mut();
            done.polled.drain(..).filter_map(|entry| watches.completed(entry)).collect()
        };
        // The borrow of the ring has ended: tasks that are woken, or dropped, may use it.
        ready.into_iter().for_each(Waker::wake);
        done.wake_all();
        if let Some(ring) = self.ring.borrow_mut().as_mut() {
            ring.reuse(done);
        }
        is_woken
    }

    /// Begins a request in this thread's ring. Returns it if the thread has no ring.
    fn begin(&self, work: Work, waker: &Waker) -> Result<InFlight, Work> {
        if self.depth.get() == 0 || self.ring_refused.get() {
            return Err(work);
        }
        let Ok(mut ring) = self.ring.try_borrow_mut() else { return Err(work) };
        if ring.is_none() {
            *ring = Ring::new(&self.wake).ok();
        }
        match ring.as_mut() {
            Some(ring) => Ok(ring.begin(work, waker)),
            None => {
                self.ring_refused.set(true);
                Err(work)
            }
        }
    }
}

/// A call of [`block_on`], for as long as it lasts: also if the future panics.
struct Inside<'a>(&'a Driver);

impl<'a> Inside<'a> {
    fn enter(driver: &'a Driver) -> Self {
        driver.depth.set(driver.depth.get() + 1);
        Self(driver)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let driver = self.0;
        if driver.depth.get() == 1 {
            while driver.ring.borrow().as_ref().is_some_and(Ring::has_requests) {
                driver.submit_and_reap(true);
            }
            driver.end_polls();
        } else {
            // A wake-up of the outer call may have been consumed by this one: let the outer call poll again.
            driver.wake.state.store(state::WOKEN, Ordering::Release);
        }
        driver.depth.set(driver.depth.get() - 1);
    }
}

/// Begins a request in this thread's ring. Gives it back if the thread has none, or is not in [`block_on`] to drive it.
pub(crate) fn begin(work: Work, waker: &Waker) -> Result<InFlight, Work> {
    match DRIVER.try_with(Rc::clone) {
        Ok(driver) => driver.begin(work, waker),
        Err(_) => Err(work),
    }
}

/// Has this thread wait for a descriptor when it sleeps. Returns false if it is not in [`block_on`].
pub(crate) fn watch(watch: &Arc<Watch>) -> bool {
    DRIVER.try_with(Rc::clone).is_ok_and(|driver| {
        let inside = driver.depth.get() > 0;
        if inside {
            driver.watches.borrow_mut().add(Arc::clone(watch));
        }
        inside
    })
}

/// Submits the requests that this thread has gathered, and takes those that are complete, without waiting: for a task
/// that uses what is complete before it begins more. Outside [`block_on`] it does nothing.
pub fn submit_gathered() {
    if let Ok(driver) = DRIVER.try_with(Rc::clone)
        && driver.depth.get() > 0
    {
        driver.submit();
    }
}

/// Runs a future to completion on this thread. File requests that it polls are executed by this thread's ring; requests
/// that it drops unfinished are complete before this returns.
///
/// Calls may be nested. The future must not block this thread with another executor: that executor would sleep, and
/// nothing would reap its completions.
pub fn block_on<F: Future>(future: F) -> F::Output {
    // Thread-local storage may already be destroyed.
    let driver = DRIVER.try_with(Rc::clone).unwrap_or_else(|_| Rc::new(Driver::new()));
    driver.run(future)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::future::poll_fn;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    /// Ready when it is polled for the given time; wakes itself each time before.
    fn after(polls: u32) -> impl Future<Output = u32> {
        let mut count = 0;
        poll_fn(move |context| {
            count += 1;
            if count == polls {
                return Poll::Ready(count);
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
    }

    #[test]
    fn a_future_that_wakes_itself_is_polled_again() {
        assert_eq!(block_on(after(1000)), 1000);
    }

    #[test]
    fn another_thread_wakes_a_thread_that_sleeps() {
        let (send, receive) = channel::<Waker>();
        let other = thread::spawn(move || {
            let waker = receive.recv().unwrap();
            thread::sleep(Duration::from_millis(20));
            waker.wake();
        });
        let mut polls = 0;
        block_on(poll_fn(|context| {
            polls += 1;
            if polls == 2 {
                return Poll::Ready(());
            }
            send.send(context.waker().clone()).unwrap();
            Poll::Pending
        }));
        other.join().unwrap();
    }

    #[test]
    fn a_wake_up_during_an_inner_wait_is_not_lost() {
        let mut polls = 0;
        block_on(poll_fn(|context| {
            polls += 1;
            if polls == 2 {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            // The inner call takes the wake-up for its own.
            assert_eq!(block_on(after(3)), 3);
            Poll::Pending
        }));
    }
}

/// Compiled for the model checker loom only; run by `cargo xtask test`.
#[cfg(all(test, loom))]
mod models {
    use std::future::poll_fn;

    use loom::sync::Mutex;
    use loom::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn no_wake_up_is_lost_whenever_it_comes() {
        loom::model(|| {
            let is_done = Arc::new(AtomicBool::new(false));
            let waiting: Arc<Mutex<Option<Waker>>> = Arc::new(Mutex::new(None));
            let other = {
                let (is_done, waiting) = (Arc::clone(&is_done), Arc::clone(&waiting));
                thread::spawn(move || {
                    is_done.store(true, Ordering::Release);
                    let waker = waiting.lock().unwrap().take();
                    waker.inspect(Waker::wake_by_ref);
                })
            };
            // A thread that sleeps although it was woken is a deadlock, which the checker finds.
            Driver::new().run(poll_fn(|context| {
                *waiting.lock().unwrap() = Some(context.waker().clone());
                if is_done.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
            }));
            other.join().unwrap();
        });
    }
}
