//! Accepting clients, time limits, the end.
//!
//! Laws: a client never delays another one: each has a thread, and the one that accepts waits for no client. Stopping
//! waits for the clients, but not longer than they are given.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Listener, Tls};
use limosa_page::to_millis;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::budget::Budget;
use super::connection::{Common, Connection};
use super::limits::{Counting, Limits, ServerCounters};
use super::negotiation::Encryption;
use crate::exports::Exports;
use crate::failure_log::FailureLog;

/// Interval at which deadlines are looked at.
const TICK: Duration = Duration::from_millis(250);
/// Time after which connections are accepted again when the kernel had no room for one.
const PAUSE: Duration = Duration::from_millis(50);
/// Connections that are accepted before anything else is done.
const AT_ONCE: usize = 64;

/// Why a server cannot start or continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The kernel has no room for the server.
    #[error("cannot start the server")]
    Start(#[source] io::Error),
    /// The listener failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A thread for a client cannot be started.
    #[error("cannot start a thread for a client")]
    Thread(#[source] io::Error),
}

/// Options of a server.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Limits on clients.
    pub limits: Limits,
    /// Credentials for clients that ask for TLS.
    pub tls: Option<Tls>,
    /// Whether a client without TLS is refused. Without credentials it has no effect.
    pub tls_required: bool,
}

impl ServerOptions {
    /// Sets the limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets the credentials, and whether a client without TLS is refused.
    #[must_use]
    pub fn tls(mut self, tls: Tls, required: bool) -> Self {
        (self.tls, self.tls_required) = (Some(tls), required);
        self
    }
}

/// A server of exports over NBD.
#[derive(Debug)]
pub struct Server {
    common: Arc<Common>,
    connections: Arc<Connections>,
    /// Milliseconds since the beginning at which connections were aged last.
    aged: AtomicU64,
    stop: Arc<OwnedFd>,
}

/// The connections that exist.
#[derive(Debug, Default)]
struct Connections {
    all: Mutex<Vec<Arc<Connection>>>,
    fewer: Condvar,
}

impl Connections {
    fn len(&self) -> usize {
        self.all.lock().len()
    }

    /// Adds a connection, unless there are `most`. Returns whether it was added.
    fn add(&self, connection: &Arc<Connection>, most: usize) -> bool {
        let mut all = self.all.lock();
        let has_room = all.len() < most;
        if has_room {
            all.push(Arc::clone(connection));
        }
        has_room
    }

    /// Removes a connection, and with it all that its thread has of the server.
    fn remove(&self, connection: Arc<Connection>) {
        let address = Arc::as_ptr(&connection);
        // The one in the list is the last: when the list is empty no thread holds an export any more.
        drop(connection);
        self.all.lock().retain(|other| Arc::as_ptr(other) != address);
        self.fewer.notify_all();
    }

    /// Waits until there are none, at most for `time`. Returns whether there are none.
    fn wait_for_none(&self, time: Duration) -> bool {
        let mut all = self.all.lock();
        self.fewer.wait_while_for(&mut all, |all| !all.is_empty(), time);
        all.is_empty()
    }
}

/// A connection in the list, for as long as its thread lives.
struct Registered {
    connections: Arc<Connections>,
    /// There until it is dropped.
    connection: Option<Arc<Connection>>,
}

impl Registered {
    fn serve(&self, channel: Channel) {
        if let Some(connection) = &self.connection {
            connection.serve(channel);
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.connections.remove(connection);
        }
    }
}

/// Stops a server from any thread.
#[derive(Debug, Clone)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    /// Makes [`Server::serve`] return: no client is accepted any more, requests in flight are carried out and answered,
    /// further ones are refused. It cannot be undone.
    pub fn stop(&self) {
        // It cannot be full: that takes more writes than are possible.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl Server {
    /// Creates a server of these exports.
    ///
    /// # Errors
    /// The kernel has no descriptors left.
    pub fn new(exports: Exports, options: ServerOptions) -> Result<Self, ServerError> {
        let ServerOptions { limits, tls, tls_required } = options;
        let encryption = if tls_required { Encryption::Required } else { Encryption::Allowed };
        let budget = Arc::new(Budget::new(&limits));
        let common = Common {
            exports,
            limits,
            budget,
            tls: tls.map(|tls| (tls, encryption)),
            counting: Counting::default(),
            begun: Instant::now(),
            refusals: FailureLog::default(),
        };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = stop.map_err(|errno| ServerError::Start(errno.into()))?;
        Ok(Self {
            common: Arc::new(common),
            connections: Arc::default(),
            aged: AtomicU64::new(0),
            stop: Arc::new(stop),
        })
    }

    /// Returns a handle that stops it.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.stop))
    }

    /// Returns its counters.
    #[must_use]
    pub fn counters(&self) -> ServerCounters {
        self.common.counting.counters(self.connections.len())
    }

    /// Serves clients of a listener until it is [stopped](Stopper::stop); of an inherited connection, until its client
    /// is gone. Several threads may call it, each with a listener.
    ///
    /// # Errors
    /// The listener fails for a reason that no client caused.
    pub fn serve(&self, listener: &Listener) -> Result<(), ServerError> {
        let served = match listener.socket() {
            Some(_) => self.accept_all(listener),
            None => listener.accept(None).map_err(ServerError::from).and_then(|channel| self.serve_channel(channel)),
        };
        self.end_all();
        served
    }

    /// Serves one client that is connected already, until it is gone or the server is [stopped](Stopper::stop).
    ///
    /// # Errors
    /// No thread can be started.
    pub fn serve_channel(&self, channel: Channel) -> Result<(), ServerError> {
        // It is the only one, of whom no other was refused.
        self.begin(channel, usize::MAX)?;
        while !self.connections.wait_for_none(TICK) {
            self.tick();
            if self.is_stopped() {
                self.end_all();
            }
        }
        Ok(())
    }

    fn accept_all(&self, listener: &Listener) -> Result<(), ServerError> {
        let mut paused = false;
        while let Some(socket) = listener.socket() {
            let events = if paused { PollFlags::empty() } else { PollFlags::IN };
            let mut fds =
                [PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN), PollFd::from_borrowed_fd(socket, events)];
            let time = if paused { PAUSE } else { TICK };
            // Without clients there are no deadlines.
            let time = (paused || self.connections.len() > 0).then(|| Timespec::try_from(time).ok()).flatten();
            match poll(&mut fds, time.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(ServerError::Start(errno.into())),
            }
            if self.is_stopped() {
                return Ok(());
            }
            self.tick();
            paused = !self.accept_some(listener)?;
        }
        Ok(())
    }

    /// Accepts clients that wait. Returns false if the kernel has no room for one.
    fn accept_some(&self, listener: &Listener) -> Result<bool, ServerError> {
        for _ in 0..AT_ONCE {
            let channel = match listener.accept(Some(Duration::ZERO)) {
                Ok(channel) => channel,
                Err(error) if error.is_timeout() => break,
                Err(ChannelError::Io { source, .. }) if is_passing(&source) => return Ok(false),
                Err(error @ ChannelError::Io { .. }) if is_lasting(&error) => return Err(error.into()),
                // A client's own fault: it is gone already.
                Err(error @ (ChannelError::Io { .. } | ChannelError::Broken { .. })) => {
                    tracing::info!(%error, "a client was not accepted");
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            match self.begin(channel, self.common.limits.connections) {
                Err(ServerError::Thread(source)) => {
                    Counting::add(&self.common.counting.refused, 1);
                    tracing::warn!(%source, "no thread can be started for a client");
                    return Ok(false);
                }
                begun => begun?,
            }
        }
        Ok(true)
    }

    /// Starts a thread for a client, unless there are `most`.
    fn begin(&self, channel: Channel, most: usize) -> Result<(), ServerError> {
        let connection = Arc::new(Connection::new(&self.common, &channel).map_err(ServerError::Thread)?);
        if !self.connections.add(&connection, most) {
            Counting::add(&self.common.counting.refused, 1);
            return Ok(());
        }
        Counting::add(&self.common.counting.connections, 1);
        let registered = Registered { connections: Arc::clone(&self.connections), connection: Some(connection) };
        let serve = move || registered.serve(channel);
        thread::Builder::new().name("nbd-client".into()).spawn(serve).map_err(ServerError::Thread)?;
        Ok(())
    }

    /// Ends connections whose time is over, and has idle ones free their memory.
    fn tick(&self) {
        let now = to_millis(self.common.begun.elapsed());
        let last = self.aged.load(Ordering::Relaxed);
        // Several listeners, and each client that connects, make it happen more often than a tick.
        let ages = now.saturating_sub(last) >= to_millis(TICK)
            && self.aged.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        for connection in self.connections.all.lock().iter() {
            if ages {
                connection.age();
            }
            connection.cut_if_late();
        }
    }

    fn is_stopped(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Ends all connections: after the time that they are given, without their last replies.
    fn end_all(&self) {
        self.connections.all.lock().iter().for_each(|connection| connection.stop());
        if self.connections.wait_for_none(self.common.limits.drain) {
            return;
        }
        self.connections.all.lock().iter().for_each(|connection| connection.cut());
        // Requests in flight are carried out by the kernel, which may take its time.
        while !self.connections.wait_for_none(TICK) {}
    }
}

/// Whether a listener will never accept a client again: its socket was closed or shut down by another process.
fn is_lasting(error: &ChannelError) -> bool {
    let ChannelError::Io { source, .. } = error else { return false };
    is_one_of(source, &[libc::EBADF, libc::EINVAL, libc::ENOTSOCK, libc::EOPNOTSUPP])
}

/// Whether the kernel may have room for another connection in a moment.
fn is_passing(error: &io::Error) -> bool {
    is_one_of(error, &[libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM])
}

fn is_one_of(error: &io::Error, numbers: &[i32]) -> bool {
    error.raw_os_error().is_some_and(|number| numbers.contains(&number))
}
