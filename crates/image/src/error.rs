//! Errors of images.

use std::path::Path;
use std::sync::Arc;

use limosa_page::BrokenInvariant;
use limosa_storage::StorageError;

use crate::luks::LuksError;
use crate::offset::GuestOffset;
use crate::truncation::TRUNCATED;

/// Why an image cannot be opened, read, written or checked.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// Its storage failed.
    #[error(transparent)]
    Storage(#[from] StorageError),

    /// A bug of limosa. Nothing that depends on it was done.
    #[error(transparent)]
    Internal(#[from] BrokenInvariant),

    /// A structure of it is wrong. Nothing that depends on it was done.
    #[error("{image}: {table}: {why}")]
    Corrupt {
        /// The image: a path.
        image: Arc<str>,
        /// The structure, with its offset in the file: `L2 table at 0x50000, entry 7`.
        table: String,
        /// The fault.
        why: String,
    },

    /// It is marked as damaged, and must be repaired before it is written.
    #[error("{image}: {what}")]
    NeedsRepair {
        /// The image: a path.
        image: Arc<str>,
        /// The damage.
        what: String,
    },

    /// A process that had it open was killed, and what its journal says cannot be brought to it.
    #[error(
        "{image}: its journal {} has {changes} changes that a killed process had acknowledged, for an image {why}; remove \
         the journal to open the image without them",
        journal.display()
    )]
    Journal {
        /// The image: a path.
        image: Arc<str>,
        /// The journal.
        journal: Arc<Path>,
        /// Its changes.
        changes: usize,
        /// Why the image is not the journal's any more: "which has ...".
        why: String,
    },

    /// A process that had it open was killed, and its journal has what the image does not have.
    #[error(
        "{image}: {changes} changes that a killed process had acknowledged are not in it, but in its journal {}",
        journal.display()
    )]
    Unreplayed {
        /// The image: a path.
        image: Arc<str>,
        /// The journal.
        journal: Arc<Path>,
        /// Its changes.
        changes: usize,
    },

    /// It is closed, and all of its contents are durable, but its dirty bitmaps could not be stored. They stay marked
    /// as in use.
    #[error("{image}: its dirty bitmaps are not stored, and cannot be relied on")]
    BitmapsNotStored {
        /// The image: a path.
        image: Arc<str>,
        /// The cause.
        source: Box<ImageError>,
    },

    /// A bitmap of it cannot be relied on.
    #[error("{image}: bitmap {bitmap:?} is inconsistent (it was in use and not stored): remove it")]
    InconsistentBitmap {
        /// The image: a path.
        image: Arc<str>,
        /// The bitmap's name.
        bitmap: String,
    },

    /// Its file ends before contents of it.
    #[error("{image}: {what}: the file ends at {end:#x}, before they do; {TRUNCATED}")]
    Truncated {
        /// The image: a path.
        image: Arc<str>,
        /// The contents, with their offset in the file.
        what: String,
        /// Length of the file in bytes.
        end: u64,
    },

    /// It is encrypted, and cannot be decrypted.
    #[error("{image}: cannot be decrypted")]
    Encryption {
        /// The image: a path.
        image: Arc<str>,
        /// The reason.
        #[source]
        source: LuksError,
    },

    /// It needs a feature that limosa does not have.
    #[error("{image}: {what}")]
    Unsupported {
        /// The image: a path.
        image: Arc<str>,
        /// The feature.
        what: String,
    },

    /// It names another file, which may not be opened.
    #[error("{image}: it refers to {reference}, which is not opened: {why}")]
    Refused {
        /// The image: a path.
        image: Arc<str>,
        /// The file that it names.
        reference: String,
        /// The reason.
        why: String,
        /// Whether the policy was [`Policy::Refuse`](crate::Policy::Refuse).
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

    /// A request past its end.
    #[error("{image} of {length} bytes has no {wanted} bytes at {at}")]
    PastEnd {
        /// The image: a path.
        image: Arc<str>,
        /// Its length in bytes.
        length: u64,
        /// Offset of the request.
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

    /// Returns whether the image is damaged: a check reports more, and a repair may help.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::NeedsRepair { .. } | Self::Truncated { .. })
    }
}

/// A name that limosa cannot open.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}: {why}")]
#[non_exhaustive]
pub struct ReferenceError {
    /// The name.
    pub name: String,
    /// The fault, and what to do.
    pub why: String,
}

/// Options that no qcow2 image can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CreateOptionsError {
    /// A value outside the limits of the format.
    #[error("{option}={value}: must be {allowed}")]
    Range {
        /// The option.
        option: &'static str,
        /// Its value.
        value: u64,
        /// The values that the format allows.
        allowed: &'static str,
    },
    /// An unknown version of the format.
    #[error("version {0}: must be 2 (compat=0.10) or 3 (compat=1.1)")]
    Version(u32),
    /// An option without another one that it needs.
    #[error("{option} needs {needs}")]
    Missing {
        /// The option.
        option: &'static str,
        /// The option that it needs.
        needs: &'static str,
    },
    /// The disk is longer than the image's tables can be for.
    #[error("size={0}: larger than its tables can be for; larger clusters make them smaller")]
    TooLarge(u64),
    /// A raw data file has all contents, so there is nothing to read from a backing file.
    #[error("data_file_raw and backing_file exclude each other")]
    RawWithBacking,
    /// The name of the backing file is empty or too long.
    #[error("backing_file: a name of {bytes} bytes; must be 1 to {most}")]
    Name {
        /// Its length.
        bytes: usize,
        /// The longest name that the format allows.
        most: usize,
    },
    /// The name of the backing file's format is too long for any format.
    #[error("backing_fmt={0}: unknown format")]
    BackingFormat(String),
}
