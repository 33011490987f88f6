//! The monitor's socket: connecting within a time, receiving within a time, sending with descriptors.
//!
//! The descriptor stays in blocking mode: the watchdog process shares its open file description, and `O_NONBLOCK` would
//! be shared with it. Every call asks for non-blocking behaviour by itself (`MSG_DONTWAIT`) and waits in `poll`.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, recv, sendmsg, socket_with,
};

use super::MonitorAddress;

/// How many descriptors one message may carry; QEMU's commands take one.
const MAX_DESCRIPTORS: usize = 4;

/// The result of a bounded receive.
pub(crate) enum Received {
    Bytes(usize),
    Closed,
    TimedOut,
}

/// Connects. `Ok(None)`: a process listens but does not accept the connection within `patience`.
pub(super) fn connect_within(address: &MonitorAddress, patience: Duration) -> io::Result<Option<OwnedFd>> {
    match address {
        MonitorAddress::Unix(path) => connect_unix(path, patience),
        MonitorAddress::Tcp { host, port } => connect_tcp(host, *port, patience),
    }
}

/// Connects to a unix socket. `Ok(None)`: a process listens but does not accept the connection within `patience`.
pub(crate) fn connect_unix(path: &Path, patience: Duration) -> io::Result<Option<OwnedFd>> {
    let deadline = Instant::now() + patience;
    // A socket's path may be longer than the 107 bytes that fit into an address: then name it through its directory.
    let directory;
    let address = match SocketAddrUnix::new(path) {
        Err(Errno::NAMETOOLONG) => {
            let name = path.file_name().ok_or(Errno::INVAL)?;
            let parent = path.parent().ok_or(Errno::INVAL)?;
            directory = rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            SocketAddrUnix::new(Path::new(&format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name))?
        }
        other => other?,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            // The queue of connections that QEMU has not accepted is full; there is nothing to poll for.
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(other) => return Err(other.into()),
        }
    }
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(Some(socket))
}

fn connect_tcp(host: &str, port: u16, patience: Duration) -> io::Result<Option<OwnedFd>> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, patience) {
            Ok(stream) => {
                // Commands are small and are waited for: none may linger for an acknowledgement of the one before.
                stream.set_nodelay(true)?;
                return Ok(Some(stream.into()));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Whether descriptors can be passed through this socket.
pub(super) fn is_unix(socket: BorrowedFd<'_>) -> bool {
    rustix::net::sockopt::socket_domain(socket).is_ok_and(|domain| domain == AddressFamily::UNIX)
}

/// Waits for bytes until `deadline` (none: for ever) and takes what is there. Tries at least once.
pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], deadline: Option<Instant>) -> Result<Received, Errno> {
    loop {
        match recv(socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(Received::Closed),
            Ok((bytes, _)) => return Ok(Received::Bytes(bytes)),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if !ready(socket, PollFlags::IN, deadline)? {
                    return Ok(Received::TimedOut);
                }
            }
            Err(Errno::CONNRESET) => return Ok(Received::Closed),
            Err(other) => return Err(other),
        }
    }
}

/// Sends everything; the descriptors travel with the first byte. `Err(TIMEDOUT)` past the deadline.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    mut bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> Result<(), Errno> {
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(Errno::TOOBIG);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOBIG);
    }
    while !bytes.is_empty() {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => {
                bytes = bytes.get(sent..).unwrap_or_default();
                control.clear();
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if !ready(socket, PollFlags::OUT, deadline)? {
                    return Err(Errno::TIMEDOUT);
                }
            }
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

/// Whether the socket became ready before the deadline.
fn ready(socket: BorrowedFd<'_>, what: PollFlags, deadline: Option<Instant>) -> Result<bool, Errno> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), what)], timeout.as_ref()) {
            Ok(count) => return Ok(count > 0),
            Err(Errno::INTR) => {}
            Err(other) => return Err(other),
        }
    }
}
