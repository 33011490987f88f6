//! Memory that a channel has been lent.
#![allow(unsafe_code, reason = "takes guest memory, which is never a slice")]

use std::io::IoSlice;
use std::marker::PhantomData;
use std::thread;

use libc::iovec;

use crate::channel::Channel;
use crate::error::ChannelError;
use crate::vector::Cursor;

/// Puts that lend memory to the kernel, until a [`flush`](Self::flush).
///
/// It borrows what is lent for `'m`, so that it cannot be changed or freed before: [`Channel::lend`] begins,
/// [`flush`](Self::flush) waits and goes on, [`finish`](Self::finish) waits and ends. One that is dropped waits too; if
/// the wait fails, the connection is cut at once, and what is queued is thrown away. (One that is leaked promises
/// nothing: the kernel keeps the pages, and the peer may get what is in them then.) One at a time: they share what was
/// lent.
///
/// On a channel that does not lend it is the same as putting.
///
/// ```compile_fail,E0502
/// # fn f(channel: &limosa_channel::Channel) -> Result<(), limosa_channel::ChannelError> {
/// let mut page = vec![7; 4096];
/// let mut lending = channel.lend();
/// lending.put(b"page", &[std::io::IoSlice::new(&page)])?;
/// page[0] = 8; // it is still lent
/// lending.finish()
/// # }
/// ```
#[derive(Debug)]
#[must_use = "what it is to send has to be put"]
pub struct Lending<'c, 'm> {
    channel: &'c Channel,
    lent: PhantomData<&'m [u8]>,
}

impl Channel {
    /// Begins to lend memory, as the channel's [`zero_copy`](crate::Options::zero_copy) says.
    pub fn lend<'m>(&self) -> Lending<'_, 'm> {
        Lending { channel: self, lent: PhantomData }
    }
}

impl<'m> Lending<'_, 'm> {
    /// Puts `header`, which is copied, and behind it slices that may be lent. They are not spliced, because after a
    /// flush they may be reused.
    ///
    /// # Errors
    /// As [`Channel::put_vector`].
    pub fn put(&mut self, header: &[u8], lent: &[IoSlice<'m>]) -> Result<(), ChannelError> {
        let header = [IoSlice::new(header)];
        let all: Vec<IoSlice<'_>> = header.iter().chain(lent).copied().collect();
        let cursors = [&mut Cursor::gather(&header), &mut Cursor::gather(lent), &mut Cursor::gather(&all)];
        self.channel.put_lent(cursors, true)
    }

    /// Puts guest memory that is not copied, behind the first `copied` entries of the list, which are.
    ///
    /// The peer gets what the pages hold when the kernel sends them, which may be after a flush: a writer of them
    /// meanwhile has to send them again (see the [module](crate::zero_copy)).
    ///
    /// # Errors
    /// As [`Channel::put_vector`].
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and readable until the call returns. (The kernel keeps the pages
    /// themselves for as long as it needs them.)
    pub unsafe fn put_pages(&mut self, list: &[iovec], copied: usize) -> Result<(), ChannelError> {
        let (head, pages) = list.split_at(copied.min(list.len()));
        // SAFETY: the caller promises what the cursors ask for, for as long as this call lasts.
        let cursors =
            unsafe { [&mut Cursor::gather_raw(head), &mut Cursor::gather_raw(pages), &mut Cursor::gather_raw(list)] };
        self.channel.put_lent(cursors, false)
    }

    /// Waits until the kernel has sent everything that was lent: as long as it takes, or until nothing was sent for the
    /// length of the write time-out, or both directions were shut down on this side. Spliced pages are not waited for.
    ///
    /// # Errors
    /// As [`Channel::put_vector`]: what was lent may not have been sent.
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        self.channel.flush_lent()
    }

    /// Gives up: if anything that was lent is not back, cuts the connection at once and throws away what is queued.
    /// Where the process may not cut it (connect(2) is filtered), what is queued has three seconds more.
    pub fn abort(&mut self) {
        self.channel.abort_lent();
    }

    /// [Flushes](Self::flush), and gives the memory back.
    ///
    /// # Errors
    /// As `flush`; the connection is cut then.
    pub fn finish(mut self) -> Result<(), ChannelError> {
        // Who has waited once need not wait again as this is dropped.
        self.flush().inspect_err(|_| self.channel.abort_lent())
    }
}

impl Drop for Lending<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.channel.abort_lent();
        } else {
            self.channel.end_lending();
        }
    }
}
