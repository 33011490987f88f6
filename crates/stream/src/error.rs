//! Errors of a stream, with their offset.
//!
//! A reader of an error must be able to open the file in a hex viewer and look at the right byte: every decoding error
//! carries the stream offset, the section (or record) it happened in, and what was expected there. Text from outside
//! is quoted and escaped.

use std::borrow::Cow;
use std::fmt;

use limosa_page::BrokenInvariant;

/// A decoding error: where it happened and what was wrong there.
///
/// Boxed inside, so that a `Result` on the per-page path stays small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamError(Box<Inner>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Inner {
    offset: u64,
    place: Cow<'static, str>,
    error_kind: ErrorKind,
}

impl StreamError {
    /// An error `error_kind` at `offset` bytes into the stream (or file), inside `place`, e.g. `section "ram" (id 2)`.
    pub fn new(offset: u64, place: impl Into<Cow<'static, str>>, error_kind: ErrorKind) -> Self {
        Self(Box::new(Inner { offset, place: place.into(), error_kind }))
    }

    /// Bytes from the beginning of the stream to what is wrong.
    pub fn offset(&self) -> u64 {
        self.0.offset
    }

    /// The section, record or file part in which it happened.
    pub fn context(&self) -> &str {
        &self.0.place
    }

    /// The reason.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.error_kind
    }
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offset {:#x}, {}: {}", self.0.offset, self.0.place, self.0.error_kind)
    }
}

impl std::error::Error for StreamError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0.error_kind)
    }
}

fn ends_inside(what: &str, wanted: usize, available: usize) -> String {
    match available {
        0 => format!("the input ends before {what}"),
        _ => format!("the input ends inside {what}: {wanted} bytes wanted, {available} there"),
    }
}

/// The kinds of things that can be wrong with decoded bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Something else is where `what` had to be.
    #[error("expected {what}, found {found}")]
    Unexpected {
        /// The expected item.
        what: Cow<'static, str>,
        /// The item found.
        found: String,
    },
    /// The input ends inside `what`.
    #[error("{}", ends_inside(what, *wanted, *available))]
    Truncated {
        /// The object being read.
        what: Cow<'static, str>,
        /// Bytes that it takes at least.
        wanted: usize,
        /// Bytes that were there.
        available: usize,
    },
    /// A part of a mapped-ram file ends after the file does.
    #[error("{what} should end at {end:#x}, but the file ends at {file_length:#x}")]
    BeyondFile {
        /// The part.
        what: String,
        /// The offset at which it should end, in bytes.
        end: u64,
        /// The length of the file in bytes.
        file_length: u64,
    },
    /// A count or length is larger than anything sensible.
    #[error("{what} is {value}, more than the limit of {limit}")]
    TooLarge {
        /// The count or length.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The largest value that is accepted.
        limit: u64,
    },
    /// A record names a RAM block that START did not list.
    #[error("RAM block {name:?} was not listed in the START section")]
    UnknownBlock {
        /// The name in the record.
        name: String,
    },
    /// START lists one RAM block name twice.
    #[error("RAM block {name:?} is listed twice")]
    DuplicateBlock {
        /// The repeated name.
        name: String,
    },
    /// A record lies outside its RAM block.
    #[error("page at {offset:#x} lies outside RAM block {block:?} of {used_length:#x} bytes")]
    OutsideBlock {
        /// The block's name.
        block: String,
        /// Byte offset of the page inside the block.
        offset: u64,
        /// The block's length in bytes.
        used_length: u64,
    },
    /// The parts of a mapped-ram file contradict each other or the file's length.
    #[error("{what} at {start:#x}..{end:#x} {problem}")]
    LayoutConflict {
        /// The part, e.g. `bitmap of RAM block "pc.ram"`.
        what: String,
        /// First byte in the file.
        start: u64,
        /// First byte behind it.
        end: u64,
        /// The problem at that offset.
        problem: String,
    },
    /// The stream uses a feature that this decoder does not take.
    #[error("{0}")]
    Unsupported(UnsupportedFeature),
    /// A bug of limosa; the stream may be right.
    #[error(transparent)]
    Internal(#[from] BrokenInvariant),
}

impl ErrorKind {
    pub(crate) fn expected(what: impl Into<Cow<'static, str>>, found: impl fmt::Display) -> Self {
        Self::Unexpected { what: what.into(), found: found.to_string() }
    }

    /// The feature that is not supported, if that is what is wrong.
    #[must_use]
    pub fn feature(&self) -> Option<&UnsupportedFeature> {
        if let Self::Unsupported(feature) = self { Some(feature) } else { None }
    }
}

/// Features of the format that a decoder recognizes and refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnsupportedFeature {
    /// Records of capability `xbzrle` (flag 0x40): page deltas.
    #[error("the stream carries xbzrle page deltas")]
    Xbzrle,
    /// Flag 0x200: pages travel on multifd channels.
    #[error("the stream joins with multifd channels, which carry its pages, and none are open here")]
    Multifd,
    /// Flag 0x40 of a multifd packet: the state of an assigned device.
    #[error("the channel carries device state (of an assigned device, vfio), which is not supported")]
    MultifdDeviceState,
    /// Pages of a multifd channel, compressed by special hardware.
    #[error("the channel's pages are compressed by {method}; only none, zlib and zstd are supported")]
    MultifdCompression {
        /// QEMU's name of the method.
        method: &'static str,
    },
    /// Flag 0x80: RDMA.
    #[error("the stream is controlled by RDMA hooks, which only an rdma: transport can follow")]
    RdmaHook,
    /// Flag 0x100: pages compressed one by one, removed in QEMU 9.1.
    #[error("the stream carries compressed pages")]
    CompressedPage,
    /// Section `dirty-bitmap`: capability `dirty-bitmaps`.
    #[error("the stream carries block dirty bitmaps")]
    DirtyBitmaps,
    /// An iterable section of another device, for example of an assigned one (vfio).
    #[error("iterable section {name:?} does not record its length, so it cannot be skipped")]
    IterableSection {
        /// The section's name.
        name: String,
    },
    /// Command 8: COLO.
    #[error("the stream enables COLO (fault tolerance by two running VMs)")]
    Colo,
    /// A target page size other than 4 KiB.
    #[error("target pages of 2^{bits} bytes; only 4096-byte pages (2^12) are supported")]
    TargetPageBits {
        /// log2 of the target page size.
        bits: u32,
    },
}

/// Why something cannot be put into QEMU's format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// A name does not fit into its length byte, or is empty.
    #[error("{what} {name:?} has {} bytes, the format takes 1 to {limit}", name.len())]
    Name {
        /// The named object.
        what: &'static str,
        /// The name.
        name: String,
        /// Longest name in bytes.
        limit: usize,
    },
    /// A number is not a multiple of what the format asks for, or is beyond its bound.
    #[error("{what} is {value:#x}: {rule}")]
    Number {
        /// The name of the number.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// Two RAM blocks have one name.
    #[error("RAM block {name:?} is given twice")]
    DuplicateBlock {
        /// The repeated name.
        name: String,
    },
    /// A bug of limosa.
    #[error(transparent)]
    Internal(#[from] BrokenInvariant),
}
