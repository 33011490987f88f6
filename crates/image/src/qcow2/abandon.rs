//! Jobs that nobody waits for any more, because their requests were dropped.
//!
//! Law: a request that begins after another one was dropped finds what that one had begun over and done, so that nothing changes by
//! itself later on.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, FutureExt, join_all};

use super::image::Inner;
use super::locks::{Rank, RankedMutex};
use super::slices::Flight;
use crate::disk::Pending;
use crate::error::ImageError;

pub(super) struct Abandoned {
    any: AtomicBool,
    flights: RankedMutex<Vec<Flight>>,
}

impl Default for Abandoned {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), flights: Rank::Abandoned.mutex(Vec::new()) }
    }
}

impl Abandoned {
    pub(super) fn take(&self) -> Vec<Flight> {
        self.flights.take()
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
            let flights = self.abandoned.flights.lock().clone();
            join_all(flights).await;
            let mut left = self.abandoned.flights.lock();
            left.retain(|flight| flight.peek().is_none());
            self.abandoned.any.store(!left.is_empty(), Ordering::Release);
        }
    }

    /// Notes the jobs that nobody waits for.
    fn abandon(&self) {
        let alone = self.jobs.alone();
        let mut flights = self.abandoned.flights.lock();
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
