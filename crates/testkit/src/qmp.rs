//! A QMP client for tests (QEMU docs: interop/qmp-spec): commands, events, descriptors. Kept apart from limosa's own
//! client so that a mistake there is not repeated here.

use std::collections::VecDeque;
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

/// How long QEMU may take for any one answer.
const ANSWER: Duration = Duration::from_secs(60);

/// QEMU's answer that a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QmpFailure {
    /// The command.
    pub command: String,
    /// `class` of the error, e.g. `GenericError`.
    pub class: String,
    /// `desc` of the error.
    pub description: String,
}

impl std::fmt::Display for QmpFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QEMU refused {}: {} ({})", self.command, self.description, self.class)
    }
}

impl std::error::Error for QmpFailure {}

/// A connection to one QMP monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    received: Vec<u8>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects and negotiates, trying until `limit` is over because a starting QEMU has no socket yet.
    ///
    /// # Errors
    /// No connection or no greeting within `limit`.
    pub fn connect(path: &Path, limit: Duration) -> Result<Self> {
        let end = Instant::now() + limit;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
                Err(error) => return Err(error).with_context(|| format!("connecting to {}", path.display())),
            }
        };
        let mut qmp = Self { stream, received: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.receive(end)?.context("no QMP greeting: another client holds this monitor")?;
        if greeting.get("QMP").is_none() {
            bail!("{}: not a QMP greeting: {greeting}", path.display());
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command; `arguments` is an object, `{}` for none. Events that arrive meanwhile are kept.
    ///
    /// # Errors
    /// A [`QmpFailure`] if QEMU refuses, anything else if the connection is lost or QEMU does not answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.send(command, arguments, None)
    }

    /// Like [`Qmp::execute`], with a descriptor that travels along (`getfd`, `add-fd`).
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn execute_with_descriptor(&mut self, command: &str, arguments: Value, fd: BorrowedFd<'_>) -> Result<Value> {
        self.send(command, arguments, Some(fd))
    }

    /// The next event of this name: one that was kept, or one to come. Others stay kept.
    ///
    /// # Errors
    /// None within `limit`, or the connection is lost.
    pub fn wait_event(&mut self, name: &str, limit: Duration) -> Result<Value> {
        let end = Instant::now() + limit;
        let mut seen = 0;
        loop {
            if let Some(found) = self.events.iter().skip(seen).position(|event| event["event"] == name) {
                return self.events.remove(seen + found).context("an event that was just there");
            }
            seen = self.events.len();
            match self.receive(end)? {
                Some(message) => self.keep(message),
                None => bail!("no event {name} within {limit:?}; seen: {:?}", self.event_names()),
            }
        }
    }

    /// Takes every event that has arrived so far.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn take_events(&mut self) -> Result<Vec<Value>> {
        // A round trip: every event sent before the answer has arrived by then.
        self.execute("query-name", json!({}))?;
        Ok(self.events.drain(..).collect())
    }

    fn event_names(&self) -> Vec<String> {
        self.events.iter().map(|event| event["event"].as_str().unwrap_or_default().to_owned()).collect()
    }

    fn keep(&mut self, message: Value) {
        if message.get("event").is_some() {
            self.events.push_back(message);
        }
    }

    fn send(&mut self, command: &str, arguments: Value, fd: Option<BorrowedFd<'_>>) -> Result<Value> {
        let mut text = json!({ "execute": command, "arguments": arguments }).to_string().into_bytes();
        text.push(b'\n');
        let sent = match &fd {
            None => 0,
            Some(fd) => {
                let fds = [*fd];
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                control.push(SendAncillaryMessage::ScmRights(&fds));
                sendmsg(&self.stream, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)
                    .with_context(|| format!("sending {command}"))?
            }
        };
        self.stream.write_all(&text[sent..]).with_context(|| format!("sending {command}"))?;
        let end = Instant::now() + ANSWER;
        loop {
            let Some(mut message) =
                self.receive(end).with_context(|| format!("waiting for the answer to {command}"))?
            else {
                bail!("QEMU did not answer {command} within {ANSWER:?}");
            };
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = message.get("error") {
                let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
                let failure =
                    QmpFailure { command: command.to_owned(), class: text("class"), description: text("desc") };
                return Err(failure.into());
            }
            self.keep(message);
        }
    }

    /// The next message, or nothing when `end` has come.
    fn receive(&mut self, end: Instant) -> Result<Option<Value>> {
        loop {
            if let Some(length) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=length).collect();
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return Ok(Some(serde_json::from_slice(&line).context("a QMP message")?));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left)).context("setting a timeout")?;
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => bail!("QEMU closed the monitor"),
                Ok(length) => self.received.extend_from_slice(&buffer[..length]),
                Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("reading the monitor"),
            }
        }
    }
}
