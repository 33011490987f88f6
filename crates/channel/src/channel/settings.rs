//! Settings of a channel's socket or pipe.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};

use super::{Channel, Result};
use crate::error::Operation;

impl Channel {
    /// Sets how long a read or write may last without a byte moving; `None` is for ever. A call in progress keeps its
    /// time-out. The bound holds within a factor of two, because the kernel's clock restarts with each system call.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> Result<()> {
        for (direction, id, time) in
            [(&self.state.input, sockopt::Timeout::Recv, read), (&self.state.output, sockopt::Timeout::Send, write)]
        {
            // Zero would mean for ever to the kernel.
            let time = time.map(|time| time.max(Duration::from_millis(1)));
            if let Some(socket) = self.transport.socket() {
                sockopt::set_socket_timeout(socket, id, time)
                    .map_err(|e| self.failed(Operation::Configure, e.into()))?;
            }
            direction.set_timeout(time);
        }
        Ok(())
    }

    /// Has the kernel end a TCP connection whose peer's host has not answered for about this time, also while nothing
    /// is transferred. Other channels end by themselves with the peer.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_keep_alive(&self, within: Duration) -> Result<()> {
        /// Probes that stay unanswered.
        const PROBES: u32 = 4;
        let Some(socket) = self.transport.socket() else { return Ok(()) };
        let set = || {
            if !matches!(sockopt::socket_domain(socket)?, AddressFamily::INET | AddressFamily::INET6) {
                return Ok(());
            }
            // Half of the time for silence, half for probes, within the kernel's limits (tcp(7): MAX_TCP_KEEPIDLE).
            let time = |time: Duration| {
                time.clamp(Duration::from_secs(1), Duration::from_secs(i16::MAX.unsigned_abs().into()))
            };
            sockopt::set_tcp_keepidle(socket, time(within / 2))?;
            sockopt::set_tcp_keepintvl(socket, time(within / 2 / PROBES))?;
            sockopt::set_tcp_keepcnt(socket, PROBES)?;
            sockopt::set_socket_keepalive(socket, true)
        };
        set().map_err(|error: Errno| self.failed(Operation::Configure, error.into()))
    }

    /// Requests kernel buffers of these sizes in bytes; `None` leaves a buffer unchanged. The kernel grants what its
    /// limits allow (`net.core.wmem_max`, `rmem_max`, `fs.pipe-max-size`), which is no error. A pipe has one buffer,
    /// the larger.
    ///
    /// # Errors
    /// If the kernel refuses altogether.
    pub fn set_buffers(&self, send: Option<usize>, receive: Option<usize>) -> Result<()> {
        match self.transport.socket() {
            Some(socket) => {
                grow_buffers(socket, send, receive).map_err(|e| self.failed(Operation::Configure, e.into()))
            }
            None => {
                if let Some(size) = send.max(receive) {
                    // Above the limit (EPERM), too small for its contents (EBUSY), or no pipe at all (EBADF): the
                    // buffer stays as it is, and works.
                    let _granted = rustix::pipe::fcntl_setpipe_size(self.transport.output(), size);
                    let _granted = rustix::pipe::fcntl_setpipe_size(self.transport.input(), size);
                }
                Ok(())
            }
        }
    }
}

/// Sets buffer sizes: beyond the system's limits if privileged, otherwise up to them.
pub(super) fn grow_buffers(
    socket: impl AsFd,
    send: Option<usize>,
    receive: Option<usize>,
) -> std::result::Result<(), Errno> {
    // The kernel doubles the value, in an int.
    const MAX: usize = 1 << 30;
    if let Some(size) = send.map(|size| size.min(MAX)) {
        sockopt::set_socket_send_buffer_size_force(&socket, size)
            .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, size))?;
    }
    if let Some(size) = receive.map(|size| size.min(MAX)) {
        sockopt::set_socket_recv_buffer_size_force(&socket, size)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, size))?;
    }
    Ok(())
}
