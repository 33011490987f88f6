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

/// How long a connection of this process to itself may take: a firewall may swallow it.
const PROBED_WITHIN: Duration = Duration::from_secs(1);
/// How often what goes out and what was acknowledged are read until they fit together.
const TRIES: usize = 64;

/// One of a socket's directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyDirection {
    Sending,
    Receiving,
}

/// What this kernel can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Support {
    /// It could not be found out: this process may not connect to itself.
    Unknown,
    /// It has no TLS.
    None,
    /// A direction keeps its first key.
    Fixed,
    /// Keys can be renewed.
    Renews,
}

/// Found out once, by a connection of this process to itself: a key cannot be taken back from a socket that others
/// need.
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
    // EBUSY where it has to stay with the first one.
    let again = set(socket.as_fd(), KeyDirection::Sending, &key);
    Ok(if again.is_ok() { Support::Renews } else { Support::Fixed })
}

/// Has a connected TCP socket take keys; until it has one nothing changes. A kernel whose TLS is a module loads it for
/// root only.
pub(super) fn attach(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    set_option(socket, libc::SOL_TCP, libc::TCP_ULP, b"tls")
}

/// Gives it a direction's key; a second one where it can renew keys.
pub(super) fn set(socket: BorrowedFd<'_>, direction: KeyDirection, key: &Key) -> Result<(), Errno> {
    set_option(socket, libc::SOL_TLS, name(direction), key.bytes())
}

/// The number of the next record that is sent. `length` is that of the key's structure.
pub(super) fn next_number(socket: BorrowedFd<'_>, length: usize) -> Result<u64, Errno> {
    let mut key = Key::room(length);
    let bytes = key.bytes_mut();
    let mut room = libc::socklen_t::try_from(bytes.len()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the room lives through the call, and is as long as is said.
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

/// How many bytes TCP was ever given to send, of which it may have sent none, and whether the connection is over. It
/// counts from where it likes.
pub(super) fn given(socket: BorrowedFd<'_>) -> Result<(u64, bool), Errno> {
    let mut acked = TcpInfo::of(socket)?.acknowledged;
    for _ in 0..TRIES {
        let mut waiting: c_int = 0;
        // SAFETY: the request (SIOCOUTQ, tcp(7)) writes one int, which lives through the call.
        if unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) } != 0 {
            return Err(last());
        }
        let TcpInfo { acknowledged: now, closed: over } = TcpInfo::of(socket)?;
        // Else some of them were acknowledged in between.
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
    // SAFETY: the value lives through the call, and is as long as is said.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), length) };
    if set == 0 { Ok(()) } else { Err(last()) }
}

/// What the call before has failed with.
pub(super) fn last() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
