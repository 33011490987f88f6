//! Sends by splice: vmsplice(2) references pages in a pipe, splice(2) moves them to the socket's buffer.
#![allow(unsafe_code, reason = "names memory to the kernel")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice};

use crate::direction::{Stop, Transfer};
use crate::vector::{Batch, Cursor, Out};

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
    fn size(&self) -> usize {
        self.size
    }

    /// References memory, as much as there is room for; returns how many bytes. Not copied: `drain` sends its contents
    /// of that moment.
    fn fill(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        // Without room it would wait for a reader, which is this thread.
        let flags = SpliceFlags::NONBLOCK.bits();
        // SAFETY: the batch's entries are valid for reads; that they do not change is not required.
        let filled =
            unsafe { libc::vmsplice(self.into.as_raw_fd(), batch.entries().as_ptr(), batch.entries().len(), flags) };
        usize::try_from(filled).map_err(|_| io::Error::last_os_error())
    }

    /// Moves at most `length` bytes to the socket; returns how many. `more`: others follow at once.
    fn drain(&self, socket: BorrowedFd<'_>, length: usize, more: bool) -> io::Result<usize> {
        let flags = if more { SpliceFlags::MOVE | SpliceFlags::MORE } else { SpliceFlags::MOVE };
        Ok(splice(&self.out, None, socket, None, length, flags)?)
    }

    /// Moves all of `pages` through the self.
    pub(super) fn send_all(&self, out: Transfer<'_>, pages: &mut Cursor<'_, Out>) -> Result<(), Stop> {
        let mut idle = out.direction.idle_timer();
        let mut paid = 0;
        let mut left = pages.left();
        while let Some(batch) = pages.batch(out.rate.batch().min(self.size())) {
            paid += out.pay(batch.bytes().saturating_sub(paid), &mut idle)?;
            out.direction.counters.called();
            let filled = match self.fill(&batch) {
                // The pipe is empty, so the order is kept.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::FAULT) => {
                    return out.write_all_by(pages, |batch| out.transport.write(batch));
                }
                filled => filled.map_err(Stop::Failed)?,
            };
            if filled == 0 {
                return Err(Stop::Failed(io::ErrorKind::WriteZero.into()));
            }
            left = left.saturating_sub(filled as u64);
            let mut inside = filled;
            while inside != 0 {
                let drain = || self.drain(out.transport.output(), inside, left != 0);
                let moved = out.attempt(&mut idle, inside, drain)?;
                if moved == 0 {
                    return Err(Stop::Failed(io::ErrorKind::WriteZero.into()));
                }
                inside = inside.saturating_sub(moved);
            }
            out.direction.counters.spliced(filled);
            paid = paid.saturating_sub(filled);
            pages.advance(filled);
        }
        Ok(())
    }
}
