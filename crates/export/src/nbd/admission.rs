//! The decision about a request, made by its header alone.
//!
//! The law: a header decides how many bytes follow it before anything else, so that a refused request never makes the
//! bytes behind it look like another one. A request whose bytes cannot be bounded ends the connection.

use limosa_page::to_usize;

use limosa_nbd::protocol::error::ErrorCode;
use limosa_nbd::protocol::request::{Command, RequestHeader, flag};
use limosa_nbd::protocol::{Headers, MAX_PAYLOAD};

/// Properties of an export that decide about requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// The form of requests and replies.
    pub(super) headers: Headers,
    /// Length of the export in bytes.
    pub(super) size: u64,
    /// Whether writes are refused.
    pub(super) read_only: bool,
    /// Whether metadata contexts were chosen.
    pub(super) has_contexts: bool,
}

/// An admitted request. Ranges are inside the export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Read `length` bytes; in one piece if `whole`.
    Read {
        /// Bytes, at most [`MAX_PAYLOAD`].
        length: usize,
        /// `DF`.
        whole: bool,
    },
    /// Write the payload.
    Write {
        /// Whether it is durable when it is answered.
        fua: bool,
    },
    /// Make writes durable.
    Flush,
    /// Forget contents.
    Trim {
        /// Bytes.
        length: u64,
        /// Whether it is durable when it is answered.
        fua: bool,
    },
    /// Prefetch.
    Cache {
        /// Bytes.
        length: u64,
    },
    /// Write zeros.
    WriteZeroes {
        /// Bytes.
        length: u64,
        /// Whether it is durable when it is answered.
        fua: bool,
        /// Whether space may be given back.
        unmap: bool,
        /// Whether it fails if it is not fast.
        fast: bool,
    },
    /// Report metadata contexts.
    BlockStatus {
        /// Bytes; `None`: the payload tells, with the contexts.
        length: Option<u64>,
        /// One extent.
        one: bool,
    },
}

/// A request: the bytes behind its header, and what is done then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Admission {
    /// Bytes of the payload, at most [`MAX_PAYLOAD`].
    pub(super) payload: usize,
    /// The work, or the error that is answered.
    pub(super) action: Result<Action, ErrorCode>,
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Disconnect {
    /// The client ends it.
    #[error("the client has disconnected")]
    Orderly,
    /// The payload is longer than allowed.
    #[error("a payload of {0} bytes is too long")]
    Payload(u64),
}

/// Decides about a request.
///
/// # Errors
/// The connection ends.
pub(super) fn admit(header: &RequestHeader, facts: &Facts) -> Result<Admission, Disconnect> {
    let command = Command::from_repr(header.command);
    if command == Some(Command::Disconnect) {
        return Err(Disconnect::Orderly);
    }
    // A write has a payload also without the flag that extended headers have for it: QEMU 10.0's client does not set it.
    let flagged = facts.headers == Headers::Extended && header.flags & flag::PAYLOAD_LEN != 0;
    let has_payload = flagged || command == Some(Command::Write);
    let payload = if has_payload { header.length } else { 0 };
    if payload > u64::from(MAX_PAYLOAD) {
        return Err(Disconnect::Payload(payload));
    }
    let action = match command {
        Some(command) => act(command, header, facts, has_payload),
        None => Err(ErrorCode::Invalid),
    };
    Ok(Admission { payload: to_usize(payload), action })
}

/// The flags that a command may have.
const fn allowed_flags(command: Command, headers: Headers) -> u16 {
    let own = match (command, headers) {
        (Command::Read, Headers::Structured | Headers::Extended) => flag::DF,
        (Command::Write, Headers::Extended) => flag::PAYLOAD_LEN,
        (Command::WriteZeroes, _) => flag::NO_HOLE | flag::FAST_ZERO,
        (Command::BlockStatus, Headers::Extended) => flag::REQ_ONE | flag::PAYLOAD_LEN,
        (Command::BlockStatus, _) => flag::REQ_ONE,
        _ => 0,
    };
    own | flag::FUA
}

fn act(command: Command, header: &RequestHeader, facts: &Facts, has_payload: bool) -> Result<Action, ErrorCode> {
    let &RequestHeader { flags, offset, length, .. } = header;
    if flags & !allowed_flags(command, facts.headers) != 0 {
        return Err(ErrorCode::Invalid);
    }
    let changes = matches!(command, Command::Write | Command::WriteZeroes | Command::Trim);
    if changes && facts.read_only {
        return Err(ErrorCode::NotPermitted);
    }
    let fua = flags & flag::FUA != 0;
    let inside = offset.checked_add(length).is_some_and(|end| end <= facts.size);
    let past_end = match command {
        Command::Write | Command::WriteZeroes => ErrorCode::NoSpace,
        _ => ErrorCode::Invalid,
    };
    let by_payload = command == Command::BlockStatus && has_payload;
    if !inside && command != Command::Flush && !by_payload {
        return Err(past_end);
    }
    match command {
        Command::Read if length > u64::from(MAX_PAYLOAD) => {
            Err(if facts.headers.has_chunks() { ErrorCode::Overflow } else { ErrorCode::Invalid })
        }
        Command::Read => Ok(Action::Read { length: to_usize(length), whole: flags & flag::DF != 0 }),
        Command::Write => Ok(Action::Write { fua }),
        Command::Flush => Ok(Action::Flush),
        Command::Trim => Ok(Action::Trim { length, fua }),
        Command::Cache => Ok(Action::Cache { length }),
        Command::WriteZeroes => {
            let (unmap, fast) = (flags & flag::NO_HOLE == 0, flags & flag::FAST_ZERO != 0);
            Ok(Action::WriteZeroes { length, fua, unmap, fast })
        }
        Command::BlockStatus if !facts.has_contexts || (length == 0 && !by_payload) => Err(ErrorCode::Invalid),
        Command::BlockStatus => {
            Ok(Action::BlockStatus { length: (!by_payload).then_some(length), one: flags & flag::REQ_ONE != 0 })
        }
        // The caller has ended the connection.
        Command::Disconnect => Err(ErrorCode::Invalid),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 1 << 20;

    fn facts(headers: Headers) -> Facts {
        Facts { headers, size: SIZE, read_only: false, has_contexts: true }
    }

    fn header(command: Command, flags: u16, offset: u64, length: u64) -> RequestHeader {
        RequestHeader { flags, command: command as u16, cookie: 0, offset, length }
    }

    fn action(headers: Headers, header: RequestHeader) -> Result<Action, ErrorCode> {
        admit(&header, &facts(headers)).unwrap().action
    }

    #[test]
    fn requests_past_the_end_fail_with_the_error_of_their_command() {
        let extended = |command, offset, length| {
            let flags = if command == Command::Write { flag::PAYLOAD_LEN } else { 0 };
            action(Headers::Extended, header(command, flags, offset, length)).unwrap_err()
        };
        for (offset, length) in [(SIZE, 1), (0, SIZE + 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            for command in [Command::Read, Command::Trim, Command::Cache, Command::BlockStatus] {
                assert_eq!(extended(command, offset, length), ErrorCode::Invalid, "{command:?} {offset} {length}");
            }
            assert_eq!(extended(Command::WriteZeroes, offset, length), ErrorCode::NoSpace);
            if length <= u64::from(MAX_PAYLOAD) {
                assert_eq!(extended(Command::Write, offset, length), ErrorCode::NoSpace);
            }
        }
    }

    #[test]
    fn a_payload_that_is_too_long_ends_the_connection() {
        let too_long = u64::from(MAX_PAYLOAD) + 1;
        let write = header(Command::Write, 0, 0, too_long);
        assert_eq!(admit(&write, &facts(Headers::Simple)), Err(Disconnect::Payload(too_long)));
        for command in [Command::Write, Command::Read, Command::BlockStatus] {
            let write = header(command, flag::PAYLOAD_LEN, 0, u64::MAX);
            assert_eq!(admit(&write, &facts(Headers::Extended)), Err(Disconnect::Payload(u64::MAX)));
        }
    }

    #[test]
    fn the_payload_of_a_refused_request_is_consumed() {
        let refused = |headers, header, payload, error| {
            let facts = Facts { read_only: true, ..facts(headers) };
            assert_eq!(admit(&header, &facts), Ok(Admission { payload, action: Err(error) }));
        };
        refused(Headers::Simple, header(Command::Write, 0, 0, 512), 512, ErrorCode::NotPermitted);
        refused(Headers::Simple, header(Command::Write, 1 << 9, 0, 512), 512, ErrorCode::Invalid);
        let read = header(Command::Read, flag::PAYLOAD_LEN, 0, 512);
        refused(Headers::Extended, read, 512, ErrorCode::Invalid);
        refused(Headers::Structured, read, 0, ErrorCode::Invalid);
        // As QEMU's client sends it.
        refused(Headers::Extended, header(Command::Write, 0, 0, 512), 512, ErrorCode::NotPermitted);
        let unknown = RequestHeader { command: 99, ..read };
        refused(Headers::Extended, unknown, 512, ErrorCode::Invalid);
        refused(Headers::Simple, unknown, 0, ErrorCode::Invalid);
    }

    #[test]
    fn long_reads_overflow_and_long_zeros_do_not() {
        let facts = Facts { size: 1 << 50, ..facts(Headers::Extended) };
        let long = |command| admit(&header(command, 0, 0, 1 << 50), &facts).unwrap().action;
        assert_eq!(long(Command::Read), Err(ErrorCode::Overflow));
        for command in [Command::Trim, Command::WriteZeroes, Command::Cache, Command::BlockStatus] {
            assert!(long(command).is_ok(), "{command:?}");
        }
    }

    #[test]
    fn flags_belong_to_commands() {
        let zero = |flags| action(Headers::Simple, header(Command::WriteZeroes, flags, 0, 512));
        let zeroes = |fua, unmap, fast| Ok(Action::WriteZeroes { length: 512, fua, unmap, fast });
        assert_eq!(zero(0), zeroes(false, true, false));
        assert_eq!(zero(flag::FUA | flag::NO_HOLE), zeroes(true, false, false));
        assert_eq!(zero(flag::FAST_ZERO), zeroes(false, true, true));
        assert_eq!(zero(flag::DF), Err(ErrorCode::Invalid));
        let read = |headers| action(headers, header(Command::Read, flag::DF, 0, 512));
        assert_eq!(read(Headers::Simple), Err(ErrorCode::Invalid));
        assert_eq!(read(Headers::Structured), Ok(Action::Read { length: 512, whole: true }));
        let status = header(Command::BlockStatus, flag::REQ_ONE, 0, 512);
        assert_eq!(action(Headers::Structured, status), Ok(Action::BlockStatus { length: Some(512), one: true }));
        let none = Facts { has_contexts: false, ..facts(Headers::Structured) };
        assert_eq!(admit(&status, &none).unwrap().action, Err(ErrorCode::Invalid));
    }

    proptest! {
        #[test]
        fn an_admitted_range_is_inside_the_export(
            flags in 0..64_u16,
            command in 0..10_u16,
            offset in prop_oneof![0..2 * SIZE, any::<u64>()],
            length in prop_oneof![0..2 * SIZE, any::<u64>()],
            mode in 0..3_usize,
            read_only: bool,
        ) {
            let headers = [Headers::Simple, Headers::Structured, Headers::Extended][mode];
            let facts = Facts { read_only, ..facts(headers) };
            let header = RequestHeader { flags, command, cookie: 7, offset, length };
            let Ok(Admission { payload, action }) = admit(&header, &facts) else { return Ok(()) };
            prop_assert!(payload as u64 <= u64::from(MAX_PAYLOAD));
            let length = match action {
                Ok(Action::Read { length, .. }) => length as u64,
                Ok(Action::Write { .. }) => payload as u64,
                Ok(Action::Trim { length, .. } | Action::Cache { length } | Action::WriteZeroes { length, .. }) => length,
                Ok(Action::BlockStatus { length: Some(length), .. }) => length,
                Ok(Action::Flush | Action::BlockStatus { length: None, .. }) | Err(_) => return Ok(()),
            };
            prop_assert!(offset.checked_add(length).is_some_and(|end| end <= SIZE));
            let changes = matches!(action, Ok(Action::Write { .. } | Action::Trim { .. } | Action::WriteZeroes { .. }));
            prop_assert!(!(changes && read_only));
        }
    }
}
