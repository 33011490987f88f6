//! The client itself: who reads, who waits, and for what.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::inbox::{Broken, Inbox};
use super::message::{Event, Greeting, Version};
use super::peer::Peer;
use super::socket::{self, Received};
use super::{MonitorAddress, QmpError};

/// Bytes asked of the kernel at once.
const READ_SIZE: usize = 64 * 1024;

/// Time-outs and limits of a connection.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long to wait for the greeting before saying that another client holds the monitor. 5 s.
    pub greeting_timeout: Duration,
    /// How long to wait for the first answer, after the greeting. QEMU greets from a thread of its own, but answers
    /// from its main loop, which is held up for ever where it waits for memory that no process brings any more. 20 s.
    pub negotiation_timeout: Duration,
    /// How long to wait for the answer to a command. QEMU answers from its main loop, which a slow disk or the loading
    /// of device state can hold up. 120 s.
    pub reply_timeout: Duration,
    /// The longest message to accept, in bytes. 64 MiB.
    pub message_limit: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            greeting_timeout: Duration::from_secs(5),
            negotiation_timeout: Duration::from_secs(20),
            reply_timeout: Duration::from_secs(120),
            message_limit: 64 * 1024 * 1024,
        }
    }
}

/// The result of a connection's negotiation, passed on with its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Negotiated {
    /// QEMU's version.
    pub version: Version,
    /// Whether commands can be executed out of band.
    pub oob: bool,
    /// QEMU's process, if it is known.
    pub process: Option<u32>,
}

/// A command that was sent. Its answer is kept until [`Qmp::wait`] takes it or [`Qmp::abandon`] gives it up.
#[derive(Debug)]
pub struct Pending {
    id: u64,
    command: String,
    sent: Instant,
}

/// A command before it has an id.
#[derive(Debug)]
struct Command<'c> {
    /// `execute`, or `exec-oob` for a command that is executed out of band.
    verb: &'static str,
    name: &'c str,
    arguments: Value,
}

impl<'c> Command<'c> {
    fn new(name: &'c str, arguments: Value) -> Self {
        Self { verb: "execute", name, arguments }
    }

    fn line(self, id: u64) -> Vec<u8> {
        let mut object = serde_json::Map::new();
        object.insert(self.verb.to_owned(), self.name.into());
        if !self.arguments.is_null() {
            object.insert("arguments".to_owned(), self.arguments);
        }
        object.insert("id".to_owned(), id.into());
        let mut line = Value::Object(object).to_string().into_bytes();
        line.push(b'\n');
        line
    }
}

/// A connection to a monitor, past the negotiation of capabilities.
///
/// All methods take `&self` and may be called from several threads.
#[derive(Debug)]
pub struct Qmp {
    socket: OwnedFd,
    monitor: String,
    descriptors: bool,
    peer_process: Option<u32>,
    oob: bool,
    greeting: Greeting,
    message_limit: usize,
    /// The next id. Held while the bytes of a command are handed to the kernel, so that two commands do not mix; a
    /// command with descriptors holds it until its answer, because QEMU keeps only the last descriptors that came.
    sender: Mutex<u64>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    /// As in the options, or a shorter one that was asked for since.
    reply_timeout: Mutex<Duration>,
}

impl Qmp {
    /// Connects, takes the greeting and negotiates capabilities (out-of-band execution where it is offered).
    ///
    /// # Errors
    /// [`QmpError::Connect`], [`QmpError::Busy`] without a greeting in time, [`QmpError::Unresponsive`] without an
    /// answer after it, [`QmpError::NotQmp`].
    pub fn connect(address: &MonitorAddress, options: &Options) -> Result<Self, QmpError> {
        let monitor = address.to_string();
        let begun = Instant::now();
        let socket = socket::connect_within(address, options.greeting_timeout)
            .map_err(|source| QmpError::Connect { monitor: monitor.clone(), source })?
            .ok_or_else(|| QmpError::Busy { monitor: monitor.clone(), waited: options.greeting_timeout })?;
        // The peer of a socket that was reached by its name is the process that listens.
        let process = Peer::of(socket.as_fd()).ok().and_then(|peer| peer.pid);
        Self::negotiate(socket, monitor, process, options, begun)
    }

    /// The same over a socket that is already connected, for example the other half of a pair that a QEMU was started
    /// with. `monitor` names it in messages.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub fn from_socket(socket: OwnedFd, monitor: &str, options: &Options) -> Result<Self, QmpError> {
        Self::negotiate(socket, monitor.to_owned(), None, options, Instant::now())
    }

    /// Says which process is at the other end, where the socket cannot tell.
    #[must_use]
    pub fn with_process(mut self, pid: u32) -> Self {
        self.peer_process = Some(pid);
        self
    }

    fn negotiate(
        socket: OwnedFd,
        monitor: String,
        process: Option<u32>,
        options: &Options,
        begun: Instant,
    ) -> Result<Self, QmpError> {
        let mut qmp = Self::bare(socket, monitor, process, options, false);
        match qmp.wait_for(Some(begun + options.greeting_timeout), |inbox| inbox.greeting.take()) {
            Ok(Some(greeting)) => qmp.greeting = greeting,
            Ok(None) => return Err(QmpError::Busy { monitor: qmp.monitor, waited: options.greeting_timeout }),
            Err(QmpError::Garbage { monitor, got }) => return Err(QmpError::NotQmp { monitor, got }),
            Err(other) => return Err(other),
        }
        qmp.oob = qmp.greeting.capabilities.iter().any(|capability| capability == "oob");
        let enable = if qmp.oob { vec!["oob"] } else { Vec::new() };
        match qmp.execute_within("qmp_capabilities", json!({ "enable": enable }), options.negotiation_timeout) {
            Ok(_) => Ok(qmp),
            Err(QmpError::NoReply { monitor, waited, .. }) => Err(QmpError::Unresponsive { monitor, waited }),
            Err(other) => Err(other),
        }
    }

    /// Takes over a connection that another process had negotiated and left at any point: in the middle of sending a
    /// command, in the middle of reading an answer, with answers still to come.
    ///
    /// The byte 0xff can be part of no JSON text: it makes QEMU drop what it holds of an unfinished command. What
    /// arrives before the answer to the first command of this client is skipped, except events.
    ///
    /// # Errors
    /// The connection's.
    pub fn adopt(socket: OwnedFd, monitor: &str, options: &Options) -> Result<Self, QmpError> {
        let mut qmp = Self::flushed(socket, monitor, options)?;
        let version = qmp.execute("query-version", Value::Null)?;
        let number =
            Version::of(&version).ok_or_else(|| QmpError::unexpected("query-version", "a version", &version))?;
        let package = version.get("package").and_then(Value::as_str).unwrap_or_default().to_owned();
        qmp.greeting = Greeting { version: number, package, capabilities: Vec::new(), raw: version };
        qmp.lock().lenient = false;
        Ok(qmp)
    }

    /// [`Qmp::adopt`] while QEMU's main loop may be held up: asks nothing, and relies on what the other process had
    /// found out (`negotiated`). Out of band, commands are answered at once; others when the main loop comes back to
    /// life.
    ///
    /// # Errors
    /// The connection's.
    pub fn adopt_unresponsive(
        socket: OwnedFd,
        monitor: &str,
        options: &Options,
        negotiated: &Negotiated,
    ) -> Result<Self, QmpError> {
        // What QEMU says to the flush waits for its main loop too, so what cannot be understood is skipped for good.
        let mut qmp = Self::flushed(socket, monitor, options)?;
        qmp.greeting.version = negotiated.version;
        qmp.oob = negotiated.oob;
        qmp.peer_process = negotiated.process;
        Ok(qmp)
    }

    /// An adopted connection, with what was half sent dropped.
    fn flushed(socket: OwnedFd, monitor: &str, options: &Options) -> Result<Self, QmpError> {
        let mut qmp = Self::bare(socket, monitor.to_owned(), None, options, true);
        // Ids that the other process cannot have used: it counted from 1.
        *qmp.sender.get_mut() = u64::from(u32::MAX) + 1;
        let deadline = Some(Instant::now() + options.reply_timeout);
        socket::send(qmp.socket.as_fd(), b"\xff\n", &[], deadline)
            .map_err(|errno| qmp.error(&Broken::Io("send", errno), Some("the flush of the parser")))?;
        Ok(qmp)
    }

    fn bare(socket: OwnedFd, monitor: String, process: Option<u32>, options: &Options, lenient: bool) -> Self {
        let version = Version::new(0, 0, 0);
        let greeting = Greeting { version, package: String::new(), capabilities: Vec::new(), raw: Value::Null };
        Self {
            descriptors: socket::is_unix(socket.as_fd()),
            socket,
            monitor,
            peer_process: process,
            oob: false,
            greeting,
            message_limit: options.message_limit,
            sender: Mutex::new(1),
            inbox: Mutex::new(Inbox::new(options.message_limit, lenient)),
            arrived: Condvar::new(),
            reply_timeout: Mutex::new(options.reply_timeout),
        }
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.greeting.version
    }

    /// The monitor's greeting.
    #[must_use]
    pub fn greeting(&self) -> &Greeting {
        &self.greeting
    }

    /// The monitor's address, for messages.
    #[must_use]
    pub fn monitor(&self) -> &str {
        &self.monitor
    }

    /// The id of the QEMU process, where it is known: of a unix socket that was reached by its path, or passed by
    /// [`Qmp::with_process`].
    #[must_use]
    pub fn process(&self) -> Option<u32> {
        self.peer_process
    }

    /// Whether descriptors can be passed to this QEMU.
    #[must_use]
    pub fn passes_descriptors(&self) -> bool {
        self.descriptors
    }

    /// Whether [`Qmp::execute_oob`] can be used.
    #[must_use]
    pub fn has_oob(&self) -> bool {
        self.oob
    }

    /// Returns the result of the negotiation, for a process that may have to continue with the connection.
    #[must_use]
    pub fn negotiated(&self) -> Negotiated {
        Negotiated { version: self.version(), oob: self.oob, process: self.peer_process }
    }

    /// Waits from here on no longer than this for an answer: for a QEMU that may not answer any more.
    pub fn limit_replies(&self, limit: Duration) {
        let mut timeout = self.reply_timeout.lock();
        *timeout = limit.min(*timeout);
    }

    fn reply_timeout(&self) -> Duration {
        *self.reply_timeout.lock()
    }

    /// The connection's descriptor, to be handed to the watchdog.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Executes a command and waits for its answer. `Null` arguments are left out.
    ///
    /// # Errors
    /// [`QmpError::Command`] with QEMU's words, [`QmpError::NoReply`], or the connection's failure.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, self.reply_timeout())
    }

    /// [`Qmp::execute`] with a time limit of its own.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn execute_within(&self, command: &str, arguments: Value, patience: Duration) -> Result<Value, QmpError> {
        let [pending] = self.send([Command::new(command, arguments)], patience)?;
        self.finish(pending, patience)
    }

    /// Executes commands that are sent as one: QEMU has the next one when it is done with the one before, so that no
    /// time passes between them but QEMU's own. All are executed, also where one before is refused. At most five: QEMU
    /// stops reading its monitor, also for commands out of band, while eight wait in it.
    ///
    /// # Errors
    /// They cannot be sent. Each command has an answer of its own, as from [`Qmp::execute`]; one limit of time holds
    /// for all of them.
    pub fn execute_all<const N: usize>(
        &self,
        commands: [(&str, Value); N],
    ) -> Result<[Result<Value, QmpError>; N], QmpError> {
        const { assert!(N <= 5, "QEMU's monitor has little room for commands that wait") };
        let commands = commands.map(|(name, arguments)| Command::new(name, arguments));
        let limit = self.reply_timeout();
        let begun = Instant::now();
        let pending = self.send(commands, limit)?;
        // Waited for even if one failed, so that no answer is left over.
        Ok(pending.map(|pending| self.finish(pending, limit.saturating_sub(begun.elapsed()))))
    }

    /// Executes a command out of band: QEMU answers it even while its main loop is held up. Only a few commands allow
    /// it, among them `migrate-pause` and `migrate-recover`. Falls back to normal execution where it was not offered.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn execute_oob(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let verb = if self.oob { "exec-oob" } else { "execute" };
        let patience = self.reply_timeout();
        let [pending] = self.send([Command { verb, name: command, arguments }], patience)?;
        self.finish(pending, patience)
    }

    /// Executes a command that takes descriptors (`getfd`, `add-fd`). QEMU gets duplicates.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; [`QmpError::NoDescriptors`] if the monitor is no unix socket.
    pub fn execute_with_descriptors(
        &self,
        command: &str,
        arguments: Value,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Value, QmpError> {
        if !self.descriptors {
            return Err(QmpError::NoDescriptors { monitor: self.monitor.clone(), command: command.to_owned() });
        }
        let patience = self.reply_timeout();
        let mut next = self.sender.lock();
        let [pending] = self.send_locked(&mut next, [Command::new(command, arguments)], descriptors, patience)?;
        self.finish(pending, patience)
    }

    /// Sends a command and returns at once; [`Qmp::wait`] takes the answer.
    ///
    /// # Errors
    /// The connection's.
    pub fn send_command(&self, command: &str, arguments: Value) -> Result<Pending, QmpError> {
        self.send([Command::new(command, arguments)], self.reply_timeout()).map(|[pending]| pending)
    }

    /// Waits for the answer to a started command; `None` if it has not come within `patience`.
    ///
    /// # Errors
    /// As [`Qmp::execute`], but never [`QmpError::NoReply`].
    pub fn wait(&self, pending: &Pending, patience: Duration) -> Result<Option<Value>, QmpError> {
        let deadline = Instant::now().checked_add(patience);
        let reply = self
            .wait_for(deadline, |inbox| inbox.replies.remove(&pending.id))
            .map_err(|error| self.during(error, &pending.command))?;
        match reply {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err((class, desc))) => Err(QmpError::Command { command: pending.command.clone(), class, desc }),
        }
    }

    /// Gives up the answer to a started command; it is discarded when it comes.
    #[expect(clippy::needless_pass_by_value, reason = "a command that was given up cannot be waited for")]
    pub fn abandon(&self, pending: Pending) {
        let mut inbox = self.lock();
        inbox.awaited.remove(&pending.id);
        inbox.replies.remove(&pending.id);
    }

    /// The first event that has one of these names, among those not yet taken, waiting for it up to `timeout`. The
    /// others stay where they are. No names: the first event of any name.
    ///
    /// # Errors
    /// The connection's. Events that came before it failed are still given out.
    pub fn wait_event(&self, names: &[&str], timeout: Duration) -> Result<Option<Event>, QmpError> {
        self.wait_event_where(|event| names.is_empty() || names.contains(&event.name.as_str()), timeout)
    }

    /// The first event that `wanted` accepts, as [`Qmp::wait_event`].
    ///
    /// # Errors
    /// As [`Qmp::wait_event`].
    pub fn wait_event_where(
        &self,
        wanted: impl Fn(&Event) -> bool,
        timeout: Duration,
    ) -> Result<Option<Event>, QmpError> {
        self.wait_for(Instant::now().checked_add(timeout), |inbox| {
            let index = inbox.events.iter().position(&wanted)?;
            inbox.events.remove(index)
        })
    }

    /// All events not yet taken, oldest first, after reading what has arrived.
    ///
    /// # Errors
    /// The connection's, if it has failed and no event is left.
    pub fn take_events(&self) -> Result<Vec<Event>, QmpError> {
        let read = self.wait_for(Some(Instant::now()), |_| None::<()>);
        let events: Vec<Event> = self.lock().events.drain(..).collect();
        if events.is_empty() {
            read?;
        }
        Ok(events)
    }

    /// Keeps QEMU undisturbed for so long, for a signal that is about to end it: commands under way are answered first,
    /// within `answers`; new ones wait, and fail as soon as QEMU says that it ends. If it does not end they
    /// continue.
    ///
    /// A QEMU that is ending still reads its monitor, and carries commands out with half of it taken down:
    /// `query-migrate` then aborts, and its exit status and all that it had still to do are lost (found with QEMU
    /// 10.0.2).
    pub fn quiesce(&self, how_long: Duration, answers: Duration) {
        self.lock().held_until = Instant::now().checked_add(how_long);
        // A connection that has failed has nothing under way.
        let _ = self.wait_for(Instant::now().checked_add(answers), |inbox| inbox.awaited.is_empty().then_some(()));
    }

    /// Events that were dropped because they were not taken.
    #[must_use]
    pub fn events_lost(&self) -> u64 {
        self.lock().events_lost
    }

    fn send<const N: usize>(&self, commands: [Command<'_>; N], patience: Duration) -> Result<[Pending; N], QmpError> {
        let mut next = self.sender.lock();
        self.send_locked(&mut next, commands, &[], patience)
    }

    /// Hands commands to the kernel as one. `next` is the locked id of the first.
    fn send_locked<const N: usize>(
        &self,
        next: &mut u64,
        commands: [Command<'_>; N],
        descriptors: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<[Pending; N], QmpError> {
        let mut bytes = Vec::new();
        let mut pending = commands.map(|command| {
            let (id, name) = (*next, command.name.to_owned());
            *next = next.wrapping_add(1);
            bytes.extend(command.line(id));
            Pending { id, command: name, sent: Instant::now() }
        });
        self.await_permission(&pending)?;
        tracing::debug!("to QEMU: {}", String::from_utf8_lossy(&bytes).trim_end());
        let sent = Instant::now();
        for command in &mut pending {
            command.sent = sent;
        }
        match socket::send(self.socket.as_fd(), &bytes, descriptors, sent.checked_add(patience)) {
            Ok(()) => Ok(pending),
            Err(errno) => {
                let gone = errno == Errno::PIPE;
                let broken = if gone { Broken::Closed } else { Broken::Io("send", errno) };
                let error = self.error(&broken, pending.first().map(|command| command.command.as_str()));
                let mut inbox = self.lock();
                for command in &pending {
                    inbox.awaited.remove(&command.id);
                }
                // Part of a command may be out, and nothing can follow it. But what a server that is gone said last can
                // still be read; its end will be met there.
                if !gone {
                    inbox.broken.get_or_insert(broken);
                }
                Err(error)
            }
        }
    }

    /// Waits until commands may be sent, and has their answers awaited from then on.
    fn await_permission(&self, commands: &[Pending]) -> Result<(), QmpError> {
        // What has arrived and is not read yet may say that QEMU ends. That the connection has failed, sending will
        // tell.
        let mut until = Instant::now();
        loop {
            let _ = self.wait_for(Some(until), |inbox| inbox.ending.then_some(()));
            let mut inbox = self.lock();
            if inbox.ending {
                let command = commands.first().map(|command| command.command.clone()).unwrap_or_default();
                return Err(QmpError::Ending { monitor: self.monitor.clone(), command });
            }
            match inbox.held_until {
                Some(held) if held > Instant::now() && inbox.broken.is_none() => until = held,
                _ => {
                    inbox.awaited.extend(commands.iter().map(|command| command.id));
                    return Ok(());
                }
            }
        }
    }

    fn finish(&self, pending: Pending, patience: Duration) -> Result<Value, QmpError> {
        if let Some(value) = self.wait(&pending, patience)? {
            return Ok(value);
        }
        let (waited, command) = (pending.sent.elapsed(), pending.command.clone());
        self.abandon(pending);
        Err(QmpError::NoReply { monitor: self.monitor.clone(), command, waited })
    }

    /// Waits until `pick` finds what it looks for, reading the socket unless another thread does.
    fn wait_for<T>(
        &self,
        deadline: Option<Instant>,
        mut pick: impl FnMut(&mut Inbox) -> Option<T>,
    ) -> Result<Option<T>, QmpError> {
        let mut buffer = Vec::new();
        let mut tried = false;
        let mut inbox = self.lock();
        loop {
            if let Some(found) = pick(&mut inbox) {
                return Ok(Some(found));
            }
            if let Some(broken) = &inbox.broken {
                return Err(self.error(broken, None));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if tried && left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            tried = true;
            if inbox.reading {
                match deadline {
                    Some(deadline) => _ = self.arrived.wait_until(&mut inbox, deadline),
                    None => self.arrived.wait(&mut inbox),
                }
                continue;
            }
            inbox.reading = true;
            drop(inbox);
            buffer.resize(READ_SIZE, 0);
            let received = socket::receive(self.socket.as_fd(), &mut buffer, deadline);
            inbox = self.lock();
            inbox.reading = false;
            match received {
                Ok(Received::Bytes(bytes)) => inbox.accept(buffer.get(..bytes).unwrap_or_default()),
                Ok(Received::TimedOut) => {}
                Ok(Received::Closed) => inbox.broken = Some(Broken::Closed),
                Err(errno) => inbox.broken = Some(Broken::Io("receive", errno)),
            }
            self.arrived.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock()
    }

    fn error(&self, broken: &Broken, command: Option<&str>) -> QmpError {
        let monitor = self.monitor.clone();
        match broken {
            Broken::Closed => QmpError::Closed { monitor, during: command.map(str::to_owned) },
            Broken::Io(operation, errno) => QmpError::Io { monitor, operation, source: (*errno).into() },
            Broken::TooLong => QmpError::TooLong { monitor, limit: self.message_limit },
            Broken::Garbage(got) => QmpError::Garbage { monitor, got: got.clone() },
        }
    }

    fn during(&self, error: QmpError, command: &str) -> QmpError {
        match error {
            QmpError::Closed { monitor, .. } => QmpError::Closed { monitor, during: Some(command.to_owned()) },
            other => other,
        }
    }
}
