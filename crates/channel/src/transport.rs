//! One system call each: how bytes enter and leave a descriptor.
//!
//! This enum is the place where other ways of moving bytes join. TLS is a variant that seals a batch into records, or
//! has the kernel do so. Nothing above this module sees which one it is.
#![allow(unsafe_code, reason = "the calls take lists of raw memory, because guest memory is never a slice")]

use std::io;
use std::mem;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use libc::{c_int, iovec};
use rustix::io::Errno;

use crate::passed_descriptors::{self, PassedDescriptors};
use crate::tls::Session;
use crate::vector::{Batch, In, Out};

/// A connected descriptor, by the calls it takes.
#[derive(Debug)]
pub(crate) enum Transport {
    /// A stream socket, in blocking mode unless its giver chose otherwise, and the descriptors that came through it.
    Socket(OwnedFd, Arc<PassedDescriptors>),
    /// A stream socket whose bytes are encrypted.
    Tls(Arc<Session>),
    /// A pipe, or another descriptor that is read and written in order; in non-blocking mode.
    Pipe(OwnedFd),
    /// Two descriptors, one for each direction.
    Pair {
        /// What is read from.
        input: Half,
        /// What is written to.
        output: Half,
    },
}

/// One direction, that others may have too.
#[derive(Debug)]
pub(crate) enum Half {
    /// A stream socket, left in the mode it is in: that is a property of the open socket, and a program at the other
    /// side of a pipeline may have the same one and rely on it. Each call says for itself that it does not wait.
    Socket(OwnedFd),
    /// A pipe in non-blocking mode.
    Pipe(OwnedFd),
}

impl Half {
    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Socket(fd) => Self::Socket(fd.try_clone()?),
            Self::Pipe(fd) => Self::Pipe(fd.try_clone()?),
        })
    }

    fn fd(&self) -> &OwnedFd {
        match self {
            Self::Socket(fd) | Self::Pipe(fd) => fd,
        }
    }
}

impl Transport {
    /// Writes some of the batch; returns how many bytes.
    pub(crate) fn put(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        match self {
            Self::Socket(fd, _) => send(fd, batch, 0),
            Self::Tls(session) => session.put(batch),
            Self::Pair { output: Half::Socket(fd), .. } => send(fd, batch, libc::MSG_DONTWAIT),
            Self::Pipe(fd) | Self::Pair { output: Half::Pipe(fd), .. } => {
                let (list, count) = parts(batch.entries());
                // SAFETY: the batch's entries are valid for reads; the list has `count` of them.
                answer(unsafe { libc::writev(fd.as_raw_fd(), list, count) })
            }
        }
    }

    /// As [`put`](Self::put), into a socket, and says that more follows at once.
    pub(crate) fn put_more(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        self.send(batch, libc::MSG_MORE)
    }

    /// As [`put`](Self::put), into a TCP socket that [allows it](Self::allow_lending), without the bytes being copied:
    /// they are to stay as they are until the socket's error queue says that they were sent.
    pub(crate) fn put_lent(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        self.send(batch, libc::MSG_ZEROCOPY)
    }

    fn send(&self, batch: &Batch<'_, Out>, flags: c_int) -> io::Result<usize> {
        let Self::Socket(fd, _) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        send(fd, batch, flags)
    }

    /// Has the socket take what is lent (`SO_ZEROCOPY`, socket(7)).
    pub(crate) fn allow_lending(&self) -> io::Result<()> {
        let (on, fd) = (1_i32, self.output().as_raw_fd());
        let length = libc::socklen_t::try_from(size_of_val(&on)).map_err(io::Error::other)?;
        // SAFETY: the option's value lives through the call and is as long as is said.
        let set = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, (&raw const on).cast(), length) };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Whether it has taken bytes that it has not written yet; `all`: also such as go out in front of others by
    /// themselves.
    pub(crate) fn holds_back(&self, all: bool) -> bool {
        matches!(self, Self::Tls(session) if session.holds_back(all))
    }

    /// Writes some of the bytes that it holds back.
    pub(crate) fn flush(&self) -> io::Result<usize> {
        if let Self::Tls(session) = self {
            session.flush()?;
        }
        Ok(0)
    }

    /// Writes some of the batch, descriptors with its first byte; returns how many bytes.
    pub(crate) fn put_with(&self, batch: &Batch<'_, Out>, descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let Self::Socket(fd, _) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        // SAFETY: the batch's entries are valid for reads.
        unsafe { passed_descriptors::send(fd.as_raw_fd(), batch.entries(), libc::MSG_NOSIGNAL, descriptors) }
    }

    /// Writes some bytes of a file, at most `length`, straight from the page cache; returns how many, 0 at its end.
    pub(crate) fn put_file(&self, file: BorrowedFd<'_>, mut offset: u64, length: usize) -> io::Result<usize> {
        if let Self::Tls(_) = self {
            // What the kernel sends by itself is not encrypted.
            return Err(Errno::OPNOTSUPP.into());
        }
        Ok(rustix::fs::sendfile(self.output(), file, Some(&mut offset), length)?)
    }

    /// Reads some of the batch, or all of it (`whole`) where the kernel can wait for that; returns how many bytes.
    pub(crate) fn get(&self, batch: &Batch<'_, In>, whole: bool) -> io::Result<usize> {
        match self {
            Self::Socket(fd, passed) if passed.wanted() != 0 => {
                let flags = if whole { libc::MSG_WAITALL } else { 0 };
                // SAFETY: the batch's entries are valid for writes.
                unsafe { passed.receive(fd.as_raw_fd(), batch.entries(), flags) }
            }
            Self::Socket(fd, _) => receive(fd, batch, if whole { libc::MSG_WAITALL } else { 0 }),
            Self::Tls(session) => session.get(batch, whole),
            Self::Pair { input: Half::Socket(fd), .. } => receive(fd, batch, libc::MSG_DONTWAIT),
            Self::Pipe(fd) | Self::Pair { input: Half::Pipe(fd), .. } => {
                let (list, count) = parts(batch.entries());
                // SAFETY: the batch's entries are valid for writes; the list has `count` of them.
                answer(unsafe { libc::readv(fd.as_raw_fd(), list, count) })
            }
        }
    }

    /// A second handle for the same end, with a descriptor of its own unless it is encrypted.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Socket(fd, passed) => Self::Socket(fd.try_clone()?, Arc::clone(passed)),
            Self::Tls(session) => Self::Tls(Arc::clone(session)),
            Self::Pipe(fd) => Self::Pipe(fd.try_clone()?),
            Self::Pair { input, output } => Self::Pair { input: input.try_clone()?, output: output.try_clone()? },
        })
    }

    /// The socket, if it is a single one.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket(fd, _) => Some(fd.as_fd()),
            Self::Tls(session) => Some(session.socket()),
            Self::Pipe(_) | Self::Pair { .. } => None,
        }
    }

    /// What gets read from.
    pub(crate) fn input(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(fd, _) | Self::Pipe(fd) => fd.as_fd(),
            Self::Tls(session) => session.socket(),
            Self::Pair { input, .. } => input.fd().as_fd(),
        }
    }

    /// What puts write to.
    pub(crate) fn output(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(fd, _) | Self::Pipe(fd) => fd.as_fd(),
            Self::Tls(session) => session.socket(),
            Self::Pair { output, .. } => output.fd().as_fd(),
        }
    }
}

/// As sendmsg(2) into a socket.
pub(crate) fn send(fd: &OwnedFd, batch: &Batch<'_, Out>, flags: c_int) -> io::Result<usize> {
    let flags = flags | libc::MSG_NOSIGNAL;
    if let [entry] = batch.entries() {
        // Measured to be a tenth cheaper than a message of one entry, for small ones.
        // SAFETY: the batch's entry is valid for reads.
        return answer(unsafe { libc::send(fd.as_raw_fd(), entry.iov_base, entry.iov_len, flags) });
    }
    let message = message(batch.entries());
    // SAFETY: the message and its list live through the call; the batch's entries are valid for reads.
    answer(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })
}

/// As recvmsg(2) from a socket.
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
pub(crate) fn put_at(fd: BorrowedFd<'_>, batch: &Batch<'_, Out>, offset: i64) -> io::Result<usize> {
    let (list, count) = parts(batch.entries());
    // SAFETY: the batch's entries are valid for reads; the list has `count` of them.
    answer(unsafe { libc::pwritev(fd.as_raw_fd(), list, count, offset) })
}

/// Reads some of the batch from a file offset.
pub(crate) fn get_at(fd: BorrowedFd<'_>, batch: &Batch<'_, In>, offset: i64) -> io::Result<usize> {
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
