//! Headers of replies.
//!
//! The law: a reply has exactly one last chunk, and a simple reply to a read has either an error or all of its bytes.

use super::error::ErrorCode;
use super::{Headers, split_u16, split_u32, split_u64};

/// The beginning of a simple reply.
const SIMPLE: u32 = 0x6744_6698;
/// The beginning of a chunk of a structured reply.
const STRUCTURED: u32 = 0x668e_33ef;
/// The beginning of a chunk of an extended reply.
const EXTENDED: u32 = 0x6e8a_278c;
/// The flag of the last chunk of a reply.
const DONE: u16 = 1;

/// The kind of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::FromRepr)]
#[repr(u16)]
pub enum Chunk {
    /// Nothing.
    None = 0,
    /// Bytes at an offset.
    OffsetData = 1,
    /// Zeros at an offset.
    OffsetHole = 2,
    /// Extents of a metadata context.
    BlockStatus = 5,
    /// The same with lengths and flags of 64 bits.
    BlockStatusExtended = 6,
    /// The request failed.
    Error = 0x8001,
    /// It failed at an offset.
    ErrorOffset = 0x8002,
}

/// Bytes of a simple reply, and of what every reply begins with.
pub const REPLY_START_LEN: usize = 16;

/// The beginning of a reply or of a chunk, for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyStart {
    /// A simple reply: its error, or 0.
    Simple {
        /// The error.
        error: u32,
        /// The client's name for the request.
        cookie: u64,
    },
    /// A chunk; the rest of its header follows.
    Chunk {
        /// Whether it is the last one of its reply.
        last: bool,
        /// A [`Chunk`], or one that is unknown; errors have the highest bit.
        kind: u16,
        /// The client's name for the request.
        cookie: u64,
    },
}

impl ReplyStart {
    /// Decodes one of a connection with these headers. `None`: it does not begin as a reply does.
    #[must_use]
    pub fn decode(headers: Headers, bytes: [u8; REPLY_START_LEN]) -> Option<Self> {
        let mut bytes = bytes.as_slice();
        let magic = split_u32(&mut bytes)?;
        let start = match (magic, headers) {
            (SIMPLE, Headers::Simple | Headers::Structured) => {
                Self::Simple { error: split_u32(&mut bytes)?, cookie: split_u64(&mut bytes)? }
            }
            (STRUCTURED, Headers::Structured) | (EXTENDED, Headers::Extended) => {
                let (flags, kind) = (split_u16(&mut bytes)?, split_u16(&mut bytes)?);
                Self::Chunk { last: flags & DONE != 0, kind, cookie: split_u64(&mut bytes)? }
            }
            _ => return None,
        };
        Some(start)
    }
}

/// Returns the bytes of a chunk's header behind its [`ReplyStart`]: they end with the length of its payload.
#[must_use]
pub const fn chunk_rest_len(headers: Headers) -> usize {
    match headers {
        Headers::Simple => 0,
        Headers::Structured => 4,
        Headers::Extended => 16,
    }
}

/// The request that a reply is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject {
    /// The form of the reply.
    pub headers: Headers,
    /// The client's name for the request.
    pub cookie: u64,
    /// The request's offset.
    pub offset: u64,
}

/// The most bytes of a [`Head`]: those of an extended chunk, and of a hole.
const HEAD_MAX: usize = 44;

/// The beginning of a reply or of a chunk, before its data.
#[derive(Clone, Copy)]
pub struct Head {
    bytes: [u8; HEAD_MAX],
    len: usize,
}

impl Head {
    const fn new() -> Self {
        Self { bytes: [0; HEAD_MAX], len: 0 }
    }

    fn push<const N: usize>(mut self, bytes: [u8; N]) -> Self {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + N) {
            room.copy_from_slice(&bytes);
            self.len += N;
        }
        self
    }

    /// Returns its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }
}

impl std::fmt::Debug for Head {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Head").field(&self.as_bytes()).finish()
    }
}

impl Subject {
    /// The header of a chunk with `length` bytes of payload.
    fn chunk(&self, chunk: Chunk, last: bool, length: u64) -> Head {
        let flags = if last { DONE } else { 0 };
        let magic = if self.headers == Headers::Extended { EXTENDED } else { STRUCTURED };
        let head = Head::new()
            .push(magic.to_be_bytes())
            .push(flags.to_be_bytes())
            .push((chunk as u16).to_be_bytes())
            .push(self.cookie.to_be_bytes());
        if self.headers == Headers::Extended {
            return head.push(self.offset.to_be_bytes()).push(length.to_be_bytes());
        }
        // The payload is at most `MAX_PAYLOAD` and a few bytes, or a bounded list.
        head.push(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes())
    }

    fn simple(&self, error: u32) -> Head {
        Head::new().push(SIMPLE.to_be_bytes()).push(error.to_be_bytes()).push(self.cookie.to_be_bytes())
    }

    /// Returns the whole reply to a request that succeeded and has no data.
    #[must_use]
    pub fn done(&self) -> Head {
        if self.headers.has_chunks() { self.chunk(Chunk::None, true, 0) } else { self.simple(0) }
    }

    /// Returns the whole reply to a request that failed.
    #[must_use]
    pub fn failed(&self, error: ErrorCode) -> Head {
        if !self.headers.has_chunks() {
            return self.simple(error.number());
        }
        let none: u16 = 0;
        self.chunk(Chunk::Error, true, 6).push(error.number().to_be_bytes()).push(none.to_be_bytes())
    }

    /// Returns what comes before `length` bytes that were read at `offset`. A simple reply has all bytes of the request
    /// in one piece.
    #[must_use]
    pub fn data(&self, offset: u64, length: usize, last: bool) -> Head {
        if !self.headers.has_chunks() {
            return self.simple(0);
        }
        self.chunk(Chunk::OffsetData, last, length as u64 + 8).push(offset.to_be_bytes())
    }

    /// Returns a chunk that says that `length` bytes at `offset` are zeros. Not for simple replies.
    #[must_use]
    pub fn hole(&self, offset: u64, length: u32, last: bool) -> Head {
        self.chunk(Chunk::OffsetHole, last, 12).push(offset.to_be_bytes()).push(length.to_be_bytes())
    }

    /// Returns a chunk with the extents of a metadata context, each with its length and its status. Not for simple
    /// replies.
    #[must_use]
    pub fn status(&self, context: u32, extents: &[(u64, u32)], last: bool) -> Vec<u8> {
        let count = u32::try_from(extents.len()).unwrap_or(u32::MAX);
        if self.headers == Headers::Extended {
            let head = self.chunk(Chunk::BlockStatusExtended, last, 8 + u64::from(count) * 16);
            let mut bytes = [head.as_bytes(), &context.to_be_bytes(), &count.to_be_bytes()].concat();
            for (length, status) in extents {
                bytes.extend_from_slice(&length.to_be_bytes());
                bytes.extend_from_slice(&u64::from(*status).to_be_bytes());
            }
            return bytes;
        }
        let head = self.chunk(Chunk::BlockStatus, last, 4 + u64::from(count) * 8);
        let mut bytes = [head.as_bytes(), &context.to_be_bytes()].concat();
        for (length, status) in extents {
            // The request's length has 32 bits, and no extent is longer.
            bytes.extend_from_slice(&u32::try_from(*length).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(&status.to_be_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(headers: Headers) -> Subject {
        Subject { headers, cookie: 0x0102_0304_0506_0708, offset: 0x200 }
    }

    #[test]
    fn simple_replies_are_as_the_document_has_them() {
        let simple = subject(Headers::Simple);
        assert_eq!(simple.done().as_bytes(), [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(simple.data(0x200, 512, true).as_bytes(), simple.done().as_bytes());
        let failed = simple.failed(ErrorCode::NoSpace);
        assert_eq!(failed.as_bytes()[4..8], [0, 0, 0, 28]);
    }

    #[test]
    fn structured_replies_are_as_the_document_has_them() {
        let structured = subject(Headers::Structured);
        let begin = [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(structured.done().as_bytes(), [&begin[..], &[0; 4]].concat());
        let failed = structured.failed(ErrorCode::Invalid);
        assert_eq!(failed.as_bytes()[6..8], [0x80, 1]);
        assert_eq!(failed.as_bytes()[16..], [0, 0, 0, 6, 0, 0, 0, 22, 0, 0]);
        let data = structured.data(0x300, 512, false);
        assert_eq!(data.as_bytes()[4..8], [0, 0, 0, 1]);
        assert_eq!(data.as_bytes()[16..], [0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 3, 0]);
        let hole = structured.hole(0x300, 0x1000, true);
        assert_eq!(hole.as_bytes()[4..8], [0, 1, 0, 2]);
        assert_eq!(hole.as_bytes()[16..], [0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0x10, 0]);
        let status = structured.status(1, &[(4096, 3), (512, 0)], true);
        assert_eq!(status[6..8], [0, 5]);
        let expected = [0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0x10, 0, 0, 0, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0];
        assert_eq!(status[16..], expected);
    }

    #[test]
    fn extended_replies_are_as_the_document_has_them() {
        let extended = subject(Headers::Extended);
        let begin = [0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 2, 0];
        assert_eq!(extended.done().as_bytes(), [&begin[..], &[0; 8]].concat());
        assert_eq!(extended.hole(0x300, 1, true).as_bytes().len(), HEAD_MAX);
        let status = extended.status(2, &[(1 << 40, 7)], true);
        assert_eq!(status[6..8], [0, 6]);
        let expected = [0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
        assert_eq!((status.len(), &status[32..]), (56, &expected[..]));
    }
}
