//! The messages between a keeper and a gate, on a unix socket.
//!
//! All numbers are big-endian. A message is its kind (4 bytes), the number of 8-byte words that follow its header (4
//! bytes), a value (8 bytes), and the words: counters, or the id of a protection. A reader ignores those that it does
//! not know.

use std::time::Duration;

use limosa_migrate::output::OutputCounters;
use limosa_page::{to_nanos, to_usize};
use uuid::Uuid;

/// The version of these messages.
pub(super) const VERSION: u64 = 2;

/// Bytes before the words.
const HEADER: usize = 16;
/// Most words of a message.
const WORDS_MAX: u32 = 64;

/// A message that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum MessageError {
    #[error("unknown message {0:#x}")]
    Kind(u32),
    #[error("message {kind:#x} has {words} words")]
    Words { kind: u32, words: u32 },
}

/// An order: a keeper's, or a failover's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// A keeper wants the gate. Its series begins with its first seal.
    Hello(Hello),
    /// The VM stands still: the epoch of this number ends.
    Seal(u64),
    /// The checkpoint of this number counts.
    Commit(u64),
    /// It does not, and no later one will.
    Abort(u64),
    /// If this keeper ends without a word, output stays held for at least as many milliseconds.
    HoldWhenLost(u64),
    /// A failover's: the VM of this protection is refused from now on.
    Fence {
        /// The checkpoint from which it continues elsewhere: its frames may leave.
        epoch: u64,
        /// The protection.
        protection: Uuid,
    },
    /// A failover's: the answer that a fence of this protection would get.
    Query {
        /// The protection.
        protection: Uuid,
    },
}

/// A keeper that wants a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// The version of the messages.
    pub(super) version: u64,
    /// Its protection; nil if the keeper does not say it.
    pub(super) protection: Uuid,
    /// The number of the process of the VM's QEMU, if it is known.
    pub(super) vm: Option<u32>,
    /// The pid namespace of that number; 0 if it is not known.
    pub(super) namespace: u64,
}

/// A gate's message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// The answer to hello.
    Welcome {
        /// The gate's version.
        version: u64,
        /// Whether a VM is connected.
        has_vm: bool,
    },
    /// Another keeper has the gate.
    Busy,
    /// The answer to seal.
    Sealed(u64),
    /// The first frame after the last seal is here.
    Output,
    /// Half of the room is taken.
    Full,
    /// The counters of the series, after each commit and before the answer to abort.
    Counters(OutputCounters),
    /// The answer to abort.
    Aborted(u64),
    /// The answer to hello of a protection that was fenced.
    Refused,
    /// The answer to hello, or to the first seal, of a keeper whose VM is another one: the number of the process that
    /// is connected.
    OtherVm(u32),
    /// The answer to fence: its process is refused from now on, or has ended. The process's number; 0: it has none that
    /// the gate can see. The answers to fence are also those to query.
    Fenced(u64),
    /// The answer to fence: the gate has not had this protection, or another one since. Nothing has changed.
    Unknown,
    /// The answer to fence: the protection has ended here, but its VM is not identified, and would be taken in when it
    /// comes back.
    Unidentified,
}

impl Order {
    pub(super) fn encode(self, out: &mut Vec<u8>) {
        match self {
            Self::Hello(Hello { version, protection, vm, namespace }) => {
                let [high, low] = id_words(protection);
                encode(1, version, &[high, low, vm.unwrap_or(0).into(), namespace], out);
            }
            Self::Seal(epoch) => encode(2, epoch, &[], out),
            Self::Commit(epoch) => encode(3, epoch, &[], out),
            Self::Abort(epoch) => encode(4, epoch, &[], out),
            Self::Fence { epoch, protection } => encode(5, epoch, &id_words(protection), out),
            Self::HoldWhenLost(millis) => encode(6, millis, &[], out),
            Self::Query { protection } => encode(7, 0, &id_words(protection), out),
        }
    }

    /// Decodes the first order; `None` if more bytes are needed. Returns its length as well.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, MessageError> {
        let Some(raw) = Raw::decode(bytes)? else { return Ok(None) };
        let order = match raw.kind {
            1 => {
                let word = |at| numbers(raw.words).nth(at).unwrap_or(0);
                let (vm, namespace) = (process(word(2)), word(3));
                Self::Hello(Hello { version: raw.value, protection: id(raw.words), vm, namespace })
            }
            2 => Self::Seal(raw.value),
            3 => Self::Commit(raw.value),
            4 => Self::Abort(raw.value),
            5 => Self::Fence { epoch: raw.value, protection: id(raw.words) },
            6 => Self::HoldWhenLost(raw.value),
            7 => Self::Query { protection: id(raw.words) },
            kind => return Err(MessageError::Kind(kind)),
        };
        Ok(Some((order, raw.length)))
    }
}

impl Answer {
    pub(super) fn encode(self, out: &mut Vec<u8>) {
        match self {
            Self::Welcome { version, has_vm } => encode(0x101, version, &[has_vm.into()], out),
            Self::Busy => encode(0x102, 0, &[], out),
            Self::Sealed(epoch) => encode(0x103, epoch, &[], out),
            Self::Output => encode(0x104, 0, &[], out),
            Self::Full => encode(0x105, 0, &[], out),
            Self::Counters(counters) => encode(0x106, 0, &words(&counters), out),
            Self::Aborted(epoch) => encode(0x107, epoch, &[], out),
            Self::Refused => encode(0x108, 0, &[], out),
            Self::Fenced(pid) => encode(0x109, pid, &[], out),
            Self::Unknown => encode(0x10a, 0, &[], out),
            Self::Unidentified => encode(0x10b, 0, &[], out),
            Self::OtherVm(process) => encode(0x10c, process.into(), &[], out),
        }
    }

    /// Decodes the first answer; `None` if more bytes are needed. Returns its length as well.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, MessageError> {
        let Some(raw) = Raw::decode(bytes)? else { return Ok(None) };
        let answer = match raw.kind {
            // A gate that does not say it is believed to have one.
            0x101 => Self::Welcome { version: raw.value, has_vm: numbers(raw.words).next() != Some(0) },
            0x102 => Self::Busy,
            0x103 => Self::Sealed(raw.value),
            0x104 => Self::Output,
            0x105 => Self::Full,
            0x106 => Self::Counters(counters(raw.words)),
            0x107 => Self::Aborted(raw.value),
            0x108 => Self::Refused,
            0x109 => Self::Fenced(raw.value),
            0x10a => Self::Unknown,
            0x10b => Self::Unidentified,
            0x10c => Self::OtherVm(process(raw.value).unwrap_or(0)),
            kind => return Err(MessageError::Kind(kind)),
        };
        Ok(Some((answer, raw.length)))
    }
}

struct Raw<'a> {
    kind: u32,
    value: u64,
    words: &'a [u8],
    length: usize,
}

impl<'a> Raw<'a> {
    fn decode(bytes: &'a [u8]) -> Result<Option<Self>, MessageError> {
        let Some(([kind, count, high, low], rest)) = header(bytes) else { return Ok(None) };
        if count > WORDS_MAX {
            return Err(MessageError::Words { kind, words: count });
        }
        let length = 8 * to_usize(count.into());
        let value = u64::from(high) << 32 | u64::from(low);
        Ok(rest.get(..length).map(|words| Self { kind, value, words, length: HEADER + length }))
    }
}

fn header(bytes: &[u8]) -> Option<([u32; 4], &[u8])> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
    let mut fields = header.chunks_exact(4).filter_map(|four| four.first_chunk()).map(|four| u32::from_be_bytes(*four));
    Some(([fields.next()?, fields.next()?, fields.next()?, fields.next()?], rest))
}

fn encode(kind: u32, value: u64, words: &[u64], out: &mut Vec<u8>) {
    debug_assert!(words.len() <= to_usize(WORDS_MAX.into()), "more words than a reader takes");
    let count = u32::try_from(words.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&count.to_be_bytes());
    out.extend_from_slice(&value.to_be_bytes());
    words.iter().for_each(|word| out.extend_from_slice(&word.to_be_bytes()));
}

fn words(counters: &OutputCounters) -> [u64; 9] {
    [
        counters.held_packets,
        counters.held_bytes,
        counters.released_packets,
        counters.released_bytes,
        counters.overflow_packets,
        counters.aborted_packets,
        counters.undelivered_packets,
        to_nanos(counters.median_hold),
        to_nanos(counters.longest_hold),
    ]
}

/// The words of a message.
fn numbers(words: &[u8]) -> impl Iterator<Item = u64> {
    words.chunks_exact(8).filter_map(|eight| eight.first_chunk()).map(|word| u64::from_be_bytes(*word))
}

fn id_words(id: Uuid) -> [u64; 2] {
    let (high, low) = id.as_u64_pair();
    [high, low]
}

/// Reads the number of a process; none has 0.
fn process(word: u64) -> Option<u32> {
    u32::try_from(word).ok().filter(|process| *process > 0)
}

/// Reads an id; one that is missing is nil.
fn id(words: &[u8]) -> Uuid {
    let mut words = numbers(words);
    words.next().zip(words.next()).map_or(Uuid::nil(), |(high, low)| Uuid::from_u64_pair(high, low))
}

/// Reads counters; those that are missing are 0.
fn counters(words: &[u8]) -> OutputCounters {
    let mut words = numbers(words);
    let mut next = || words.next().unwrap_or(0);
    let mut counters = OutputCounters::default();
    counters.held_packets = next();
    counters.held_bytes = next();
    counters.released_packets = next();
    counters.released_bytes = next();
    counters.overflow_packets = next();
    counters.aborted_packets = next();
    counters.undelivered_packets = next();
    counters.median_hold = Duration::from_nanos(next());
    counters.longest_hold = Duration::from_nanos(next());
    counters
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let mut counters = OutputCounters::default();
        counters.held_packets = 1 << 40;
        counters.undelivered_packets = 7;
        counters.longest_hold = Duration::from_micros(123);
        for answer in [
            Answer::Welcome { version: VERSION, has_vm: true },
            Answer::Welcome { version: VERSION, has_vm: false },
            Answer::OtherVm(1 << 22),
            Answer::Busy,
            Answer::Sealed(u64::MAX),
            Answer::Output,
            Answer::Full,
            Answer::Counters(counters),
            Answer::Aborted(3),
            Answer::Refused,
            Answer::Fenced(1 << 22),
            Answer::Unknown,
            Answer::Unidentified,
        ] {
            let mut bytes = Vec::new();
            answer.encode(&mut bytes);
            assert_eq!(Answer::decode(&bytes), Ok(Some((answer, bytes.len()))));
            assert_eq!(Answer::decode(&bytes[..bytes.len() - 1]), Ok(None));
        }
        let protection = Uuid::new_v4();
        for order in [
            Order::Hello(Hello { version: 1, protection, vm: Some(1 << 22), namespace: 1 << 33 }),
            Order::Query { protection },
            Order::Seal(5),
            Order::Commit(1 << 33),
            Order::Abort(0),
            Order::Fence { epoch: 7, protection },
            Order::HoldWhenLost(13_000),
        ] {
            let mut bytes = Vec::new();
            order.encode(&mut bytes);
            let length = bytes.len();
            assert_eq!(Order::decode(&bytes[..length - 1]), Ok(None));
            bytes.push(0);
            assert_eq!(Order::decode(&bytes), Ok(Some((order, length))));
        }
    }

    #[test]
    fn a_hello_without_the_name_of_its_protection_has_none() {
        let mut bytes = Vec::new();
        encode(1, VERSION, &[], &mut bytes);
        let hello = Hello { version: VERSION, protection: Uuid::nil(), vm: None, namespace: 0 };
        assert_eq!(Order::decode(&bytes), Ok(Some((Order::Hello(hello), HEADER))));
    }

    #[test]
    fn unknown_messages_and_endless_ones_are_refused() {
        let mut bytes = Vec::new();
        encode(9, 0, &[], &mut bytes);
        assert_eq!(Order::decode(&bytes), Err(MessageError::Kind(9)));
        bytes[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(Order::decode(&bytes), Err(MessageError::Words { kind: 9, words: u32::MAX }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_within_them_or_none(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for read in [Answer::decode(&bytes).map(|read| read.map(|(_, length)| length)),
                Order::decode(&bytes).map(|read| read.map(|(_, length)| length))]
            {
                prop_assert!(read.is_err() || read.unwrap().is_none_or(|length| length <= bytes.len()));
            }
        }
    }
}
