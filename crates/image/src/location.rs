//! Where the bytes of an image are: in a file, at an NBD server, or nowhere.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_nbd::{ConnectOptions, NbdAddress, NbdStorage};
use limosa_storage::{FileOptions, FileStorage, NullStorage, Storage, StorageError};

/// Where the bytes of an image are.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// A file or block device.
    File(PathBuf),
    /// An export of an NBD server.
    Nbd {
        /// The export.
        address: NbdAddress,
        /// The metadata context that tells about holes, in place of the usual one: `x-dirty-bitmap`.
        context: Option<String>,
    },
    /// Nowhere: writes are lost, reads return zeros.
    Null {
        /// Its length in bytes.
        size: u64,
        /// Whether it says that it reads as zeros: `read-zeroes`.
        zeroes: bool,
    },
}

impl Location {
    /// Returns the path of a file.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Nbd { .. } | Self::Null { .. } => None,
        }
    }

    /// Opens it. Only files have locks and cache modes.
    pub(crate) fn open(&self, options: &FileOptions) -> Result<Arc<dyn Storage>, StorageError> {
        Ok(match self {
            Self::File(path) => FileStorage::open(path, options)?,
            Self::Nbd { address, context } => {
                let mut connect = ConnectOptions::default().read_only(options.read_only);
                if let Some(context) = context {
                    connect = connect.context(context);
                }
                NbdStorage::connect(address, &connect)?
            }
            Self::Null { size, zeroes } => Arc::new(NullStorage::new(self.to_string(), *size, *zeroes)),
        })
    }

    /// QEMU's name of the driver that has such bytes, but for files.
    pub(crate) const fn protocol(&self) -> Option<&'static str> {
        match self {
            Self::File(_) => None,
            Self::Nbd { .. } => Some("nbd"),
            Self::Null { .. } => Some("null-co"),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Nbd { address, .. } => address.fmt(f),
            Self::Null { .. } => f.write_str("null-co://"),
        }
    }
}
