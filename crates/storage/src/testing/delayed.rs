//! Requests with random delays: they overtake each other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::chance::SeededRandom;
use super::scheduler::Scheduler;
use super::{Behaviour, Call, Through};
use crate::storage::{Request, Storage};

/// Executes every request after a random delay of at most `most`.
#[derive(Debug, Clone)]
pub struct Delayed(Arc<RandomDelay>);

#[derive(Debug)]
struct RandomDelay {
    scheduler: Scheduler,
    chance: Mutex<SeededRandom>,
    most: Duration,
}

impl Delayed {
    /// With delays up to `most`.
    #[must_use]
    pub fn new(seed: u64, most: Duration) -> Self {
        Self(Arc::new(RandomDelay { scheduler: Scheduler::new(), chance: Mutex::new(SeededRandom::new(seed)), most }))
    }

    /// The same storage, with delays.
    #[must_use]
    pub fn wrap(&self, storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Through::wrap(storage, &self.0)
    }
}

impl Behaviour for RandomDelay {
    fn request(self: Arc<Self>, storage: &Arc<dyn Storage>, call: Call) -> Request {
        let nanos = u64::try_from(self.most.as_nanos()).unwrap_or(u64::MAX);
        let delay = Duration::from_nanos(self.chance.lock().below(nanos));
        self.scheduler.at(Instant::now() + delay, storage, call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::SparseMemory;
    use crate::{Buffer, block_on};

    #[test]
    fn a_dropped_request_is_completed() {
        let memory = Arc::new(SparseMemory::file("disk", 1 << 20));
        let delayed = Delayed::new(1, Duration::from_millis(2));
        let storage = delayed.wrap(memory.clone());
        drop(storage.write(0, Buffer::from_slice(b"dropped").into()));
        block_on(storage.write(7, Buffer::from_slice(b" kept").into())).unwrap();
        drop((storage, delayed));
        while memory.contents() != b"dropped kept" {
            std::thread::yield_now();
        }
    }

    #[test]
    fn requests_are_not_always_executed_in_order() {
        let order = |seed| {
            let memory = Arc::new(SparseMemory::file("disk", 1 << 20));
            let storage = Delayed::new(seed, Duration::from_millis(5)).wrap(memory.clone());
            let both = [b"first ", b"second"].map(|bytes| storage.write(0, Buffer::from_slice(bytes).into()));
            both.into_iter().for_each(|request| block_on(request).unwrap());
            memory.contents()
        };
        assert!((0..100).map(order).any(|found| found == b"first "));
    }
}
