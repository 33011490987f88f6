//! A control socket for VMMs: programs watch and steer a migration through it as through QEMU's monitor.
//!
//! It speaks lines of JSON as QMP does (greeting, `qmp_capabilities`, `execute`/`arguments`/`id`, `return`/`error`,
//! `MIGRATION` events), on its own threads that use only the [`Handle`] of the engine. So it answers at any moment,
//! also while the engine waits. A VMM adds its own commands ([`Commands`]), and changes the job of the socket
//! ([`ControlSocket::set_job`]).
//!
//! ```
//! use limosa_control::{ControlSocket, JobKind};
//! use limosa_migrate::Handle;
//!
//! # fn main() -> std::io::Result<()> {
//! # let directory = std::env::temp_dir().join(format!("limosa-control-{}", std::process::id()));
//! # std::fs::create_dir_all(&directory)?;
//! let handle = Handle::new();
//! // `query-migrate` answers from now on, and `migrate_cancel` stops the engine that is given the handle.
//! let socket = ControlSocket::listen(&directory.join("control"), JobKind::Live, &handle)?;
//! # drop(socket);
//! # std::fs::remove_dir(&directory)
//! # }
//! ```

mod answers;
mod state;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use limosa_channel::Uri;
use limosa_socket::SocketFile;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde_json::{Value, json};

use answers::{answer, error, status};
use limosa_migrate::Handle;
use limosa_migrate::control::Phase;
use state::{Client, Current, Server};
pub use state::{CommandError, Commands, JobKind};

/// Longest line a client may send.
const LINE_LIMIT: u64 = 64 << 10;
/// Clients at the same time.
const CLIENTS: usize = 8;
/// Clients that may wait to be accepted.
const BACKLOG: i32 = 64;
/// How often a change of phase is looked for while there is a job. Phases last longer; an event may be this late.
const TICK: Duration = Duration::from_millis(20);
/// How long commands that were read may take to be answered when the job is over.
const LAST_REPLIES: Duration = Duration::from_secs(2);

/// The listening socket. Dropping it closes and removes it; the job continues.
#[derive(Debug)]
pub struct ControlSocket {
    _file: SocketFile,
    server: Arc<Server>,
    over: Arc<AtomicBool>,
    /// Readable when the thread that accepts has something new to look at: a job, or the end.
    news: Arc<OwnedFd>,
    listener: Option<thread::JoinHandle<()>>,
}

impl ControlSocket {
    /// Listens at `path`, which only the owner may open.
    ///
    /// # Errors
    /// `path` exists and is not the socket of a killed job; or the kernel refuses.
    pub fn listen(path: &Path, job: JobKind, handle: &Handle) -> io::Result<Self> {
        Self::open(path, Some(Current { job, handle: handle.clone(), begun: Instant::now() }), None)
    }

    /// Listens at `path` for a VMM that has no job yet: `query-migrate` answers nothing until there is one.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn listen_without_job(path: &Path, commands: Arc<dyn Commands>) -> io::Result<Self> {
        Self::open(path, None, Some(commands))
    }

    /// Reports this job from now on.
    pub fn set_job(&self, job: JobKind, handle: &Handle) {
        self.clear_listen_address();
        let next = Current { job, handle: handle.clone(), begun: Instant::now() };
        *self.server.current.lock() = Some(next);
        self.wake();
    }

    /// Wakes the thread that accepts.
    fn wake(&self) {
        // It cannot be full: that takes more writes than are possible.
        let _ = rustix::io::write(&self.news, &1_u64.to_ne_bytes());
    }

    /// Sends an event to all clients, as QMP does: a VMM's `STOP` and `RESUME`.
    pub fn emit(&self, event: &str, data: &Value) {
        emit(&self.server, &json!({ "event": event, "data": data, "timestamp": now() }));
    }

    fn open(path: &Path, current: Option<Current>, commands: Option<Arc<dyn Commands>>) -> io::Result<Self> {
        Self::start(BoundControlSocket::bind(path)?, current, commands)
    }

    fn start(
        BoundControlSocket { listener, file }: BoundControlSocket,
        current: Option<Current>,
        commands: Option<Arc<dyn Commands>>,
    ) -> io::Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let news = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let server = Arc::new(Server {
            current: Mutex::new(current),
            commands,
            clients: Mutex::default(),
            dismissed: Condvar::new(),
            addresses: Mutex::default(),
            admitted: AtomicUsize::new(0),
        });
        let (stop, mine, woken) = (Arc::clone(&over), Arc::clone(&server), Arc::clone(&news));
        let serve = move || serve(&listener, &mine, &stop, &woken);
        let thread = thread::Builder::new().name("control".into()).spawn(serve)?;
        Ok(Self { _file: file, server, over, news, listener: Some(thread) })
    }

    /// Adds an address at which the job waits for its peer. `query-migrate` reports it as `socket-address`.
    pub fn set_listen_address(&self, uri: &Uri) {
        let address = match uri {
            Uri::Tcp { host, port } => json!({ "type": "inet", "host": host, "port": port.to_string() }),
            Uri::Unix(path) => json!({ "type": "unix", "path": path.to_string_lossy() }),
            Uri::Vsock { cid, port } => json!({ "type": "vsock", "cid": cid.to_string(), "port": port.to_string() }),
            Uri::Fd(number) => json!({ "type": "fd", "str": number.to_string() }),
            _ => return,
        };
        self.server.addresses.lock().push(address);
    }

    /// Forgets the addresses: the peer has connected, and no other connection is expected.
    pub fn clear_listen_address(&self) {
        self.server.addresses.lock().clear();
    }
}

/// A control socket that clients can connect to, and that answers nobody yet: for a program that must start no thread
/// before it has confined itself.
#[derive(Debug)]
pub struct BoundControlSocket {
    listener: UnixListener,
    file: SocketFile,
}

impl BoundControlSocket {
    /// Listens at `path`, which only the owner may open.
    ///
    /// # Errors
    /// As [`ControlSocket::listen`].
    pub fn bind(path: &Path) -> io::Result<Self> {
        let (socket, file) = limosa_socket::listen(path, BACKLOG)?;
        Ok(Self { listener: UnixListener::from(socket), file })
    }

    /// Answers clients, as [`ControlSocket::listen_without_job`] does.
    ///
    /// # Errors
    /// The kernel has no room for a thread.
    pub fn serve(self, commands: Arc<dyn Commands>) -> io::Result<ControlSocket> {
        ControlSocket::start(self, None, Some(commands))
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.listener.take() {
            let _ = thread.join();
        }
    }
}

/// Accepts clients and announces phases until the job is over; then says the last phase and hangs up.
fn serve(listener: &UnixListener, server: &Arc<Server>, over: &AtomicBool, news: &OwnedFd) {
    let mut announced = Phase::Setup;
    loop {
        let ending = over.load(Ordering::Acquire);
        let accepts = accept_all(listener, server);
        let current = server.current();
        let phase = current.as_ref().map_or(Phase::Setup, |current| current.handle.progress.read().phase);
        if phase != announced {
            announced = phase;
            emit(server, &json!({ "event": "MIGRATION", "data": { "status": status(phase) }, "timestamp": now() }));
        }
        if ending {
            hang_up(server);
            return;
        }
        // A server without a job sleeps until somebody connects.
        let time = current.and_then(|_| Timespec::try_from(TICK).ok());
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::from_borrowed_fd(news.as_fd(), PollFlags::IN)];
        if !accepts || poll(&mut fds, time.as_ref()).is_err() {
            thread::sleep(TICK);
        }
        let _ = rustix::io::read(news, &mut [0; 8]);
    }
}

/// Accepts the clients that wait. Returns false if one has to wait, because the kernel has no room for it.
fn accept_all(listener: &UnixListener, server: &Arc<Server>) -> bool {
    loop {
        match listener.accept() {
            Ok((client, _)) => admit(server, client),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            // It has gone already.
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
            Err(_) => return false,
        }
    }
}

/// Ends all conversations. A command that was read is answered first: a client that ended the job by it gets its reply,
/// although the process may exit next.
fn hang_up(server: &Server) {
    let mut clients = server.clients.lock();
    for client in clients.iter() {
        let _ = client.stream.shutdown(Shutdown::Read);
    }
    let _ = server.dismissed.wait_while_for(&mut clients, |clients| !clients.is_empty(), LAST_REPLIES);
    for client in clients.drain(..) {
        let _ = client.stream.shutdown(Shutdown::Both);
    }
}

fn admit(server: &Arc<Server>, client: UnixStream) {
    // A client that does not read must not hold up the events of the others.
    let _ = client.set_nonblocking(false);
    let _ = client.set_write_timeout(Some(Duration::from_secs(1)));
    let Ok(stream) = client.try_clone() else { return };
    let number = server.admitted.fetch_add(1, Ordering::Relaxed);
    {
        let mut clients = server.clients.lock();
        if clients.len() >= CLIENTS {
            return;
        }
        clients.push(Client { number, stream, listens: false });
    }
    let place = Place { server: Arc::clone(server), number };
    let _ = thread::Builder::new().name("control client".into()).spawn(move || {
        let _ = converse(&place.server, &client, number);
        let _ = client.shutdown(Shutdown::Both);
        drop(place);
    });
}

/// A client's place among those that are admitted: free again when it is dropped, also by a panic in a command.
struct Place {
    server: Arc<Server>,
    number: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.server.clients.lock().retain(|client| client.number != self.number);
        self.server.dismissed.notify_all();
    }
}

fn emit(server: &Server, event: &Value) {
    let mut clients = server.clients.lock();
    clients.retain_mut(|client| !client.listens || say(&mut client.stream, event).is_ok());
}

fn say(client: &mut UnixStream, message: &Value) -> io::Result<()> {
    let mut line = message.to_string();
    line.push_str("\r\n");
    client.write_all(line.as_bytes())
}

fn converse(server: &Server, client: &UnixStream, number: usize) -> io::Result<()> {
    let mut out = client.try_clone()?;
    let version = json!({ "qemu": { "major": 0, "minor": 0, "micro": 0 }, "package": concat!("limosa ", env!("CARGO_PKG_VERSION")) });
    say(&mut out, &json!({ "QMP": { "version": version, "capabilities": [] } }))?;
    let mut lines = BufReader::new(client);
    let mut line = Vec::new();
    loop {
        line.clear();
        if (&mut lines).take(LINE_LIMIT).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if !line.ends_with(b"\n") {
            return say(&mut out, &error("GenericError", "a command is a line of at most 64 KiB"));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let mut negotiated = false;
        let reply = match serde_json::from_slice::<Value>(&line) {
            Ok(command) => {
                negotiated = command.get("execute").and_then(Value::as_str) == Some("qmp_capabilities");
                let mut reply = answer(server, &command);
                if let (Some(id), Some(reply)) = (command.get("id"), reply.as_object_mut()) {
                    reply.insert("id".into(), id.clone());
                }
                reply
            }
            Err(fault) => error("GenericError", &format!("not JSON: {fault}")),
        };
        if !negotiated {
            say(&mut out, &reply)?;
            continue;
        }
        // Under the lock of those who announce: no event before the reply, and none lost after it.
        let mut clients = server.clients.lock();
        say(&mut out, &reply)?;
        clients.iter_mut().filter(|client| client.number == number).for_each(|client| client.listens = true);
    }
}

fn now() -> Value {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    json!({ "seconds": since.as_secs(), "microseconds": since.subsec_micros() })
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
