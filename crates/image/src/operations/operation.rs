//! Progress, cancellation and errors of operations on whole disks.

use std::ops::ControlFlow;

use crate::error::ImageError;
use crate::offset::GuestOffset;

/// The progress of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes of the disk that are done: copied, zeroed or skipped.
    pub done: u64,
    /// Bytes of the disk; [`u64::MAX`] until its end is known, if it comes through a pipe.
    pub total: u64,
    /// Bytes that were written for it, or read if nothing is written.
    pub moved: u64,
}

impl Progress {
    /// A progress of `done` of `total` bytes, with `moved` bytes written.
    #[must_use]
    pub const fn new(done: u64, total: u64, moved: u64) -> Self {
        Self { done, total, moved }
    }
}

/// A function that observes progress after every request, and stops the operation with [`ControlFlow::Break`].
pub type ProgressObserver<'a> = &'a (dyn Fn(Progress) -> ControlFlow<()> + Sync);

/// The operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum DiskOperation {
    /// Mapping: finding out what is allocated.
    #[strum(to_string = "finding out what is allocated")]
    Mapping,
    /// Reading.
    #[strum(to_string = "reading")]
    Reading,
    /// Writing.
    #[strum(to_string = "writing")]
    Writing,
    /// Writing zeros.
    #[strum(to_string = "writing zeros")]
    Zeroing,
    /// Making durable.
    #[strum(to_string = "flushing")]
    Flushing,
}

/// Why an operation failed.
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
    /// The target would overwrite a source while that is read.
    #[error("{target}: source and target are the same file")]
    SameFile {
        /// The target: a path.
        target: String,
    },
    /// A target cannot share the backing file of several sources.
    #[error("a target with backing file {backing} needs exactly one source")]
    SharedBacking {
        /// The backing file's name.
        backing: String,
    },
    /// The target cannot be closed.
    #[error("cannot finish {target}")]
    CloseTarget {
        /// The target: a path.
        target: String,
        /// The cause.
        source: ImageError,
    },
    /// A request failed.
    #[error("error while {operation} at byte {}", at.0)]
    Failed {
        /// The operation that failed.
        operation: DiskOperation,
        /// Its offset.
        at: GuestOffset,
        /// The cause.
        source: ImageError,
    },
    /// The target is too small.
    #[error("{target} of {has} bytes is smaller than its new contents of {needs} bytes")]
    TargetTooSmall {
        /// The target: a path.
        target: String,
        /// Its length in bytes.
        has: u64,
        /// The sum of the sources' lengths in bytes.
        needs: u64,
    },
    /// The sources have more bytes than an offset can express.
    #[error("the sources are larger, one after the other, than a disk can be")]
    TooLarge,
    /// An interrupted copy cannot be continued.
    #[error("{target}: the interrupted copy cannot be continued: {why}")]
    CannotResume {
        /// The target: a path.
        target: String,
        /// The reason, and what to do.
        why: String,
    },
    /// The observing function stopped it.
    #[error("stopped on request")]
    Stopped,
}

impl OperationError {
    /// A request that failed there.
    pub(crate) fn at(doing: DiskOperation, at: u64) -> impl FnOnce(ImageError) -> Self {
        move |source| Self::Failed { operation: doing, at: GuestOffset(at), source }
    }
}
