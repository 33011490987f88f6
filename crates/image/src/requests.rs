//! Requests in flight, and the end of a disk.
//!
//! Law: once a disk is being closed no request begins, and its end begins when those that had begun are over: done, or
//! dropped. Whether it is closed and how many there are is one number, so no request slips through between the two.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};

use parking_lot::Mutex;

/// Set in the number of requests when no more of them begin.
const CLOSED: u64 = 1 << 63;

#[derive(Debug, Default)]
pub(crate) struct Requests {
    state: AtomicU64,
    /// Tasks that wait for the last one.
    waiting: Mutex<Vec<Waker>>,
}

/// A request is under way.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Requests);

impl Requests {
    /// `None`: the disk is closed.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let inside = Inside(self);
        // Leaves again if it is closed.
        let before = self.state.fetch_add(1, Ordering::AcqRel);
        (before & CLOSED == 0).then_some(inside)
    }

    /// From now on no request begins.
    pub(crate) fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Waits until those that had begun are over.
    pub(crate) async fn over(&self) {
        poll_fn(|context| {
            let mut waiting = self.waiting.lock();
            if self.state.load(Ordering::Acquire) & !CLOSED == 0 {
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
        if self.0.state.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            let waiting = std::mem::take(&mut *self.0.waiting.lock());
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
