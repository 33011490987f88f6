//! The order in which locks are taken, and locks that keep to it.
//!
//! Law: a thread that holds a lock takes only locks that come later in [`Rank`], so threads cannot wait for each other
//! in a circle. A lock is held for a look or a change, never across an `await`, and nothing that could panic half-way
//! is done under it. With debug assertions every thread keeps a list of what it holds, and a lock that is taken out of
//! order panics; without them a [`RankedMutex`] is a [`Mutex`] and nothing more.
//!
//! Four locks are outside of the order. That of [`Requests`](crate::requests::Requests), which every format has, is
//! taken with no other held, and no other is taken under it, and so is that of compressors. Those of stripes, of the L1
//! table's entries and of the slices that were looked at, may be taken with any other held, and no other is taken under
//! them.

use std::fmt;
use std::ops::{Deref, DerefMut};
#[cfg(loom)]
use std::sync::PoisonError;

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use self::held::{Held, Ranked};

/// Every lock of an open image, in the order in which they may be taken. Of one rank a thread holds one lock at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// The end of the image, once it has begun.
    Closing,
    /// The last growth.
    Growing,
    /// Jobs that nothing waits for any more.
    CancelledRequests,
    /// Jobs under way.
    InFlight,
    /// The state of a job: gathered bytes, or places.
    InFlightAllocation,
    /// The flush under way, and the next one.
    Flushes,
    /// The last change of refcounts or of the header.
    Serial,
    /// The L1 table.
    L1,
    /// L2 slices.
    Slices,
    /// L2 tables that are being made.
    Making,
    /// L2 tables that the file does not have yet.
    New,
    /// References that were dropped since the last flush.
    Drops,
    /// References that were dropped, and that requests may still be using.
    DeferredFree,
    /// Refcounts.
    Refcounts,
    /// Clusters to be handed out.
    Pool,
    /// Room behind compressed contents.
    Tails,
    /// The places of the image's tables.
    OverlapCheck,
    /// The header.
    Header,
    /// Writes in place whose requests were dropped.
    CancelledWrites,
    /// Storages that refused to share.
    Refused,
    /// Space for records of the journal, which is found under the lock of a slice.
    Journal,
    /// The dirty bitmaps, in which a request that is dropped sets bits wherever that happens.
    DirtyBitmaps,
}

/// A [`Mutex`] with its place in the order.
pub(super) struct RankedMutex<T> {
    rank: Ranked,
    inner: Mutex<T>,
}

/// A [`RankedMutex`] in code that the model checker goes through, which has a lock of its own.
#[cfg(not(loom))]
pub(super) type CheckedMutex<T> = RankedMutex<T>;

/// The model checker's lock.
#[cfg(loom)]
#[derive(Debug)]
pub(super) struct CheckedMutex<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
impl<T> CheckedMutex<T> {
    pub(super) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lock for many readers or one writer, with its place in the order.
pub(super) struct RankedRwLock<T> {
    rank: Ranked,
    inner: RwLock<T>,
}

/// A lock that is held.
pub(super) struct RankedGuard<G> {
    guard: G,
    _held: Held,
}

impl Rank {
    pub(super) const fn mutex<T>(self, value: T) -> RankedMutex<T> {
        RankedMutex { rank: Ranked::new(self), inner: Mutex::new(value) }
    }

    /// Returns a lock for code that the model checker goes through.
    #[cfg(not(loom))]
    pub(super) const fn checked_mutex<T>(self, value: T) -> CheckedMutex<T> {
        self.mutex(value)
    }

    #[cfg(loom)]
    pub(super) fn checked_mutex<T>(self, value: T) -> CheckedMutex<T> {
        CheckedMutex(loom::sync::Mutex::new(value))
    }

    pub(super) const fn rw_lock<T>(self, value: T) -> RankedRwLock<T> {
        RankedRwLock { rank: Ranked::new(self), inner: RwLock::new(value) }
    }
}

impl<T> RankedMutex<T> {
    pub(super) fn lock(&self) -> RankedGuard<MutexGuard<'_, T>> {
        let held = self.rank.take();
        RankedGuard { guard: self.inner.lock(), _held: held }
    }
}

impl<T: Default> RankedMutex<T> {
    /// Takes all of it, and leaves nothing.
    pub(super) fn take(&self) -> T {
        std::mem::take(&mut *self.lock())
    }
}

impl<T> RankedRwLock<T> {
    pub(super) fn read(&self) -> RankedGuard<RwLockReadGuard<'_, T>> {
        let held = self.rank.take();
        RankedGuard { guard: self.inner.read(), _held: held }
    }

    pub(super) fn write(&self) -> RankedGuard<RwLockWriteGuard<'_, T>> {
        let held = self.rank.take();
        RankedGuard { guard: self.inner.write(), _held: held }
    }
}

impl<G: Deref> Deref for RankedGuard<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for RankedGuard<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

impl<T> fmt::Debug for RankedMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankedMutex").finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for RankedRwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankedRwLock").finish_non_exhaustive()
    }
}

#[cfg(debug_assertions)]
mod held {
    use std::cell::RefCell;

    use super::Rank;

    thread_local! {
        /// The locks that this thread holds, in the order of acquisition.
        static HELD: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) struct Ranked(Rank);

    /// An entry of the list.
    pub(super) struct Held(Rank);

    impl Ranked {
        pub(super) const fn new(rank: Rank) -> Self {
            Self(rank)
        }

        pub(super) fn take(&self) -> Held {
            HELD.with_borrow_mut(|held| {
                let last = held.iter().max().copied();
                assert!(last < Some(self.0), "lock order: {:?} is taken while {last:?} is held", self.0);
                held.push(self.0);
            });
            Held(self.0)
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if let Some(at) = held.iter().rposition(|rank| *rank == self.0) {
                    held.remove(at);
                }
            });
        }
    }
}

#[cfg(not(debug_assertions))]
mod held {
    use super::Rank;

    pub(super) struct Ranked;

    pub(super) struct Held;

    impl Ranked {
        pub(super) const fn new(_: Rank) -> Self {
            Self
        }

        #[expect(clippy::unused_self, reason = "with debug assertions there is something in it")]
        pub(super) const fn take(&self) -> Held {
            Held
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_in_their_order_and_let_go_in_any() {
        let (jobs, slices) = (Rank::InFlight.mutex(1), Rank::Slices.rw_lock(2));
        let (outer, inner) = (jobs.lock(), slices.read());
        assert_eq!((*outer, *inner), (1, 2));
        drop(outer);
        drop(inner);
        *slices.write() += 1;
        *jobs.lock() += 1;
        assert_eq!((*jobs.lock(), *slices.read()), (2, 3));
    }

    #[test]
    fn threads_hold_each_their_own() {
        let (jobs, slices) = (Rank::InFlight.mutex(1), Rank::Slices.mutex(2));
        let _inner = slices.lock();
        std::thread::scope(|scope| scope.spawn(|| drop(jobs.lock())).join()).unwrap();
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "lock order: InFlight is taken while Some(Slices) is held")]
    fn a_lock_that_is_taken_before_its_turn_is_found() {
        let (jobs, slices) = (Rank::InFlight.mutex(()), Rank::Slices.mutex(()));
        let _inner = slices.lock();
        drop(jobs.lock());
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "lock order: Pool is taken while Some(Pool) is held")]
    fn a_lock_that_is_held_already_is_found_and_does_not_hang() {
        let pool = Rank::Pool.mutex(());
        let _held = pool.lock();
        drop(pool.lock());
    }
}
