//! The socket options of the kernel's TLS.
#![allow(unsafe_code, reason = "options that take structures of the kernel's")]

use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

use libc::c_int;
use rustix::io::Errno;
use rustls::ConnectionTrafficSecrets;

use super::key::Key;
use crate::tcp_info::TcpInfo;

// include/uapi/linux/tls.h
const TLS_TX: c_int = 1;
const TLS_RX: c_int = 2;

/// Time limit of a connection of this process to itself: a firewall may drop it.
const PROBED_WITHIN: Duration = Duration::from_secs(1);
/// Attempts to read a consistent pair of sent and acknowledged bytes.
const TRIES: usize = 64;

/// One of a socket's directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyDirection {
    Sending,
    Receiving,
}

/// TLS support of this kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Support {
    /// Unknown: this process may not connect to itself.
    Unknown,
    /// No TLS.
    None,
    /// A direction keeps its first key.
    Fixed,
    /// Keys can be renewed.
    Renews,
}

/// Determines the support once, on a connection of this process to itself: a key cannot be removed from a socket in
/// use.
pub(super) fn support() -> Support {
    static FOUND: OnceLock<Support> = OnceLock::new();
    *FOUND.get_or_init(|| probe().unwrap_or(Support::Unknown))
}

fn probe() -> std::io::Result<Support> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).or_else(|_| TcpListener::bind((Ipv6Addr::LOCALHOST, 0)))?;
    let socket = TcpStream::connect_timeout(&listener.local_addr()?, PROBED_WITHIN)?;
    match attach(socket.as_fd()) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::NOPROTOOPT) => return Ok(Support::None),
        Err(errno) => return Err(errno.into()),
    }
    let secrets = ConnectionTrafficSecrets::Aes256Gcm { key: [0; 32].into(), iv: [0; 12].into() };
    let Some(key) = Key::new(&secrets, 0) else { return Ok(Support::None) };
    set(socket.as_fd(), KeyDirection::Sending, &key)?;
    // EBUSY if the first key must stay.
    let again = set(socket.as_fd(), KeyDirection::Sending, &key);
    Ok(if again.is_ok() { Support::Renews } else { Support::Fixed })
}

/// Enables TLS on a connected TCP socket; nothing changes until it has a key. A kernel with TLS as a module loads it
/// for root only.
pub(super) fn attach(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    set_option(socket, libc::SOL_TCP, libc::TCP_ULP, b"tls")
}

/// Sets the key of a direction; a second one only if the kernel can renew keys.
pub(super) fn set(socket: BorrowedFd<'_>, direction: KeyDirection, key: &Key) -> Result<(), Errno> {
    set_option(socket, libc::SOL_TLS, name(direction), key.bytes())
}

/// Returns the number of the next record to send. `length` is the size of the key's structure.
pub(super) fn next_number(socket: BorrowedFd<'_>, length: usize) -> Result<u64, Errno> {
    let mut key = Key::room(length);
    let bytes = key.bytes_mut();
    let mut room = libc::socklen_t::try_from(bytes.len()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the room lives through the call, and has the given length.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_TLS,
            name(KeyDirection::Sending),
            bytes.as_mut_ptr().cast(),
            &raw mut room,
        )
    };
    if got == 0 { Ok(key.number()) } else { Err(last()) }
}

/// Returns the number of bytes ever queued in TCP, sent or not, and whether the connection is closed. The starting
/// value is arbitrary.
pub(super) fn queued(socket: BorrowedFd<'_>) -> Result<(u64, bool), Errno> {
    let mut acked = TcpInfo::of(socket)?.acknowledged;
    for _ in 0..TRIES {
        let mut waiting: c_int = 0;
        // SAFETY: the request (SIOCOUTQ, tcp(7)) writes one int, which lives through the call.
        if unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) } != 0 {
            return Err(last());
        }
        let TcpInfo { acknowledged: now, closed: over } = TcpInfo::of(socket)?;
        // Otherwise some were acknowledged between the calls.
        if std::mem::replace(&mut acked, now) == now {
            return Ok((now.wrapping_add_signed(waiting.into()), over));
        }
    }
    Err(Errno::AGAIN)
}

fn name(direction: KeyDirection) -> c_int {
    match direction {
        KeyDirection::Sending => TLS_TX,
        KeyDirection::Receiving => TLS_RX,
    }
}

fn set_option(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
    let length = libc::socklen_t::try_from(value.len()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the value lives through the call, and has the given length.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), length) };
    if set == 0 { Ok(()) } else { Err(last()) }
}

/// Returns the error of the last system call.
pub(super) fn last() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
