//! A conversation with an agent: commands and their answers, one at a time, within a time and a number of bytes.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use limosa_page::broken_invariant;
use rustix::io::Errno;
use serde_json::{Value, json};

use super::answers::{AgentAnswers, DELIMITER};
use super::error::GuestAgentError;
use crate::qmp::{Received, excerpt, receive, send};

/// Time limit of a whole conversation. An agent that waits for its host looks for one every 100 ms, and a busy guest is
/// slow to run it.
pub(super) const CONVERSATION_WITHIN: Duration = Duration::from_secs(10);
/// Bytes that are read in a conversation. The answers take some hundred; what an agent still has for the program that
/// was connected before comes first.
const BYTES_LIMIT: usize = 1 << 20;
/// Bytes asked of the kernel at once.
const READ_SIZE: usize = 4096;

/// A connection to an agent that has answered.
#[derive(Debug)]
pub(super) struct Conversation {
    socket: OwnedFd,
    answers: AgentAnswers,
    limit: Duration,
    deadline: Instant,
}

impl Conversation {
    /// Begins a conversation over a connected socket, for `limit`: drops what is left of an earlier one.
    pub(super) fn begin(socket: OwnedFd, limit: Duration) -> Result<Self, GuestAgentError> {
        let deadline = Instant::now() + limit;
        let mut conversation = Self { socket, answers: AgentAnswers::new(BYTES_LIMIT), limit, deadline };
        conversation.synchronize()?;
        Ok(conversation)
    }

    /// Waits for the answer that has this conversation's number. An agent that had half of a command reports an error
    /// first.
    fn synchronize(&mut self) -> Result<(), GuestAgentError> {
        const COMMAND: &str = "guest-sync-delimited";
        // Agents count with 64 bits and a sign.
        let number = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
        self.send(COMMAND, &json!({ "id": number }))?;
        loop {
            let line = self.line(COMMAND)?;
            let answer: Option<Value> = serde_json::from_slice(&line).ok();
            if answer.is_some_and(|answer| answer.get("return").and_then(Value::as_u64) == Some(number.into())) {
                return Ok(());
            }
        }
    }

    /// Executes a command. `Null` arguments are left out.
    pub(super) fn execute(&mut self, command: &'static str, arguments: &Value) -> Result<Value, GuestAgentError> {
        self.send(command, arguments)?;
        let line = self.line(command)?;
        let unexpected = || GuestAgentError::Unexpected { command, got: excerpt(&line) };
        let mut answer: Value = serde_json::from_slice(&line).map_err(|_| unexpected())?;
        if let Some(reason) = answer.get("error") {
            let reason = reason.get("desc").and_then(Value::as_str).unwrap_or_default();
            return Err(GuestAgentError::Refused { command, reason: excerpt(reason.as_bytes()) });
        }
        answer.get_mut("return").map(Value::take).ok_or_else(unexpected)
    }

    fn send(&self, command: &'static str, arguments: &Value) -> Result<(), GuestAgentError> {
        let mut object = json!({ "execute": command });
        if !arguments.is_null() {
            object["arguments"] = arguments.clone();
        }
        // The delimiter ends a command that another program has sent in part. No command of this conversation is.
        let mut bytes = if command == "guest-sync-delimited" { vec![DELIMITER] } else { Vec::new() };
        bytes.extend_from_slice(object.to_string().as_bytes());
        bytes.push(b'\n');
        send(self.socket.as_fd(), &bytes, &[], Some(self.deadline)).map_err(|errno| match errno {
            Errno::TIMEDOUT => GuestAgentError::NoAnswer { command, limit: self.limit },
            Errno::PIPE | Errno::CONNRESET => GuestAgentError::Closed { command },
            errno => GuestAgentError::Io { what: "send to the guest agent", source: errno.into() },
        })
    }

    /// The next line that the agent sends.
    fn line(&mut self, command: &'static str) -> Result<Vec<u8>, GuestAgentError> {
        let mut buffer = [0; READ_SIZE];
        loop {
            if let Some(line) = self.answers.next_line() {
                return Ok(line);
            }
            // A guest that sends without a pause is never waited for, so the time is looked at here too.
            let no_answer = GuestAgentError::NoAnswer { command, limit: self.limit };
            if Instant::now() >= self.deadline {
                return Err(no_answer);
            }
            match receive(self.socket.as_fd(), &mut buffer, Some(self.deadline)) {
                Ok(Received::Bytes(count)) => {
                    let bytes = buffer.get(..count).ok_or_else(|| GuestAgentError::Io {
                        what: "receive from the guest agent",
                        source: io::Error::other(broken_invariant("at most a buffer's length is received into it")),
                    })?;
                    let pushed = self.answers.push(bytes);
                    pushed.map_err(|_| GuestAgentError::TooManyBytes { limit: BYTES_LIMIT })?;
                }
                Ok(Received::TimedOut) => return Err(no_answer),
                Ok(Received::Closed) => return Err(GuestAgentError::Closed { command }),
                Err(errno) => {
                    return Err(GuestAgentError::Io { what: "receive from the guest agent", source: errno.into() });
                }
            }
        }
    }
}
