//! Driving a future on a thread that has no runtime.
//!
//! **Law: a thread in [`block_on`] sleeps only when nothing can go on, and then in one call, which hands what was gathered to the
//! kernel, waits, and takes what is done.** Requests of files that its future polls go into its own ring. It leaves with none under way:
//! whoever a request was handed to, or nobody, need not come back to this thread.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
#[cfg(not(loom))]
use std::thread::{self, Thread};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(loom)]
use loom::thread::{self, Thread};

use crate::request::Work;
use crate::ring::{Begun, Done, Ring};

/// Polls in a row after which requests are begun although more may be coming.
const GATHERED: u32 = 16;

/// Sleeps after a wake-up that came during a call and had to wait for it, in which no such call is made.
const WARY: u32 = 1000;

/// What a thread in [`block_on`] does at the moment.
mod state {
    /// It polls, and will look for wake-ups before it sleeps.
    pub(super) const AWAKE: u32 = 0;
    /// Somebody woke it.
    pub(super) const WOKEN: u32 = 1;
    /// It sleeps without a ring.
    pub(super) const PARKED: u32 = 2;
    /// It sleeps in its ring.
    pub(super) const IN_RING: u32 = 3;
    /// It is in a call that nobody can end.
    pub(super) const IN_CALL: u32 = 4;
}

/// How a thread is woken.
pub(crate) struct Bell {
    state: AtomicU32,
    thread: Thread,
    /// Ends a sleep in the ring.
    event: OnceLock<OwnedFd>,
}

impl Bell {
    /// The descriptor that is readable when the bell was rung during a sleep in the ring; `event` is it from now on, if there was
    /// none.
    pub(crate) fn event(&self, event: impl FnOnce() -> std::io::Result<OwnedFd>) -> std::io::Result<&OwnedFd> {
        match self.event.get() {
            Some(event) => Ok(event),
            None => {
                let event = event()?;
                Ok(self.event.get_or_init(|| event))
            }
        }
    }

    fn turn(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl Wake for Bell {
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

/// What a thread needs to drive futures.
struct Driver {
    /// Calls of [`block_on`] that are in each other.
    depth: Cell<u32>,
    bell: Arc<Bell>,
    waker: Waker,
    ring: RefCell<Option<Ring>>,
    /// Whether the kernel gave this thread no ring.
    is_without: Cell<bool>,
    /// Sleeps that have to be such that they can be ended.
    wary: Cell<u32>,
}

impl Driver {
    fn new() -> Self {
        let bell =
            Arc::new(Bell { state: AtomicU32::new(state::AWAKE), thread: thread::current(), event: OnceLock::new() });
        let waker = Waker::from(Arc::clone(&bell));
        Self {
            depth: Cell::new(0),
            bell,
            waker,
            ring: RefCell::new(None),
            is_without: Cell::new(false),
            wary: Cell::new(0),
        }
    }

    fn run<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let mut context = Context::from_waker(&self.waker);
        let _inside = Inside::enter(self);
        let mut polls = 0;
        loop {
            self.bell.state.store(state::AWAKE, Ordering::Release);
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            polls += 1;
            if polls % GATHERED == 0 {
                self.turn(false);
            }
            while self.bell.state.load(Ordering::Acquire) == state::AWAKE {
                self.sleep();
                polls = 0;
            }
        }
    }

    /// Sleeps until something happened.
    fn sleep(&self) {
        let (has_requests, is_alone) =
            self.ring.borrow().as_ref().map_or((false, false), |ring| (ring.has_requests(), ring.is_alone()));
        let wary = self.wary.get();
        self.wary.set(wary.saturating_sub(1));
        if is_alone && wary == 0 {
            if self.bell.turn(state::AWAKE, state::IN_CALL) && self.with_ring(Ring::block) {
                self.wary.set(WARY);
            }
        } else if has_requests {
            if self.bell.turn(state::AWAKE, state::IN_RING) {
                self.turn(true);
            }
        } else if self.bell.turn(state::AWAKE, state::PARKED) {
            thread::park();
            self.bell.turn(state::PARKED, state::AWAKE);
        }
    }

    /// Hands the kernel what was gathered, waits for something to be done if so asked, and tells those who wait for what is.
    fn turn(&self, wait: bool) {
        self.with_ring(|ring| ring.turn(wait));
    }

    /// Lets the ring do something, and tells of what is done. Whether the thread was woken meanwhile.
    fn with_ring(&self, turn: impl FnOnce(&mut Ring) -> Done) -> bool {
        let mut done = {
            let mut ring = self.ring.borrow_mut();
            let Some(ring) = ring.as_mut() else { return false };
            turn(ring)
        };
        let is_woken = ![state::IN_RING, state::IN_CALL].iter().any(|from| self.bell.turn(*from, state::AWAKE));
        // The ring is free again: who is woken, or dropped, may do as it likes.
        done.announce();
        if let Some(ring) = self.ring.borrow_mut().as_mut() {
            ring.reuse(done);
        }
        is_woken
    }

    /// Begins a request in this thread's ring; gives it back if there is none.
    fn begin(&self, work: Work, waker: &Waker) -> Result<Begun, Work> {
        if self.depth.get() == 0 || self.is_without.get() {
            return Err(work);
        }
        let Ok(mut ring) = self.ring.try_borrow_mut() else { return Err(work) };
        if ring.is_none() {
            *ring = Ring::new(&self.bell).ok();
        }
        match ring.as_mut() {
            Some(ring) => Ok(ring.begin(work, waker)),
            None => {
                self.is_without.set(true);
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
                driver.turn(true);
            }
        } else {
            // What woke the outer call while this one ran, this one has taken note of.
            driver.bell.state.store(state::WOKEN, Ordering::Release);
        }
        driver.depth.set(driver.depth.get() - 1);
    }
}

/// Begins a request in this thread's ring; gives it back if the thread has none, or is not in [`block_on`] to look after it.
pub(crate) fn begin(work: Work, waker: &Waker) -> Result<Begun, Work> {
    match DRIVER.try_with(Rc::clone) {
        Ok(driver) => driver.begin(work, waker),
        Err(_) => Err(work),
    }
}

/// Waits for a future on this thread. Requests of files that it polls are carried out meanwhile; those it leaves behind are
/// finished before this returns.
///
/// A future may itself wait with `block_on`. With another executor inside of it, it may not: that one would sleep while its requests
/// are done.
pub fn block_on<F: Future>(future: F) -> F::Output {
    // A thread that ends has no driver any more.
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

/// For the model checker alone; `cargo xtask test` runs it.
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
