//! Cancelled requests: jobs and other work that nothing waits for any more, because their requests were dropped.
//!
//! Law: a request that looks at the disk or changes it, and begins after another one was dropped, finds what that one had begun over
//! and done, so that nothing changes by itself later on. So does a close.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, FutureExt, join_all};
use limosa_page::broken;

use super::super::locks::{Rank, RankedMutex};
use super::super::shared_future::SharedFuture;
use super::Writer;
use crate::error::ImageError;

pub(super) struct CancelledRequests {
    any: AtomicBool,
    jobs: RankedMutex<Vec<SharedFuture>>,
}

impl Default for CancelledRequests {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), jobs: Rank::CancelledRequests.mutex(Vec::new()) }
    }
}

impl CancelledRequests {
    /// Lets go of them.
    pub(super) fn clear(&self) {
        drop(self.jobs.take());
    }
}

/// Work that is ended by others if what waits for it is dropped.
pub(in super::super) struct Unfinished {
    work: SharedFuture,
    writer: Arc<Writer>,
}

/// A request whose jobs are ended by others if it is dropped.
pub(in super::super) struct Whole {
    request: Option<BoxFuture<'static, Result<(), ImageError>>>,
    writer: Arc<Writer>,
}

impl Writer {
    /// Has the jobs of a request ended by others if it is dropped. It begins when what was dropped before is over.
    pub(in super::super) fn finish_when_cancelled(
        self: &Arc<Self>,
        request: impl Future<Output = Result<(), ImageError>> + Send + 'static,
    ) -> Whole {
        let writer = Arc::clone(self);
        let request = async move {
            writer.finish_cancelled().await;
            request.await
        };
        Whole { request: Some(request.boxed()), writer: Arc::clone(self) }
    }

    /// Has work that is more than jobs ended by others if the request that holds this is dropped.
    pub(in super::super) fn finish_if_cancelled(self: &Arc<Self>, work: &SharedFuture) -> Unfinished {
        Unfinished { work: work.clone(), writer: Arc::clone(self) }
    }

    /// Ends what requests that were dropped have begun.
    pub(in super::super) async fn finish_cancelled(&self) {
        while self.cancelled.any.load(Ordering::Acquire) {
            let jobs = self.cancelled.jobs.lock().clone();
            join_all(jobs).await;
            let mut left = self.cancelled.jobs.lock();
            left.retain(|job| job.peek().is_none());
            self.cancelled.any.store(!left.is_empty(), Ordering::Release);
        }
    }

    /// Notes the jobs that nothing waits for.
    fn note_cancelled(&self) {
        // Before the look: another drop at the same time may have handles of the same jobs, and has noted them when this lock is free.
        let mut jobs = self.cancelled.jobs.lock();
        jobs.extend(self.in_flight.alone());
        self.cancelled.any.store(!jobs.is_empty(), Ordering::Release);
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Work that panicked cannot be looked at, and has ended.
        if !std::thread::panicking() && self.work.peek().is_none() {
            let mut jobs = self.writer.cancelled.jobs.lock();
            jobs.push(self.work.clone());
            self.writer.cancelled.any.store(true, Ordering::Release);
        }
    }
}

impl Future for Whole {
    type Output = Result<(), ImageError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(request) = &mut self.request else {
            return Poll::Ready(Err(broken("a request that is over is not polled again").into()));
        };
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
            self.writer.note_cancelled();
        }
    }
}
