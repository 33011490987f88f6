//! Cancelled requests: jobs and other work that nothing waits for any more, because their requests were dropped.
//!
//! Law: a request that looks at the disk or changes it, and begins after another one was dropped, finds what that one
//! had begun over and done, so that nothing changes by itself later on. So does a close.

use std::pin::Pin;
use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, FutureExt, join_all};
use limosa_page::broken_invariant;
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};

use super::super::locks::{CheckedMutex, Rank};
use super::super::shared_future::SharedFuture;
use super::Writer;
use crate::error::ImageError;

pub(super) type CancelledRequests = HandOver<SharedFuture>;

/// Work that is handed over from requests that were cancelled to those that come next.
pub(super) struct HandOver<T> {
    any: AtomicBool,
    works: CheckedMutex<Vec<T>>,
}

impl<T> Default for HandOver<T> {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), works: Rank::CancelledRequests.checked_mutex(Vec::new()) }
    }
}

impl<T: Clone> HandOver<T> {
    /// Returns all that was handed over and is not known to be over.
    fn all(&self) -> Option<Vec<T>> {
        self.any.load(Ordering::Acquire).then(|| self.works.lock().clone())
    }

    /// Forgets what is over.
    fn forget(&self, is_over: impl Fn(&T) -> bool) {
        let mut works = self.works.lock();
        works.retain(|work| !is_over(work));
        self.any.store(!works.is_empty(), Ordering::Release);
    }

    /// Hands over what `alone` finds that nothing waits for.
    fn note(&self, alone: impl FnOnce() -> Vec<T>) {
        // Before the look: another drop at the same time may have handles of the same jobs, and has noted them when
        // this lock is free.
        let mut works = self.works.lock();
        works.extend(alone());
        self.any.store(!works.is_empty(), Ordering::Release);
    }

    /// Drops all.
    pub(super) fn clear(&self) {
        let works = std::mem::take(&mut *self.works.lock());
        drop(works);
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
        while let Some(works) = self.cancelled.all() {
            join_all(works).await;
            self.cancelled.forget(|work| work.peek().is_some());
        }
    }

    /// Notes the jobs that nothing waits for.
    fn note_cancelled(&self) {
        self.cancelled.note(|| self.in_flight.alone());
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Work that panicked cannot be looked at, and has ended.
        if !std::thread::panicking() && self.work.peek().is_none() {
            self.writer.cancelled.note(|| vec![self.work.clone()]);
        }
    }
}

impl Future for Whole {
    type Output = Result<(), ImageError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(request) = &mut self.request else {
            return Poll::Ready(Err(broken_invariant("a request that is over is not polled again").into()));
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

/// Compiled for the model checker loom only; run by `cargo xtask test`.
#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// A job that is over when whoever waits for it has driven it.
    type Job = Arc<AtomicBool>;

    fn is_over(job: &Job) -> bool {
        job.load(Ordering::Acquire)
    }

    impl HandOver<Job> {
        /// As a request begins.
        fn finish(&self) {
            while let Some(jobs) = self.all() {
                jobs.iter().for_each(|job| job.store(true, Ordering::Release));
                drop(jobs);
                self.forget(is_over);
            }
        }
    }

    fn check(model: impl Fn() + Send + Sync + 'static) {
        let mut checker = loom::model::Builder::new();
        checker.preemption_bound = Some(3);
        checker.check(model);
    }

    #[test]
    fn a_job_of_two_requests_that_are_cancelled_at_once_is_handed_over() {
        check(|| {
            let listed: Job = Arc::new(AtomicBool::new(false));
            let shared = std::sync::Arc::new((HandOver::<Job>::default(), Arc::clone(&listed)));
            drop(listed);
            let requests = [(), ()].map(|()| {
                let (shared, handle) = (std::sync::Arc::clone(&shared), Arc::clone(&shared.1));
                thread::spawn(move || {
                    drop(handle);
                    let (cancelled, listed) = &*shared;
                    // As the list of jobs says it: there is no handle but its own.
                    let is_alone = || Arc::strong_count(listed) <= 1;
                    cancelled.note(|| if is_alone() { vec![Arc::clone(listed)] } else { Vec::new() });
                })
            });
            requests.into_iter().for_each(|request| request.join().unwrap());
            shared.0.finish();
            assert!(is_over(&shared.1));
        });
    }

    #[test]
    fn what_a_cancelled_request_has_begun_is_over_for_every_request_that_comes_after_it() {
        check(|| {
            let shared = std::sync::Arc::new((
                HandOver::<Job>::default(),
                Job::new(AtomicBool::new(false)),
                AtomicBool::new(false),
            ));
            let cancelled = {
                let shared = std::sync::Arc::clone(&shared);
                thread::spawn(move || {
                    shared.0.note(|| vec![Arc::clone(&shared.1)]);
                    shared.2.store(true, Ordering::Release);
                })
            };
            let other = {
                let shared = std::sync::Arc::clone(&shared);
                thread::spawn(move || shared.0.finish())
            };
            if shared.2.load(Ordering::Acquire) {
                shared.0.finish();
                assert!(is_over(&shared.1));
            }
            cancelled.join().unwrap();
            other.join().unwrap();
            shared.0.finish();
            assert!(is_over(&shared.1) && shared.0.all().is_none());
        });
    }
}
