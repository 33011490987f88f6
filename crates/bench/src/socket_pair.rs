//! Two ends of a local stream socket, as limosa makes them for QEMU.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};

/// The send buffer of the pair that `limosa save` gives to QEMU, in bytes.
pub(crate) const WIDE: usize = 512 << 10;

/// The sender's end and the receiver's; with a send buffer of this size, or else of the system's default.
pub(crate) fn pair(buffer: Option<usize>) -> Result<(OwnedFd, OwnedFd)> {
    let (sender, receiver) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).context("socketpair")?;
    if let Some(bytes) = buffer {
        // The forced form passes the system's limit and needs CAP_NET_ADMIN.
        if sockopt::set_socket_send_buffer_size_force(&sender, bytes).is_err() {
            sockopt::set_socket_send_buffer_size(&sender, bytes).context("SO_SNDBUF")?;
        }
    }
    Ok((sender, receiver))
}
