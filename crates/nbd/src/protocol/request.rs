//! Headers of requests.

use super::{Headers, split_u16, split_u32, split_u64};

/// The beginning of a compact request.
const COMPACT: u32 = 0x2560_9513;
/// The beginning of an extended request.
const EXTENDED: u32 = 0x21e4_1c71;

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::FromRepr)]
#[repr(u16)]
pub enum Command {
    /// Read.
    Read = 0,
    /// Write the payload.
    Write = 1,
    /// End the connection.
    Disconnect = 2,
    /// Make writes durable.
    Flush = 3,
    /// Forget contents.
    Trim = 4,
    /// Prefetch.
    Cache = 5,
    /// Write zeros.
    WriteZeroes = 6,
    /// Report metadata contexts.
    BlockStatus = 7,
}

/// Flags of commands.
pub mod flag {
    /// The write is durable when it is answered.
    pub const FUA: u16 = 1 << 0;
    /// Zeros are not made a hole.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The reply has one content chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent is reported.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeros are written fast, or not at all.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// Flags: [`flag`].
    pub flags: u16,
    /// The number of the command: a [`Command`], or one that is unknown.
    pub command: u16,
    /// The client's name for the request.
    pub cookie: u64,
    /// Offset in the export, in bytes.
    pub offset: u64,
    /// Bytes that it is about, or of its payload.
    pub length: u64,
}

impl RequestHeader {
    /// Decodes the header at the front of `bytes`, of [`Headers::request_len`] bytes. `None`: it does not begin as a
    /// request does, or is too short.
    #[must_use]
    pub fn decode(headers: Headers, mut bytes: &[u8]) -> Option<Self> {
        let bytes = &mut bytes;
        let magic = split_u32(bytes)?;
        let (flags, command) = (split_u16(bytes)?, split_u16(bytes)?);
        let (cookie, offset) = (split_u64(bytes)?, split_u64(bytes)?);
        let (expected, length) = match headers {
            Headers::Simple | Headers::Structured => (COMPACT, u64::from(split_u32(bytes)?)),
            Headers::Extended => (EXTENDED, split_u64(bytes)?),
        };
        (magic == expected).then_some(Self { flags, command, cookie, offset, length })
    }

    /// Encodes it, for clients. A compact header has the lower half of the length.
    #[must_use]
    pub fn encode(&self, headers: Headers) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(headers.request_len());
        let extended = headers == Headers::Extended;
        bytes.extend_from_slice(&if extended { EXTENDED } else { COMPACT }.to_be_bytes());
        bytes.extend_from_slice(&self.flags.to_be_bytes());
        bytes.extend_from_slice(&self.command.to_be_bytes());
        bytes.extend_from_slice(&self.cookie.to_be_bytes());
        bytes.extend_from_slice(&self.offset.to_be_bytes());
        bytes.extend_from_slice(&self.length.to_be_bytes()[if extended { 0 } else { 4 }..]);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_are_as_the_document_has_them() {
        let header = RequestHeader { flags: 1, command: 6, cookie: 0x0102_0304_0506_0708, offset: 512, length: 1024 };
        let compact = [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 0];
        assert_eq!(header.encode(Headers::Structured), compact);
        let mut extended = vec![0x21, 0xe4, 0x1c, 0x71];
        extended.extend_from_slice(&compact[4..24]);
        extended.extend_from_slice(&[0, 0, 0, 0, 0, 0, 4, 0]);
        assert_eq!(header.encode(Headers::Extended), extended);
        assert_eq!(RequestHeader::decode(Headers::Extended, &compact), None);
        assert_eq!(RequestHeader::decode(Headers::Simple, &extended), None);
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            flags: u16, command: u16, cookie: u64, offset: u64, length: u64, extended: bool, cut in 0..32_usize,
        ) {
            let headers = if extended { Headers::Extended } else { Headers::Simple };
            let length = if extended { length } else { length >> 32 };
            let header = RequestHeader { flags, command, cookie, offset, length };
            let bytes = header.encode(headers);
            prop_assert_eq!(bytes.len(), headers.request_len());
            prop_assert_eq!(RequestHeader::decode(headers, &bytes), Some(header));
            if cut < bytes.len() {
                prop_assert_eq!(RequestHeader::decode(headers, &bytes[..cut]), None);
            }
        }
    }
}
