//! Requests in flight to sectors that are written in part.
//!
//! A write of a part of a sector reads the sector, changes it and writes it. Law: nothing else that touches the sector
//! is in flight between the read and the end of the write. A request is registered when it begins, also while it still
//! waits, and waits for all that it conflicts with and that were registered before it; so two never wait for each
//! other, and none is lost. A write is driven by whoever waits for it: one that is dropped, or not polled, is in
//! nobody's way.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Waker};

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use limosa_storage::{Request, StorageError};
use parking_lot::Mutex;

/// Requests in flight.
#[derive(Default)]
pub(super) struct SectorLocks(Mutex<State>);

#[derive(Default)]
struct State {
    next: u64,
    /// In the order of their numbers.
    entries: Vec<Entry>,
    waiting: Vec<Waker>,
}

struct Entry {
    number: u64,
    sectors: Range<u64>,
    /// Whether it writes parts of sectors.
    partial: bool,
    /// A write with all that it waits for; `None`: a read.
    write: Option<Shared<Request>>,
}

impl Entry {
    fn conflicts(&self, other: &Self) -> bool {
        (self.partial || other.partial)
            && self.sectors.start < other.sectors.end
            && other.sectors.start < self.sectors.end
    }
}

/// A read in flight.
pub(super) struct Reading<'a> {
    locks: &'a SectorLocks,
    number: u64,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.locks.leave(self.number);
    }
}

/// The first request that another one waits for.
enum Before {
    Nothing,
    Write(u64, Shared<Request>),
    Read,
}

impl SectorLocks {
    /// Registers a read, and waits for its turn.
    pub(super) async fn read(&self, sectors: Range<u64>) -> Reading<'_> {
        let number = self.register(sectors, false, |_| None);
        let reading = Reading { locks: self, number };
        self.turn(number).await;
        reading
    }

    /// Registers a write and carries it out. `write` makes it by its number, and has it wait for its
    /// [turn](Self::turn).
    pub(super) async fn write(
        self: Arc<Self>,
        sectors: Range<u64>,
        partial: bool,
        write: impl FnOnce(u64) -> Request,
    ) -> Result<(), StorageError> {
        let mut shared = None;
        let number = self.register(sectors, partial, |number| {
            let request = write(number).shared();
            shared = Some(request.clone());
            Some(request)
        });
        let written = match shared {
            Some(shared) => shared.await,
            None => Ok(()),
        };
        self.leave(number);
        written
    }

    fn register(&self, sectors: Range<u64>, partial: bool, write: impl FnOnce(u64) -> Option<Shared<Request>>) -> u64 {
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        state.entries.push(Entry { number, sectors, partial, write: write(number) });
        number
    }

    /// Waits until the request of this number conflicts with none before it.
    pub(super) async fn turn(&self, number: u64) {
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
    pub(super) async fn finish(&self) {
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
