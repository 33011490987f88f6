//! Memory for requests, shared by all connections of a server.
//!
//! Laws: the bytes of all requests in flight, and of the buffers that are kept for further ones, stay within the
//! budget. Each connection has a share that no other connection can take: a request within it waits for no other
//! connection, and touches nothing that connections share. All beyond comes from a pool, where a connection may have
//! at most as much as it leaves free: one gets no more than half of it, and of any number that want all, each gets as
//! much as the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Waker;

use limosa_page::to_usize;
use parking_lot::Mutex;

use super::limits::Limits;
use limosa_nbd::protocol::MAX_PAYLOAD;

/// A number of requests, and the bytes that they keep in memory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) requests: usize,
    pub(super) bytes: usize,
}

/// The memory of a server.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes that each connection has for itself.
    share: usize,
    /// Bytes of the pool.
    size: usize,
    used: AtomicUsize,
    /// Whether `waiting` may have some.
    has_waiting: AtomicBool,
    /// Those who wait for bytes of the pool.
    waiting: Mutex<Vec<Waker>>,
}

impl Budget {
    pub(super) fn new(limits: &Limits) -> Self {
        let share = limits.total_bytes / 2 / limits.connections.max(1);
        let shares = share.saturating_mul(limits.connections);
        // Never less than twice the longest request, so that one can be served.
        let size = limits.total_bytes.saturating_sub(shares).max(2 * to_usize(MAX_PAYLOAD.into()));
        Self { share, size, used: AtomicUsize::new(0), has_waiting: AtomicBool::new(false), waiting: Mutex::default() }
    }

    /// Takes bytes of the pool for one that has `has` of them.
    fn take(&self, has: usize, bytes: usize) -> bool {
        let fits = |used: usize| {
            let free = self.size.saturating_sub(used);
            (has.saturating_add(bytes) <= free).then_some(used.saturating_add(bytes))
        };
        self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits).is_ok()
    }

    /// Takes bytes for a buffer that is kept although no request uses it: only while half of the pool is free.
    pub(super) fn keep(&self, bytes: usize) -> bool {
        self.take(self.size / 2, bytes)
    }

    /// Gives bytes of the pool back.
    pub(super) fn release(&self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        if self.has_waiting.swap(false, Ordering::SeqCst) {
            let waiting = std::mem::take(&mut *self.waiting.lock());
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Has `waker` woken when bytes are given back.
    fn wait(&self, waker: &Waker) {
        let mut waiting = self.waiting.lock();
        if !waiting.iter().any(|other| other.will_wake(waker)) {
            waiting.push(waker.clone());
        }
        // Under the lock: a connection that takes the list has seen the flag after this waker was in it.
        self.has_waiting.store(true, Ordering::SeqCst);
    }
}

/// The requests of a connection in flight, and their bytes.
#[derive(Debug)]
pub(super) struct Account {
    budget: Arc<Budget>,
    held: Load,
}

impl Account {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self { budget, held: Load::default() }
    }

    /// Counts a request, if there is room for it in the connection and in the server. If the server has none,
    /// `waker` is woken when it is worth another try. A connection without requests has room for one of any length.
    pub(super) fn admit(&mut self, bytes: usize, limits: &Limits, waker: &Waker) -> bool {
        let Load { requests, bytes: held } = self.held;
        let sum = held.saturating_add(bytes);
        if requests > 0 && (requests >= limits.requests || sum > limits.bytes) {
            return false;
        }
        let (has, wants) = (self.beyond(held), self.beyond(sum));
        if wants > has && !self.budget.take(has, wants - has) {
            self.budget.wait(waker);
            // Bytes may have been given back before the waker was in the list.
            if !self.budget.take(has, wants - has) {
                return false;
            }
        }
        self.held = Load { requests: requests + 1, bytes: sum };
        true
    }

    /// Notes that replies were handed over.
    pub(super) fn release(&mut self, released: Load) {
        let before = self.beyond(self.held.bytes);
        self.held.requests = self.held.requests.saturating_sub(released.requests);
        self.held.bytes = self.held.bytes.saturating_sub(released.bytes);
        self.budget.release(before - self.beyond(self.held.bytes));
    }

    /// The bytes of the pool among those of requests.
    fn beyond(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.budget.share)
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.budget.release(self.beyond(self.held.bytes));
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    const MIB: usize = 1 << 20;

    /// A share of 1 MiB, a pool of 128 MiB.
    fn budget() -> (Arc<Budget>, Limits) {
        let limits = Limits::default().connections(128).total_bytes(256 * MIB).bytes(usize::MAX).requests(usize::MAX);
        let budget = Budget::new(&limits);
        assert_eq!((budget.share, budget.size), (MIB, 128 * MIB));
        (Arc::new(budget), limits)
    }

    fn fill(account: &mut Account, bytes: usize, limits: &Limits) -> usize {
        (0..).take_while(|_| account.admit(bytes, limits, Waker::noop())).count()
    }

    #[test]
    fn one_connection_gets_half_of_the_pool_and_others_get_their_parts() {
        let (budget, limits) = budget();
        let mut accounts: Vec<_> = (0..4).map(|_| Account::new(Arc::clone(&budget))).collect();
        let counts: Vec<_> = accounts.iter_mut().map(|account| fill(account, MIB, &limits)).collect();
        // Its share, and half of what is free.
        assert_eq!(counts, [65, 33, 17, 9]);
        accounts[0].release(Load { requests: 65, bytes: 65 * MIB });
        // What the greatest gives back is there for all.
        assert!(fill(&mut accounts[3], MIB, &limits) >= 20);
        drop(accounts);
        assert_eq!(budget.used.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_share_is_there_also_when_the_pool_is_empty() {
        let (budget, limits) = budget();
        let mut greedy: Vec<_> = (0..20).map(|_| Account::new(Arc::clone(&budget))).collect();
        greedy.iter_mut().for_each(|account| _ = fill(account, 4096, &limits));
        let mut modest = Account::new(Arc::clone(&budget));
        assert_eq!(fill(&mut modest, 4096, &limits), 256);
    }

    #[test]
    fn the_longest_request_fits_into_the_smallest_budget() {
        let limits = Limits::default().total_bytes(0);
        let budget = Arc::new(Budget::new(&limits));
        let longest = to_usize(MAX_PAYLOAD.into());
        let mut account = Account::new(Arc::clone(&budget));
        assert!(account.admit(longest, &limits, Waker::noop()));
        assert!(!Account::new(Arc::clone(&budget)).admit(longest + 1, &limits, Waker::noop()));
    }

    #[test]
    fn a_connection_has_room_for_one_request_and_then_keeps_to_its_limits() {
        let budget = Arc::new(Budget::new(&Limits::default()));
        let limits = Limits::default().bytes(4096).requests(3);
        let mut account = Account::new(budget);
        assert!(account.admit(8192, &limits, Waker::noop()) && !account.admit(0, &limits, Waker::noop()));
        account.release(Load { requests: 1, bytes: 8192 });
        assert_eq!(fill(&mut account, 512, &limits), 3);
    }

    #[test]
    fn those_who_wait_are_woken_when_bytes_are_given_back() {
        struct Woken(AtomicBool);
        impl Wake for Woken {
            fn wake(self: Arc<Self>) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let (budget, limits) = budget();
        let mut accounts: Vec<_> = (0..2).map(|_| Account::new(Arc::clone(&budget))).collect();
        assert!(accounts[0].admit(65 * MIB, &limits, Waker::noop()));
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        assert!(!accounts[1].admit(66 * MIB, &limits, &Waker::from(Arc::clone(&woken))));
        accounts[0].release(Load { requests: 0, bytes: MIB });
        assert!(woken.0.load(Ordering::SeqCst));
        accounts[0].release(Load { requests: 1, bytes: 64 * MIB });
        assert!(accounts[1].admit(66 * MIB, &limits, Waker::noop()));
    }

    #[test]
    fn buffers_are_kept_while_half_of_the_pool_is_free() {
        let (budget, limits) = budget();
        let mut account = Account::new(Arc::clone(&budget));
        assert!(budget.keep(32 * MIB) && account.admit(33 * MIB, &limits, Waker::noop()));
        assert!(!budget.keep(1));
        budget.release(32 * MIB);
        assert!(budget.keep(1));
    }
}
