//! Errors of packed snapshots.
//!
//! Law of this module: an error names the file that is wrong, which may be a base far down, and one line is enough.

use std::io;
use std::path::{Path, PathBuf};

use limosa_image::ImageError;
use limosa_image::luks::LuksError;
use limosa_migrate::MigrateError;
use limosa_snapshot::SnapshotError;
use limosa_storage::StorageError;
use thiserror::Error;

/// Why a packed snapshot could not be opened, made or unpacked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PackError {
    /// The stored VM: the one that is read, or the one that is made.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// An image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A system call failed.
    #[error("{}: cannot {operation}", path.display())]
    Io {
        /// The operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's word for it.
        source: io::Error,
    },
    /// The file is encrypted, and no passphrase was given.
    #[error("{}: is encrypted, and no passphrase was given", path.display())]
    NoPassphrase {
        /// The file.
        path: PathBuf,
    },
    /// The file is an image, but not of a kind that snapshots are packed in.
    #[error("{}: is not a packed snapshot: {what}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The reason.
        what: String,
    },
    /// The request cannot be carried out with this file.
    #[error("{}: {what}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The reason.
        what: String,
    },
    /// A base is missing, was changed, or is not the one that was compared.
    #[error("{}: its base {base}: {what}", path.display())]
    Base {
        /// The image that stands on the base.
        path: PathBuf,
        /// The name of the base.
        base: String,
        /// The fault.
        what: String,
    },
    /// Memory that is encrypted in the base would be in the clear.
    #[error("{}: would not be encrypted, and its base {base} is", path.display())]
    Unencrypted {
        /// The image.
        path: PathBuf,
        /// The name of the base.
        base: String,
    },
    /// Other snapshots stand on it.
    #[error("{}: {by} stands on it", path.display())]
    Needed {
        /// The file.
        path: PathBuf,
        /// Those that stand on it.
        by: String,
    },
    /// Another file may stand on a snapshot, and cannot be looked into.
    #[error("{}: whether it stands on another snapshot is not known", path.display())]
    Unknown {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: Box<PackError>,
    },
    /// The file is not a snapshot, and limosa removes only these.
    #[error("{}: is not a snapshot that limosa can read, and stays", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The filesystem may be too small for what is packed.
    #[error("{}: may take {needed} bytes, and {free} are free", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes that it may take, at most.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The new file does not hold the snapshot that was packed again.
    #[error("{}: reads differently when it is packed again; it stays as it was", path.display())]
    Differs {
        /// The file.
        path: PathBuf,
    },
    /// The job was cancelled.
    #[error("cancelled; the unfinished file was not kept")]
    Cancelled(#[source] MigrateError),
}

impl PackError {
    pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { operation, path, source }
    }

    pub(crate) fn storage(error: StorageError) -> Self {
        Self::Image(error.into())
    }

    /// Whether the bytes could not be had, so that it is not known what they are.
    pub(crate) const fn is_unreadable(&self) -> bool {
        matches!(
            self,
            Self::Io { .. }
                | Self::Image(ImageError::Storage(_))
                | Self::Snapshot(SnapshotError::Io { .. } | SnapshotError::Packed { .. })
        )
    }

    /// Whether a passphrase is missing or wrong.
    #[must_use]
    pub fn is_about_passphrase(&self) -> bool {
        let wrong = |error: &ImageError| {
            matches!(error, ImageError::Encryption { source: LuksError::Passphrase | LuksError::NoSecret, .. })
        };
        match self {
            Self::NoPassphrase { .. } => true,
            Self::Image(error) => wrong(error),
            Self::Unknown { source, .. } => source.is_about_passphrase(),
            _ => false,
        }
    }
}
