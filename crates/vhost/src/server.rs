//! The server: a socket to which front ends connect, one after the other.
//!
//! **Law: stopping the server does not wait for a front end.** What a front end shares may block a thread that uses it
//! forever: the front end can make a call descriptor blocking and full at any moment, because that is a property of the
//! open file description, which is shared; and a page of its memory may never arrive (of a file in user space, or on a
//! dead network). No call is safe from all of it. So only the threads of a connection use what its front end shares.
//! The server's own thread waits for those threads, and once it must stop, for at most [`STOP_TIMEOUT`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use limosa_memory::ForwardedFaultsSource;
use limosa_socket::{SocketAccess, SocketFile};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::Timespec;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SocketFlags, accept_with};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::connection::{self, Disconnect};
use crate::fault::{FaultKind, Faults};
use crate::postcopy::Postcopy;
use crate::session::Session;
use crate::worker::Worker;
use crate::{Device, FrontEnd, MAX_QUEUES};

/// How long the threads of a connection may take to end when the server must stop. The work for an honest front end
/// (discarding some hundred MiB at most, or completing the requests in flight) takes a fraction of it.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// How long another front end waits before it is logged. One that replaces the first is served sooner.
const QUEUED_NOTICE: Duration = Duration::from_secs(1);

/// Number of front ends that may wait to be served.
const BACKLOG: i32 = 4;

/// Why a server cannot start or continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The server cannot listen at the socket.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// Its file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The device has too many queues.
    #[error("a device with {got} queues cannot be served, at most {MAX_QUEUES} are possible")]
    Queues {
        /// Number of its queues.
        got: usize,
    },
    /// Serving failed for a reason that no front end caused.
    #[error("serving {}: {operation}", path.display())]
    Kernel {
        /// The socket's file.
        path: PathBuf,
        /// The operation that failed.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The server was stopped, but what a front end shares blocks threads of it (see [`Stopper::stop`]).
    #[error(
        "serving {}: stopped, but the front end blocks it by a descriptor or by memory that never arrives; after {} s its \
         threads are abandoned and end with the process",
        path.display(),
        STOP_TIMEOUT.as_secs()
    )]
    StopBlocked {
        /// The socket's file.
        path: PathBuf,
    },
}

/// A vhost-user server for one device.
///
/// It serves one front end at a time; others wait until that one has disconnected. The socket's file is accessible only
/// to its owner from the beginning, unless [`bind_with`](Self::bind_with) says more, and is removed with the server.
pub struct Server {
    device: Arc<dyn Device>,
    queues: usize,
    path: PathBuf,
    listener: OwnedFd,
    file: Arc<SocketFile>,
    stop: Arc<OwnedFd>,
    faults: Arc<Faults>,
    /// How memory that comes by postcopy is waited for, if that is possible.
    forwarded: Option<Arc<ForwardedFaultsSource>>,
    connections: AtomicU64,
    has_front_end: AtomicBool,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).field("queues", &self.queues).finish_non_exhaustive()
    }
}

/// Stops a server from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    /// Makes [`Server::serve`] return, regardless of what a front end does. It cannot be undone.
    ///
    /// If a front end blocks the server by a descriptor, or by a page of its memory that never arrives, the server
    /// waits for some seconds. Then `serve` returns [`ServerError::StopBlocked`] and abandons the blocked threads with
    /// the device: they may still call [`Device::process_queue`], [`Device::poll_requests`] and [`Device::reset`] if
    /// the front end ever unblocks them.
    pub fn stop(&self) {
        // It cannot be full: that takes more writes than are possible.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl Server {
    /// Listens at `path`. A socket that a process left there when it ended is replaced.
    ///
    /// # Errors
    /// The path is in use or invalid, or the device has more than [`MAX_QUEUES`] queues.
    pub fn bind(path: &Path, device: Arc<dyn Device>) -> Result<Self, ServerError> {
        Self::bind_with(path, SocketAccess::default(), device)
    }

    /// Listens as [`bind`](Self::bind) does; the socket's file has this mode and group before a front end can connect.
    ///
    /// # Errors
    /// As of [`bind`](Self::bind); the process may not give the file that group.
    pub fn bind_with(path: &Path, access: SocketAccess, device: Arc<dyn Device>) -> Result<Self, ServerError> {
        let queues = device.num_queues();
        if queues > MAX_QUEUES {
            return Err(ServerError::Queues { got: queues });
        }
        let failed = |source: io::Error| ServerError::Listen { path: path.to_owned(), source };
        let (listener, file) = limosa_socket::listen_with(path, access, BACKLOG).map_err(failed)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| failed(errno.into()))?;
        let waits = device.waits_for_memory();
        let forwarded = if waits { ForwardedFaultsSource::find().ok().map(Arc::new) } else { None };
        Ok(Self {
            forwarded,
            device,
            queues,
            path: path.to_owned(),
            listener,
            file: Arc::new(file),
            stop: Arc::new(stop),
            faults: Arc::default(),
            connections: AtomicU64::new(0),
            has_front_end: AtomicBool::new(false),
        })
    }

    /// Returns a server of another device at the same socket, once this one has been stopped: front ends that connect
    /// meanwhile wait for it. It waits for memory as this one does.
    ///
    /// # Errors
    /// The device has too many queues, or the kernel has no descriptor left.
    pub fn successor(&self, device: Arc<dyn Device>) -> Result<Self, ServerError> {
        let queues = device.num_queues();
        if queues > MAX_QUEUES {
            return Err(ServerError::Queues { got: queues });
        }
        let failed = |source: io::Error| ServerError::Listen { path: self.path.clone(), source };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| failed(errno.into()))?;
        Ok(Self {
            forwarded: self.forwarded.clone(),
            device,
            queues,
            path: self.path.clone(),
            listener: self.listener.try_clone().map_err(failed)?,
            file: Arc::clone(&self.file),
            stop: Arc::new(stop),
            faults: Arc::clone(&self.faults),
            connections: AtomicU64::new(self.connection_count()),
            has_front_end: AtomicBool::new(false),
        })
    }

    /// A handle that stops it.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.stop.clone())
    }

    /// How often this kind of fault of front ends and guests occurred.
    pub fn fault_count(&self, fault: FaultKind) -> u64 {
        self.faults.count(fault)
    }

    /// How many front ends have connected.
    pub fn connection_count(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns whether a front end is connected.
    pub fn has_front_end(&self) -> bool {
        self.has_front_end.load(Ordering::Relaxed)
    }

    /// Serves one front end after the other until it is [stopped](Stopper::stop).
    ///
    /// # Errors
    /// The kernel has no descriptor or thread left for a front end, or one [blocks](ServerError::StopBlocked) a server
    /// that is stopped.
    pub fn serve(&self) -> Result<(), ServerError> {
        let failed = |operation| move |source| ServerError::Kernel { path: self.path.clone(), operation, source };
        loop {
            let mut both = [PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&*self.stop, PollFlags::IN)];
            match poll(&mut both, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(failed("poll")(errno.into())),
            }
            let [_, stop] = &both;
            if !stop.revents().is_empty() {
                return Ok(());
            }
            match accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(socket) if !self.device.accepts(socket.as_fd()) => {}
                Ok(socket) => {
                    self.connections.fetch_add(1, Ordering::Relaxed);
                    self.has_front_end.store(true, Ordering::Relaxed);
                    let disconnect = self.serve_one(socket);
                    self.has_front_end.store(false, Ordering::Relaxed);
                    if disconnect? == Disconnect::Stopped {
                        return Ok(());
                    }
                }
                Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => {}
                Err(errno) => return Err(failed("accept")(errno.into())),
            }
        }
    }

    /// Serves a front end on separate threads, and waits for them.
    fn serve_one(&self, socket: OwnedFd) -> Result<Disconnect, ServerError> {
        let failed = |source| ServerError::Kernel { path: self.path.clone(), operation: "a connection", source };
        // Readable when the other end is closed: when the thread has ended, also by a panic.
        let (ended, ends) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let connection = Connection {
            socket,
            stop: self.stop.clone(),
            device: self.device.clone(),
            queues: self.queues,
            faults: self.faults.clone(),
            forwarded: self.forwarded.clone(),
        };
        let thread = thread::Builder::new().name("vhost-messages".into()).spawn(move || {
            let _ends = ends;
            connection.serve()
        });
        let thread = thread.map_err(failed)?;
        if !self.has_ended(&ended).map_err(|errno| failed(errno.into()))? {
            return Err(ServerError::StopBlocked { path: self.path.clone() });
        }
        let disconnect = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        disconnect.map_err(failed)
    }

    /// Waits until a connection ends or the server must stop. A front end that waits for that end looks as if it hung:
    /// the first one is logged.
    fn wait_for_end(&self, ended: &OwnedFd) -> Result<(), Errno> {
        let (mut watched, mut notice) = (PollFlags::IN, None);
        loop {
            let mut fds = [
                PollFd::new(ended, PollFlags::IN),
                PollFd::new(&*self.stop, PollFlags::IN),
                PollFd::new(&self.listener, watched),
            ];
            let ready = retry_on_intr(|| poll(&mut fds, notice.as_ref()))?;
            let [ended, stop, _] = &fds;
            if !ended.revents().is_empty() || !stop.revents().is_empty() {
                return Ok(());
            }
            if ready == 0 {
                tracing::warn!(socket = %self.path.display(), "another front end waits until the one that is connected ends");
                notice = None;
            } else {
                notice = Timespec::try_from(QUEUED_NOTICE).ok();
            }
            watched = PollFlags::empty();
        }
    }

    /// Waits for the end of a connection; for at most [`STOP_TIMEOUT`] once the server must stop.
    fn has_ended(&self, ended: &OwnedFd) -> Result<bool, Errno> {
        self.wait_for_end(ended)?;
        let end = Instant::now() + STOP_TIMEOUT;
        loop {
            let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).map_err(|_| Errno::INVAL)?;
            match poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&left)) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

/// The state of a connection's threads: they may outlive the server.
struct Connection {
    socket: OwnedFd,
    stop: Arc<OwnedFd>,
    device: Arc<dyn Device>,
    queues: usize,
    faults: Arc<Faults>,
    forwarded: Option<Arc<ForwardedFaultsSource>>,
}

impl Connection {
    fn serve(self) -> io::Result<Disconnect> {
        let threads = self.device.num_threads().min(self.queues);
        let front_end = FrontEnd::with_threads(threads)?;
        let worker = Worker::new(self.device.clone(), front_end.clone(), self.queues, self.faults.clone())?;
        let worker = Arc::new(worker);
        thread::scope(|scope| {
            // Also on a panic: the scope would otherwise wait for a thread that does not end.
            let _ends = EndsOnDrop(&worker);
            for (number, mut queues) in worker.threads().enumerate() {
                let device = &self.device;
                let run = move || device.run_queues(&mut queues);
                thread::Builder::new().name(format!("vhost-queues-{number}")).spawn_scoped(scope, run)?;
            }
            self.device.front_end_connected(front_end.clone());
            let mut session = Session::new(
                self.device.clone(),
                worker.clone(),
                (front_end, self.faults.clone()),
                Postcopy::new(self.forwarded.clone()),
            );
            let disconnect = connection::serve(&self.socket, self.stop.as_fd(), &mut session, &self.faults);
            session.end();
            Ok(disconnect)
        })
    }
}

struct EndsOnDrop<'a>(&'a Worker);

impl Drop for EndsOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
