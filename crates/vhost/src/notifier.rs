//! Descriptors that carry notifications: kicks, calls and errors of rings. An eventfd, a pipe, or a socket (user-mode
//! Linux calls through one).
//!
//! Law: a passive other end never makes this end wait. An active one can: it shares the open file description, and may
//! make it blocking again and fill it. So only the connection's threads write and drain notifiers; a server that is
//! stopped abandons them if necessary ([`crate::Stopper`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// A descriptor that carries notifications.
#[derive(Debug)]
pub(crate) struct Notifier {
    descriptor: OwnedFd,
    socket: bool,
}

impl Notifier {
    /// A descriptor that is not a socket is made non-blocking. That does not disturb its other users: they poll it.
    pub(crate) fn new(descriptor: OwnedFd) -> Self {
        let kind = fstat(&descriptor).map(|status| FileType::from_raw_mode(status.st_mode));
        let socket = matches!(kind, Ok(FileType::Socket));
        if !socket {
            let _ = rustix::io::ioctl_fionbio(&descriptor, true);
        }
        Self { descriptor, socket }
    }

    /// Sends a notification. A full descriptor is readable already; if its other end is closed, the failure has no
    /// effect here.
    pub(crate) fn notify(&self) {
        let one = 1_u64.to_ne_bytes();
        let _ = if self.socket {
            send(&self.descriptor, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        } else {
            rustix::io::write(&self.descriptor, &one)
        };
    }

    /// Reads the notifications that came. `false` if its other end is closed.
    pub(crate) fn drain(&self) -> bool {
        let mut bytes = [0; 512];
        let taken = if self.socket {
            recv(&self.descriptor, &mut bytes, RecvFlags::DONTWAIT).map(|(_, taken)| taken)
        } else {
            rustix::io::read(&self.descriptor, &mut bytes)
        };
        matches!(taken, Ok(1..) | Err(Errno::AGAIN | Errno::INTR))
    }
}

impl AsFd for Notifier {
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
    fn a_notification_to_a_full_eventfd_does_not_wait() {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&descriptor, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let notifier = Notifier::new(descriptor);
        notifier.notify();
        assert!(notifier.drain() && notifier.drain());
    }

    #[test]
    fn a_socket_is_read_empty_and_its_end_is_seen() {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let (ours, theirs) = (Notifier::new(ours), Notifier::new(theirs));
        for _ in 0..3 {
            theirs.notify();
        }
        assert!(ours.drain(), "three times eight bytes");
        assert!(ours.drain(), "nothing more to read, and no wait for it");
        drop(theirs);
        assert!(!ours.drain());
        ours.notify();
    }
}
