//! Writes in place whose requests were cancelled (dropped): they continue, and their clusters count as in use until
//! they are over. Which bytes of the guest they may still change is known meanwhile.

use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::join_all;
use limosa_page::broken_invariant;
use limosa_storage::{Request, StripedArc};

use super::allocator::InUse;
use super::locks::{Rank, RankedMutex};
use crate::error::ImageError;
use crate::offset::GuestOffset;

/// Something that no request waits for any more.
type Rest = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Debug)]
pub(super) struct CancelledWrites {
    rest: RankedMutex<Vec<Rest>>,
    /// The guest's bytes that they write; dangling of those that are over. Apart from them, since a poll takes them.
    bytes: RankedMutex<Vec<Weak<Range<GuestOffset>>>>,
}

/// A write in place in flight. If it is dropped, [`CancelledWrites`] continue it.
pub(super) struct InPlace {
    request: Option<(Request, InUse)>,
    bytes: Range<GuestOffset>,
    cancelled_writes: StripedArc<CancelledWrites>,
}

impl CancelledWrites {
    pub(super) fn new() -> Arc<Self> {
        let (rest, bytes) = (Rank::CancelledWrites.mutex(Vec::new()), Rank::CancelledWrites.mutex(Vec::new()));
        Arc::new(Self { rest, bytes })
    }

    /// `bytes`: those of the guest that it writes.
    pub(super) fn in_place(
        this: &StripedArc<Self>,
        request: Request,
        in_use: InUse,
        bytes: Range<GuestOffset>,
    ) -> InPlace {
        InPlace { request: Some((request, in_use)), bytes, cancelled_writes: this.clone() }
    }

    /// The guest's bytes that they may still change.
    pub(super) fn bytes(&self) -> Vec<Range<GuestOffset>> {
        self.bytes.lock().iter().filter_map(|bytes| Some((*bytes.upgrade()?).clone())).collect()
    }

    fn take_over(&self, request: Request, in_use: InUse, bytes: Range<GuestOffset>) {
        let bytes = Arc::new(bytes);
        let mut all = self.bytes.lock();
        all.retain(|bytes| bytes.strong_count() > 0);
        all.push(Arc::downgrade(&bytes));
        drop(all);
        let rest = async move {
            let _ = request.await;
            drop((in_use, bytes));
        };
        self.rest.lock().push(Box::pin(rest));
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
            self.cancelled_writes.take_over(request, in_use, self.bytes.clone());
        }
    }
}
