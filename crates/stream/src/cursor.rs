//! Bounded big-endian reading from a byte slice that may still grow.
//!
//! Running out of input is not an error here: the caller learns how many bytes the whole item wants and comes again
//! with more. What is read is only borrowed; nothing is allocated from a length found in the input.

use std::borrow::Cow;

use limosa_page::{BrokenInvariant, to_u64};

use crate::error::{ErrorKind, StreamError};

/// Why reading stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    /// At least this number of bytes, from the cursor's first on, is needed.
    Need(usize),
    /// The bytes are wrong, `at` bytes behind the cursor's first.
    Fail { at: usize, error_kind: ErrorKind },
}

impl From<BrokenInvariant> for Stop {
    fn from(broken: BrokenInvariant) -> Self {
        Self::Fail { at: 0, error_kind: broken.into() }
    }
}

impl Stop {
    /// As an error of the stream in which the cursor's first byte is at `base`; `Need` becomes `Truncated`.
    pub(crate) fn into_error(self, base: u64, place: impl Into<Cow<'static, str>>, available: usize) -> StreamError {
        let place = place.into();
        match self {
            Self::Need(wanted) => {
                StreamError::new(base, place, ErrorKind::Truncated { what: "it".into(), wanted, available })
            }
            Self::Fail { at, error_kind } => StreamError::new(base.saturating_add(to_u64(at)), place, error_kind),
        }
    }
}

pub(crate) struct Cursor<'a> {
    input: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self { input, at: 0 }
    }

    /// A cursor at the same place, to look ahead; what it needs counts from the same first byte.
    pub(crate) fn fork(&self) -> Self {
        Self { input: self.input, at: self.at }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.at == self.input.len()
    }

    /// An error about what begins at the cursor.
    pub(crate) fn fail(&self, error_kind: ErrorKind) -> Stop {
        Stop::Fail { at: self.at, error_kind }
    }

    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let end = self.at.saturating_add(length);
        let taken = self.input.get(self.at..end).ok_or(Stop::Need(end))?;
        self.at = end;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let end = self.at.saturating_add(N);
        let taken = self.input.get(self.at..end).and_then(|taken| taken.first_chunk()).ok_or(Stop::Need(end))?;
        self.at = end;
        Ok(*taken)
    }

    pub(crate) fn peek(&self) -> Result<u8, Stop> {
        self.input.get(self.at).copied().ok_or(Stop::Need(self.at.saturating_add(1)))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Stop> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn be16(&mut self) -> Result<u16, Stop> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn be32(&mut self) -> Result<u32, Stop> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn be64(&mut self) -> Result<u64, Stop> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads a length byte and that number of bytes of UTF-8, at least one.
    pub(crate) fn name(&mut self, what: &'static str) -> Result<&'a str, Stop> {
        let begin = self.at;
        let length = usize::from(self.u8()?);
        if length == 0 {
            return Err(Stop::Fail { at: begin, error_kind: ErrorKind::expected(what, "an empty name") });
        }
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map_err(|_| Stop::Fail {
            at: begin,
            error_kind: ErrorKind::expected(
                what,
                format_args!("bytes that are not UTF-8: {:?}", bytes.escape_ascii().to_string()),
            ),
        })
    }
}

/// Appends a length byte and `name`.
pub(crate) fn put_name(what: &'static str, name: &str, out: &mut Vec<u8>) -> Result<(), crate::EncodeError> {
    match u8::try_from(name.len()) {
        Ok(length) if length > 0 => {
            out.push(length);
            out.extend_from_slice(name.as_bytes());
            Ok(())
        }
        _ => Err(crate::EncodeError::Name { what, name: name.to_owned(), limit: 255 }),
    }
}
