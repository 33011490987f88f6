//! Commands of the main channel: type byte 0x08, number, length, payload.
//!
//! A fixed length that does not match is an error, as is an unknown number: QEMU treats both so.

use crate::cursor::{Cursor, Stop, put_name};
use crate::error::{EncodeError, ErrorKind, StreamError};
use crate::ram::PAGE_SIZE;
use crate::section::COMMAND;
use limosa_page::to_u64;
use std::ops::Range;

/// Most ranges in one `RAM_DISCARD`: what the 16-bit length takes with the longest block name.
pub const DISCARD_LIMIT: usize = (65535 - 258) / 16;

/// Page sizes that a postcopy source announces, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSizes {
    /// Bitwise OR of the host page sizes of all RAM blocks.
    pub summary: u64,
    /// Size of a target page.
    pub target: u64,
}

/// A command to the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// 1: the channel's other direction becomes the return path.
    OpenReturnPath,
    /// 2: answer with a PONG of this token.
    Ping(u32),
    /// 3: postcopy may follow; without page sizes only for block dirty bitmaps.
    PostcopyAdvise(Option<PageSizes>),
    /// 4: listen for pages from now on, userfaultfd armed.
    PostcopyListen,
    /// 5: start the guest.
    PostcopyRun,
    /// 6: throw these parts of a block away.
    RamDiscard {
        /// RAM block name.
        block: String,
        /// Byte ranges inside the block, page aligned, at least one.
        ranges: Vec<Range<u64>>,
    },
    /// 7: this many bytes follow the command: a section stream without file header.
    Packaged {
        /// Bytes of the package.
        length: u32,
    },
    /// 8: fault tolerance by two running VMs.
    EnableColo,
    /// 9: go on after a recovery.
    PostcopyResume,
    /// 10: report which pages of a block have arrived.
    ReceiveBitmap {
        /// RAM block name.
        block: String,
    },
    /// 11: the VM is stopped, the end comes.
    SwitchoverStart,
}

impl Command {
    /// The command's number.
    pub const fn number(&self) -> u16 {
        match self {
            Self::OpenReturnPath => 1,
            Self::Ping(_) => 2,
            Self::PostcopyAdvise(_) => 3,
            Self::PostcopyListen => 4,
            Self::PostcopyRun => 5,
            Self::RamDiscard { .. } => 6,
            Self::Packaged { .. } => 7,
            Self::EnableColo => 8,
            Self::PostcopyResume => 9,
            Self::ReceiveBitmap { .. } => 10,
            Self::SwitchoverStart => 11,
        }
    }

    /// Appends the command with its type byte.
    ///
    /// # Errors
    /// A block name that does not fit; no, too many, empty or unaligned discard ranges. `out` is then as before.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let begin = out.len();
        let encoded = self.encode_frame(out);
        if encoded.is_err() {
            out.truncate(begin);
        }
        encoded
    }

    fn encode_frame(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.push(COMMAND);
        out.extend_from_slice(&self.number().to_be_bytes());
        let length_at = out.len();
        out.extend_from_slice(&[0, 0]);
        match self {
            Self::Ping(token) => out.extend_from_slice(&token.to_be_bytes()),
            Self::PostcopyAdvise(Some(sizes)) => {
                out.extend_from_slice(&sizes.summary.to_be_bytes());
                out.extend_from_slice(&sizes.target.to_be_bytes());
            }
            Self::Packaged { length } => out.extend_from_slice(&length.to_be_bytes()),
            Self::ReceiveBitmap { block } => put_name("RAM block", block, out)?,
            Self::RamDiscard { block, ranges } => {
                if ranges.is_empty() || ranges.len() > DISCARD_LIMIT {
                    let (what, rule) = ("number of discard ranges", "1 to 4079 in one command");
                    return Err(EncodeError::Number { what, value: to_u64(ranges.len()), rule });
                }
                out.push(0);
                put_name("RAM block", block, out)?;
                out.push(0);
                for range in ranges {
                    let (what, value) = ("discard range", range.start);
                    if range.start >= range.end || range.start % PAGE_SIZE != 0 || range.end % PAGE_SIZE != 0 {
                        return Err(EncodeError::Number { what, value, rule: "must be whole pages, at least one" });
                    }
                    out.extend_from_slice(&range.start.to_be_bytes());
                    out.extend_from_slice(&(range.end - range.start).to_be_bytes());
                }
            }
            Self::OpenReturnPath
            | Self::PostcopyAdvise(None)
            | Self::PostcopyListen
            | Self::PostcopyRun
            | Self::EnableColo
            | Self::PostcopyResume
            | Self::SwitchoverStart => {}
        }
        let length = out.len() - length_at - 2;
        let length = u16::try_from(length).map_err(|_| EncodeError::Number {
            what: "length of a command",
            value: to_u64(length),
            rule: "at most 65535",
        })?;
        out[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
        Ok(())
    }

    /// Reads one command from the beginning of `input`, type byte included: the command and its length in bytes, or
    /// `None` if `input` ends inside it.
    ///
    /// # Errors
    /// Unknown number, wrong length, impossible payload; offsets count from the beginning of `input`.
    pub fn decode(input: &[u8]) -> Result<Option<(Self, usize)>, StreamError> {
        let mut cursor = Cursor::new(input);
        match Self::read(&mut cursor) {
            Ok(command) => Ok(Some((command, cursor.at()))),
            Err(Stop::Need(_)) => Ok(None),
            Err(stop) => Err(stop.into_error(0, "command", input.len())),
        }
    }

    pub(crate) fn read(cursor: &mut Cursor<'_>) -> Result<Self, Stop> {
        let kind = cursor.peek()?;
        if kind != COMMAND {
            return Err(cursor.fail(ErrorKind::expected("a command (0x08)", format_args!("{kind:#04x}"))));
        }
        cursor.u8()?;
        let begin = cursor.at();
        let number = cursor.be16()?;
        let length = cursor.be16()?;
        let wrong = |what: &'static str| Stop::Fail {
            at: begin,
            error_kind: ErrorKind::expected(what, format_args!("command {number} of {length} bytes")),
        };
        match (number, length) {
            (1 | 4 | 5 | 8 | 9 | 11, 0) | (2 | 7, 4) | (3, 0 | 16) | (6 | 10, _) => {}
            (1..=11, _) => return Err(wrong("a command of the length that its number asks for")),
            _ => return Err(wrong("a command number from 1 to 11")),
        }
        let payload = cursor.take(usize::from(length))?;
        let payload_at = begin + 4;
        let mut inner = Cursor::new(payload);
        let command = match number {
            1 => Self::OpenReturnPath,
            2 => Self::Ping(inside(inner.be32(), payload_at, length)?),
            3 if length == 0 => Self::PostcopyAdvise(None),
            3 => Self::PostcopyAdvise(Some(PageSizes {
                summary: inside(inner.be64(), payload_at, length)?,
                target: inside(inner.be64(), payload_at, length)?,
            })),
            4 => Self::PostcopyListen,
            5 => Self::PostcopyRun,
            6 => inside(read_discard(&mut inner), payload_at, length)?,
            7 => Self::Packaged { length: inside(inner.be32(), payload_at, length)? },
            8 => Self::EnableColo,
            9 => Self::PostcopyResume,
            10 => {
                let block = inside(inner.name("a RAM block name"), payload_at, length)?.to_owned();
                Self::ReceiveBitmap { block }
            }
            _ => Self::SwitchoverStart,
        };
        if !inner.is_at_end() {
            return Err(wrong("a payload of the command's length"));
        }
        Ok(command)
    }
}

/// A payload that is too short for what it says is wrong, not incomplete: its length is known.
fn inside<T>(read: Result<T, Stop>, payload_at: usize, length: u16) -> Result<T, Stop> {
    read.map_err(|stop| match stop {
        Stop::Need(wanted) => Stop::Fail {
            at: payload_at,
            error_kind: ErrorKind::expected(
                format!("a payload of {wanted} bytes or more"),
                format_args!("{length} bytes"),
            ),
        },
        Stop::Fail { at, error_kind } => Stop::Fail { at: payload_at + at, error_kind },
    })
}

fn read_discard(cursor: &mut Cursor<'_>) -> Result<Command, Stop> {
    let version = cursor.u8()?;
    if version != 0 {
        return Err(Stop::Fail { at: 0, error_kind: ErrorKind::expected("version 0 of RAM_DISCARD", version) });
    }
    let block = cursor.name("a RAM block name")?.to_owned();
    let terminator = cursor.u8()?;
    if terminator != 0 {
        return Err(cursor.fail(ErrorKind::expected("a zero byte behind the RAM block name", terminator)));
    }
    let mut ranges = Vec::new();
    loop {
        let at = cursor.at();
        let (start, length) = (cursor.be64()?, cursor.be64()?);
        match start.checked_add(length) {
            Some(end) if length > 0 && start % PAGE_SIZE == 0 && end % PAGE_SIZE == 0 => ranges.push(start..end),
            _ => {
                let error_kind =
                    ErrorKind::expected("a range of whole pages", format_args!("{length:#x} bytes at {start:#x}"));
                return Err(Stop::Fail { at, error_kind });
            }
        }
        if cursor.is_at_end() {
            return Ok(Command::RamDiscard { block, ranges });
        }
    }
}
