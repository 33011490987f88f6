//! Who is at the other end of a unix socket.
#![allow(unsafe_code)] // rustix's call cannot express a peer that has no number in this pid namespace.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The process at the other end of a unix socket, as it was when it made that end (unix(7), `SO_PEERCRED`): it may have
/// changed its user since. Of a socket pair, the process that made the pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its number; `None` if it has none in this process's pid namespace: it is in another container.
    pub(crate) pid: Option<u32>,
    /// Its effective user.
    pub(crate) uid: u32,
    /// Its effective group.
    pub(crate) gid: u32,
}

impl Peer {
    /// Asks the kernel.
    ///
    /// # Errors
    /// If the socket is no unix socket.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let mut found = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
        let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).map_err(io::Error::other)?;
        // SAFETY: both pointers are to live values of this function, `length` says how long the first is, and any bytes
        // that the kernel puts there are a valid `ucred`.
        let answer = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut length,
            )
        };
        if answer != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { pid: u32::try_from(found.pid).ok().filter(|pid| *pid > 0), uid: found.uid, gid: found.gid })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_peer_of_a_pair_is_who_made_it_and_other_sockets_have_none() {
        let (near, _far) = UnixStream::pair().unwrap();
        let peer = Peer::of(near.as_fd()).unwrap();
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        assert_eq!((peer.pid, (peer.uid, peer.gid)), (Some(std::process::id()), own));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(Peer::of(listener.as_fd()).map(|peer| peer.pid).unwrap_or_default(), None);
    }
}
