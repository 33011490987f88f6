//! The ways to move bytes through a descriptor, one system call a method.
//!
//! [`Transport`] is where other ways of moving bytes are added. TLS is a variant that encrypts a batch into records. No
//! module above sees which variant it is.
#![allow(unsafe_code, reason = "passes descriptors, and sets an option that no library has")]

use std::io;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use libc::c_int;
use rustix::io::Errno;

use crate::passed_descriptors::{self, PassedDescriptors};
use crate::system_call;
use crate::tls::Session;
use crate::vector::{Batch, In, Out};

/// A connected descriptor, by the system calls it needs.
#[derive(Debug)]
pub(crate) enum Transport {
    /// A stream socket, in blocking mode unless its previous owner chose otherwise, and the descriptors received
    /// through it.
    Socket(OwnedFd, Arc<PassedDescriptors>),
    /// A stream socket whose bytes are encrypted.
    Tls(Arc<Session>),
    /// A pipe, or another descriptor that is read and written in order; in non-blocking mode.
    Pipe(OwnedFd),
    /// Two descriptors, one for each direction.
    Pair {
        /// The end that is read.
        input: Half,
        /// The end that is written.
        output: Half,
    },
}

/// A descriptor of one direction, which other processes may share.
#[derive(Debug)]
pub(crate) enum Half {
    /// A stream socket, left in its mode: the mode belongs to the open socket, and another program of a pipeline may
    /// share it and rely on it. Each call passes `MSG_DONTWAIT` instead.
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
    pub(crate) fn write(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        match self {
            Self::Socket(fd, _) => system_call::send(fd, batch, 0),
            Self::Tls(session) => session.write(batch),
            Self::Pair { output: Half::Socket(fd), .. } => system_call::send(fd, batch, libc::MSG_DONTWAIT),
            Self::Pipe(fd) | Self::Pair { output: Half::Pipe(fd), .. } => system_call::write(fd, batch),
        }
    }

    /// Writes as [`write`](Self::write) to a socket, and tells the kernel that more follows at once (`MSG_MORE`).
    pub(crate) fn write_more(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        self.send(batch, libc::MSG_MORE)
    }

    /// Writes as [`write`](Self::write), without a copy, to a TCP socket with [`SO_ZEROCOPY`](Self::enable_zero_copy).
    /// The bytes must not change until the socket's error queue reports that they were sent.
    pub(crate) fn write_zero_copy(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        self.send(batch, libc::MSG_ZEROCOPY)
    }

    fn send(&self, batch: &Batch<'_, Out>, flags: c_int) -> io::Result<usize> {
        let Self::Socket(fd, _) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        system_call::send(fd, batch, flags)
    }

    /// Enables `MSG_ZEROCOPY` on the socket (`SO_ZEROCOPY`, socket(7)).
    pub(crate) fn enable_zero_copy(&self) -> io::Result<()> {
        let (on, fd) = (1_i32, self.output().as_raw_fd());
        let length = libc::socklen_t::try_from(size_of_val(&on)).map_err(io::Error::other)?;
        // SAFETY: the option's value lives through the call and has the given length.
        let set = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, (&raw const on).cast(), length) };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Whether it buffers bytes that are not written yet.
    pub(crate) fn is_buffering(&self) -> bool {
        matches!(self, Self::Tls(session) if session.is_buffering())
    }

    /// Writes some of the buffered bytes.
    pub(crate) fn flush(&self) -> io::Result<usize> {
        if let Self::Tls(session) = self {
            session.flush()?;
        }
        Ok(0)
    }

    /// Writes some of the batch, and passes descriptors with its first byte; returns how many bytes.
    pub(crate) fn write_with_descriptors(
        &self,
        batch: &Batch<'_, Out>,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<usize> {
        let Self::Socket(fd, _) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        // SAFETY: the batch's entries are valid for reads.
        unsafe { passed_descriptors::send(fd.as_raw_fd(), batch.entries(), libc::MSG_NOSIGNAL, descriptors) }
    }

    /// Writes some bytes of a file, at most `length`, straight from the page cache; returns how many, 0 at its end.
    pub(crate) fn send_file(&self, file: BorrowedFd<'_>, mut offset: u64, length: usize) -> io::Result<usize> {
        if let Self::Tls(_) = self {
            // Sendfile bypasses the encryption.
            return Err(Errno::OPNOTSUPP.into());
        }
        Ok(rustix::fs::sendfile(self.output(), file, Some(&mut offset), length)?)
    }

    /// Reads some of the batch, or all of it (`whole`) if the kernel can wait for that; returns how many bytes.
    pub(crate) fn read(&self, batch: &Batch<'_, In>, whole: bool) -> io::Result<usize> {
        match self {
            Self::Socket(fd, passed) if passed.wanted() != 0 => {
                let flags = if whole { libc::MSG_WAITALL } else { 0 };
                // SAFETY: the batch's entries are valid for writes.
                unsafe { passed.receive(fd.as_raw_fd(), batch.entries(), flags) }
            }
            Self::Socket(fd, _) => system_call::receive(fd, batch, if whole { libc::MSG_WAITALL } else { 0 }),
            Self::Tls(session) => session.read(batch),
            Self::Pair { input: Half::Socket(fd), .. } => system_call::receive(fd, batch, libc::MSG_DONTWAIT),
            Self::Pipe(fd) | Self::Pair { input: Half::Pipe(fd), .. } => system_call::read(fd, batch),
        }
    }

    /// Creates a second handle for the same end, with a descriptor of its own unless it is encrypted.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Socket(fd, passed) => Self::Socket(fd.try_clone()?, Arc::clone(passed)),
            Self::Tls(session) => Self::Tls(Arc::clone(session)),
            Self::Pipe(fd) => Self::Pipe(fd.try_clone()?),
            Self::Pair { input, output } => Self::Pair { input: input.try_clone()?, output: output.try_clone()? },
        })
    }

    /// Returns the socket, if there is exactly one.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket(fd, _) => Some(fd.as_fd()),
            Self::Tls(session) => Some(session.socket()),
            Self::Pipe(_) | Self::Pair { .. } => None,
        }
    }

    /// Returns the descriptor that is read.
    pub(crate) fn input(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(fd, _) | Self::Pipe(fd) => fd.as_fd(),
            Self::Tls(session) => session.socket(),
            Self::Pair { input, .. } => input.fd().as_fd(),
        }
    }

    /// Returns the descriptor that is written.
    pub(crate) fn output(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(fd, _) | Self::Pipe(fd) => fd.as_fd(),
            Self::Tls(session) => session.socket(),
            Self::Pair { output, .. } => output.fd().as_fd(),
        }
    }
}
