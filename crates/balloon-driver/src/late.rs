//! A device that passes hints on late and out of order.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use limosa_memory::{FreePageHinting, FreePageSink, FreePagesError};
use limosa_page::to_usize;
use parking_lot::{Condvar, Mutex};

/// Free pages whose hints wait until they are passed on: in any order, and also after
/// [`stop_list`](FreePageHinting::stop_list) and [`return_pages`](FreePageHinting::return_pages). The end of a list
/// comes behind all hints.
#[derive(Clone)]
pub struct LateHints {
    from: Arc<dyn FreePageHinting>,
    queue: Arc<HintQueue>,
}

#[derive(Default)]
struct HintQueue {
    hints: Mutex<VecDeque<QueuedHint>>,
    added: Condvar,
}

enum QueuedHint {
    Free(Arc<dyn FreePageSink>, Range<u64>),
    Complete(Arc<dyn FreePageSink>),
}

impl std::fmt::Debug for LateHints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LateHints").field("waiting", &self.queue.hints.lock().len()).finish_non_exhaustive()
    }
}

impl LateHints {
    /// Hints of `from`, late.
    pub fn new(from: Arc<dyn FreePageHinting>) -> Self {
        Self { from, queue: Arc::default() }
    }

    /// Waits for hints, for at most `time`. Returns whether there are any.
    pub fn wait(&self, time: Duration) -> bool {
        let mut hints = self.queue.hints.lock();
        if hints.is_empty() {
            self.queue.added.wait_for(&mut hints, time);
        }
        !hints.is_empty()
    }

    /// Passes on the hint that a random number chooses. Returns whether there was one.
    pub fn pass_on(&self, random: u64) -> bool {
        let mut hints = self.queue.hints.lock();
        let free: Vec<_> = (0..).zip(&*hints).filter(|(_, hint)| hint.is_free()).map(|(index, _)| index).collect();
        let index = if free.is_empty() { 0 } else { free[to_usize(random) % free.len()] };
        let hint = hints.remove(index);
        // A sink may ask for the next list.
        drop(hints);
        match hint {
            Some(QueuedHint::Free(to, range)) => to.add_range(range),
            Some(QueuedHint::Complete(to)) => to.complete(),
            None => return false,
        }
        true
    }
}

impl FreePageHinting for LateHints {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        self.from.request_list(Arc::new(LateSink { queue: Arc::clone(&self.queue), to }))
    }

    fn stop_list(&self) {
        self.from.stop_list();
    }

    fn return_pages(&self) {
        self.from.return_pages();
    }
}

/// Queues a list for its sink.
struct LateSink {
    queue: Arc<HintQueue>,
    to: Arc<dyn FreePageSink>,
}

impl FreePageSink for LateSink {
    fn add_range(&self, range: Range<u64>) {
        self.queue.add(QueuedHint::Free(Arc::clone(&self.to), range));
    }

    fn complete(&self) {
        self.queue.add(QueuedHint::Complete(Arc::clone(&self.to)));
    }
}

impl HintQueue {
    fn add(&self, hint: QueuedHint) {
        self.hints.lock().push_back(hint);
        self.added.notify_all();
    }
}

impl QueuedHint {
    fn is_free(&self) -> bool {
        matches!(self, Self::Free(..))
    }
}
