//! Requests in flight, and the end of a disk.
//!
//! Law: once a disk is being closed no request begins, and its end begins when those that had begun are over: done, or
//! dropped. A request is counted before it looks whether the disk is closed, and the counts are looked at after it was
//! closed; so no request slips through between the two. Threads count in stripes.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Poll, Waker};

use limosa_storage::Striped;
use parking_lot::Mutex;

#[derive(Debug, Default)]
pub(crate) struct Requests {
    inside: Striped<AtomicU64>,
    is_closed: AtomicBool,
    /// Tasks that wait for the last one.
    waiting: Mutex<Vec<Waker>>,
}

/// A request is under way.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    requests: &'a Requests,
    /// Where it is counted: it may end on another thread.
    count: &'a AtomicU64,
}

impl Requests {
    /// `None`: the disk is closed.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let count = self.inside.own();
        count.fetch_add(1, Ordering::SeqCst);
        // Leaves again if it is closed.
        let inside = Inside { requests: self, count };
        (!self.is_closed.load(Ordering::SeqCst)).then_some(inside)
    }

    /// From now on no request begins.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    /// Waits until those that had begun are over. Only after [`Requests::close`].
    pub(crate) async fn over(&self) {
        poll_fn(|context| {
            let mut waiting = self.waiting.lock();
            if self.inside.iter().all(|count| count.load(Ordering::SeqCst) == 0) {
                return Poll::Ready(());
            }
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
        if self.requests.is_closed.load(Ordering::SeqCst) {
            // They look again.
            let waiting = std::mem::take(&mut *self.requests.waiting.lock());
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn the_end_comes_when_the_last_request_is_over_and_none_begins_after_it_was_asked_for() {
        let requests = Requests::default();
        let (first, second) = (requests.enter().unwrap(), requests.enter().unwrap());
        requests.close();
        assert!(requests.enter().is_none());
        let mut over = Box::pin(requests.over());
        let mut look = || over.poll_unpin(&mut Context::from_waker(Waker::noop())).is_ready();
        assert!(!look());
        drop(first);
        assert!(!look());
        drop(second);
        assert!(look());
    }
}
