//! The descriptors that a thread waits for.
//!
//! **Law: a thread that waits for a descriptor and for requests sleeps in one system call for both.** It polls the
//! descriptor in its ring while requests are in flight there, and by poll(2) otherwise: a connection without requests
//! needs no ring. A wait that is dropped is taken out before the thread sleeps again.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

/// The stage of a wait: `New` until it is polled, then `Waiting`, until it is `Ready` or `Dropped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    New,
    Waiting,
    Ready,
    Dropped,
}

#[derive(Debug)]
struct State {
    stage: Stage,
    waker: Option<Waker>,
}

/// A wait, as its thread sees it.
#[derive(Debug)]
pub(crate) struct Watch {
    fd: Arc<OwnedFd>,
    events: PollFlags,
    state: Mutex<State>,
}

impl Watch {
    /// A wait that has not begun.
    pub(crate) fn new(fd: Arc<OwnedFd>, events: PollFlags) -> Self {
        Self { fd, events, state: Mutex::new(State { stage: Stage::New, waker: None }) }
    }

    /// Begins the wait by `register`, which returns whether the thread can wait, and notes the task to wake.
    pub(crate) fn poll(&self, context: &mut Context<'_>, register: impl FnOnce() -> bool) -> Poll<io::Result<()>> {
        let mut state = self.state.lock();
        match state.stage {
            Stage::Ready | Stage::Dropped => return Poll::Ready(Ok(())),
            Stage::New if !register() => return Poll::Ready(Err(io::ErrorKind::Unsupported.into())),
            Stage::New | Stage::Waiting => state.stage = Stage::Waiting,
        }
        if state.waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
            let old = state.waker.replace(context.waker().clone());
            // Dropping a waker runs foreign code: not under the lock.
            drop(state);
            drop(old);
        }
        Poll::Pending
    }

    /// Notes that nobody waits any more.
    pub(crate) fn abandon(&self) {
        let mut state = self.state.lock();
        state.stage = Stage::Dropped;
        let waker = state.waker.take();
        drop(state);
        drop(waker);
    }

    fn is_waiting(&self) -> bool {
        self.state.lock().stage == Stage::Waiting
    }

    /// Ends the wait. Returns the task to wake.
    fn finish(&self) -> Option<Waker> {
        let mut state = self.state.lock();
        if state.stage == Stage::Waiting {
            state.stage = Stage::Ready;
        }
        state.waker.take()
    }
}

/// A poll that a ring is to begin or to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingPoll {
    /// Begin one, with the number of its entry.
    Begin { entry: usize, fd: RawFd, events: u32 },
    /// End the one of this entry.
    End { entry: usize },
}

struct Entry {
    /// `None`: free.
    watch: Option<Arc<Watch>>,
    /// Whether the ring polls it.
    in_ring: bool,
    /// Whether the ring was asked to stop.
    ending: bool,
}

/// The waits of a thread. An entry is free only when no ring polls it, so a late completion finds its own entry.
#[derive(Default)]
pub(crate) struct Watches {
    entries: Vec<Entry>,
    in_ring: usize,
}

impl Watches {
    /// Adds one. Its state may be locked by the caller.
    pub(crate) fn add(&mut self, watch: Arc<Watch>) {
        let entry = Entry { watch: Some(watch), in_ring: false, ending: false };
        match self.entries.iter_mut().find(|entry| entry.watch.is_none()) {
            Some(free) => *free = entry,
            None => self.entries.push(entry),
        }
    }

    /// Removes those that nobody waits for. Returns whether others are left.
    pub(crate) fn purge(&mut self) -> bool {
        let mut waiting = false;
        for entry in &mut self.entries {
            let Some(watch) = &entry.watch else { continue };
            if watch.is_waiting() {
                waiting = true;
            } else if !entry.in_ring {
                entry.watch = None;
            }
        }
        waiting
    }

    /// Returns whether a ring polls one.
    pub(crate) fn are_in_ring(&self) -> bool {
        self.in_ring > 0
    }

    /// Returns the polls that a ring must begin or end before it waits; with `all`, it ends all of them.
    pub(crate) fn for_ring(&mut self, all: bool) -> Vec<RingPoll> {
        let mut polls = Vec::new();
        for (index, entry) in self.entries.iter_mut().enumerate() {
            let Some(watch) = &entry.watch else { continue };
            match (watch.is_waiting() && !all, entry.in_ring) {
                (true, false) => {
                    (entry.in_ring, entry.ending) = (true, false);
                    self.in_ring += 1;
                    let events = u32::from(watch.events.bits());
                    polls.push(RingPoll::Begin { entry: index, fd: watch.fd.as_raw_fd(), events });
                }
                (false, true) if !entry.ending => {
                    entry.ending = true;
                    polls.push(RingPoll::End { entry: index });
                }
                _ => {}
            }
        }
        polls
    }

    /// Ends all waits, because the thread leaves: they may be continued elsewhere. Returns the tasks to wake.
    pub(crate) fn finish_all(&mut self) -> Vec<Waker> {
        self.entries.drain(..).filter_map(|entry| entry.watch?.finish()).collect()
    }

    /// Notes that the ring polls an entry no more. Returns the task to wake.
    pub(crate) fn completed(&mut self, index: usize) -> Option<Waker> {
        let entry = self.entries.get_mut(index).filter(|entry| entry.in_ring)?;
        entry.in_ring = false;
        self.in_ring -= 1;
        entry.watch.as_ref().and_then(|watch| watch.finish())
    }

    /// Sleeps by poll(2) until `event` or a descriptor is ready. Returns the tasks to wake.
    pub(crate) fn sleep(&mut self, event: BorrowedFd<'_>) -> Vec<Waker> {
        let waits = |entry: &&Entry| entry.watch.as_ref().is_some_and(|watch| watch.is_waiting());
        let watches: Vec<_> = self.entries.iter().filter(waits).filter_map(|entry| entry.watch.clone()).collect();
        let fds = watches.iter().map(|watch| PollFd::from_borrowed_fd(watch.fd.as_fd(), watch.events));
        let mut fds: Vec<_> = fds.chain([PollFd::from_borrowed_fd(event, PollFlags::IN)]).collect();
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Vec::new(),
            // It cannot be waited for (too many descriptors, no memory): the tasks try, and find out why.
            Err(_) => return watches.iter().filter_map(|watch| watch.finish()).collect(),
        }
        if fds.last().is_some_and(|event| !event.revents().is_empty()) {
            _ = rustix::io::read(event, &mut [0; 8]);
        }
        let ready = fds.iter().zip(&watches).filter(|(fd, _)| !fd.revents().is_empty());
        ready.filter_map(|(_, watch)| watch.finish()).collect()
    }
}
