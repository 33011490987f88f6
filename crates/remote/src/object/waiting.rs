//! Reads that wait for blocks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use limosa_page::to_usize;
use limosa_storage::IoVector;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::error::RemoteError;

/// A read whose blocks come one by one.
#[derive(Debug)]
pub(super) struct PendingRead {
    left: AtomicUsize,
    error: Mutex<Option<RemoteError>>,
    done: Mutex<Option<oneshot::Sender<()>>>,
}

/// The end of a read.
pub(super) type ReadEnd = oneshot::Receiver<()>;

impl PendingRead {
    /// A read of this many blocks.
    pub(super) fn new(blocks: usize) -> (Arc<Self>, ReadEnd) {
        let (send, receive) = oneshot::channel();
        let read = Self { left: AtomicUsize::new(blocks), error: Mutex::default(), done: Mutex::new(Some(send)) };
        (Arc::new(read), receive)
    }

    /// One block of it is there, or has failed.
    fn advance(&self, outcome: Result<(), &RemoteError>) {
        if let Err(error) = outcome {
            self.error.lock().get_or_insert_with(|| error.clone());
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(done) = self.done.lock().take()
        {
            // It was dropped: its buffers are filled all the same.
            _ = done.send(());
        }
    }

    /// The outcome after the end.
    pub(super) fn outcome(&self) -> io::Result<()> {
        match self.error.lock().take() {
            Some(error) => Err(error.into()),
            None if self.left.load(Ordering::Acquire) == 0 => Ok(()),
            None => Err(io::Error::other("a request was lost")),
        }
    }
}

/// The part of a read that is in one block.
#[derive(Debug)]
pub(super) struct Part {
    /// Where it goes.
    pub(super) into: IoVector,
    /// Its offset in the block, in bytes.
    pub(super) offset: u64,
    pub(super) read: Arc<PendingRead>,
}

impl Part {
    /// Copies it out of its block.
    pub(super) fn fill(&self, block: &Bytes) {
        let start = to_usize(self.offset);
        let whole = block.get(start..).is_some_and(|bytes| self.into.copy_from(0, bytes) == self.into.len());
        let short = RemoteError::Protocol("a block is too short".to_owned());
        self.read.advance(if whole { Ok(()) } else { Err(&short) });
    }

    pub(super) fn fail(&self, error: &RemoteError) {
        self.read.advance(Err(error));
    }
}
