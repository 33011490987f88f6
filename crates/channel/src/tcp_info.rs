//! State of a TCP connection (`TCP_INFO`, tcp(7)).
#![allow(unsafe_code, reason = "an option that no library reads")]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

// include/uapi/linux/tcp.h: where struct tcp_info has tcpi_bytes_acked, in words of 8 bytes, and the value of
// tcpi_state, its first byte, that include/net/tcp_states.h calls TCP_CLOSE.
const BYTES_ACKED: usize = 15;
const CLOSE: u8 = 7;

/// The fields of `struct tcp_info` that are used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcpInfo {
    /// Whether the connection is over, and not only both of its directions shut down.
    pub(crate) closed: bool,
    /// Bytes that the peer has acknowledged. The starting value is arbitrary.
    pub(crate) acknowledged: u64,
}

impl TcpInfo {
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Result<Self, Errno> {
        let mut info = [0_u64; BYTES_ACKED + 1];
        let mut room = libc::socklen_t::try_from(size_of_val(&info)).map_err(|_| Errno::INVAL)?;
        // SAFETY: the room lives through the call, and is as long as is said.
        let got = unsafe {
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut room)
        };
        if got != 0 {
            return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
        }
        let [state, ..] = info[0].to_ne_bytes();
        Ok(Self { closed: state == CLOSE, acknowledged: info[BYTES_ACKED] })
    }
}
