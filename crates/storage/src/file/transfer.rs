//! One read or write, however many calls it takes.
//!
//! **Law: all of it or an error.** The kernel may do a part: the rest is asked for again, by whoever carries the request out (a
//! thread, a ring), until all is done. What a read finds behind the end is zeros.
#![allow(unsafe_code, reason = "the kernel is given addresses of memory that others write")]

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::buffer::IoVector;
use crate::error::{Operation, StorageError};
use crate::file::open::OpenFile;

/// The most buffers that the kernel takes at a time (`IOV_MAX`).
const MOST_BUFFERS: usize = 1024;
/// The most bytes asked for at a time: less than the kernel's own limit of 2 GiB, and a multiple of every block.
const MOST_BYTES: usize = 1 << 30;
/// The largest offset that a file can have.
pub(crate) const MAX_OFFSET: u64 = i64::MAX as u64;

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the file.
    Read,
    /// Into the file.
    Write,
}

/// A read or a write, and how far it has come.
pub(crate) struct Transfer {
    pub(crate) file: Arc<OpenFile>,
    pub(crate) direction: Direction,
    offset: u64,
    vector: IoVector,
    done: usize,
    /// Whether it is counted by the file's [`Blocks`](crate::file::blocks::Blocks).
    is_counted: bool,
}

impl Transfer {
    pub(crate) fn new(file: Arc<OpenFile>, direction: Direction, offset: u64, vector: IoVector) -> Self {
        Self { file, direction, offset, vector, done: 0, is_counted: false }
    }

    pub(crate) fn failed(&self, error: io::Error) -> StorageError {
        let operation = match self.direction {
            Direction::Read => Operation::Read,
            Direction::Write => Operation::Write,
        };
        StorageError::at(operation, &self.file.name, self.offset, self.vector.len() as u64, error)
    }

    /// The outcome, if no call is needed: nothing to do, or nothing that can be done.
    pub(crate) fn early(&self) -> Option<Result<(), StorageError>> {
        let end = self.offset.checked_add(self.vector.len() as u64);
        match self.direction {
            _ if self.vector.is_empty() => Some(Ok(())),
            Direction::Write if self.file.read_only => {
                let reason = "it was opened for reading only";
                Some(Err(self.failed(io::Error::new(io::ErrorKind::PermissionDenied, reason))))
            }
            Direction::Read if self.offset > MAX_OFFSET => {
                self.vector.clear();
                Some(Ok(()))
            }
            _ if end.is_none_or(|end| end > MAX_OFFSET) => Some(Err(self.failed(io::ErrorKind::InvalidInput.into()))),
            _ => None,
        }
    }

    /// Counts it among the writes of whole blocks, if it has to be: false if its blocks have to be held.
    pub(crate) fn count(&mut self) -> bool {
        if self.direction == Direction::Read || !self.file.has_blocks() || self.is_counted {
            return true;
        }
        self.is_counted = self.file.blocks.count();
        self.is_counted
    }

    /// Takes that back: whoever carries it out counts it anew, when it is sure not to wait.
    pub(crate) fn uncount(&mut self) {
        if std::mem::take(&mut self.is_counted) {
            self.file.blocks.uncount();
        }
    }

    /// Where the next call reads or writes.
    pub(crate) fn at(&self) -> u64 {
        self.offset + self.done as u64
    }

    /// The next call's memory, if it is in one piece.
    pub(crate) fn piece(&self) -> Option<(*mut u8, u32)> {
        match self.vector.buffers() {
            [buffer] => {
                let len = u32::try_from((buffer.len() - self.done).min(MOST_BYTES)).ok()?;
                Some((buffer.start().wrapping_add(self.done), len))
            }
            _ => None,
        }
    }

    /// What the calls of a write are told: to be durable when they are done, in the cache modes that want it.
    pub(crate) fn flags(&self) -> libc::c_int {
        if self.file.cache.is_synchronous() { libc::RWF_DSYNC } else { 0 }
    }

    /// The next call's memory, in as many pieces as the kernel takes.
    pub(crate) fn pieces(&self, pieces: &mut Vec<libc::iovec>) {
        pieces.clear();
        let (mut skip, mut room) = (self.done, MOST_BYTES);
        for buffer in self.vector.buffers() {
            let begin = skip.min(buffer.len());
            skip -= begin;
            let len = (buffer.len() - begin).min(room);
            if len > 0 {
                pieces.push(libc::iovec { iov_base: buffer.start().wrapping_add(begin).cast(), iov_len: len });
                room -= len;
            }
            if room == 0 || pieces.len() == MOST_BUFFERS {
                break;
            }
        }
    }

    /// Takes the kernel's answer to a call: the outcome, or none if there is more to do.
    pub(crate) fn settle(&mut self, answer: io::Result<usize>) -> Option<Result<(), StorageError>> {
        match answer {
            Ok(0) if self.direction == Direction::Read => {
                self.vector.slice(self.done..self.vector.len()).clear();
                Some(Ok(()))
            }
            Ok(0) => Some(Err(self.failed(io::ErrorKind::WriteZero.into()))),
            Ok(bytes) => {
                self.done = self.done.saturating_add(bytes).min(self.vector.len());
                // Direct reads end inside of a block only at the end of the file, and could not go on there.
                if self.direction == Direction::Read && !self.file.is_aligned(self.done as u64) {
                    self.vector.slice(self.done..self.vector.len()).clear();
                    self.done = self.vector.len();
                }
                (self.done == self.vector.len()).then_some(Ok(()))
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
            Err(error) => {
                if self.direction == Direction::Write {
                    self.file.write_failed(&error);
                }
                Some(Err(self.failed(error)))
            }
        }
    }

    /// Carries it out on this thread.
    pub(crate) fn block(mut self) -> Result<(), StorageError> {
        if let Some(outcome) = self.early() {
            return outcome;
        }
        if self.count() {
            return self.all();
        }
        let file = Arc::clone(&self.file);
        let _held = file.blocks.hold(self.offset..self.offset + self.vector.len() as u64);
        self.all()
    }

    /// Makes all calls, on this thread, which holds its blocks if there is need.
    pub(crate) fn all(mut self) -> Result<(), StorageError> {
        let mut pieces = Vec::new();
        loop {
            self.pieces(&mut pieces);
            let (fd, at) = (self.file.fd.as_raw_fd(), self.at().cast_signed());
            let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
            let answer = match self.direction {
                // SAFETY: each piece is memory that the vector's buffers keep, which nobody has a reference to.
                Direction::Read => unsafe { libc::preadv2(fd, pieces.as_ptr(), count, at, 0) },
                // SAFETY: as above.
                Direction::Write => unsafe { libc::pwritev2(fd, pieces.as_ptr(), count, at, self.flags()) },
            };
            let answer = usize::try_from(answer).map_err(|_| io::Error::last_os_error());
            if let Some(outcome) = self.settle(answer) {
                return outcome;
            }
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.uncount();
    }
}
