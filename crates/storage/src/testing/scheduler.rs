//! Requests that are carried out when they are due, by a separate thread.
//!
//! Law: every request is executed, also if its future is dropped, and also if the behaviour is dropped.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::Call;
use super::completion::Completion;
use crate::drive::block_on;
use crate::storage::{Request, Storage};

#[derive(Debug)]
struct Job {
    storage: Arc<dyn Storage>,
    call: Call,
    completion: Completion,
}

#[derive(Debug, Default)]
struct DueRequests {
    /// The one that is due first is the last one: popped from the end.
    jobs: BTreeMap<Reverse<(Instant, u64)>, Job>,
    asked: u64,
    over: bool,
}

#[derive(Debug, Default)]
struct SharedQueue {
    queue: Mutex<DueRequests>,
    changed: Condvar,
}

/// A thread that carries out requests when they are due.
#[derive(Debug)]
pub(super) struct Scheduler(Arc<SharedQueue>);

impl Scheduler {
    pub(super) fn new() -> Self {
        let queue = Arc::<SharedQueue>::default();
        let theirs = Arc::clone(&queue);
        thread::spawn(move || theirs.run());
        Self(queue)
    }

    pub(super) fn at(&self, due: Instant, storage: &Arc<dyn Storage>, call: Call) -> Request {
        let completion = Completion::default();
        let request = completion.request();
        let mut queue = self.0.queue.lock();
        queue.asked += 1;
        let key = Reverse((due, queue.asked));
        queue.jobs.insert(key, Job { storage: Arc::clone(storage), call, completion });
        drop(queue);
        self.0.changed.notify_one();
        request
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.0.queue.lock().over = true;
        self.0.changed.notify_one();
    }
}

impl SharedQueue {
    fn run(&self) {
        while let Some(Job { storage, call, completion }) = self.next() {
            let outcome = block_on(call.begin(&*storage));
            // Whoever waits for the last request may open the same file next: nothing holds it here any more.
            drop(storage);
            completion.complete(outcome);
        }
    }

    /// Waits for one that is due; `None`: the scheduler was dropped, and no request is left.
    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            let (now, over) = (Instant::now(), queue.over);
            match queue.jobs.last_entry() {
                Some(job) if job.key().0.0 <= now => return Some(job.remove()),
                Some(job) => {
                    let wait = job.key().0.0 - now;
                    self.changed.wait_for(&mut queue, wait);
                }
                None if over => return None,
                None => self.changed.wait(&mut queue),
            }
        }
    }
}
