//! Requests that wait until a test releases them, in an order of the test's choice.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::completion::Completion;
use super::{Behaviour, Call, Through};
use crate::drive::block_on;
use crate::error::Operation;
use crate::storage::{Request, Storage};

/// A request that is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldRequest {
    /// Its number, in the order in which they came.
    pub number: u64,
    /// The storage, by its name.
    pub storage: Arc<str>,
    /// The operation.
    pub operation: Operation,
    /// Its range of bytes.
    pub range: Range<u64>,
}

#[derive(Debug)]
struct Entry {
    waiting: HeldRequest,
    storage: Arc<dyn Storage>,
    call: Call,
    completion: Completion,
}

#[derive(Debug, Default)]
struct State {
    came: u64,
    open: bool,
    /// Operations that are held; empty: all.
    only: Vec<Operation>,
    /// Whether every other request is begun by its first poll only, and how many there were.
    lazy: bool,
    calls: u64,
    entries: Vec<Entry>,
}

/// Holds requests until they are released, also those whose future was dropped.
#[derive(Debug, Clone, Default)]
pub struct RequestHolder(Arc<HeldRequests>);

#[derive(Debug, Default)]
struct HeldRequests(Mutex<State>);

impl RequestHolder {
    /// Holds everything.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Holds requests of these kinds, and passes the others on.
    #[must_use]
    pub fn only(kinds: &[Operation]) -> Self {
        let this = Self::default();
        this.0.0.lock().only = kinds.to_vec();
        this
    }

    /// Every other request is begun by its first poll, not by the call: both are allowed.
    #[must_use]
    pub fn lazily(self) -> Self {
        self.0.0.lock().lazy = true;
        self
    }

    /// The same storage, held.
    #[must_use]
    pub fn wrap(&self, storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Through::wrap(storage, &self.0)
    }

    /// Returns the held requests in the order of arrival.
    #[must_use]
    pub fn waiting(&self) -> Vec<HeldRequest> {
        self.0.0.lock().entries.iter().map(|entry| entry.waiting.clone()).collect()
    }

    /// Carries out the request of this number, on this thread; false if it is not held.
    pub fn release(&self, number: u64) -> bool {
        let entry = {
            let mut state = self.0.0.lock();
            let place = state.entries.iter().position(|entry| entry.waiting.number == number);
            place.map(|place| state.entries.remove(place))
        };
        entry.map(Entry::carry_out).is_some()
    }

    /// Carries out all that are held, in the order in which they came; those that come from now on are not held.
    pub fn release_all(&self) {
        let entries = {
            let mut state = self.0.0.lock();
            state.open = true;
            std::mem::take(&mut state.entries)
        };
        entries.into_iter().for_each(Entry::carry_out);
    }

    /// Holds those that come from now on.
    pub fn hold_again(&self) {
        self.0.0.lock().open = false;
    }
}

impl Entry {
    fn carry_out(self) {
        self.completion.complete(block_on(self.call.begin(&*self.storage)));
    }
}

impl Behaviour for HeldRequests {
    fn request(self: Arc<Self>, storage: &Arc<dyn Storage>, call: Call) -> Request {
        let mut state = self.0.lock();
        state.calls += 1;
        if state.lazy && state.calls.is_multiple_of(2) {
            drop(state);
            let storage = Arc::clone(storage);
            return Box::pin(async move { self.begin(&storage, call).await });
        }
        drop(state);
        self.begin(storage, call)
    }
}

impl HeldRequests {
    fn begin(&self, storage: &Arc<dyn Storage>, call: Call) -> Request {
        let operation = call.operation();
        let mut state = self.0.lock();
        if state.open || (!state.only.is_empty() && !state.only.contains(&operation)) {
            drop(state);
            return call.begin(&**storage);
        }
        let waiting =
            HeldRequest { number: state.came, storage: Arc::clone(storage.name()), operation, range: call.range() };
        state.came += 1;
        let completion = Completion::default();
        let request = completion.request();
        state.entries.push(Entry { waiting, storage: Arc::clone(storage), call, completion });
        request
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;
    use crate::Buffer;
    use crate::testing::SparseMemory;

    #[test]
    fn a_lazy_request_is_begun_by_its_first_poll() {
        let held = RequestHolder::new().lazily();
        let storage = held.wrap(Arc::new(SparseMemory::file("disk", 1 << 20)));
        let requests = [b"one", b"two"].map(|bytes| storage.write(0, Buffer::from_slice(bytes).into()));
        assert_eq!(held.waiting().len(), 1);
        let [_, mut second] = requests;
        assert!(second.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(held.waiting().len(), 2);
    }

    #[test]
    fn writes_are_executed_in_the_order_in_which_they_are_released() {
        let held = RequestHolder::only(&[Operation::Write]);
        let memory = Arc::new(SparseMemory::file("disk", 1 << 20));
        let storage = held.wrap(memory.clone());
        let mut first = storage.write(0, Buffer::from_slice(b"first").into());
        let second = storage.write(0, Buffer::from_slice(b"second").into());
        block_on(storage.flush()).unwrap();
        assert_eq!(held.waiting().iter().map(|waiting| waiting.range.end).collect::<Vec<_>>(), [5, 6]);
        assert!(memory.contents().is_empty());
        assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(second);
        assert!(held.release(1) && !held.release(1));
        assert_eq!(memory.contents(), b"second", "its future was dropped, and it is executed nevertheless");
        held.release_all();
        block_on(first).unwrap();
        assert_eq!(memory.contents(), b"firstd");
        block_on(storage.write(0, Buffer::from_slice(b"third").into())).unwrap();
        held.hold_again();
        drop(storage.write(0, Buffer::from_slice(b"fourth").into()));
        assert_eq!((memory.contents().as_slice(), held.waiting().len()), (b"thirdd".as_slice(), 1));
    }
}
