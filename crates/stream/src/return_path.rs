//! Messages of a destination to its source: type, length, payload, in both directions.
//!
//! [`ReturnDecoder`] takes the bytes as they come and gives whole messages. Its memory is bounded: a message has at
//! most 512 bytes (QEMU's own limit), except for the bitmap of received pages, whose limit the caller sets.

use limosa_page::{to_u64, to_usize};

use crate::cursor::{Cursor, Stop, put_name};
use crate::error::{EncodeError, ErrorKind, StreamError};

/// Longest payload of a message, in bytes; QEMU's own limit.
pub const RETURN_MESSAGE_LIMIT: u16 = 512;
/// The end mark of a bitmap of received pages.
pub const RECEIVED_BITMAP_END: u64 = 0x0123_4567_89ab_cdef;

/// A message from destination to source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReturnMessage {
    /// 1: the last message; 0 means that all went well.
    Shut(u32),
    /// 2: the answer to a PING of this token.
    Pong(u32),
    /// 3 with a block name, 4 without: send these pages first.
    RequestPages {
        /// RAM block name; `None` repeats that of the request before.
        block: Option<String>,
        /// First byte in the block, a multiple of the block's page size.
        start: u64,
        /// Bytes, a multiple of the block's page size.
        length: u32,
    },
    /// 5: which pages of a block have arrived.
    ReceivedBitmap {
        /// RAM block name.
        block: String,
        /// Bit i % 8 of byte i / 8 is page i; a multiple of 8 bytes.
        bitmap: Vec<u8>,
    },
    /// 6: ready to go on after a recovery (value 1).
    ResumeAck(u32),
    /// 7: the devices agree to the switchover.
    SwitchoverAck,
}

impl ReturnMessage {
    /// Appends the message.
    ///
    /// # Errors
    /// A block name that does not fit. `out` is then as before.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let begin = out.len();
        let encoded = self.encode_frame(out);
        if encoded.is_err() {
            out.truncate(begin);
        }
        encoded
    }

    fn encode_frame(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        match self {
            Self::Shut(value) => frame(1, &[&value.to_be_bytes()], out),
            Self::Pong(token) => frame(2, &[&token.to_be_bytes()], out),
            Self::RequestPages { block: None, start, length } => {
                frame(4, &[&start.to_be_bytes(), &length.to_be_bytes()], out);
            }
            Self::RequestPages { block: Some(block), start, length } => {
                let mut name = Vec::with_capacity(1 + block.len());
                put_name("RAM block", block, &mut name)?;
                frame(3, &[&start.to_be_bytes(), &length.to_be_bytes(), &name], out);
            }
            Self::ReceivedBitmap { block, bitmap } => {
                let mut name = Vec::with_capacity(1 + block.len());
                put_name("RAM block", block, &mut name)?;
                frame(5, &[&name], out);
                out.extend_from_slice(&to_u64(bitmap.len()).to_be_bytes());
                out.extend_from_slice(bitmap);
                out.extend_from_slice(&RECEIVED_BITMAP_END.to_be_bytes());
            }
            Self::ResumeAck(value) => frame(6, &[&value.to_be_bytes()], out),
            Self::SwitchoverAck => frame(7, &[], out),
        }
        Ok(())
    }
}

fn frame(kind: u16, payload: &[&[u8]], out: &mut Vec<u8>) {
    // At most 12 bytes and a name of at most 256.
    let [low, high, rest @ ..] = payload.iter().map(|part| part.len()).sum::<usize>().to_le_bytes();
    debug_assert!(rest == [0; 6] && high < 2, "the body of a message of the return path is at most 268 bytes long");
    let length = u16::from_le_bytes([low, high]);
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
    for part in payload {
        out.extend_from_slice(part);
    }
}

/// Incremental decoder of a return path.
#[derive(Debug, Clone)]
pub struct ReturnDecoder {
    buffer: Vec<u8>,
    begin: usize,
    offset: u64,
    wanted: usize,
    bitmap_limit: u64,
    block_known: bool,
}

impl ReturnDecoder {
    /// Accepts bitmaps of at most `bitmap_limit` bytes (one bit per page of the largest block is enough).
    pub fn new(bitmap_limit: u64) -> Self {
        Self { buffer: Vec::new(), begin: 0, offset: 0, wanted: 4, bitmap_limit, block_known: false }
    }

    /// The same for a return path that takes the place of a broken one: a destination may go on to leave out the name
    /// of the block that it named there, until it agrees to resume.
    pub fn for_recovery(bitmap_limit: u64) -> Self {
        Self { block_known: true, ..Self::new(bitmap_limit) }
    }

    /// Takes bytes as they came from the channel. Take all [messages](Self::next_message) out before the next push:
    /// what waits inside is bounded by one message and one push.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.begin);
        self.begin = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Bytes of the return path before the next message.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the bytes behind the last message.
    pub fn rest(&self) -> &[u8] {
        &self.buffer[self.begin..]
    }

    /// Whether the bytes so far end between two messages.
    pub fn is_between_messages(&self) -> bool {
        self.begin == self.buffer.len()
    }

    /// The next whole message, or `None` until more bytes are pushed.
    ///
    /// # Errors
    /// Unknown type, wrong length, impossible payload, a request without block before any with one; the decoder must
    /// not be used after that.
    pub fn next_message(&mut self) -> Result<Option<ReturnMessage>, StreamError> {
        let input = &self.buffer[self.begin..];
        // A long bitmap comes in pieces: it is not looked at again before it can be complete.
        if input.len() < self.wanted {
            return Ok(None);
        }
        let mut cursor = Cursor::new(input);
        match read(&mut cursor, self.bitmap_limit, self.block_known) {
            Ok(message) => {
                let length = cursor.at();
                self.block_known |= matches!(message, ReturnMessage::RequestPages { .. });
                self.begin += length;
                self.offset = self.offset.saturating_add(to_u64(length));
                self.wanted = 4;
                Ok(Some(message))
            }
            Err(Stop::Need(wanted)) => {
                self.wanted = wanted;
                Ok(None)
            }
            Err(stop) => Err(stop.into_error(self.offset, "return path", input.len())),
        }
    }
}

fn read(cursor: &mut Cursor<'_>, bitmap_limit: u64, block_known: bool) -> Result<ReturnMessage, Stop> {
    let kind = cursor.be16()?;
    let length = cursor.be16()?;
    let wrong = |what: &'static str| Stop::Fail {
        at: 0,
        error_kind: ErrorKind::expected(what, format_args!("message {kind} of {length} bytes")),
    };
    match (kind, length) {
        (1 | 2 | 6, 4) | (4, 12) | (7, 0) => {}
        (3, 14..=RETURN_MESSAGE_LIMIT) | (5, 2..=RETURN_MESSAGE_LIMIT) => {}
        (1..=7, _) => return Err(wrong("a message of the length that its type asks for")),
        _ => return Err(wrong("a message type from 1 to 7")),
    }
    let mut payload = Cursor::new(cursor.take(usize::from(length))?);
    // The payload is there as a whole: what it lacks now will not come.
    let short = |stop: Stop| match stop {
        Stop::Need(_) => wrong("a payload that is as long as it says"),
        Stop::Fail { at, error_kind } => Stop::Fail { at: 4 + at, error_kind },
    };
    let message = match kind {
        1 => ReturnMessage::Shut(payload.be32().map_err(short)?),
        2 => ReturnMessage::Pong(payload.be32().map_err(short)?),
        3 | 4 => {
            let start = payload.be64().map_err(short)?;
            let length = payload.be32().map_err(short)?;
            if length == 0 || start.checked_add(length.into()).is_none() {
                let found = format_args!("{length:#x} bytes at {start:#x}").to_string();
                return Err(Stop::Fail { at: 4, error_kind: ErrorKind::expected("a range of pages", found) });
            }
            if kind == 4 && !block_known {
                return Err(wrong("a request with a block name (type 3) before one without (type 4)"));
            }
            let block =
                if kind == 3 { Some(payload.name("a RAM block name").map_err(short)?.to_owned()) } else { None };
            ReturnMessage::RequestPages { block, start, length }
        }
        5 => {
            let block = payload.name("a RAM block name").map_err(short)?.to_owned();
            let bitmap = read_bitmap(cursor, bitmap_limit)?;
            ReturnMessage::ReceivedBitmap { block, bitmap }
        }
        6 => ReturnMessage::ResumeAck(payload.be32().map_err(short)?),
        _ => ReturnMessage::SwitchoverAck,
    };
    if !payload.is_at_end() {
        return Err(wrong("a payload that is as long as it says"));
    }
    Ok(message)
}

/// Reads the bitmap that follows message 5, which is not part of its length.
fn read_bitmap(cursor: &mut Cursor<'_>, limit: u64) -> Result<Vec<u8>, Stop> {
    let at = cursor.at();
    let size = cursor.be64()?;
    if size > limit || size % 8 != 0 {
        let error_kind = match size > limit {
            true => ErrorKind::TooLarge { what: "size of a bitmap of received pages", value: size, limit },
            false => ErrorKind::expected("a bitmap of whole 8-byte words", format_args!("{size} bytes")),
        };
        return Err(Stop::Fail { at, error_kind });
    }
    let size = to_usize(size);
    let bitmap = cursor.take(size)?;
    let at = cursor.at();
    let end = cursor.be64()?;
    if end != RECEIVED_BITMAP_END {
        let error_kind = ErrorKind::expected("0x0123456789abcdef behind the bitmap", format_args!("{end:#x}"));
        return Err(Stop::Fail { at, error_kind });
    }
    Ok(bitmap.to_vec())
}
