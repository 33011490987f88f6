//! Jobs that nobody waits for any more, because their requests were dropped.
//!
//! Law: a request that begins after another one was dropped finds what that one had begun over and done, so that nothing changes by
//! itself later on.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, FutureExt, join_all};

use super::image::{Inner, lock};
use super::slices::Flight;
use crate::disk::Pending;
use crate::error::ImageError;

#[derive(Default)]
pub(super) struct Abandoned {
    any: AtomicBool,
    flights: Mutex<Vec<Flight>>,
}

impl Abandoned {
    pub(super) fn take(&self) -> Vec<Flight> {
        std::mem::take(&mut *lock(&self.flights))
    }
}

impl Inner {
    /// A request whose jobs are ended by others if it is dropped.
    pub(super) fn whole(
        self: &Arc<Self>,
        request: impl Future<Output = Result<(), ImageError>> + Send + 'static,
    ) -> Pending<'static> {
        let inner = Arc::clone(self);
        let request = async move {
            inner.end_abandoned().await;
            request.await
        };
        Box::pin(Whole { request: Some(request.boxed()), inner: Arc::clone(self) })
    }

    /// Ends what was dropped.
    pub(super) async fn end_abandoned(&self) {
        while self.abandoned.any.load(Ordering::Acquire) {
            let flights = lock(&self.abandoned.flights).clone();
            join_all(flights).await;
            let mut left = lock(&self.abandoned.flights);
            left.retain(|flight| flight.peek().is_none());
            self.abandoned.any.store(!left.is_empty(), Ordering::Release);
        }
    }

    /// Notes the jobs that nobody waits for.
    fn abandon(&self) {
        let jobs = lock(&self.jobs);
        // One handle is that of the list itself.
        let alone = jobs.flights().into_iter().filter(|flight| flight.strong_count().is_some_and(|count| count <= 2));
        let mut flights = lock(&self.abandoned.flights);
        flights.extend(alone);
        self.abandoned.any.store(!flights.is_empty(), Ordering::Release);
    }
}

struct Whole {
    request: Option<BoxFuture<'static, Result<(), ImageError>>>,
    inner: Arc<Inner>,
}

impl Future for Whole {
    type Output = Result<(), ImageError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(request) = &mut self.request else { return Poll::Ready(Ok(())) };
        let done = request.as_mut().poll(context);
        if done.is_ready() {
            self.request = None;
        }
        done
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            drop(request);
            self.inner.abandon();
        }
    }
}
