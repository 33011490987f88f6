//! Connecting to the end point of a URI.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::addr::SocketAddrArg;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};

use crate::channel::Channel;
use crate::descriptor;
use crate::error::{ChannelError, Operation};
use crate::options::Options;
use crate::uri::Uri;
use crate::vsock::VsockAddress;

const OPERATION: Operation = Operation::Connect;

impl Channel {
    /// Connects to a `tcp:`, `unix:` or `vsock:` listener, or takes over the descriptor of `fd:` or those of `-`.
    ///
    /// `fd:N` takes possession of number N: it must be open, inherited by this process, and not taken before.
    ///
    /// With [`Options::tls`] of a client the handshake is complete when this returns, unless it is
    /// [deferred](crate::Tls::with_deferred_handshake): stock QEMU takes the first channel that completes the handshake
    /// as the main one.
    ///
    /// # Errors
    /// [`ChannelError::Refused`] if no process listens, [`ChannelError::TimedOut`] after `options.connect_timeout`,
    /// [`ChannelError::Unsupported`] for `file:` (open it as a [`FileChannel`](crate::FileChannel)), for `exec:` (start
    /// it as an [`Exec`](crate::Exec)), and for `-` if standard input and output do not carry a direction each;
    /// [`ChannelError::Tls`] if the peer's identity is wrong.
    pub fn connect(uri: &Uri, options: &Options) -> Result<Self, ChannelError> {
        let peer: Arc<str> = uri.to_string().into();
        options.check(OPERATION, &peer)?;
        let timeout = options.connect_timeout.map(|time| time.max(Duration::from_millis(1)));
        if uri.is_socket() && options.tls.as_ref().is_some_and(|tls| !tls.is_client()) {
            let why = "a connecting end needs TLS credentials of a client, with the expected host name";
            return Err(ChannelError::Unsupported { operation: OPERATION, peer, why });
        }
        let connected = match uri {
            Uri::Tcp { host, port } => tcp(host, *port, timeout),
            Uri::Unix(path) => unix(path, timeout),
            Uri::Vsock { cid, port } => vsock(VsockAddress { cid: *cid, port: *port }, timeout),
            Uri::Fd(number) => Ok(descriptor::take(*number, OPERATION)?),
            Uri::Stdio => return Self::stdio(options),
            Uri::Exec(_) => {
                let why = "a command must be started and waited for";
                return Err(ChannelError::Unsupported { operation: OPERATION, peer, why });
            }
            Uri::File { .. } => {
                let why = "a file is not a stream; open it as a file";
                return Err(ChannelError::Unsupported { operation: OPERATION, peer, why });
            }
        };
        let mut options = options.clone();
        if let (Some(tls), Uri::Tcp { host, .. }) = (&mut options.tls, uri) {
            *tls = tls.to_host(host);
        }
        let fd = connected.map_err(|source| match (source.kind(), timeout) {
            (io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock, Some(after)) => {
                ChannelError::TimedOut { operation: OPERATION, peer: peer.clone(), offset: None, after }
            }
            // The answer of a machine with vsock where no process listens is a reset.
            (kind, _)
                if kind == io::ErrorKind::ConnectionRefused
                    || (kind == io::ErrorKind::ConnectionReset && matches!(uri, Uri::Vsock { .. })) =>
            {
                ChannelError::Refused { operation: OPERATION, peer: peer.clone(), source }
            }
            _ => ChannelError::setup(OPERATION, peer.clone(), source),
        })?;
        Self::over(fd, peer, &options)
    }

    /// Connects to standard input and output: the channel of a program that another one runs, locally or through ssh.
    fn stdio(options: &Options) -> Result<Self, ChannelError> {
        let peer: Arc<str> = "standard input and output".into();
        let failed = |source: io::Error| ChannelError::setup(OPERATION, peer.clone(), source);
        for (fd, why) in [
            (rustix::stdio::stdin(), "standard input is not a pipe or socket"),
            (rustix::stdio::stdout(), "standard output is not a pipe or socket"),
        ] {
            // A file or /dev/null would not answer, and a stream would garble a terminal.
            let found = rustix::fs::fstat(fd).map_err(|errno| failed(errno.into()))?;
            if !matches!(FileType::from_raw_mode(found.st_mode), FileType::Fifo | FileType::Socket) {
                return Err(ChannelError::Unsupported { operation: OPERATION, peer, why });
            }
        }
        let (input, output) = (descriptor::take(0, OPERATION)?, descriptor::take(1, OPERATION)?);
        Self::over_two(input, output, peer, options)
    }
}

/// Tries every address of the host in the resolver's order, all within the time; the last failure is reported.
fn tcp(host: &str, port: u16, timeout: Option<Duration>) -> io::Result<OwnedFd> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    let began = Instant::now();
    for address in (host, port).to_socket_addrs()? {
        let rest = timeout.map(|time| time.saturating_sub(began.elapsed()));
        if rest == Some(Duration::ZERO) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match tcp_to(&address, rest) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn tcp_to(address: &SocketAddr, timeout: Option<Duration>) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    unpaced(&socket, address);
    connect_within(&socket, address, timeout)?;
    Ok(socket)
}

fn vsock(address: VsockAddress, timeout: Option<Duration>) -> io::Result<OwnedFd> {
    let socket = VsockAddress::connecting_socket(timeout)?;
    connect_within(&socket, &address, timeout)?;
    Ok(socket)
}

/// Connects a socket in non-blocking mode, which is then in blocking mode.
fn connect_within(socket: &OwnedFd, address: &impl SocketAddrArg, timeout: Option<Duration>) -> io::Result<()> {
    match connect(socket, address) {
        Ok(()) => {}
        // In progress. An interrupted connect continues in the background as well (connect(2)).
        Err(Errno::INPROGRESS | Errno::INTR) => {
            wait_connected(socket, timeout)?;
            sockopt::socket_error(socket)??;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(ioctl_fionbio(socket, false)?)
}

fn wait_connected(socket: &OwnedFd, timeout: Option<Duration>) -> io::Result<()> {
    let began = Instant::now();
    loop {
        let rest = timeout.map(|time| time.saturating_sub(began.elapsed()));
        let rest = rest.and_then(|rest| Timespec::try_from(rest).ok());
        match poll(&mut [PollFd::new(socket, PollFlags::OUT)], rest.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Selects the congestion control `reno` for a socket whose peer is on this machine: every kernel has it, every user
/// may select it, and it does not pace. One that paces (BBR, the default of many machines) runs a timer for each burst
/// between two local processes: measured to cost a migration a fifth of its time. Pacing persists on a connected
/// socket, so this must come before connect. A failure is ignored: it only costs time.
pub(crate) fn unpaced(socket: impl AsFd, address: &SocketAddr) {
    if address.ip().to_canonical().is_loopback() {
        let _ = sockopt::set_tcp_congestion(socket, "reno");
    }
}

fn unix(path: &Path, timeout: Option<Duration>) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // With a full backlog connect waits, for the length of the send time-out (net/unix/af_unix.c; unix(7)).
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, timeout)?;
    loop {
        match connect(&socket, &address) {
            Err(Errno::INTR) => {}
            answer => break answer?,
        }
    }
    Ok(socket)
}
