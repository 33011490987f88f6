//! The guest's clock is set to the host's.

use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::conversation::{CONVERSATION_WITHIN, Conversation};
use super::error::GuestAgentError;
use super::port;
use crate::monitor::Monitor;

/// How far a clock that was set may be from the host's, in nanoseconds: a busy guest takes long to answer.
const SET_TOLERANCE: i64 = 2_000_000_000;

/// A clock that was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClockSet {
    /// How far the guest's clock was behind the host's before, in nanoseconds; negative if it was ahead. `None` if the
    /// agent does not tell the time.
    pub behind_nanos: Option<i64>,
}

/// The clock of a guest that is being set, by a thread of its own.
#[derive(Debug)]
pub struct GuestClock(Result<JoinHandle<Result<ClockSet, GuestAgentError>>, GuestAgentError>);

impl GuestClock {
    /// Begins to set the clock of the VM behind `monitor`, which must run. The monitor is not needed any more when this
    /// returns, which takes some round trips.
    #[must_use]
    pub fn begin(monitor: &Monitor) -> Self {
        let begun = port::connect(monitor).and_then(|socket| {
            let name = thread::Builder::new().name("clock".into());
            let start = name.spawn(move || set(socket, CONVERSATION_WITHIN));
            start.map_err(|source| GuestAgentError::Io { what: "start a thread to set the guest's clock", source })
        });
        Self(begun)
    }

    /// Waits until the clock is set, for 10 s at most.
    ///
    /// # Errors
    /// [`GuestAgentError`]: the clock is not set, or the agent did not say so in time.
    pub fn finish(self) -> Result<ClockSet, GuestAgentError> {
        self.0?.join().unwrap_or_else(|_| {
            let source = std::io::Error::other("its thread panicked");
            Err(GuestAgentError::Io { what: "set the guest's clock", source })
        })
    }
}

fn set(socket: OwnedFd, limit: Duration) -> Result<ClockSet, GuestAgentError> {
    let mut agent = Conversation::begin(socket, limit)?;
    let behind_nanos = behind(&mut agent).or_else(|error| match error {
        GuestAgentError::Refused { .. } => Ok(None),
        other => Err(other),
    })?;
    let Err(refused) = agent.execute("guest-set-time", &json!({ "time": now() })) else {
        return Ok(ClockSet { behind_nanos });
    };
    // Agents report a failure if they set the clock and then find no program that sets the hardware clock as well.
    match (&refused, behind_nanos) {
        (GuestAgentError::Refused { .. }, Some(_))
            if behind(&mut agent)?.is_some_and(|behind| behind.abs() < SET_TOLERANCE) =>
        {
            Ok(ClockSet { behind_nanos })
        }
        _ => Err(refused),
    }
}

/// How far the guest's clock is behind, in nanoseconds.
fn behind(agent: &mut Conversation) -> Result<Option<i64>, GuestAgentError> {
    const COMMAND: &str = "guest-get-time";
    let answer = agent.execute(COMMAND, &Value::Null)?;
    let time = answer.as_i64().ok_or_else(|| GuestAgentError::Unexpected {
        command: COMMAND,
        got: crate::qmp::excerpt(answer.to_string().as_bytes()),
    })?;
    Ok(Some(now().saturating_sub(time)))
}

/// The host's time in nanoseconds since 1970, as agents take it: until the year 2262.
fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    /// Sets the clock of a guest whose agent is `agent`, which gets each command.
    fn set_by(
        limit: Duration,
        mut agent: impl FnMut(&mut UnixStream, &Value) + Send + 'static,
    ) -> Result<ClockSet, GuestAgentError> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let reader = BufReader::new(theirs.try_clone().unwrap());
        let thread = thread::spawn(move || {
            for line in reader.split(b'\n').map_while(Result::ok) {
                let text = line.strip_prefix(b"\xff").unwrap_or(&line);
                agent(&mut theirs, &serde_json::from_slice(text).unwrap());
            }
        });
        let outcome = set(ours.into(), limit);
        thread.join().unwrap();
        outcome
    }

    /// Answers as an agent does whose clock is `clock`, and which has no program for the hardware clock if `bare`.
    fn honest(clock: &mut i64, bare: bool, out: &mut UnixStream, command: &Value) {
        let answer = match command["execute"].as_str().unwrap() {
            "guest-sync-delimited" => {
                out.write_all(b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"no JSON\"}}\n\xff").unwrap();
                json!({ "return": command["arguments"]["id"] })
            }
            "guest-get-time" => json!({ "return": *clock }),
            _ => {
                *clock = command["arguments"]["time"].as_i64().unwrap();
                let failed = json!({ "error": { "class": "GenericError", "desc": "no \u{1b}[31mhwclock" } });
                if bare { failed } else { json!({ "return": {} }) }
            }
        };
        out.write_all(format!("{answer}\n").as_bytes()).unwrap();
    }

    const PATIENT: Duration = Duration::from_secs(60);
    const HOUR: i64 = 3_600_000_000_000;

    #[test]
    fn a_clock_is_set_and_it_is_told_how_far_it_was_behind() {
        for bare in [false, true] {
            let mut clock = now() - HOUR;
            let set = set_by(PATIENT, move |out, command| honest(&mut clock, bare, out, command)).unwrap();
            assert!((HOUR..HOUR + HOUR / 10).contains(&set.behind_nanos.unwrap()), "{set:?}");
        }
    }

    #[test]
    fn answers_to_an_earlier_program_are_not_taken_for_ones_own() {
        let mut clock = now();
        let set = set_by(PATIENT, move |out, command| {
            if command["execute"] == "guest-sync-delimited" {
                out.write_all(b"{\"return\": 5}\n[]\n{\"return\": \"cut o").unwrap();
            }
            honest(&mut clock, false, out, command);
        });
        assert!(set.is_ok(), "{set:?}");
    }

    #[test]
    fn a_refusal_is_an_error_in_printable_words() {
        let refusal = set_by(PATIENT, |out, command| {
            // The clock that it tells does not change.
            let mut clock = now() - HOUR;
            honest(&mut clock, true, out, command);
        });
        let text = refusal.unwrap_err().to_string();
        assert_eq!(text, "the guest agent refuses guest-set-time: no .[31mhwclock");
    }

    #[test]
    fn an_agent_that_is_silent_or_sends_without_end_costs_no_more_than_the_limits() {
        let begun = Instant::now();
        let limit = Duration::from_millis(200);
        let silent = set_by(limit, |_, _| {}).unwrap_err();
        assert!(matches!(silent, GuestAgentError::NoAnswer { command: "guest-sync-delimited", .. }), "{silent:?}");
        // One byte at a time keeps the connection busy.
        let slow = set_by(limit, |out, _| while out.write_all(b"\n").is_ok() {}).unwrap_err();
        assert!(matches!(slow, GuestAgentError::NoAnswer { .. } | GuestAgentError::TooManyBytes { .. }), "{slow:?}");
        let flood = set_by(PATIENT, |out, _| while out.write_all(&[b'{'; 4096]).is_ok() {}).unwrap_err();
        assert!(matches!(flood, GuestAgentError::TooManyBytes { limit: 1_048_576 }), "{flood:?}");
        assert!(begun.elapsed() < PATIENT);
    }

    #[test]
    fn answers_of_the_wrong_shape_and_a_closed_socket_are_errors() {
        let deep = |out: &mut UnixStream, command: &Value| {
            let mut clock = now();
            if command["execute"] == "guest-get-time" {
                out.write_all(&[&[b'['; 100_000][..], b"\n"].concat()).unwrap();
            } else {
                honest(&mut clock, false, out, command);
            }
        };
        let error = set_by(PATIENT, deep).unwrap_err();
        assert!(matches!(error, GuestAgentError::Unexpected { command: "guest-get-time", .. }), "{error:?}");
        let error = set_by(PATIENT, |out, _| out.shutdown(std::net::Shutdown::Both).unwrap()).unwrap_err();
        assert!(matches!(error, GuestAgentError::Closed { .. }), "{error:?}");
    }
}
