//! What an image fails with.

use std::sync::Arc;

use limosa_page::BrokenInvariant;
use limosa_storage::StorageError;

use crate::offset::GuestOffset;
use crate::qcow2::CreateOptionsError;
use crate::reference::ReferenceError;

/// Why an image cannot be opened, read, written or checked.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// What it lies in failed.
    #[error(transparent)]
    Storage(#[from] StorageError),

    /// A bug of limosa. Nothing that rests on it was done.
    #[error(transparent)]
    Internal(#[from] BrokenInvariant),

    /// It is not what it should be. Nothing that rests on it was done.
    #[error("{image}: {table}: {why}")]
    Corrupt {
        /// The image: a path.
        image: Arc<str>,
        /// Which of its structures, with its offset in the file: `L2 table at 0x50000, entry 7`.
        table: String,
        /// What is wrong with it.
        why: String,
    },

    /// It says that it is damaged, and has to be repaired before it is written.
    #[error("{image}: {what}")]
    Damaged {
        /// The image: a path.
        image: Arc<str>,
        /// What it says.
        what: String,
    },

    /// It asks for what limosa does not have.
    #[error("{image}: {what}")]
    Unsupported {
        /// The image: a path.
        image: Arc<str>,
        /// What that is, and what to do.
        what: String,
    },

    /// It names another file, and may not have it opened.
    #[error("{image}: it refers to {reference}, which is not opened: {why}")]
    Refused {
        /// The image: a path.
        image: Arc<str>,
        /// What it names.
        reference: String,
        /// Why.
        why: String,
        /// The policy was [`Policy::Refuse`](crate::Policy::Refuse).
        untrusted: bool,
    },

    /// A name that names no image.
    #[error(transparent)]
    Reference(#[from] ReferenceError),

    /// A new image cannot have these options.
    #[error("{image}: cannot be created")]
    Options {
        /// The image: a path.
        image: Arc<str>,
        /// The options.
        #[source]
        source: CreateOptionsError,
    },

    /// It may not be written.
    #[error("{image} is read-only")]
    ReadOnly {
        /// The image: a path.
        image: Arc<str>,
    },

    /// A request behind its end.
    #[error("{image} of {length} bytes has no {wanted} bytes at {at}")]
    Outside {
        /// The image: a path.
        image: Arc<str>,
        /// Its length in bytes.
        length: u64,
        /// Where the request begins.
        at: GuestOffset,
        /// Its length in bytes.
        wanted: u64,
    },
}

impl ImageError {
    /// A new image that cannot have these options.
    pub(crate) fn options(image: impl Into<Arc<str>>, source: CreateOptionsError) -> Self {
        Self::Options { image: image.into(), source }
    }

    /// Whether the image is damaged: a check tells more, and a repair may help.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::Damaged { .. })
    }
}
