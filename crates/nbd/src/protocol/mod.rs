//! The messages of NBD, without I/O.
//!
//! The facts are those of the protocol's document (NetworkBlockDevice/nbd, doc/proto.md) and of its extension for
//! extended headers (branch extension-ext-header). Numbers are big-endian.
//!
//! | file | subject |
//! |---|---|
//! | `handshake` | greeting, options and their replies |
//! | `option_data` | the data of options |
//! | `request` | headers of requests |
//! | `reply` | headers of replies |
//! | `error` | errors of requests |

pub mod error;
pub mod handshake;
pub mod option_data;
pub mod reply;
pub mod request;

/// The longest payload of a request or a reply, in bytes: what the protocol asks for at least.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// The longest string of the protocol, in bytes.
pub const MAX_STRING: usize = 4096;

/// The metadata context of holes and zeros.
pub mod allocation {
    /// Its name.
    pub const NAME: &str = "base:allocation";
    /// Nothing is allocated.
    pub const HOLE: u32 = 1 << 0;
    /// It reads as zeros.
    pub const ZERO: u32 = 1 << 1;
}

/// The form of requests and replies that a client has negotiated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Headers {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies.
    Structured,
    /// Extended requests and replies.
    Extended,
}

impl Headers {
    /// Returns the bytes of a request's header.
    #[must_use]
    pub const fn request_len(self) -> usize {
        match self {
            Self::Simple | Self::Structured => 28,
            Self::Extended => 32,
        }
    }

    /// Returns whether a reply consists of chunks.
    #[must_use]
    pub const fn has_chunks(self) -> bool {
        !matches!(self, Self::Simple)
    }
}

/// Splits the next `N` bytes off.
pub fn split<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

/// Splits a u16 off.
pub fn split_u16(bytes: &mut &[u8]) -> Option<u16> {
    split(bytes).map(u16::from_be_bytes)
}

/// Splits a u32 off.
pub fn split_u32(bytes: &mut &[u8]) -> Option<u32> {
    split(bytes).map(u32::from_be_bytes)
}

/// Splits a u64 off.
pub fn split_u64(bytes: &mut &[u8]) -> Option<u64> {
    split(bytes).map(u64::from_be_bytes)
}

/// Splits a string off that has its length before it.
pub fn split_string<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(split_u32(bytes)?).ok()?;
    let (string, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(string)
}
