//! A socket's error queue, where the kernel reports completions.
#![allow(unsafe_code, reason = "ancillary data is laid out by macros over raw memory")]

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::completions::Completion;

/// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED` (include/uapi/linux/errqueue.h).
const ORIGIN_ZEROCOPY: u8 = 5;
const CODE_COPIED: u8 = 1;

/// State of a TCP connection that is over (`include/net/tcp_states.h`).
const TCP_CLOSE: u8 = 7;

/// Pause between polls of a socket with both directions shut down: poll returns at once for it.
const HANG_UP_PAUSE: Duration = Duration::from_millis(1);

/// The completions of a socket; tests implement it without a kernel.
pub(super) trait ErrorQueue {
    /// Returns the next available completion, without waiting.
    fn next(&self) -> io::Result<Option<Completion>>;

    /// Waits at most `time` until there may be one. An error is the end of the connection.
    fn wait(&self, time: Duration) -> io::Result<()>;
}

/// The error queue of a socket.
pub(super) struct SocketQueue<'s>(pub(super) BorrowedFd<'s>);

impl ErrorQueue for SocketQueue<'_> {
    fn next(&self) -> io::Result<Option<Completion>> {
        loop {
            match receive(self.0) {
                Ok(Some(completion)) => return Ok(Some(completion)),
                // Another error, such as a message about the route.
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn wait(&self, time: Duration) -> io::Result<()> {
        // No event is requested: poll always reports errors.
        let mut polled = [PollFd::from_borrowed_fd(self.0, PollFlags::empty())];
        match poll(&mut polled, Timespec::try_from(time).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if polled.iter().any(|polled| polled.revents().contains(PollFlags::HUP)) {
            // A reading thread may have consumed the reason already.
            sockopt::socket_error(self.0)??;
            if is_closed(self.0)? {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            // Both directions are shut down, and data written before is still being sent.
            thread::sleep(time.min(HANG_UP_PAUSE));
        }
        Ok(())
    }
}

/// Whether a TCP connection is over, and not only both of its directions shut down (`TCP_INFO`, tcp(7)).
fn is_closed(socket: BorrowedFd<'_>) -> io::Result<bool> {
    // The first byte is tcpi_state (include/uapi/linux/tcp.h); the kernel writes only as much as there is room for.
    let (mut state, mut length) = (0_u8, 1);
    let place = (&raw mut state).cast();
    // SAFETY: the state and the length live through the call, which writes no more bytes than the length says.
    let got = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_TCP, libc::TCP_INFO, place, &raw mut length) };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(state == TCP_CLOSE) }
}

/// Receives one message of the queue; `None` if it is no completion.
fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Completion>> {
    // A header, the error and an address of either family take less. Words, because headers must be aligned.
    let mut control = [0_u64; 16];
    // SAFETY: all zero is the header of an empty message; its fields differ between C libraries, hence no literal.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the message and its room for ancillary data live through the call.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    if message.msg_flags & libc::MSG_ERRQUEUE == 0 {
        // A socket without such a queue returned something else, or nothing.
        return Err(io::ErrorKind::WouldBlock.into());
    }
    // SAFETY: the macros walk the headers that the kernel wrote, within `msg_controllen`.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let kind = ((*header).cmsg_level, (*header).cmsg_type);
            let is_error = matches!(kind, (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR));
            let length = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
            if is_error && length >= size_of::<libc::sock_extended_err>() {
                let error: libc::sock_extended_err = ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                if error.ee_origin == ORIGIN_ZEROCOPY && error.ee_errno == 0 {
                    let copied = error.ee_code & CODE_COPIED != 0;
                    return Ok(Some(Completion { first: error.ee_info, last: error.ee_data, copied }));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok(None)
}
