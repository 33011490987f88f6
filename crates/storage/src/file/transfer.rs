//! One read or write, in as many calls as it takes.
//!
//! **Law: complete or an error.** The kernel may transfer a part: the executor of the request (a thread, a ring) asks
//! for the rest again, until all is done. A read beyond the end returns zeros.
#![allow(unsafe_code, reason = "the kernel is passed addresses of memory with other writers")]

use std::io;
use std::os::fd::AsRawFd;

use crate::buffer::IoVector;
use crate::error::{Operation, StorageError};
use crate::file::align::MAX_OFFSET;
use crate::file::open::OpenFile;
use crate::striped::StripedArc;

/// Maximum number of buffers per call (`IOV_MAX`).
const MAX_BUFFERS: usize = 1024;
/// Maximum number of bytes per call: less than the kernel's limit of 2 GiB, and a multiple of every block size.
const MAX_BYTES: usize = 1 << 30;

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the file.
    Read,
    /// Into the file.
    Write,
}

/// A read or a write, and its progress.
pub(crate) struct Transfer {
    pub(crate) file: StripedArc<OpenFile>,
    pub(crate) direction: Direction,
    offset: u64,
    vector: IoVector,
    done: usize,
    /// Whether it is counted by the file's [`Blocks`](crate::file::blocks::Blocks).
    is_counted: bool,
}

impl Transfer {
    pub(crate) fn new(file: StripedArc<OpenFile>, direction: Direction, offset: u64, vector: IoVector) -> Self {
        Self { file, direction, offset, vector, done: 0, is_counted: false }
    }

    pub(crate) fn failed(&self, error: io::Error) -> StorageError {
        let operation = match self.direction {
            Direction::Read => Operation::Read,
            Direction::Write => Operation::Write,
        };
        StorageError::for_request(operation, &self.file.name, self.offset, self.vector.len() as u64, error)
    }

    /// The outcome, if it is known without a call.
    pub(crate) fn early(&self) -> Option<Result<(), StorageError>> {
        let end = self.offset.checked_add(self.vector.len() as u64);
        match self.direction {
            _ if self.vector.is_empty() => Some(Ok(())),
            Direction::Write if self.file.read_only => {
                let reason = "it is open read-only";
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

    /// Counts it among the writes of whole blocks, if it needs to be. False if its blocks must be held instead.
    pub(crate) fn count(&mut self) -> bool {
        if self.direction == Direction::Read || !self.file.has_blocks() || self.is_counted {
            return true;
        }
        self.is_counted = self.file.blocks.count();
        self.is_counted
    }

    /// Undoes [`Transfer::count`], for a write that may wait in a queue.
    pub(crate) fn uncount(&mut self) {
        if std::mem::take(&mut self.is_counted) {
            self.file.blocks.uncount();
        }
    }

    /// Length of all of it.
    pub(crate) fn bytes(&self) -> usize {
        self.vector.len()
    }

    /// Offset of the next call.
    pub(crate) fn at(&self) -> u64 {
        self.offset + self.done as u64
    }

    /// Memory of the next call, if it is contiguous.
    pub(crate) fn piece(&self) -> Option<(*mut u8, u32)> {
        match self.vector.buffers() {
            [buffer] => {
                let len = u32::try_from((buffer.len() - self.done).min(MAX_BYTES)).ok()?;
                Some((buffer.address().wrapping_add(self.done), len))
            }
            _ => None,
        }
    }

    /// Flags of write calls: `RWF_DSYNC` in the synchronous cache modes.
    pub(crate) fn flags(&self) -> libc::c_int {
        if self.file.cache.is_synchronous() { libc::RWF_DSYNC } else { 0 }
    }

    /// Memory of the next call, in as many pieces as the kernel accepts.
    pub(crate) fn pieces(&self, pieces: &mut Vec<libc::iovec>) {
        pieces.clear();
        let (mut skip, mut room) = (self.done, MAX_BYTES);
        for buffer in self.vector.buffers() {
            let begin = skip.min(buffer.len());
            skip -= begin;
            let len = (buffer.len() - begin).min(room);
            if len > 0 {
                pieces.push(libc::iovec { iov_base: buffer.address().wrapping_add(begin).cast(), iov_len: len });
                room -= len;
            }
            if room == 0 || pieces.len() == MAX_BUFFERS {
                break;
            }
        }
    }

    /// Handles the kernel's result of a call. Returns the outcome; `None` if another call is needed.
    pub(crate) fn advance(&mut self, answer: io::Result<usize>) -> Option<Result<(), StorageError>> {
        match answer {
            Ok(0) if self.direction == Direction::Read => {
                self.vector.slice(self.done..self.vector.len()).clear();
                Some(Ok(()))
            }
            Ok(0) => Some(Err(self.failed(io::ErrorKind::WriteZero.into()))),
            Ok(bytes) => {
                self.done = self.done.saturating_add(bytes).min(self.vector.len());
                // A direct read ends within a block only at the end of the file, and could not continue there.
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

    /// Executes it on this thread.
    pub(crate) fn block(mut self) -> Result<(), StorageError> {
        if let Some(outcome) = self.early() {
            return outcome;
        }
        if self.count() {
            return self.all();
        }
        let file = self.file.clone();
        let _held = file.blocks.hold(self.offset..self.offset + self.vector.len() as u64);
        self.all()
    }

    /// Makes all calls on this thread. The caller holds the blocks if that is needed.
    pub(crate) fn all(mut self) -> Result<(), StorageError> {
        let mut pieces = Vec::new();
        loop {
            self.pieces(&mut pieces);
            let (fd, at) = (self.file.fd.as_raw_fd(), self.at().cast_signed());
            let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
            let answer = match self.direction {
                // SAFETY: each piece is memory that the vector's buffers keep alive, and to which no reference exists.
                Direction::Read => unsafe { libc::preadv2(fd, pieces.as_ptr(), count, at, 0) },
                // SAFETY: as above.
                Direction::Write => unsafe { libc::pwritev2(fd, pieces.as_ptr(), count, at, self.flags()) },
            };
            let answer = usize::try_from(answer).map_err(|_| io::Error::last_os_error());
            if let Some(outcome) = self.advance(answer) {
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
