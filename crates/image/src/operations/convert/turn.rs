//! The turns of workers, for writes in the order of the disk.

use std::future::poll_fn;
use std::task::{Poll, Waker};

use parking_lot::Mutex;

/// Numbers are called one after the other.
#[derive(Debug, Default)]
pub(super) struct Turn {
    called: Mutex<(u64, Vec<(u64, Waker)>)>,
}

impl Turn {
    /// Waits until this number is called.
    pub(super) async fn wait(&self, number: u64) {
        poll_fn(|context| {
            let mut called = self.called.lock();
            if called.0 >= number {
                return Poll::Ready(());
            }
            called.1.push((number, context.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    /// Calls the next number.
    pub(super) fn done(&self) {
        let mut called = self.called.lock();
        called.0 = called.0.saturating_add(1);
        let next = called.0;
        called.1.extract_if(.., |(number, _)| *number <= next).for_each(|(_, waker)| waker.wake());
    }

    /// Calls all numbers: no worker waits any more.
    pub(super) fn abandon(&self) {
        let mut called = self.called.lock();
        called.0 = u64::MAX;
        called.1.drain(..).for_each(|(_, waker)| waker.wake());
    }
}
