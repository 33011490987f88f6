//! A file request on its way to its executor: a ring or the thread pool.
//!
//! **Law: a request that has begun completes even if its future is dropped.** It is owned by the ring or the pool's
//! job, not by the future.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::drive;
use crate::error::StorageError;
use crate::file::open::OpenFile;
use crate::file::transfer::Transfer;
use crate::pool;
use crate::ring::InFlight;
use crate::storage::Request;
use crate::striped::StripedArc;

/// A request that a ring can execute.
pub(crate) enum Work {
    /// A read or a write.
    Transfer(Transfer),
    /// A flush.
    Flush(StripedArc<OpenFile>),
}

impl Work {
    /// The outcome, if it is known without a call.
    pub(crate) fn early(&self) -> Option<Result<(), StorageError>> {
        match self {
            Self::Transfer(transfer) => transfer.early(),
            Self::Flush(_) => None,
        }
    }

    /// Whether a ring may execute it. A request that may have to wait for others goes to the pool.
    fn is_ready(&mut self) -> bool {
        match self {
            Self::Transfer(transfer) => transfer.count(),
            Self::Flush(_) => true,
        }
    }

    /// Undoes [`Work::is_ready`] for a request that waits in a queue: others may wait for counted writes.
    fn put_off(&mut self) {
        match self {
            Self::Transfer(transfer) => transfer.uncount(),
            Self::Flush(_) => {}
        }
    }

    /// Handles the kernel's result. Returns the outcome; `None` if another call is needed.
    pub(crate) fn advance(&mut self, answer: io::Result<usize>) -> Option<Result<(), StorageError>> {
        match self {
            Self::Transfer(transfer) => transfer.advance(answer),
            Self::Flush(_) if answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) => None,
            Self::Flush(file) => Some(file.flushed(answer.map(drop))),
        }
    }

    /// Executes it on this thread.
    pub(crate) fn block(self) -> Result<(), StorageError> {
        match self {
            Self::Transfer(transfer) => transfer.block(),
            Self::Flush(file) => file.flush(),
        }
    }
}

/// A file request. The first poll begins it: in the ring of the polling thread, if that is in
/// [`block_on`](crate::block_on), else in the pool.
pub(crate) struct FileRequest(State);

enum State {
    New(Work),
    InRing(InFlight),
    InPool(Request),
    Complete,
}

impl FileRequest {
    pub(crate) fn new(work: Work) -> Self {
        Self(State::New(work))
    }
}

impl Future for FileRequest {
    type Output = Result<(), StorageError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::InRing(begun) => return begun.poll(context),
            State::InPool(pooled) => return pooled.as_mut().poll(context),
            State::New(_) | State::Complete => {}
        }
        let State::New(mut work) = std::mem::replace(&mut self.0, State::Complete) else { return Poll::Pending };
        if let Some(outcome) = work.early() {
            return Poll::Ready(outcome);
        }
        let begun = if work.is_ready() { drive::begin(work, context.waker()) } else { Err(work) };
        match begun {
            Ok(begun) => {
                self.0 = State::InRing(begun);
                Poll::Pending
            }
            Err(mut work) => {
                work.put_off();
                let mut pooled: Request = Box::pin(pool::run(move || work.block()));
                let polled = pooled.as_mut().poll(context);
                self.0 = State::InPool(pooled);
                polled
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::task::Waker;

    use super::*;
    use crate::{Buffer, CacheMode, FileOptions, FileStorage, Io, Storage, block_on};

    #[test]
    fn whole_blocks_that_wait_in_the_pool_do_not_keep_parts_of_blocks_waiting() {
        let options = FileOptions { cache: CacheMode::None, io: Io::Uring, ..FileOptions::default() };
        let storage = FileStorage::from_fd(tempfile::tempfile().unwrap().into(), "disk", &options).unwrap();
        if storage.alignment().offset == 1 {
            return;
        }
        let mut no_waker = Context::from_waker(Waker::noop());
        // All threads of the pool are busy until everything is queued: partial blocks first, then whole blocks.
        let (go, wait) = channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        let kept: Vec<_> = (0..pool::MAX_THREADS)
            .map(|_| {
                let wait = Arc::clone(&wait);
                let mut job = Box::pin(pool::run(move || wait.lock().unwrap().recv().unwrap_err()));
                assert!(job.as_mut().poll(&mut no_waker).is_pending());
                job
            })
            .collect();
        let count = pool::MAX_THREADS as u64;
        let parts = (0..count).map(|part| storage.write(part * 8, Buffer::from_slice(&[7; 8]).into()));
        let whole = storage.write(8192, Buffer::from_slice(&[8; 4096]).into());
        let mut writes: Vec<_> = parts.chain([whole]).collect();
        for write in &mut writes {
            assert!(write.as_mut().poll(&mut no_waker).is_pending());
        }
        drop(go);
        for job in kept {
            block_on(job);
        }
        writes.into_iter().try_for_each(block_on).unwrap();
        let found = Buffer::zeroed(8192 + 4096);
        block_on(storage.read(0, found.clone().into())).unwrap();
        assert_eq!(found.slice(0..pool::MAX_THREADS * 8).to_vec(), [7; pool::MAX_THREADS * 8]);
        assert_eq!(found.slice(8192..8192 + 4096).to_vec(), [8; 4096]);
    }
}
