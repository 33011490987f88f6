//! A QMP client as small as a bench needs it (QEMU docs: interop/qmp-spec): commands, and events with QEMU's own times.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

/// How long QEMU may take for any one answer or event: for one that hangs, not a measure.
const LIMIT: Duration = Duration::from_secs(120);

/// An event and when QEMU says that it was.
#[derive(Debug, Clone)]
struct Event {
    name: String,
    /// `status` of a `MIGRATION` event.
    status: Option<String>,
    at: SystemTime,
}

/// A connection to one monitor.
#[derive(Debug)]
pub(crate) struct Qmp {
    stream: UnixStream,
    received: Vec<u8>,
    events: VecDeque<Event>,
}

impl Qmp {
    /// Negotiates on a new connection.
    pub(crate) fn new(stream: UnixStream) -> Result<Self> {
        let mut qmp = Self { stream, received: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.receive().context("waiting for the greeting")?;
        if greeting.get("QMP").is_none() {
            bail!("not a QMP greeting: {greeting}");
        }
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Connects to a monitor that may not be there yet.
    pub(crate) fn connect(path: &Path, alive: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        let stream = connect(path, alive)?;
        Self::new(stream).with_context(|| path.display().to_string())
    }

    /// Runs a command; events that come meanwhile are kept.
    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let text = line(command, arguments);
        self.stream.write_all(text.as_bytes()).with_context(|| format!("sending {command}"))?;
        self.answer(command)
    }

    /// Runs two commands of which the second must not come late: both are there before QEMU begins the first.
    pub(crate) fn execute_both(&mut self, first: (&str, &Value), second: (&str, &Value)) -> Result<()> {
        let text = line(first.0, first.1) + &line(second.0, second.1);
        self.stream.write_all(text.as_bytes()).with_context(|| format!("sending {}", first.0))?;
        self.answer(first.0)?;
        self.answer(second.0).map(drop)
    }

    /// Gives QEMU a descriptor under a name, for a URI `fd:NAME`.
    pub(crate) fn give(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<()> {
        let text = line("getfd", &json!({ "fdname": name }));
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let slices = [IoSlice::new(text.as_bytes())];
        let sent = sendmsg(&self.stream, &slices, &mut control, SendFlags::NOSIGNAL).context("sending getfd")?;
        self.stream.write_all(text.as_bytes().get(sent..).unwrap_or_default()).context("sending getfd")?;
        self.answer("getfd").map(drop)
    }

    fn answer(&mut self, command: &str) -> Result<Value> {
        loop {
            let mut message = self.receive().with_context(|| format!("waiting for the answer to {command}"))?;
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = message.get("error") {
                let text = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
                bail!("QEMU refused {command}: {text}");
            }
            self.events.extend(event(&message));
        }
    }

    /// Switches migration capabilities on or off.
    pub(crate) fn set(&mut self, capabilities: &[(&str, bool)]) -> Result<()> {
        let list: Vec<Value> =
            capabilities.iter().map(|(name, state)| json!({ "capability": name, "state": state })).collect();
        self.execute("migrate-set-capabilities", &json!({ "capabilities": list })).map(drop)
    }

    /// Drops the events that have come so far.
    pub(crate) fn forget_events(&mut self) {
        self.events.clear();
    }

    /// The next event that `wanted` accepts; others are kept. A migration that fails is an error.
    fn wait(&mut self, wanted: impl Fn(&Event) -> bool) -> Result<Event> {
        let failed =
            |event: &Event| matches!(event.status.as_deref(), Some("failed" | "cancelled" | "postcopy-paused"));
        loop {
            if let Some(event) = self.events.iter().position(&wanted).and_then(|found| self.events.remove(found)) {
                return Ok(event);
            }
            if self.events.iter().any(failed) {
                let state = self.execute("query-migrate", &json!({}))?;
                bail!("the migration has failed: {state}");
            }
            let message = self.receive().context("waiting for an event")?;
            self.events.extend(event(&message));
        }
    }

    /// Waits for the event that says that the guest runs.
    pub(crate) fn wait_resumed(&mut self) -> Result<SystemTime> {
        Ok(self.wait(|event| event.name == "RESUME").context("the guest to run")?.at)
    }

    /// Waits for a `MIGRATION` event, which takes the capability `events`.
    pub(crate) fn wait_migration(&mut self, status: &str) -> Result<SystemTime> {
        let found = self.wait(|event| event.status.as_deref() == Some(status));
        Ok(found.with_context(|| format!("a migration to be {status}"))?.at)
    }

    /// Waits until an incoming migration has become a postcopy.
    pub(crate) fn wait_postcopy(&mut self) -> Result<()> {
        let (postcopy, completed) = (Some("postcopy-active"), Some("completed"));
        let found = self.wait(|event| [postcopy, completed].contains(&event.status.as_deref()));
        let status = found.context("a migration to become a postcopy")?.status;
        ensure!(status.as_deref() == postcopy, "all was sent before the postcopy could begin: take a larger --size");
        Ok(())
    }

    fn receive(&mut self) -> Result<Value> {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(length) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=length).collect();
                return serde_json::from_slice(&line).context("a QMP message");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("nothing within {LIMIT:?}");
            }
            self.stream.set_read_timeout(Some(left)).context("setting a timeout")?;
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => bail!("QEMU closed the monitor"),
                Ok(length) => self.received.extend_from_slice(buffer.get(..length).unwrap_or_default()),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                }
                Err(error) => return Err(error).context("reading the monitor"),
            }
        }
    }
}

/// Connects to a socket that a starting process is about to make; `alive` fails if that has ended.
pub(crate) fn connect(path: &Path, alive: &mut dyn FnMut() -> Result<()>) -> Result<UnixStream> {
    let end = Instant::now() + LIMIT;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= end => {
                return Err(error).with_context(|| format!("{}: cannot connect", path.display()));
            }
            Err(_) => {
                alive()?;
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

fn line(command: &str, arguments: &Value) -> String {
    let mut text = json!({ "execute": command, "arguments": arguments }).to_string();
    text.push('\n');
    text
}

fn event(message: &Value) -> Option<Event> {
    let name = message.get("event")?.as_str()?.to_owned();
    let status = message.pointer("/data/status").and_then(Value::as_str).map(str::to_owned);
    let time = |unit: &str| message.pointer(&format!("/timestamp/{unit}")).and_then(Value::as_u64);
    let at = UNIX_EPOCH + Duration::from_secs(time("seconds")?) + Duration::from_micros(time("microseconds")?);
    Some(Event { name, status, at })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    /// A monitor that sends the lines given: one after the connection, the next after each command.
    fn scripted(lines: &'static [&'static str]) -> Result<Qmp> {
        let (ours, theirs) = UnixStream::pair()?;
        std::thread::spawn(move || {
            let mut commands = BufReader::new(theirs.try_clone().expect("clones"));
            for line in lines {
                (&theirs).write_all(line.as_bytes()).expect("sends");
                let _ = commands.read_line(&mut String::new());
            }
        });
        Qmp::new(ours)
    }

    #[test]
    fn an_event_that_comes_before_an_answer_is_kept_with_its_time() {
        let mut qmp = scripted(&[
            "{\"QMP\": {}}\r\n",
            "{\"return\": {}}\r\n",
            "{\"timestamp\": {\"seconds\": 7, \"microseconds\": 5}, \"event\": \"RESUME\"}\r\n{\"return\": 3}\r\n",
        ])
        .expect("negotiates");
        assert_eq!(qmp.execute("cont", &json!({})).expect("answers"), json!(3));
        let at = qmp.wait_resumed().expect("was kept");
        assert_eq!(at, UNIX_EPOCH + Duration::from_micros(7_000_005));
    }

    #[test]
    fn a_refused_command_gives_the_reason() {
        let mut qmp = scripted(&["{\"QMP\": {}}\n", "{\"return\": {}}\n", "{\"error\": {\"desc\": \"too late\"}}\n"])
            .expect("negotiates");
        let error = qmp.execute("migrate", &json!({})).expect_err("refused");
        assert_eq!(error.to_string(), "QEMU refused migrate: too late");
    }

    #[test]
    fn what_is_no_monitor_is_refused() {
        assert!(scripted(&["{\"hello\": {}}\n"]).is_err());
    }
}
