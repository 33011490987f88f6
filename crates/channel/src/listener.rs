//! Waiting for a peer to connect.
//!
//! [`limosa_socket`] creates and removes the files of unix sockets.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use limosa_socket::{SocketAccess, SocketFile};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{self, OFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{self, SocketFlags};

use crate::channel::Channel;
use crate::connect::unpaced;
use crate::descriptor::{self, Kind};
use crate::error::{ChannelError, Operation};
use crate::options::Options;
use crate::tls::Tls;
use crate::uri::Uri;
use crate::vsock::VsockAddress;

/// Backlog of `listen`: the connections of a migration with many channels come at once.
const BACKLOG: i32 = 64;

/// A `tcp:`, `unix:` or `vsock:` end point that accepts connections, or an inherited descriptor.
#[derive(Debug)]
pub struct Listener {
    source: Source,
    uri: Uri,
    name: Arc<str>,
    options: Options,
}

#[derive(Debug)]
enum Source {
    /// A listening socket in non-blocking mode, and the file that belongs to it.
    Socket { socket: OwnedFd, _file: Option<SocketFile> },
    /// An inherited descriptor that is connected already: the first `accept` returns it.
    Connected(Mutex<Option<OwnedFd>>),
}

impl Listener {
    /// Listens on `uri`. Accepted channels have `options`.
    ///
    /// `unix:` creates a socket file of mode 0600 and replaces one that an ended process left behind. `fd:N` takes
    /// possession of an inherited descriptor: a listening socket, or one connected already, which the first
    /// [`accept`](Self::accept) returns.
    ///
    /// # Errors
    /// If the address is in use or not this machine's, or something other than a stale socket is at the path;
    /// [`ChannelError::Unsupported`] for `file:`, `exec:` and `-`.
    pub fn bind(uri: &Uri, options: &Options) -> Result<Self, ChannelError> {
        Self::bind_with(uri, SocketAccess::default(), options)
    }

    /// Listens as [`bind`](Self::bind) does; the socket file that `unix:` creates has this mode and group before a peer
    /// can connect.
    ///
    /// # Errors
    /// As of [`bind`](Self::bind); the process may not give the file that group.
    pub fn bind_with(uri: &Uri, access: SocketAccess, options: &Options) -> Result<Self, ChannelError> {
        let operation = Operation::Listen;
        let name: Arc<str> = uri.to_string().into();
        let failed = |source: io::Error| ChannelError::setup(operation, name.clone(), source);
        let unsupported = |why| ChannelError::Unsupported { operation, peer: name.clone(), why };
        options.check(operation, &name)?;
        if uri.is_socket() && options.tls.as_ref().is_some_and(Tls::is_client) {
            return Err(unsupported("a listening end needs TLS credentials of a server"));
        }
        let mut local = uri.clone();
        let source = match uri {
            Uri::Tcp { host, port } => {
                let socket = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
                let address = socket.local_addr().map_err(failed)?;
                // Accepted sockets inherit it.
                unpaced(&socket, &address);
                let port = address.port();
                local = Uri::Tcp { host: host.clone(), port };
                Source::Socket { socket: socket.into(), _file: None }
            }
            Uri::Unix(path) => {
                let (socket, file) = limosa_socket::listen_with(path, access, BACKLOG).map_err(failed)?;
                Source::Socket { socket, _file: Some(file) }
            }
            Uri::Vsock { cid, port } => {
                let socket = VsockAddress { cid: *cid, port: *port }.listen(BACKLOG).map_err(failed)?;
                if let Some(VsockAddress { cid, port }) = VsockAddress::of(&socket).map_err(failed)? {
                    local = Uri::Vsock { cid, port };
                }
                Source::Socket { socket, _file: None }
            }
            Uri::Fd(number) => {
                let fd = descriptor::take(*number, operation)?;
                match descriptor::kind(&fd).map_err(failed)? {
                    Kind::Listening => Source::Socket { socket: fd, _file: None },
                    Kind::Stream(_) | Kind::Ordered => Source::Connected(Mutex::new(Some(fd))),
                    Kind::Unsupported(why) => return Err(unsupported(why)),
                }
            }
            Uri::Exec(_) | Uri::Stdio => {
                return Err(unsupported("it is already connected and accepts no further connections"));
            }
            Uri::File { .. } => return Err(unsupported("a file cannot be connected to; open it as a file")),
        };
        if let Source::Socket { socket, .. } = &source {
            // Between readiness and accept a peer may give up. Accept must then not wait for the next one.
            let flags = fs::fcntl_getfl(socket).map_err(|e| failed(e.into()))?;
            fs::fcntl_setfl(socket, flags | OFlags::NONBLOCK).map_err(|e| failed(e.into()))?;
        }
        let name = local.to_string().into();
        Ok(Self { source, uri: local, name, options: options.clone() })
    }

    /// Waits for the next peer: for ever, or at most `timeout`.
    ///
    /// With [`Options::tls`] the handshake is not complete yet: it runs when the channel is used or, without waiting
    /// for the peer, when it is [peeked](Channel::peek). It may take 30 s from now.
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`] if no peer connects.
    pub fn accept(&self, timeout: Option<Duration>) -> Result<Channel, ChannelError> {
        let operation = Operation::Accept;
        let peer = || Arc::clone(&self.name);
        let failed = |errno: Errno| ChannelError::setup(operation, peer(), errno);
        let socket = match &self.source {
            Source::Socket { socket, .. } => socket,
            Source::Connected(fd) => {
                let taken = fd.lock().take();
                let why = "its only connection was accepted before";
                let fd = taken.ok_or_else(|| ChannelError::Unsupported { operation, peer: peer(), why })?;
                return Channel::over(fd, peer(), &self.options);
            }
        };
        let began = Instant::now();
        loop {
            match net::accept_with(socket, SocketFlags::CLOEXEC) {
                Ok(fd) => return Channel::over(fd, format!("the peer on {}", self.name), &self.options),
                // The peer gave up before it was accepted.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(Errno::AGAIN) => {
                    let rest = timeout.map(|time| time.saturating_sub(began.elapsed()));
                    if let (Some(after), Some(Duration::ZERO)) = (timeout, rest) {
                        return Err(ChannelError::TimedOut { operation, peer: peer(), offset: None, after });
                    }
                    let rest = rest.and_then(|rest| Timespec::try_from(rest).ok());
                    match poll(&mut [PollFd::new(socket, PollFlags::IN)], rest.as_ref()) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(errno) => return Err(failed(errno)),
                    }
                }
                Err(errno) => return Err(failed(errno)),
            }
        }
    }

    /// Returns the URI that peers connect to: the one given, with the port that the kernel chose if it was 0.
    pub fn local_uri(&self) -> &Uri {
        &self.uri
    }

    /// Returns the listening socket, for polling several; `None` for an inherited connection.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            Source::Socket { socket, .. } => Some(socket.as_fd()),
            Source::Connected(_) => None,
        }
    }
}
