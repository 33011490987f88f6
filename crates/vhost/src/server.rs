//! The server: a socket that front ends connect to, one after the other.
//!
//! **Law: whoever stops it waits for no front end.** What a front end shares may keep whoever touches it for ever: it can make a
//! call descriptor blocking and full at any moment, because that is a property of the open file, which is its own too; and a
//! page of its memory may be one that never comes (of a file in user space, or on a dead network). There is no call that
//! would be safe from all of it. So everything of a front end's is touched by threads of its connection alone, the server's own
//! thread waits for those, and once it is to stop, for [`PATIENCE`] and no longer.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use limosa_socket::SocketFile;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::Timespec;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SocketFlags, accept_with};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::connection::{self, Disconnect};
use crate::fault::{Fault, Faults};
use crate::session::Session;
use crate::worker::Worker;
use crate::{Device, FrontEnd, MAX_QUEUES};

/// How long the threads of a connection may take to end when the server is to stop. What an honest front end has them do (giving
/// back some hundred MiB at most) takes a fraction of it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Front ends that may wait for their turn.
const BACKLOG: i32 = 4;

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The socket cannot be had.
    #[error("listening on {}: {source}", path.display())]
    Listen {
        /// Its file.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The device cannot be served.
    #[error("a device with {got} queues cannot be served, at most {MAX_QUEUES} are possible")]
    Queues {
        /// As many as it has.
        got: usize,
    },
    /// Serving failed for a reason that no front end is to blame for.
    #[error("serving {}: {operation}: {source}", path.display())]
    Kernel {
        /// The socket's file.
        path: PathBuf,
        /// What was to be done.
        operation: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The server was stopped, but a front end holds threads of it in what it shares (see [`Stopper::stop`]).
    #[error(
        "serving {}: stopped, but the front end holds it in a descriptor that blocks, or in memory that does not come; \
         after {} s its threads are left behind, and go with the process",
        path.display(),
        PATIENCE.as_secs()
    )]
    Held {
        /// The socket's file.
        path: PathBuf,
    },
}

/// A vhost-user server for one device.
///
/// It serves whoever connects; the next one, when that one has gone. Others wait. The socket's file is accessible to its owner
/// alone from the first, and removed with the server.
pub struct Server {
    device: Arc<dyn Device>,
    queues: usize,
    path: PathBuf,
    listener: OwnedFd,
    _file: SocketFile,
    stop: Arc<OwnedFd>,
    faults: Arc<Faults>,
    connections: AtomicU64,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).field("queues", &self.queues).finish_non_exhaustive()
    }
}

/// Stops a server, from anywhere.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    /// Has [`Server::serve`] return, whatever a front end does; for good.
    ///
    /// A front end that holds the server in a descriptor that blocks, or in a page of its memory that does not come, is waited
    /// for some seconds. Then `serve` returns [`ServerError::Held`], and the threads that are held stay behind, with the device: it
    /// may still be [worked](Device::work) and [reset](Device::reset) by them, should the front end ever let them go.
    pub fn stop(&self) {
        // It cannot be full: nobody writes to it as often.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl Server {
    /// Listens at `path`. A socket that a dead process left there is replaced.
    ///
    /// # Errors
    /// The path is in use or cannot be, or the device has more than [`MAX_QUEUES`] queues.
    pub fn bind(path: &Path, device: Arc<dyn Device>) -> Result<Self, ServerError> {
        let queues = device.queues();
        if queues > MAX_QUEUES {
            return Err(ServerError::Queues { got: queues });
        }
        let failed = |source: io::Error| ServerError::Listen { path: path.to_owned(), source };
        let (listener, file) = limosa_socket::listen(path, BACKLOG).map_err(failed)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| failed(errno.into()))?;
        Ok(Self {
            device,
            queues,
            path: path.to_owned(),
            listener,
            _file: file,
            stop: Arc::new(stop),
            faults: Arc::default(),
            connections: AtomicU64::new(0),
        })
    }

    /// What stops it.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.stop.clone())
    }

    /// How often front ends, or guests, did what is wrong in that way.
    pub fn faults(&self, fault: Fault) -> u64 {
        self.faults.count(fault)
    }

    /// How many front ends have connected.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Serves one front end after the other until it is [stopped](Stopper::stop).
    ///
    /// # Errors
    /// The kernel has no descriptor or thread left for a front end, or one [holds](ServerError::Held) a server that is stopped.
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
                Ok(socket) => {
                    self.connections.fetch_add(1, Ordering::Relaxed);
                    if self.serve_one(socket)? == Disconnect::Stopped {
                        return Ok(());
                    }
                }
                Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => {}
                Err(errno) => return Err(failed("accept")(errno.into())),
            }
        }
    }

    /// Serves a front end on threads of its own, and waits for them.
    fn serve_one(&self, socket: OwnedFd) -> Result<Disconnect, ServerError> {
        let failed = |source| ServerError::Kernel { path: self.path.clone(), operation: "a connection", source };
        // Readable when the other end is closed: when the thread has ended, however it does.
        let (ended, ends) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let connection = Connection {
            socket,
            stop: self.stop.clone(),
            device: self.device.clone(),
            queues: self.queues,
            faults: self.faults.clone(),
        };
        let thread = thread::Builder::new().name("vhost-messages".into()).spawn(move || {
            let _ends = ends;
            connection.serve()
        });
        let thread = thread.map_err(failed)?;
        if !self.has_ended(&ended).map_err(|errno| failed(errno.into()))? {
            return Err(ServerError::Held { path: self.path.clone() });
        }
        let disconnect = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        disconnect.map_err(failed)
    }

    /// Waits for the end of a connection; for so long as there is patience once the server is to stop.
    fn has_ended(&self, ended: &OwnedFd) -> Result<bool, Errno> {
        let waited = retry_on_intr(|| {
            poll(&mut [PollFd::new(ended, PollFlags::IN), PollFd::new(&*self.stop, PollFlags::IN)], None)
        });
        waited?;
        let end = Instant::now() + PATIENCE;
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

/// All that the threads of a connection need: they may outlive the server.
struct Connection {
    socket: OwnedFd,
    stop: Arc<OwnedFd>,
    device: Arc<dyn Device>,
    queues: usize,
    faults: Arc<Faults>,
}

impl Connection {
    fn serve(self) -> io::Result<Disconnect> {
        let front_end = FrontEnd::new()?;
        let worker = Worker::new(self.device.clone(), front_end.clone(), self.queues, self.faults.clone())?;
        let worker = Arc::new(worker);
        thread::scope(|scope| {
            thread::Builder::new().name("vhost-queues".into()).spawn_scoped(scope, || worker.run())?;
            // Also if something panics: the scope would wait for a thread that nobody ends.
            let _ends = EndsOnDrop(&worker);
            self.device.attached(front_end.clone());
            let mut session = Session::new(self.device.clone(), worker.clone(), front_end, self.faults.clone());
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
