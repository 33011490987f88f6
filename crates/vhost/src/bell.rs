//! Descriptors that are written to and read from so that somebody takes notice: an eventfd, a pipe, or a socket (user-mode Linux
//! calls through one).
//!
//! Law: nothing that the other end leaves undone keeps us waiting. What it does can: the open file is its own too, and it may make
//! that blocking again and fill it. So bells are rung and hushed by threads of the connection alone, which a server that is
//! stopped leaves behind if it has to ([`crate::Stopper`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// One of them.
#[derive(Debug)]
pub(crate) struct Bell {
    descriptor: OwnedFd,
    socket: bool,
}

impl Bell {
    /// What is not a socket is made non-blocking, which its other users do not mind: they poll it.
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        let kind = fstat(&descriptor).map(|status| FileType::from_raw_mode(status.st_mode));
        let socket = matches!(kind, Ok(FileType::Socket));
        if !socket {
            let _ = rustix::io::ioctl_fionbio(&descriptor, true);
        }
        Self { descriptor, socket }
    }

    /// Rings it. One that is full rings already; one that nobody listens to is not our loss.
    pub(crate) fn ring(&self) {
        let one = 1_u64.to_ne_bytes();
        let _ = if self.socket {
            send(&self.descriptor, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        } else {
            rustix::io::write(&self.descriptor, &one)
        };
    }

    /// Takes in that it was rung; `false` if nobody can ring it any more.
    pub(crate) fn hush(&self) -> bool {
        let mut bytes = [0; 512];
        let taken = if self.socket {
            recv(&self.descriptor, &mut bytes, RecvFlags::DONTWAIT).map(|(_, taken)| taken)
        } else {
            rustix::io::read(&self.descriptor, &mut bytes)
        };
        matches!(taken, Ok(1..) | Err(Errno::AGAIN | Errno::INTR))
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn an_eventfd_that_is_full_keeps_nobody_waiting() {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&descriptor, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let bell = Bell::new(descriptor);
        bell.ring();
        assert!(bell.hush() && bell.hush());
    }

    #[test]
    fn a_socket_is_read_empty_and_its_end_is_seen() {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let (ours, theirs) = (Bell::new(ours), Bell::new(theirs));
        for _ in 0..3 {
            theirs.ring();
        }
        assert!(ours.hush(), "three times eight bytes");
        assert!(ours.hush(), "nothing more, and nobody waits for it");
        drop(theirs);
        assert!(!ours.hush());
        ours.ring();
    }
}
