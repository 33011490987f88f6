//! Messages that have arrived from the monitor and were not taken yet.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Instant;

use rustix::io::Errno;
use serde_json::Value;

use super::excerpt;
use super::framer::{Frame, Framer};
use super::message::{Event, Greeting, Message};

/// Events that are kept until they are taken; past this the oldest are dropped. A long migration makes a few per
/// second.
const MAX_EVENTS: usize = 65_536;

#[derive(Debug)]
pub(super) struct Inbox {
    framer: Framer,
    /// A thread is in `recv` on behalf of all; the others wait for `arrived`.
    pub(super) reading: bool,
    /// Before the negotiation of an adopted connection is proven, what cannot be understood is skipped.
    pub(super) lenient: bool,
    pub(super) greeting: Option<Greeting>,
    pub(super) awaited: HashSet<u64>,
    pub(super) replies: HashMap<u64, Result<Value, (String, String)>>,
    pub(super) events: VecDeque<Event>,
    next_sequence: u64,
    pub(super) events_lost: u64,
    pub(super) broken: Option<Broken>,
    /// No command is sent before that instant.
    pub(super) held_until: Option<Instant>,
    /// QEMU has said that it ends, regardless of its `-action`: by a signal or `quit`.
    pub(super) ending: bool,
}

/// Why nothing will come any more.
#[derive(Debug, Clone)]
pub(super) enum Broken {
    Closed,
    Io(&'static str, Errno),
    TooLong,
    Garbage(String),
}

impl Inbox {
    /// An empty one, for messages of up to `message_limit` bytes.
    pub(super) fn new(message_limit: usize, lenient: bool) -> Self {
        Self {
            framer: Framer::new(message_limit),
            reading: false,
            lenient,
            greeting: None,
            awaited: HashSet::new(),
            replies: HashMap::new(),
            events: VecDeque::new(),
            next_sequence: 0,
            events_lost: 0,
            broken: None,
            held_until: None,
            ending: false,
        }
    }

    pub(super) fn accept(&mut self, bytes: &[u8]) {
        let pushed = self.framer.push(bytes);
        while let Some(frame) = self.framer.next() {
            let (Frame::Object(bytes) | Frame::Garbage(bytes)) = &frame;
            tracing::debug!("from QEMU: {}", String::from_utf8_lossy(bytes).trim_end());
            match (&frame, Message::parse(bytes)) {
                (Frame::Object(_), Ok(message)) => self.file(message),
                _ if self.lenient => {}
                _ => {
                    self.broken.get_or_insert(Broken::Garbage(excerpt(bytes)));
                    return;
                }
            }
        }
        if pushed.is_err() {
            self.broken.get_or_insert(Broken::TooLong);
        }
    }

    fn file(&mut self, message: Message) {
        match message {
            Message::Return { id: Some(id), value } => self.reply(id, Ok(value)),
            Message::Error { id: Some(id), class, desc } => self.reply(id, Err((class, desc))),
            Message::Event(mut event) => {
                let reason = event.data.get("reason").and_then(Value::as_str);
                self.ending |= event.name == "SHUTDOWN" && matches!(reason, Some("host-signal" | "host-qmp-quit"));
                event.sequence = self.next_sequence;
                self.next_sequence += 1;
                if self.events.len() >= MAX_EVENTS {
                    self.events.pop_front();
                    self.events_lost += 1;
                }
                self.events.push_back(event);
            }
            Message::Greeting(greeting) => self.greeting = Some(greeting),
            // Without an id: QEMU could not read a command. After the flush of an adopted connection that is expected.
            Message::Error { id: None, class, desc } if !self.lenient => {
                self.broken.get_or_insert(Broken::Garbage(format!("{class}: {desc}")));
            }
            // A server may say things that this client does not know.
            Message::Return { id: None, .. } | Message::Error { .. } | Message::Other => {}
        }
    }

    fn reply(&mut self, id: u64, reply: Result<Value, (String, String)>) {
        if self.awaited.remove(&id) {
            self.replies.insert(id, reply);
        }
    }
}
