//! Work that several requests wait for.

use std::future::Future;
use std::pin::Pin;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, join_all};

use super::locks::{Rank, RankedMutex};
use crate::error::ImageError;

/// Something that several requests wait for: whichever of them is polled drives it. It borrows nothing.
pub(super) type SharedFuture = Shared<Pin<Box<dyn Future<Output = Result<(), ImageError>> + Send>>>;

/// Works that are carried out one after the other, in the order in which they were begun.
#[derive(Debug)]
pub(super) struct Serial {
    last: RankedMutex<Option<SharedFuture>>,
}

impl Serial {
    pub(super) const fn new(rank: Rank) -> Self {
        Self { last: rank.mutex(None) }
    }

    /// Work that begins when what was begun before it is over. A request that waits for it drives that, too, so nothing
    /// within the work may wait for further work of the same kind.
    pub(super) fn run(&self, work: BoxFuture<'static, Result<(), ImageError>>) -> SharedFuture {
        let mut last = self.last.lock();
        let before = last.take();
        let future: SharedFuture = async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            work.await
        }
        .boxed()
        .shared();
        *last = Some(future.clone());
        future
    }

    /// Drops the last work.
    pub(super) fn clear(&self) {
        drop(self.last.take());
    }
}

/// All of them at once, to their ends; the first error.
pub(super) async fn all<F: Future<Output = Result<(), ImageError>>>(parts: Vec<F>) -> Result<(), ImageError> {
    join_all(parts).await.into_iter().collect()
}
