//! The pipe between memory and a socket: vmsplice references pages, splice moves them to the socket's buffer.
#![allow(unsafe_code, reason = "names memory to the kernel")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice};

use crate::vector::{Batch, Out};

/// Requested size in bytes: the maximum of an unprivileged process (`fs.pipe-max-size`), two packets.
const WANTED: usize = 1 << 20;

/// A pipe with both ends in this process.
///
/// Invariant: it is empty between two writes. A write that fails halfway leaves it filled, and the channel broken.
#[derive(Debug)]
pub(super) struct Pipe {
    out: OwnedFd,
    into: OwnedFd,
    size: usize,
}

impl Pipe {
    pub(super) fn new() -> io::Result<Self> {
        let (out, into) = pipe_with(PipeFlags::CLOEXEC)?;
        // Refused above the limits of the system or the user: it stays smaller, and works.
        let _granted = fcntl_setpipe_size(&into, WANTED);
        let size = fcntl_getpipe_size(&into)?;
        Ok(Self { out, into, size })
    }

    /// Returns its capacity in bytes of aligned pages.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// References memory, as much as there is room for; returns how many bytes. Not copied: `drain` sends its contents
    /// of that moment.
    pub(super) fn fill(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        // Without room it would wait for a reader, which is this thread.
        let flags = SpliceFlags::NONBLOCK.bits();
        // SAFETY: the batch's entries are valid for reads; that they do not change is not required.
        let filled =
            unsafe { libc::vmsplice(self.into.as_raw_fd(), batch.entries().as_ptr(), batch.entries().len(), flags) };
        usize::try_from(filled).map_err(|_| io::Error::last_os_error())
    }

    /// Moves at most `length` bytes to the socket; returns how many. `more`: others follow at once.
    pub(super) fn drain(&self, socket: BorrowedFd<'_>, length: usize, more: bool) -> io::Result<usize> {
        let flags = if more { SpliceFlags::MOVE | SpliceFlags::MORE } else { SpliceFlags::MOVE };
        Ok(splice(&self.out, None, socket, None, length, flags)?)
    }
}
