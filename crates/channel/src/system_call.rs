//! The system calls that move the bytes of a [batch](Batch), one each.
#![allow(unsafe_code, reason = "the calls take lists of raw memory, because guest memory is never a slice")]

use std::io;
use std::mem;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use libc::{c_int, iovec};

use crate::vector::{Batch, In, Out};

/// Writes as writev(2).
pub(crate) fn write(fd: &OwnedFd, batch: &Batch<'_, Out>) -> io::Result<usize> {
    let (list, count) = parts(batch.entries());
    // SAFETY: the batch's entries are valid for reads; the list has `count` of them.
    answer(unsafe { libc::writev(fd.as_raw_fd(), list, count) })
}

/// Reads as readv(2).
pub(crate) fn read(fd: &OwnedFd, batch: &Batch<'_, In>) -> io::Result<usize> {
    let (list, count) = parts(batch.entries());
    // SAFETY: the batch's entries are valid for writes; the list has `count` of them.
    answer(unsafe { libc::readv(fd.as_raw_fd(), list, count) })
}

/// Sends as sendmsg(2).
pub(crate) fn send(fd: &OwnedFd, batch: &Batch<'_, Out>, flags: c_int) -> io::Result<usize> {
    let flags = flags | libc::MSG_NOSIGNAL;
    if let [entry] = batch.entries() {
        // Measured: a tenth cheaper than a message of one entry, for small ones.
        // SAFETY: the batch's entry is valid for reads.
        return answer(unsafe { libc::send(fd.as_raw_fd(), entry.iov_base, entry.iov_len, flags) });
    }
    let message = message(batch.entries());
    // SAFETY: the message and its list live through the call; the batch's entries are valid for reads.
    answer(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })
}

/// Receives as recvmsg(2).
pub(crate) fn receive(fd: &OwnedFd, batch: &Batch<'_, In>, flags: c_int) -> io::Result<usize> {
    if let [entry] = batch.entries() {
        // SAFETY: the batch's entry is valid for writes.
        return answer(unsafe { libc::recv(fd.as_raw_fd(), entry.iov_base, entry.iov_len, flags) });
    }
    let mut message = message(batch.entries());
    // SAFETY: the message and its list live through the call; the batch's entries are valid for writes.
    answer(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) })
}

/// Writes some of the batch at a file offset.
pub(crate) fn write_at(fd: BorrowedFd<'_>, batch: &Batch<'_, Out>, offset: i64) -> io::Result<usize> {
    let (list, count) = parts(batch.entries());
    // SAFETY: the batch's entries are valid for reads; the list has `count` of them.
    answer(unsafe { libc::pwritev(fd.as_raw_fd(), list, count, offset) })
}

/// Reads some of the batch from a file offset.
pub(crate) fn read_at(fd: BorrowedFd<'_>, batch: &Batch<'_, In>, offset: i64) -> io::Result<usize> {
    let (list, count) = parts(batch.entries());
    // SAFETY: the batch's entries are valid for writes; the list has `count` of them.
    answer(unsafe { libc::preadv(fd.as_raw_fd(), list, count, offset) })
}

fn parts(entries: &[iovec]) -> (*const iovec, c_int) {
    // A batch has at most ENTRIES_MAX entries.
    (entries.as_ptr(), c_int::try_from(entries.len()).unwrap_or(c_int::MAX))
}

fn message(entries: &[iovec]) -> libc::msghdr {
    // SAFETY: all zero is the header of an empty message; its fields differ between C libraries, hence no literal.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = entries.as_ptr().cast_mut();
    message.msg_iovlen = entries.len() as _;
    message
}

fn answer(returned: isize) -> io::Result<usize> {
    usize::try_from(returned).map_err(|_| io::Error::last_os_error())
}
