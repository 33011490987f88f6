//! Requests in flight to units (sectors, blocks) that are written in part.
//!
//! A write of a part of a unit reads the unit, changes it and writes it. Law: nothing else that touches the unit is in
//! flight between the read and the end of the write. A request is registered when it begins, also while it still
//! waits, and waits for all that it conflicts with and that were registered before it; so two never wait for each
//! other, and none is lost. A write that has begun is driven by whoever waits for it: one that is dropped, or not
//! polled, is in nobody's way. One that is dropped before its turn is not carried out: others that were registered
//! after it may be done.

use std::fmt;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Waker};

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use parking_lot::Mutex;

use crate::{Request, StorageError};

/// Requests in flight to a storage that is written in whole units only.
#[derive(Default)]
pub struct UnitLocks(Mutex<State>);

#[derive(Default)]
struct State {
    next: u64,
    /// In the order of their numbers.
    entries: Vec<Entry>,
    waiting: Vec<Waker>,
}

struct Entry {
    number: u64,
    units: Range<u64>,
    /// Whether it writes parts of units.
    partial: bool,
    /// A write with all that it waits for; `None`: a read.
    write: Option<Shared<Request>>,
    /// Its turn has come.
    has_begun: bool,
}

impl fmt::Debug for UnitLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnitLocks({} in flight)", self.0.lock().entries.len())
    }
}

impl Entry {
    fn conflicts(&self, other: &Self) -> bool {
        (self.partial || other.partial) && self.units.start < other.units.end && other.units.start < self.units.end
    }
}

/// A read in flight: until it is dropped.
#[derive(Debug)]
pub struct ReadInUnits<'a> {
    locks: &'a UnitLocks,
    number: u64,
}

impl Drop for ReadInUnits<'_> {
    fn drop(&mut self) {
        self.locks.leave(self.number);
    }
}

/// A write whose caller waits for it.
struct WaitingWrite<'a> {
    locks: &'a UnitLocks,
    number: u64,
}

impl Drop for WaitingWrite<'_> {
    fn drop(&mut self) {
        self.locks.abandon(self.number);
    }
}

/// The first request that another one waits for.
enum Before {
    Nothing,
    Write(u64, Shared<Request>),
    Read,
}

impl UnitLocks {
    /// Registers a read, and waits for its turn.
    pub async fn read(&self, units: Range<u64>) -> ReadInUnits<'_> {
        let number = self.register(units, false, |_| None);
        let reading = ReadInUnits { locks: self, number };
        self.turn(number).await;
        reading
    }

    /// Registers a write, and carries it out when its turn has come.
    ///
    /// # Errors
    /// The write's.
    pub async fn write(self: Arc<Self>, units: Range<u64>, partial: bool, write: Request) -> Result<(), StorageError> {
        // Weakly, because the locks hold the write. Without locks there are no other requests.
        let locks = Arc::downgrade(&self);
        let mut shared = None;
        let number = self.register(units, partial, |number| {
            let in_turn: Request = Box::pin(async move {
                if let Some(locks) = locks.upgrade() {
                    locks.turn(number).await;
                    if !locks.begin(number) {
                        // Its caller has dropped it.
                        return Ok(());
                    }
                }
                write.await
            });
            Some(shared.insert(in_turn.shared()).clone())
        });
        let _waiting = WaitingWrite { locks: &self, number };
        let written = match shared {
            Some(shared) => shared.await,
            None => Ok(()),
        };
        self.leave(number);
        written
    }

    /// The turn of a write has come. False if it is not registered any more.
    fn begin(&self, number: u64) -> bool {
        let mut state = self.0.lock();
        let own = state.entries.iter_mut().find(|entry| entry.number == number);
        own.map(|entry| entry.has_begun = true).is_some()
    }

    /// Forgets a request that has not begun.
    fn abandon(&self, number: u64) {
        let has_begun = self.0.lock().entries.iter().any(|entry| entry.number == number && entry.has_begun);
        if !has_begun {
            self.leave(number);
        }
    }

    fn register(&self, units: Range<u64>, partial: bool, write: impl FnOnce(u64) -> Option<Shared<Request>>) -> u64 {
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        state.entries.push(Entry { number, units, partial, write: write(number), has_begun: false });
        number
    }

    /// Waits until the request of this number conflicts with none before it.
    async fn turn(&self, number: u64) {
        loop {
            match self.before(number, None) {
                Before::Nothing => return,
                Before::Write(before, write) => {
                    // Whether it failed or not, it is over.
                    let _ = write.await;
                    self.leave(before);
                }
                Before::Read => {
                    poll_fn(|context| match self.before(number, Some(context.waker())) {
                        Before::Read => Poll::Pending,
                        Before::Nothing | Before::Write(..) => Poll::Ready(()),
                    })
                    .await;
                }
            }
        }
    }

    /// Returns the first request that the one of this number waits for, and notes who waits for a read. The first one
    /// waits for few others itself, so that futures are not nested deeply.
    fn before(&self, number: u64, waker: Option<&Waker>) -> Before {
        let mut state = self.0.lock();
        let Some(own) = state.entries.iter().find(|entry| entry.number == number) else { return Before::Nothing };
        let mut earlier = state.entries.iter().take_while(|entry| entry.number < number);
        match earlier.find(|entry| entry.conflicts(own)) {
            None => Before::Nothing,
            Some(Entry { number, write: Some(write), .. }) => Before::Write(*number, write.clone()),
            Some(_) => {
                state.waiting.extend(waker.cloned());
                Before::Read
            }
        }
    }

    fn leave(&self, number: u64) {
        let (left, waiting) = {
            let mut state = self.0.lock();
            let at = state.entries.iter().position(|entry| entry.number == number);
            (at.map(|at| state.entries.remove(at)), std::mem::take(&mut state.waiting))
        };
        // Outside of the lock: the last handle of a request drops it.
        drop(left);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Carries out writes whose requests were dropped.
    pub async fn finish(&self) {
        let writes: Vec<(u64, Shared<Request>)> = {
            let state = self.0.lock();
            state.entries.iter().filter_map(|entry| Some((entry.number, entry.write.clone()?))).collect()
        };
        for (number, write) in writes {
            let _ = write.await;
            self.leave(number);
        }
    }
}
