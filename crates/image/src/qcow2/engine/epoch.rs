//! Epochs: the requests that may still be using a cluster that nothing refers to any more.
//!
//! Law: a request that reads or writes a data cluster enters an epoch before it looks up where the cluster lies, and
//! leaves it when the storage is done. A cluster that was dropped from the tables in an epoch is reused only when all
//! requests that entered up to then have left. Nothing waits for that: a cluster that cannot be reused yet stays
//! listed.
//!
//! Requests are counted in the stripes of the threads that begin them, each with a reference count of its own.

use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

use limosa_storage::Striped;

use super::locks::{CheckedMutex, Rank};

#[derive(Debug)]
pub(super) struct Epochs<T> {
    now: AtomicU64,
    stripes: Striped<Arc<Stripe>>,
    deferred: CheckedMutex<DeferredFree<T>>,
}

/// How many requests are in the even and in the odd epoch.
#[derive(Debug)]
#[repr(align(128))]
struct Stripe([AtomicU64; 2]);

#[derive(Debug)]
struct DeferredFree<T> {
    /// Dropped in the epoch before.
    old: Vec<T>,
    /// Dropped in this one.
    new: Vec<T>,
}

/// A request is using clusters.
#[derive(Debug)]
pub(super) struct Guard {
    /// It leaves where it has entered, on any thread.
    stripe: Arc<Stripe>,
    epoch: u64,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.stripe.place(self.epoch).fetch_sub(1, Ordering::SeqCst);
    }
}

impl Guard {
    /// For another part of the same request.
    pub(super) fn again(&self) -> Self {
        self.stripe.place(self.epoch).fetch_add(1, Ordering::SeqCst);
        Self { stripe: Arc::clone(&self.stripe), epoch: self.epoch }
    }
}

impl Stripe {
    fn new() -> Arc<Self> {
        Arc::new(Self([AtomicU64::new(0), AtomicU64::new(0)]))
    }

    const fn place(&self, epoch: u64) -> &AtomicU64 {
        let [even, odd] = &self.0;
        if epoch & 1 == 0 { even } else { odd }
    }
}

impl<T> Epochs<T> {
    pub(super) fn new() -> Self {
        let deferred = Rank::DeferredFree.checked_mutex(DeferredFree { old: Vec::new(), new: Vec::new() });
        Self { now: AtomicU64::new(0), stripes: Striped::new(Stripe::new), deferred }
    }

    /// Returns how many requests are in an epoch that none enters any more. A change of each count, and not a look: a
    /// request that enters later sees the epoch that was begun before this.
    fn count(&self, epoch: u64) -> u64 {
        self.stripes.iter().map(|stripe| stripe.place(epoch).fetch_add(0, Ordering::SeqCst)).sum()
    }

    pub(super) fn enter(&self) -> Guard {
        let stripe = self.stripes.own();
        loop {
            let epoch = self.now.load(Ordering::SeqCst);
            stripe.place(epoch).fetch_add(1, Ordering::SeqCst);
            if self.now.load(Ordering::SeqCst) == epoch {
                return Guard { stripe: Arc::clone(stripe), epoch };
            }
            stripe.place(epoch).fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Nothing refers to these any more; those that no request can be using any more come out.
    pub(super) fn pass(&self, dropped: Vec<T>) -> Vec<T> {
        let mut deferred = self.deferred.lock();
        deferred.new.extend(dropped);
        let mut free = Vec::new();
        // Twice: what was dropped now is free at once if no request is inside.
        for _ in 0..2 {
            if deferred.old.is_empty() && deferred.new.is_empty() {
                break;
            }
            let now = self.now.load(Ordering::SeqCst);
            // The epoch before is over as soon as no request is in it: none enters it any more.
            if self.count(now + 1) != 0 {
                break;
            }
            free.append(&mut deferred.old);
            deferred.old = std::mem::take(&mut deferred.new);
            self.now.store(now + 1, Ordering::SeqCst);
            if self.count(now) == 0 {
                free.append(&mut deferred.old);
            }
        }
        free
    }

    /// Returns how many requests may be using clusters.
    pub(super) fn inside(&self) -> u64 {
        let inside = self.stripes.iter().flat_map(|stripe| &stripe.0);
        inside.map(|inside| inside.load(Ordering::SeqCst)).sum()
    }

    /// Everything that is kept: no request may be inside any more.
    pub(super) fn rest(&self) -> Vec<T> {
        let mut deferred = self.deferred.lock();
        let mut rest = std::mem::take(&mut deferred.old);
        rest.append(&mut deferred.new);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_request_uses_is_free_at_once() {
        let epochs = Epochs::new();
        drop(epochs.enter());
        assert_eq!(epochs.pass(vec![1, 2]), [1, 2]);
        assert_eq!(epochs.pass(Vec::new()), [0; 0]);
    }

    #[test]
    fn what_a_request_may_be_using_waits_for_it_and_not_for_those_that_came_later() {
        let epochs = Epochs::new();
        let before = epochs.enter();
        assert_eq!(epochs.pass(vec![1]), [0; 0]);
        let after = epochs.enter();
        assert_eq!(epochs.pass(vec![2]), [0; 0]);
        drop(before);
        assert_eq!(epochs.pass(Vec::new()), [1]);
        assert_eq!(epochs.pass(vec![3]), [0; 0]);
        drop(after);
        let mut rest = epochs.pass(Vec::new());
        rest.sort_unstable();
        assert_eq!(rest, [2, 3]);
    }
}

/// Compiled for the model checker loom only; run by `cargo xtask test`.
#[cfg(all(test, loom))]
mod models {
    use loom::thread;

    use super::*;

    const GUESTS: u64 = 7;

    /// Two clusters, and the table's entry that leads to one of them.
    struct Disk {
        epochs: Epochs<usize>,
        entry: AtomicU64,
        clusters: [AtomicU64; 2],
    }

    impl Disk {
        fn read(&self) {
            let guard = self.epochs.enter();
            let part = guard.again();
            let at = self.entry.load(Ordering::Acquire);
            drop(guard);
            assert_eq!(self.clusters[usize::from(at > 0)].load(Ordering::Relaxed), GUESTS);
            drop(part);
        }
    }

    #[test]
    fn a_dropped_cluster_is_used_anew_only_when_no_request_that_saw_it_is_inside() {
        let mut checker = loom::model::Builder::new();
        checker.preemption_bound = Some(3);
        checker.check(|| {
            let disk = Arc::new(Disk {
                epochs: Epochs::new(),
                entry: AtomicU64::new(0),
                clusters: [AtomicU64::new(GUESTS), AtomicU64::new(GUESTS)],
            });
            let readers = [(), ()].map(|()| {
                let disk = Arc::clone(&disk);
                thread::spawn(move || disk.read())
            });
            disk.entry.store(1, Ordering::Release);
            let mut freed = 0;
            for dropped in [vec![0], vec![]] {
                for cluster in disk.epochs.pass(dropped) {
                    // Others get it.
                    disk.clusters[cluster].store(0, Ordering::Relaxed);
                    freed += 1;
                }
            }
            readers.into_iter().for_each(|reader| reader.join().unwrap());
            assert_eq!((disk.epochs.inside(), freed + disk.epochs.pass(Vec::new()).len()), (0, 1));
        });
    }
}
