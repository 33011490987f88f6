//! Zero-copy sends of a channel.
//!
//! The law of this module: a write under any method has the same outcome as a plain one, including errors, time-outs,
//! rate limit and shutdown.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrAny, connect_unspec, getpeername, getsockname, shutdown, sockopt,
};

use super::ZeroCopy;
use super::error_queue::SocketQueue;
use super::msg::{self, Sends};
use super::splice::Pipe;
use crate::direction::{Stop, Transfer};
use crate::options;
use crate::transport::Transport;
use crate::vector::{Batch, Cursor, Out};

/// Attempts to cut a connection.
const ABORTS: u32 = 100;

/// User time-out of a connection that could not be cut, in milliseconds.
const USER_TIMEOUT_MS: u32 = 1000;

/// How long queued data may still be sent on a connection that could not be cut.
const DRAIN_WITHIN: Duration = Duration::from_secs(3);

/// The reason why a named method is unavailable.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The transport does not support it.
    Unsupported(&'static str),
    /// The process may pin `limit` bytes, and the method needs `least`.
    MemoryLock { limit: u64, least: u64 },
    /// The kernel's answer.
    Failed(io::Error),
}

/// A write of two parts; the second one need not be copied.
pub(crate) struct Parts<'l> {
    pub(crate) copied: Cursor<'l, Out>,
    pub(crate) pages: Cursor<'l, Out>,
    /// Both parts, for a method that copies.
    pub(crate) all: Cursor<'l, Out>,
    /// The memory of `pages` must be free after a flush, so it is not spliced.
    pub(crate) reused: bool,
}

/// The zero-copy method of a channel, and its sends in flight.
#[derive(Debug)]
pub(crate) struct ZeroCopySender {
    /// The requested method. Under [`ZeroCopy::Auto`] a method that turns out to copy is replaced by another.
    setting: ZeroCopy,
    /// Number of the method, readable while a write holds the lock.
    method: AtomicU8,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    method: Method,
    sends: Sends,
}

#[derive(Debug)]
enum Method {
    Copy,
    Msg,
    Splice(Pipe),
}

/// Numbers of the methods.
const COPY: u8 = 0;
const MSG: u8 = 1;
const SPLICE: u8 = 2;

impl Method {
    fn number(&self) -> u8 {
        match self {
            Self::Copy => COPY,
            Self::Msg => MSG,
            Self::Splice(_) => SPLICE,
        }
    }
}

impl ZeroCopySender {
    /// Selects the method for `setting` on this transport.
    pub(crate) fn new(setting: ZeroCopy, transport: &Transport) -> Result<Self, Refusal> {
        let chosen = match setting {
            ZeroCopy::Off => Method::Copy,
            ZeroCopy::Msg => msg_zerocopy(transport)?,
            ZeroCopy::Splice => {
                socket(transport)?;
                Method::Splice(Pipe::new().map_err(Refusal::Failed)?)
            }
            ZeroCopy::Auto => match socket(transport) {
                Err(_) => Method::Copy,
                Ok(fd) if is_local(fd) => Pipe::new().map_or(Method::Copy, Method::Splice),
                Ok(_) => msg_zerocopy(transport).unwrap_or(Method::Copy),
            },
        };
        let method = AtomicU8::new(chosen.number());
        let state = State { method: chosen, sends: Sends::default() };
        Ok(Self { setting, method, state: Mutex::new(state) })
    }

    /// Returns the requested method.
    pub(crate) fn setting(&self) -> ZeroCopy {
        self.setting
    }

    /// Returns the method in use: never [`ZeroCopy::Auto`].
    pub(crate) fn method(&self) -> ZeroCopy {
        match self.method.load(Ordering::Relaxed) {
            MSG => ZeroCopy::Msg,
            SPLICE => ZeroCopy::Splice,
            _ => ZeroCopy::Off,
        }
    }

    /// Writes both parts, the second one without a copy if the method allows.
    pub(crate) fn write_all(&self, out: Transfer<'_>, parts: Parts<'_>) -> Result<(), Stop> {
        let Parts { mut copied, mut pages, mut all, reused } = parts;
        let mut state = self.state.lock();
        let State { method, sends } = &mut *state;
        // With nothing to follow, MSG_MORE would hold the header back.
        let no_pages = pages.left() == 0;
        match method {
            Method::Msg if !no_pages && !sends.skips() => {
                out.write_all_by(&mut copied, |batch| out.transport.write_more(batch))?;
                let queue = SocketQueue(out.transport.output());
                let send = |batch: &Batch<'_, Out>, zero_copy| match zero_copy {
                    true => out.transport.write_zero_copy(batch),
                    false => out.transport.write(batch),
                };
                let written = sends.send_all(out, &mut pages, &queue, send);
                let hopeless = sends.is_refused();
                self.check_for_copies(&mut state, hopeless);
                written
            }
            Method::Splice(pipe) if !no_pages && !reused => {
                out.write_all_by(&mut copied, |batch| out.transport.write_more(batch))?;
                let spliced = pipe.send_all(out, &mut pages);
                if spliced.is_err() {
                    // The rest in the pipe must not go out before later data.
                    self.change_method(method, Method::Copy);
                }
                spliced
            }
            _ => out.write_all(&mut all, &[]),
        }
    }

    /// Waits until all sends are complete, unless the channel is `given_up`. Data written before a shutdown of this
    /// direction alone is still sent, and waited for.
    pub(crate) fn flush(&self, out: Transfer<'_>, given_up: impl Fn() -> bool) -> Result<(), Stop> {
        let mut state = self.state.lock();
        let flushed = state.sends.wait_all(out.direction, &SocketQueue(out.transport.output()), given_up);
        self.check_for_copies(&mut state, false);
        flushed
    }

    /// If sends are incomplete, cuts the connection at once and discards queued data.
    pub(crate) fn abort(&self, transport: &Transport) {
        let mut state = self.state.lock();
        if !state.sends.is_incomplete() {
            return;
        }
        // A shutdown or a close would still send it (tcp(7), connect(2) on AF_UNSPEC). Some kernels refuse while
        // another thread waits in the socket; a shutdown wakes it.
        for _ in 0..ABORTS {
            match connect_unspec(transport.output()) {
                Ok(()) | Err(Errno::NOTCONN) => return state.sends.forget(),
                Err(_) => {
                    let _ = shutdown(transport.output(), Shutdown::Both);
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        // The kernel cuts a connection by itself if the peer acknowledges nothing.
        let _ = sockopt::set_tcp_user_timeout(transport.output(), USER_TIMEOUT_MS);
        state.sends.drain_within(&SocketQueue(transport.output()), DRAIN_WITHIN);
    }

    fn check_for_copies(&self, state: &mut State, hopeless: bool) {
        let copies = hopeless || state.sends.only_copies();
        if self.setting == ZeroCopy::Auto && matches!(state.method, Method::Msg) && copies {
            self.change_method(&mut state.method, Pipe::new().map_or(Method::Copy, Method::Splice));
        }
    }

    fn change_method(&self, method: &mut Method, to: Method) {
        self.method.store(to.number(), Ordering::Relaxed);
        *method = to;
    }
}

/// Returns the socket of a transport with exactly one.
fn socket(transport: &Transport) -> Result<BorrowedFd<'_>, Refusal> {
    match transport {
        Transport::Socket(..) => Ok(transport.output()),
        Transport::Tls(_) => Err(Refusal::Unsupported(options::COPIED_BY_TLS)),
        Transport::Pipe(_) | Transport::Pair { .. } => {
            Err(Refusal::Unsupported("zero-copy needs a socket of its own: tcp, or unix for splice"))
        }
    }
}

fn msg_zerocopy(transport: &Transport) -> Result<Method, Refusal> {
    let fd = socket(transport)?;
    let family = sockopt::socket_domain(fd).map_err(|errno| Refusal::Failed(errno.into()))?;
    if !matches!(family, AddressFamily::INET | AddressFamily::INET6) {
        return Err(Refusal::Unsupported("MSG_ZEROCOPY is for TCP; on a unix socket splice saves the copy"));
    }
    msg::check_memlock().map_err(|limit| Refusal::MemoryLock { limit, least: msg::PINNED_MIN })?;
    transport.enable_zero_copy().map_err(Refusal::Failed)?;
    // An unread completion is an error that poll reports at once, so poll could not wait for room: the socket must
    // block.
    let blocking = || fcntl_setfl(fd, fcntl_getfl(fd)? - OFlags::NONBLOCK);
    blocking().map_err(|errno: Errno| Refusal::Failed(errno.into()))?;
    Ok(Method::Msg)
}

/// Whether the peer is known to be on this machine.
fn is_local(fd: BorrowedFd<'_>) -> bool {
    let inet =
        |address: SocketAddrAny| std::net::SocketAddr::try_from(address).ok().map(|inet| inet.ip().to_canonical());
    match sockopt::socket_domain(fd) {
        Ok(AddressFamily::UNIX) => true,
        Ok(AddressFamily::INET | AddressFamily::INET6) => {
            let peer = getpeername(fd).ok().flatten().and_then(inet);
            let own = getsockname(fd).ok().and_then(inet);
            peer.is_some_and(|peer| peer.is_loopback() || Some(peer) == own)
        }
        _ => false,
    }
}
