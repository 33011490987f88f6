//! The completion of a request that another thread executes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::error::StorageError;
use crate::storage::Request;

type Outcome = Result<(), StorageError>;

#[derive(Debug, Default)]
struct State {
    outcome: Option<Outcome>,
    waker: Option<Waker>,
}

/// Carries the outcome from the thread that executes the request to its future.
#[derive(Debug, Clone, Default)]
pub(super) struct Completion(Arc<Mutex<State>>);

impl Completion {
    pub(super) fn complete(&self, outcome: Outcome) {
        let waker = {
            let mut state = self.0.lock();
            state.outcome = Some(outcome);
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    pub(super) fn request(&self) -> Request {
        Box::pin(CompletionFuture(Arc::clone(&self.0)))
    }
}

struct CompletionFuture(Arc<Mutex<State>>);

impl Future for CompletionFuture {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let mut state = self.0.lock();
        match state.outcome.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
