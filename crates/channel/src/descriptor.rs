//! Inherited descriptors: taking possession of a number, and determining its type.
//!
//! The law of this module: a number is taken at most once. A descriptor that was inherited on purpose survived `exec`,
//! so it has no close-on-exec flag; one that this process opened itself has it, as Rust sets it everywhere. Taking a
//! number sets the flag. So neither a second attempt nor a mistyped number can steal a descriptor that is in use here.
#![allow(unsafe_code, reason = "turns a number into an owned descriptor")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::{self, FileType, Mode, OFlags};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::stdio;

use crate::error::{ChannelError, Operation};

/// Takes over the descriptor with this number.
///
/// Standard input, output and error are moved to another number and replaced by `/dev/null`, so that other output does
/// not end up in the stream.
pub(crate) fn take(number: RawFd, operation: Operation) -> Result<OwnedFd, ChannelError> {
    let peer = || Arc::<str>::from(format!("fd:{number}"));
    let failed = |source: io::Error| ChannelError::setup(operation, peer(), source);
    let unsupported = |why| ChannelError::Unsupported { operation, peer: peer(), why };
    if number < 0 {
        return Err(unsupported("a descriptor number must not be negative"));
    }
    // SAFETY: only its flags are read; if it is closed, the kernel reports EBADF.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(borrowed).map_err(|errno| match errno {
        rustix::io::Errno::BADF => unsupported("no such descriptor is open in this process"),
        errno => failed(errno.into()),
    })?;
    if number <= 2 {
        let moved = fcntl_dupfd_cloexec(borrowed, 3).map_err(|e| failed(e.into()))?;
        let null =
            fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|e| failed(e.into()))?;
        let replaced = match number {
            0 => stdio::dup2_stdin(&null),
            1 => stdio::dup2_stdout(&null),
            _ => stdio::dup2_stderr(&null),
        };
        replaced.map_err(|e| failed(e.into()))?;
        return Ok(moved);
    }
    if flags.contains(FdFlags::CLOEXEC) {
        return Err(unsupported("this descriptor was not inherited, or is in use already"));
    }
    fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    // SAFETY: the descriptor is open, was inherited for this purpose, and the flag says that this process has not taken
    // it before.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Type of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A connected stream socket of this family.
    Stream(AddressFamily),
    /// A stream socket that waits for connections.
    Listening,
    /// Bytes in order: a pipe, a terminal, an open file.
    Ordered,
    /// Cannot carry a channel; the reason.
    Unsupported(&'static str),
}

/// Determines the type of a descriptor.
pub(crate) fn kind(fd: impl AsFd) -> io::Result<Kind> {
    let stat = fs::fstat(&fd)?;
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::Socket if sockopt::socket_type(&fd)? != SocketType::STREAM => {
            Kind::Unsupported("the socket keeps message boundaries; expected a stream socket")
        }
        FileType::Socket if sockopt::socket_acceptconn(&fd)? => Kind::Listening,
        FileType::Socket => Kind::Stream(sockopt::socket_domain(&fd)?),
        FileType::Fifo | FileType::CharacterDevice | FileType::RegularFile => Kind::Ordered,
        FileType::Directory => Kind::Unsupported("it is a directory"),
        _ => Kind::Unsupported("expected a stream socket, a pipe or a file"),
    })
}
