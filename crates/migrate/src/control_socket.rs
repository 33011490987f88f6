//! A QMP-shaped socket on a running job, for programs: what QEMU's monitor answers about a migration, this answers.
//!
//! It speaks lines of JSON as QMP does (greeting, `qmp_capabilities`, `execute`/`arguments`/`id`, `return`/`error`,
//! `MIGRATION` events), on its own threads that touch nothing but [`Control`] and [`Progress`]: it answers at any
//! moment, whatever the engine waits for. A VMM adds its own commands ([`Commands`]), and one job after
//! another on the same socket ([`ControlSocket::set_job`]).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::num::NonZeroU64;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use limosa_channel::Uri;
use limosa_socket::SocketFile;
use serde_json::{Value, json};

use crate::control::{Control, Stop};
use crate::progress::{Phase, Progress};

/// Longest line a client may send.
const LINE_LIMIT: u64 = 64 << 10;
/// Clients at the same time.
const CLIENTS: usize = 8;
/// Clients that may wait to be accepted.
const BACKLOG: i32 = 64;
/// QEMU's own limit, in milliseconds.
const DOWNTIME_LIMIT_MAX: u64 = 2_000_000;
/// How often a change of phase is looked for. Phases last longer; an event may be this late.
const TICK: Duration = Duration::from_millis(20);
/// How long commands that were read may take to be answered when the job is over.
const LAST_REPLIES: Duration = Duration::from_secs(2);

/// What the job does, which decides what a cancellation means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    /// The VM is at this side's peer until the job ends: it can be cancelled at any moment.
    Save,
    /// Once the guest runs, the job can only be paused.
    Restore,
    /// Either end of a live migration: as [`Restore`](Self::Restore), and the limit of its downtime can be changed.
    Live,
}

/// What a VMM answers on its socket in addition to the commands of a job. Called on the threads of clients, so it must
/// not wait for an engine.
pub trait Commands: Send + Sync {
    /// Answers a command; `None` leaves it to the socket.
    ///
    /// # Errors
    /// Why it was refused, in one line.
    fn execute(&self, name: &str, arguments: &Value) -> Option<Result<Value, String>>;

    /// Adds to what `query-migrate` answers, or corrects it: the socket knows nothing of how a job ended.
    fn amend(&self, answer: &mut serde_json::Map<String, Value>) {
        let _ = answer;
    }
}

/// The listening socket. Dropping it closes and removes it; the job goes on.
#[derive(Debug)]
pub struct ControlSocket {
    _file: SocketFile,
    server: Arc<Server>,
    over: Arc<AtomicBool>,
    listener: Option<thread::JoinHandle<()>>,
}

/// What the socket is about at a time.
#[derive(Debug, Clone)]
struct Current {
    job: Job,
    control: Control,
    progress: Progress,
    begun: Instant,
}

/// What the threads of the socket share.
struct Server {
    current: Mutex<Option<Current>>,
    commands: Option<Arc<dyn Commands>>,
    clients: Mutex<Vec<Client>>,
    /// Notified when a conversation has ended.
    dismissed: Condvar,
    /// Where the job waits for its peer, as QEMU writes addresses.
    addresses: Mutex<Vec<Value>>,
    admitted: AtomicUsize,
}

impl Server {
    fn current(&self) -> Option<Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("current", &self.current).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Client {
    /// What its thread knows it by.
    number: usize,
    /// For events.
    stream: UnixStream,
    /// Whether it gets events: from `qmp_capabilities` on, as with QEMU. Before, an event could arrive ahead of the
    /// greeting.
    listens: bool,
}

impl ControlSocket {
    /// Listens at `path`, which only the owner may open. Nothing may be there but a socket that a killed job left
    /// behind.
    pub fn listen(path: &Path, job: Job, control: Control, progress: Progress) -> io::Result<Self> {
        Self::open(path, Some(Current { job, control, progress, begun: Instant::now() }), None)
    }

    /// Listens at `path` for a VMM that has no job yet: `query-migrate` answers nothing until there is one.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn listen_for(path: &Path, commands: Arc<dyn Commands>) -> io::Result<Self> {
        Self::open(path, None, Some(commands))
    }

    /// From now on the socket is about this job.
    pub fn set_job(&self, job: Job, control: Control, progress: Progress) {
        self.clear_listen_address();
        let next = Current { job, control, progress, begun: Instant::now() };
        *self.server.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
    }

    /// Tells an event to all clients, as QMP does: a VMM's `STOP` and `RESUME`.
    pub fn emit(&self, event: &str, data: &Value) {
        emit(&self.server, &json!({ "event": event, "data": data, "timestamp": now() }));
    }

    fn open(path: &Path, current: Option<Current>, commands: Option<Arc<dyn Commands>>) -> io::Result<Self> {
        let (socket, file) = limosa_socket::listen(path, BACKLOG)?;
        let listener = UnixListener::from(socket);
        let over = Arc::new(AtomicBool::new(false));
        let server = Arc::new(Server {
            current: Mutex::new(current),
            commands,
            clients: Mutex::default(),
            dismissed: Condvar::new(),
            addresses: Mutex::default(),
            admitted: AtomicUsize::new(0),
        });
        let (stop, mine) = (Arc::clone(&over), Arc::clone(&server));
        let thread = thread::Builder::new().name("control".into()).spawn(move || serve(&listener, &mine, &stop))?;
        Ok(Self { _file: file, server, over, listener: Some(thread) })
    }

    /// Says where the job waits for its peer: `query-migrate` tells it from now on, as `socket-address`.
    pub fn set_listen_address(&self, uri: &Uri) {
        let address = match uri {
            Uri::Tcp { host, port } => json!({ "type": "inet", "host": host, "port": port.to_string() }),
            Uri::Unix(path) => json!({ "type": "unix", "path": path.to_string_lossy() }),
            Uri::Fd(number) => json!({ "type": "fd", "str": number.to_string() }),
            _ => return,
        };
        self.server.addresses.lock().unwrap_or_else(PoisonError::into_inner).push(address);
    }

    /// Says that the peer has come: no other connection is waited for.
    pub fn clear_listen_address(&self) {
        self.server.addresses.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.listener.take() {
            let _ = thread.join();
        }
    }
}

/// Accepts clients and announces phases until the job is over; then says the last phase and hangs up.
fn serve(listener: &UnixListener, server: &Arc<Server>, over: &AtomicBool) {
    let mut announced = Phase::Setup;
    loop {
        let ending = over.load(Ordering::Acquire);
        while let Ok((client, _)) = listener.accept() {
            admit(server, client);
        }
        let phase = server.current().map_or(Phase::Setup, |current| current.progress.read().phase);
        if phase != announced {
            announced = phase;
            emit(server, &json!({ "event": "MIGRATION", "data": { "status": status(phase) }, "timestamp": now() }));
        }
        if ending {
            hang_up(server);
            return;
        }
        thread::sleep(TICK);
    }
}

/// Ends all conversations. A command that was read is answered first: a client that ended the job by it gets its reply,
/// although the process may exit next.
fn hang_up(server: &Server) {
    let clients = server.clients.lock().unwrap_or_else(PoisonError::into_inner);
    for client in clients.iter() {
        let _ = client.stream.shutdown(Shutdown::Read);
    }
    let waited = server.dismissed.wait_timeout_while(clients, LAST_REPLIES, |clients| !clients.is_empty());
    let (mut clients, _) = waited.unwrap_or_else(PoisonError::into_inner);
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
        let mut clients = server.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if clients.len() >= CLIENTS {
            return;
        }
        clients.push(Client { number, stream, listens: false });
    }
    let mine = Arc::clone(server);
    let spawned = thread::Builder::new().name("control client".into()).spawn(move || {
        let _ = converse(&mine, &client, number);
        let _ = client.shutdown(Shutdown::Both);
        dismiss(&mine, number);
    });
    if spawned.is_err() {
        dismiss(server, number);
    }
}

fn dismiss(server: &Server, number: usize) {
    server.clients.lock().unwrap_or_else(PoisonError::into_inner).retain(|client| client.number != number);
    server.dismissed.notify_all();
}

fn emit(server: &Server, event: &Value) {
    let mut clients = server.clients.lock().unwrap_or_else(PoisonError::into_inner);
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
        let mut clients = server.clients.lock().unwrap_or_else(PoisonError::into_inner);
        say(&mut out, &reply)?;
        clients.iter_mut().filter(|client| client.number == number).for_each(|client| client.listens = true);
    }
}

fn answer(server: &Server, command: &Value) -> Value {
    let Some(name) = command.get("execute").and_then(Value::as_str) else {
        return error("GenericError", "expected {\"execute\": COMMAND}");
    };
    let done = json!({ "return": {} });
    if name == "qmp_capabilities" {
        return done;
    }
    let nothing = Value::Object(serde_json::Map::new());
    let own = server.commands.as_ref();
    match own.and_then(|own| own.execute(name, command.get("arguments").unwrap_or(&nothing))) {
        Some(Ok(value)) => return json!({ "return": value }),
        Some(Err(why)) => return error("GenericError", &why),
        None => {}
    }
    let Some(current) = server.current() else {
        return match name {
            "query-migrate" => json!({ "return": amended(server, serde_json::Map::new()) }),
            "migrate_cancel" => done,
            _ => error("GenericError", "no migration has begun here"),
        };
    };
    let phase = current.progress.read().phase;
    match name {
        "query-migrate" => json!({ "return": query_migrate(server, &current) }),
        "query-migrate-parameters" => {
            let mut parameters = json!({ "max-bandwidth": current.control.max_bandwidth().map_or(0, NonZeroU64::get) });
            if let (Some(limit), Some(parameters)) = (current.control.downtime_limit(), parameters.as_object_mut()) {
                parameters.insert("downtime-limit".into(), u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).into());
            }
            json!({ "return": parameters })
        }
        "migrate-set-parameters" => match set_parameters(&current, command.get("arguments")) {
            Ok(()) => done,
            Err(why) => error("GenericError", &why),
        },
        "migrate_cancel" => {
            if current.job != Job::Save && phase >= Phase::PostcopyActive {
                let why = "the guest runs already and cannot be taken back; migrate-pause breaks the transfer off recoverably";
                return error("GenericError", why);
            }
            current.control.stop(Stop::Cancel);
            done
        }
        "migrate-pause" => {
            if phase != Phase::PostcopyActive {
                return error("GenericError", "only a postcopy whose guest runs can be paused");
            }
            current.control.stop(Stop::Pause);
            done
        }
        other => error("CommandNotFound", &format!("the command {other} has not been found")),
    }
}

fn set_parameters(current: &Current, arguments: Option<&Value>) -> Result<(), String> {
    let control = &current.control;
    let arguments = arguments.and_then(Value::as_object).ok_or("arguments are missing")?;
    let (mut bandwidth, mut downtime) = (None, None);
    for (key, value) in arguments {
        match key.as_str() {
            "max-bandwidth" => {
                bandwidth =
                    Some(value.as_u64().ok_or("max-bandwidth is a number of bytes per second, 0 for no limit")?);
            }
            "downtime-limit" if current.job == Job::Live => {
                let limit = value.as_u64().filter(|limit| *limit <= DOWNTIME_LIMIT_MAX);
                downtime = Some(limit.ok_or("downtime-limit is a number of milliseconds, at most 2000000")?);
            }
            other => return Err(format!("the parameter {other} cannot be changed in this job")),
        }
    }
    if let Some(limit) = downtime {
        control.set_downtime_limit(Duration::from_millis(limit));
    }
    if let Some(bandwidth) = bandwidth {
        control.set_max_bandwidth(NonZeroU64::new(bandwidth));
    }
    Ok(())
}

fn query_migrate(server: &Server, current: &Current) -> Value {
    let reading = current.progress.read();
    let total = reading.total_pages.saturating_mul(limosa_page::PAGE_SIZE);
    let unique =
        (reading.normal_pages + reading.zero_pages + reading.hinted_pages).saturating_sub(reading.resent_pages);
    let remaining = reading.total_pages.saturating_sub(unique).saturating_mul(limosa_page::PAGE_SIZE);
    let answer = json!({
        "status": if current.control.stopped().is_some() { "cancelling" } else { status(reading.phase) },
        "total-time": u64::try_from(current.begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        "ram": {
            "transferred": reading.bytes,
            "remaining": remaining,
            "total": total,
            "duplicate": reading.zero_pages,
            "normal": reading.normal_pages,
            "hinted": reading.hinted_pages,
            "normal-bytes": reading.bytes,
            "postcopy-requests": reading.requests,
            "page-size": limosa_page::PAGE_SIZE,
        },
    });
    let Value::Object(mut answer) = answer else { return answer };
    let addresses = server.addresses.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if !addresses.is_empty() {
        answer.insert("socket-address".into(), addresses.into());
    }
    amended(server, answer)
}

fn amended(server: &Server, mut answer: serde_json::Map<String, Value>) -> Value {
    if let Some(own) = &server.commands {
        own.amend(&mut answer);
    }
    Value::Object(answer)
}

fn status(phase: Phase) -> &'static str {
    match phase {
        Phase::Setup => "setup",
        Phase::Active => "active",
        Phase::Device | Phase::Completing => "device",
        Phase::PostcopyActive => "postcopy-active",
        Phase::Completed => "completed",
    }
}

fn error(class: &str, why: &str) -> Value {
    json!({ "error": { "class": class, "desc": why } })
}

fn now() -> Value {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    json!({ "seconds": since.as_secs(), "microseconds": since.subsec_micros() })
}
