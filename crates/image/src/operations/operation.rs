//! What whole-disk operations have in common: how far they are, how they are stopped, and what they fail with.

use std::fmt;
use std::ops::ControlFlow;

use crate::error::ImageError;
use crate::offset::GuestOffset;

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the disk that are done with, in whatever way.
    pub done: u64,
    /// Bytes of the disk.
    pub total: u64,
    /// Bytes that were written for it, or read if nothing is written.
    pub moved: u64,
}

/// Is told how far an operation is, after every request, and stops it with [`ControlFlow::Break`].
pub type Watch<'a> = &'a (dyn Fn(Progress) -> ControlFlow<()> + Sync);

/// What was being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Asking where bytes come from.
    Mapping,
    /// Reading.
    Reading,
    /// Writing.
    Writing,
    /// Writing zeros.
    Zeroing,
    /// Making durable.
    Flushing,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mapping => "finding out what is allocated",
            Self::Reading => "reading",
            Self::Writing => "writing",
            Self::Zeroing => "writing zeros",
            Self::Flushing => "flushing",
        })
    }
}

/// Why an operation did not come to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// An image cannot be opened or created.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A new target's backing file cannot be opened.
    #[error("cannot open the backing file {backing}")]
    Backing {
        /// Its name.
        backing: String,
        /// The cause.
        source: ImageError,
    },
    /// A target cannot share the backing file of several sources.
    #[error("a target with backing file {backing} needs exactly one source")]
    SharedBacking {
        /// The backing file's name.
        backing: String,
    },
    /// The target cannot be closed.
    #[error("cannot finish {target}")]
    Finish {
        /// The target: a path.
        target: String,
        /// The cause.
        source: ImageError,
    },
    /// A request failed.
    #[error("error while {doing} at byte {}", at.0)]
    Failed {
        /// What was being done.
        doing: Operation,
        /// Where.
        at: GuestOffset,
        /// Why it failed.
        source: ImageError,
    },
    /// The target has no room.
    #[error(
        "{target} of {has} bytes is smaller than what is to be written into it, {needs} bytes: make it larger first"
    )]
    TargetTooSmall {
        /// The target: a path.
        target: String,
        /// Its length in bytes.
        has: u64,
        /// The sum of the sources' lengths in bytes.
        needs: u64,
    },
    /// More bytes than an offset can say.
    #[error("the sources are larger, one after the other, than a disk can be")]
    TooLarge,
    /// The watching function said so.
    #[error("stopped on request")]
    Stopped,
}

impl OperationError {
    /// A request that failed there.
    pub(crate) fn at(doing: Operation, at: u64) -> impl FnOnce(ImageError) -> Self {
        move |source| Self::Failed { doing, at: GuestOffset(at), source }
    }
}
