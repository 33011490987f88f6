//! The first messages between a primary's limosa and its keeper, and the notes between checkpoints.
//!
//! Before the stream of QEMU the two greet each other. All numbers are big-endian.
//!
//! ```text
//! hello:  "LIMOSA-P", version (4 bytes), length (4 bytes), JSON
//! answer: "LIMOSA-K", status (4 bytes), length (4 bytes), text
//! ```
//!
//! A stream that begins with `QEVM` is that of a bare QEMU, which greets nobody. From the answer on both sides speak
//! COLO; what they have to say besides is in its [notes](ColoMessage::Note). A reader ignores kinds that are new to it.

use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Operation};
use limosa_migrate::MigrateError;
use limosa_page::{to_nanos, to_u64};
use limosa_snapshot::{Checkpoint, Manifest};
use limosa_stream::colo::ColoMessage;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::report::KeptCheckpoint;

/// The version of these messages.
pub(super) const VERSION: u32 = 2;
/// The first bytes of a bare stream.
const BARE: [u8; 4] = *b"QEVM";
const HELLO: [u8; 8] = *b"LIMOSA-P";
const ANSWER: [u8; 8] = *b"LIMOSA-K";
/// Most bytes of a hello's JSON: a manifest names RAM blocks and disks.
const HELLO_MAX: u32 = 256 << 10;
/// Most bytes of an answer's text.
const TEXT_MAX: u32 = 4096;
/// Bytes before a hello's JSON, and before an answer's text.
const HEADER: usize = 16;

/// A primary's greeting.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The protection: the same for all connections of one `limosa protect`.
    pub(super) protection: Uuid,
    /// The record of the checkpoints.
    pub(super) manifest: Manifest,
}

/// The beginning of a connection.
#[derive(Debug)]
pub(super) enum Opening {
    /// A limosa.
    Limosa(Box<Hello>),
    /// A QEMU, or a VMM that links limosa: the bytes that were read.
    Bare(Vec<u8>),
}

/// A keeper's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// The stream may come; the keeper's name for the checkpoints.
    Welcome(String),
    /// It does not keep this VM now; a later attempt may succeed.
    Busy(String),
    /// The VM continues at the keeper: it must not run at the primary's end any more.
    TakenOver(String),
    /// It never will.
    Refused(String),
}

impl Hello {
    /// Writes it.
    pub(super) fn write(&self, channel: &Channel) -> Result<(), MigrateError> {
        let json = serde_json::to_vec(self).map_err(|error| MigrateError::Protocol(error.to_string()))?;
        let length = u32::try_from(json.len()).ok().filter(|length| *length <= HELLO_MAX);
        let length = length.ok_or_else(|| MigrateError::Protocol("the record of the VM is too long".into()))?;
        let mut bytes = HELLO.to_vec();
        bytes.extend_from_slice(&VERSION.to_be_bytes());
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&json);
        Ok(channel.write_all(&bytes)?)
    }
}

impl Opening {
    /// Reads it; all of it has to come within `within`.
    pub(super) fn read(channel: &Channel, within: Duration) -> Result<Self, MigrateError> {
        let reader = Reader { channel, until: Instant::now() + within, within };
        let mut begin = [0; 4];
        reader.read(&mut begin)?;
        if begin == BARE {
            return Ok(Self::Bare(begin.to_vec()));
        }
        let protocol = |what: String| MigrateError::Protocol(what);
        let mut magic = [0; 8];
        let (known, rest) = magic.split_at_mut(4);
        known.copy_from_slice(&begin);
        reader.read(rest)?;
        if magic != HELLO {
            return Err(protocol("it is neither a limosa protect nor a migration stream".into()));
        }
        let (version, length) = (reader.number()?, reader.number()?);
        if version != VERSION {
            return Err(protocol(format!("it speaks version {version} of the protocol, and this end {VERSION}")));
        }
        let json = reader.bytes(length, HELLO_MAX)?;
        let hello = serde_json::from_slice(&json).map_err(|error| protocol(format!("its greeting: {error}")))?;
        Ok(Self::Limosa(Box::new(hello)))
    }
}

impl Answer {
    /// Writes it.
    pub(super) fn write(&self, channel: &Channel) -> Result<(), MigrateError> {
        let (status, text): (u32, _) = match self {
            Self::Welcome(text) => (0, text),
            Self::Busy(text) => (1, text),
            Self::TakenOver(text) => (2, text),
            Self::Refused(text) => (3, text),
        };
        let mut text = text.as_str();
        while to_u64(text.len()) > u64::from(TEXT_MAX) {
            let mut shorter = text.chars();
            shorter.next_back();
            text = shorter.as_str();
        }
        let mut bytes = Vec::with_capacity(HEADER + text.len());
        bytes.extend_from_slice(&ANSWER);
        bytes.extend_from_slice(&status.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(text.len()).unwrap_or(TEXT_MAX).to_be_bytes());
        bytes.extend_from_slice(text.as_bytes());
        Ok(channel.write_all(&bytes)?)
    }

    /// Reads it; all of it has to come within `within`.
    pub(super) fn read(channel: &Channel, within: Duration) -> Result<Self, MigrateError> {
        let reader = Reader { channel, until: Instant::now() + within, within };
        let mut magic = [0; 8];
        reader.read(&mut magic)?;
        if magic != ANSWER {
            return Err(MigrateError::Protocol("it is not a limosa keep".into()));
        }
        let (status, length) = (reader.number()?, reader.number()?);
        let text = String::from_utf8_lossy(&reader.bytes(length, TEXT_MAX)?).replace(char::is_control, " ");
        match status {
            0 => Ok(Self::Welcome(text)),
            1 => Ok(Self::Busy(text)),
            2 => Ok(Self::TakenOver(text)),
            3 => Ok(Self::Refused(text)),
            other => Err(MigrateError::Protocol(format!("an answer of unknown status {other}"))),
        }
    }
}

/// The peer owes something for so long.
pub(super) fn timed_out(channel: &Channel, after: Duration) -> ChannelError {
    ChannelError::TimedOut { operation: Operation::Read, peer: channel.peer().into(), offset: None, after }
}

/// The keeper has closed the connection, and owes something.
pub(super) fn closed_early() -> MigrateError {
    MigrateError::Protocol("it closed the connection in the middle".into())
}

/// Reads from a peer that may be anybody.
struct Reader<'c> {
    channel: &'c Channel,
    until: Instant,
    within: Duration,
}

impl Reader<'_> {
    fn read(&self, mut into: &mut [u8]) -> Result<(), MigrateError> {
        while !into.is_empty() {
            let rest = self.until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(timed_out(self.channel, self.within).into());
            }
            self.channel.set_timeouts(Some(rest), Some(rest))?;
            match self.channel.read(into) {
                Ok(0) => return Err(MigrateError::Protocol("it closed the connection instead of a greeting".into())),
                Ok(got) => into = into.get_mut(got..).unwrap_or_default(),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn number(&self) -> Result<u32, MigrateError> {
        let mut bytes = [0; 4];
        self.read(&mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Reads this many bytes; `limit` is the most.
    fn bytes(&self, length: u32, limit: u32) -> Result<Vec<u8>, MigrateError> {
        if length > limit {
            return Err(MigrateError::Protocol(format!("a greeting of {length} bytes, of at most {limit}")));
        }
        let mut bytes = vec![0; limosa_page::to_usize(length.into())];
        self.read(&mut bytes)?;
        Ok(bytes)
    }
}

/// The reason why a primary ends a series in an orderly way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Farewell {
    /// The VM continues without protection.
    Unprotected,
    /// The VM has ended by itself: its guest powered off, or QEMU was told to quit.
    VmEnded,
    /// The VM is lost: its QEMU was killed or has crashed.
    VmLost,
}

/// A number between checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// To the keeper: the VM is there, and whether it runs. To the primary: the store is at work.
    Alive(bool),
    /// To the keeper: the series is over.
    Farewell(Farewell),
    /// To the primary: the checkpoint of this number counts. The notes before it are about it.
    Kept(u64),
    /// Its pages with contents.
    Contents(u64),
    /// Those that had not changed.
    Equal(u64),
    /// Its zero pages.
    Zero(u64),
    /// Bytes of its file.
    Length(u64),
    /// Nanoseconds until it counted.
    Commit(u64),
    /// Nanoseconds to prepare the store for it.
    CatchUp(u64),
    /// To the primary, before its base counts: the keeper fails over by itself, and this many milliseconds after its
    /// loss at the latest.
    FailsOver(u64),
    /// To the keeper: the VM's disks are prepared for the checkpoint of this number. One of a VM with such disks does
    /// not count before.
    Prepared(u64),
}

impl Note {
    /// Reads one; `None` if it is unknown here.
    pub(super) fn of(kind: u8, value: u64) -> Option<Self> {
        Some(match kind {
            1 => Self::Alive(value != 0),
            2 => Self::Farewell(match value {
                1 => Farewell::VmEnded,
                2 => Farewell::VmLost,
                _ => Farewell::Unprotected,
            }),
            3 => Self::Kept(value),
            4 => Self::Contents(value),
            5 => Self::Equal(value),
            6 => Self::Zero(value),
            7 => Self::Length(value),
            8 => Self::Commit(value),
            9 => Self::CatchUp(value),
            10 => Self::Prepared(value),
            11 => Self::FailsOver(value),
            _ => return None,
        })
    }

    /// Appends it.
    pub(super) fn encode(self, out: &mut Vec<u8>) {
        let (kind, value) = match self {
            Self::Alive(runs) => (1, u64::from(runs)),
            Self::Farewell(Farewell::Unprotected) => (2, 0),
            Self::Farewell(Farewell::VmEnded) => (2, 1),
            Self::Farewell(Farewell::VmLost) => (2, 2),
            Self::Kept(number) => (3, number),
            Self::Contents(pages) => (4, pages),
            Self::Equal(pages) => (5, pages),
            Self::Zero(pages) => (6, pages),
            Self::Length(bytes) => (7, bytes),
            Self::Commit(nanos) => (8, nanos),
            Self::CatchUp(nanos) => (9, nanos),
            Self::Prepared(number) => (10, number),
            Self::FailsOver(millis) => (11, millis),
        };
        ColoMessage::Note { kind, value }.encode(out);
    }

    /// Appends those that say that a checkpoint counts.
    pub(super) fn encode_kept(number: u64, kept: Option<&KeptCheckpoint>, out: &mut Vec<u8>) {
        if let Some(KeptCheckpoint { stored, commit, catch_up, .. }) = kept {
            for note in [
                Self::Contents(stored.pages.contents),
                Self::Equal(stored.pages.equal),
                Self::Zero(stored.pages.zero),
                Self::Length(stored.length),
                Self::Commit(to_nanos(*commit)),
                Self::CatchUp(to_nanos(*catch_up)),
            ] {
                note.encode(out);
            }
        }
        Self::Kept(number).encode(out);
    }
}

/// A checkpoint that the keeper says to have, from its notes.
#[derive(Debug, Default)]
pub(crate) struct KeptNotes {
    pub(crate) stored: Checkpoint,
    pub(super) commit: Duration,
    pub(crate) catch_up: Duration,
    /// The time within which the keeper fails over by itself.
    pub(crate) fails_over: Option<Duration>,
}

impl KeptNotes {
    /// Takes a note about the checkpoint; returns its number if that is the last one.
    pub(super) fn take(&mut self, note: Note) -> Option<u64> {
        match note {
            Note::Kept(number) => {
                self.stored.number = number;
                return Some(number);
            }
            Note::Contents(pages) => self.stored.pages.contents = pages,
            Note::Equal(pages) => self.stored.pages.equal = pages,
            Note::Zero(pages) => self.stored.pages.zero = pages,
            Note::Length(bytes) => self.stored.length = bytes,
            Note::Commit(nanos) => self.commit = Duration::from_nanos(nanos),
            Note::CatchUp(nanos) => self.catch_up = Duration::from_nanos(nanos),
            Note::FailsOver(millis) => self.fails_over = Some(Duration::from_millis(millis)),
            Note::Alive(_) | Note::Farewell(_) | Note::Prepared(_) => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (Channel, Channel) {
        let (near, far) = Channel::pair().unwrap();
        (near, Channel::from_fd(far).unwrap())
    }

    fn opening(bytes: &[u8], within: Duration) -> Result<Opening, MigrateError> {
        let (near, far) = pair();
        near.write_all(bytes).unwrap();
        Opening::read(&far, within)
    }

    #[test]
    fn greetings_and_answers_are_read_as_they_were_written() {
        let (near, far) = pair();
        let hello = Hello { protection: Uuid::new_v4(), manifest: Manifest::new() };
        hello.write(&near).unwrap();
        let Opening::Limosa(read) = Opening::read(&far, LONG).unwrap() else { panic!("it is a limosa") };
        assert_eq!((read.protection, read.manifest), (hello.protection, hello.manifest));
        for answer in [Answer::Welcome("/srv/vm".into()), Answer::Busy("a".into()), Answer::TakenOver(String::new())] {
            answer.write(&far).unwrap();
            assert_eq!(Answer::read(&near, LONG).unwrap(), answer);
        }
        Answer::Refused("é".repeat(5000)).write(&far).unwrap();
        let Answer::Refused(text) = Answer::read(&near, LONG).unwrap() else { panic!("it is refused") };
        assert_eq!(text, "é".repeat(2048));
        let Ok(Opening::Bare(bytes)) = opening(b"QEVM", LONG) else { panic!("it is a bare stream") };
        assert_eq!(bytes, b"QEVM");
    }

    #[test]
    fn strangers_are_refused_whatever_they_say_and_cost_little() {
        let header =
            |version: u32, length: u32| [&HELLO[..], &version.to_be_bytes(), &length.to_be_bytes(), b"{}"].concat();
        for (bytes, why) in [
            (b"GET / HTTP/1.1\r\n".to_vec(), "neither a limosa protect"),
            (header(9, 2), "version 9"),
            (header(VERSION, u32::MAX), "of at most"),
            (header(VERSION, 2), "protection"),
        ] {
            let refused = opening(&bytes, LONG).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
        let begun = Instant::now();
        let (near, far) = pair();
        thread::scope(|scope| {
            // A byte now and then does not make it longer.
            scope.spawn(|| {
                for byte in HELLO {
                    let _ = near.write_all(&[byte]);
                    thread::sleep(Duration::from_millis(40));
                }
            });
            Opening::read(&far, Duration::from_millis(150)).unwrap_err();
        });
        assert!(begun.elapsed() < LONG / 2);
    }

    #[test]
    fn notes_are_read_as_they_were_written_and_unknown_ones_mean_nothing() {
        for note in [
            Note::Alive(true),
            Note::Alive(false),
            Note::Farewell(Farewell::Unprotected),
            Note::Farewell(Farewell::VmEnded),
            Note::Farewell(Farewell::VmLost),
            Note::Kept(u64::MAX),
            Note::CatchUp(7),
            Note::Prepared(1 << 40),
            Note::FailsOver(16_000),
        ] {
            let mut bytes = Vec::new();
            note.encode(&mut bytes);
            let Ok(Some((ColoMessage::Note { kind, value }, 12))) = ColoMessage::decode(&bytes, 0, 0) else {
                panic!("{note:?}")
            };
            assert_eq!(Note::of(kind, value), Some(note));
        }
        assert_eq!(Note::of(200, 1), None);
    }
}
