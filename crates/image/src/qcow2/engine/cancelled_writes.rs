//! Writes in place whose requests were cancelled (dropped): they continue, and their clusters count as in use until
//! they are over.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::join_all;
use limosa_page::broken_invariant;
use limosa_storage::Request;

use super::allocator::InUse;
use super::locks::{Rank, RankedMutex};
use crate::error::ImageError;

/// Something that no request waits for any more.
type Rest = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Debug)]
pub(super) struct CancelledWrites {
    rest: RankedMutex<Vec<Rest>>,
}

/// A write in place in flight. If it is dropped, [`CancelledWrites`] continue it.
pub(super) struct InPlace {
    request: Option<(Request, InUse)>,
    cancelled_writes: Arc<CancelledWrites>,
}

impl CancelledWrites {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { rest: Rank::CancelledWrites.mutex(Vec::new()) })
    }

    pub(super) fn in_place(self: &Arc<Self>, request: Request, in_use: InUse) -> InPlace {
        InPlace { request: Some((request, in_use)), cancelled_writes: Arc::clone(self) }
    }

    /// Polls them once, without waiting.
    pub(super) async fn poll(&self) {
        let mut rest = self.rest.take();
        std::future::poll_fn(|context| {
            rest.retain_mut(|rest| rest.poll_unpin(context).is_pending());
            Poll::Ready(())
        })
        .await;
        self.rest.lock().append(&mut rest);
    }

    /// Waits until they are over.
    pub(super) async fn over(&self) {
        let rest = self.rest.take();
        join_all(rest).await;
    }

    /// Returns the number of writes that are not known to be over.
    pub(super) fn len(&self) -> usize {
        self.rest.lock().len()
    }

    /// Drops them.
    pub(super) fn clear(&self) {
        drop(self.rest.take());
    }
}

impl Future for InPlace {
    type Output = Result<(), ImageError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some((request, _)) = &mut self.request else {
            return Poll::Ready(Err(broken_invariant("a write that is over is not polled again").into()));
        };
        let Poll::Ready(done) = request.as_mut().poll(context) else { return Poll::Pending };
        self.request = None;
        Poll::Ready(Ok(done?))
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        if let Some((request, in_use)) = self.request.take() {
            let rest = async move {
                let _ = request.await;
                drop(in_use);
            };
            self.cancelled_writes.rest.lock().push(Box::pin(rest));
        }
    }
}
