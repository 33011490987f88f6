//! The writer of zero-copy sends.
#![allow(unsafe_code, reason = "takes guest memory, which is never a slice")]

use std::io::IoSlice;
use std::marker::PhantomData;
use std::thread;

use libc::iovec;

use crate::channel::Channel;
use crate::error::ChannelError;
use crate::vector::Cursor;
use crate::zero_copy::Parts;

/// Writes memory without a copy; the kernel references it until a [`flush`](Self::flush).
///
/// It borrows the memory for `'m`, so that it cannot be changed or freed before. [`Channel::zero_copy_writer`] creates
/// it, [`flush`](Self::flush) waits for completion, [`finish`](Self::finish) waits and ends. Dropping it waits too; if
/// that fails, the connection is cut at once, and queued data is discarded. (A leaked one guarantees nothing: the
/// kernel keeps the pages, and the peer may receive their later contents.) Use one at a time: they share the
/// completions of the channel.
///
/// On a channel without zero-copy it writes as [`Channel::write_all_vectored`].
///
/// ```compile_fail,E0502
/// # fn f(channel: &limosa_channel::Channel) -> Result<(), limosa_channel::ChannelError> {
/// let mut page = vec![7; 4096];
/// let mut writer = channel.zero_copy_writer();
/// writer.write_all(b"page", &[std::io::IoSlice::new(&page)])?;
/// page[0] = 8; // the kernel still references it
/// writer.finish()
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a writer sends nothing by itself"]
pub struct ZeroCopyWriter<'c, 'm> {
    channel: &'c Channel,
    memory: PhantomData<&'m [u8]>,
}

impl Channel {
    /// Creates a writer that uses the channel's [`zero_copy`](crate::Options::zero_copy) method.
    pub fn zero_copy_writer<'m>(&self) -> ZeroCopyWriter<'_, 'm> {
        ZeroCopyWriter { channel: self, memory: PhantomData }
    }
}

impl<'m> ZeroCopyWriter<'_, 'm> {
    /// Writes a copy of `header` and then slices without a copy, if the method allows. They are not spliced, because
    /// they may be reused after a flush.
    ///
    /// # Errors
    /// As [`Channel::write_all_vectored`].
    pub fn write_all(&mut self, header: &[u8], referenced: &[IoSlice<'m>]) -> Result<(), ChannelError> {
        let header = [IoSlice::new(header)];
        let all: Vec<IoSlice<'_>> = header.iter().chain(referenced).copied().collect();
        let (copied, pages) = (Cursor::gather(&header), Cursor::gather(referenced));
        self.channel.write_all_zero_copy(Parts { copied, pages, all: Cursor::gather(&all), reused: true })
    }

    /// Writes guest memory without a copy, after a copy of the first `copied` entries of the list.
    ///
    /// The peer receives the contents of the pages at the time when the kernel sends them, which may be after a flush:
    /// pages written meanwhile must be sent again (see the [module](crate::zero_copy)).
    ///
    /// # Errors
    /// As [`Channel::write_all_vectored`].
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and readable until the call returns. (The kernel keeps the pages
    /// themselves for as long as it needs them.)
    pub unsafe fn write_pages(&mut self, list: &[iovec], copied: usize) -> Result<(), ChannelError> {
        let (head, pages) = list.split_at(copied.min(list.len()));
        // SAFETY: the caller promises what the cursors ask for, for as long as this call lasts.
        let [copied, pages, all] = unsafe { [head, pages, list].map(|list| Cursor::gather_raw(list)) };
        self.channel.write_all_zero_copy(Parts { copied, pages, all, reused: false })
    }

    /// Waits until the kernel has sent everything it references. Fails if nothing is sent for the length of the write
    /// time-out, or if both directions are shut down on this side. Does not wait for spliced pages.
    ///
    /// # Errors
    /// As [`Channel::write_all_vectored`]: some memory may not have been sent.
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        self.channel.flush_zero_copy()
    }

    /// Gives up: if sends are incomplete, cuts the connection at once and discards queued data. If the process may not
    /// cut it (connect(2) is filtered), queued data is sent for up to three more seconds.
    pub fn abort(&mut self) {
        self.channel.abort_zero_copy();
    }

    /// [Flushes](Self::flush) and ends the borrow.
    ///
    /// # Errors
    /// As `flush`; the connection is then cut.
    pub fn finish(mut self) -> Result<(), ChannelError> {
        // After one failed wait, dropping must not wait again.
        self.flush().inspect_err(|_| self.channel.abort_zero_copy())
    }
}

impl Drop for ZeroCopyWriter<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.channel.abort_zero_copy();
        } else {
            self.channel.end_zero_copy();
        }
    }
}
