//! Errors of stored VMs.
//!
//! Law of this module: an error names the file, what was being done to it, the offset or the RAM block, and, where a
//! person can do something about it, what that is.

use std::io;
use std::path::{Path, PathBuf};

use limosa_stream::{ErrorKind, StreamError, UnsupportedFeature};
use thiserror::Error;
use uuid::Uuid;

/// Why a snapshot could not be written, published, opened or served.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The target exists, and replacing it was not asked for.
    #[error("{}: exists already", path.display())]
    Exists {
        /// The target.
        path: PathBuf,
    },
    /// Another process serves the file, or is replacing it.
    #[error("{}: in use: {by}", path.display())]
    Locked {
        /// The file.
        path: PathBuf,
        /// The holder, according to the lock, and the remedy.
        by: &'static str,
    },
    /// The name cannot be that of a snapshot file.
    #[error("{}: {why}", path.display())]
    Target {
        /// The name.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The file system, the quota or the process's file size limit is exhausted.
    #[error("{}: no room left{}; nothing was kept", path.display(), At(*offset))]
    Full {
        /// The file.
        path: PathBuf,
        /// Where the write would have gone.
        offset: Option<u64>,
        /// The kernel's word for it.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{}: cannot {operation}{}", path.display(), At(*offset))]
    Io {
        /// The operation: "write pages", "read the page bitmap of pc.ram".
        operation: String,
        /// The file.
        path: PathBuf,
        /// The position in the file, where there is one.
        offset: Option<u64>,
        /// The kernel's word for it.
        source: io::Error,
    },
    /// Bytes that are not those of a file here could not be had: taken out of an image, or out of a store.
    #[error("{}: the snapshot cannot be read{}", path.display(), At(Some(*offset)))]
    Packed {
        /// The image or object.
        path: PathBuf,
        /// The position in the snapshot.
        offset: u64,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file is not a whole mapped-ram file.
    #[error("{}: {what} (at offset {offset:#x})", path.display())]
    Structure {
        /// The file.
        path: PathBuf,
        /// The offset of the object that is wrong.
        offset: u64,
        /// The value found, and the expected one.
        what: String,
        /// The feature of QEMU's streams that is not supported, if that is the reason.
        feature: Option<UnsupportedFeature>,
    },
    /// The file begins like nothing that holds a VM.
    #[error("{}: neither a snapshot nor a recorded migration stream nor a libvirt save image: {why}", path.display())]
    Unrecognized {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
    /// The file is a recorded migration stream, not a mapped-ram file.
    #[error("{}: {what} (at offset {offset:#x})", path.display())]
    RecordedStream {
        /// The file.
        path: PathBuf,
        /// The offset of the configuration that shows it.
        offset: u64,
        /// The value found, and the expected one.
        what: String,
    },
    /// The contents of a chunk of guest memory are not those that were saved.
    #[error(
        "{}: RAM block {block}: checksum of the chunk at block offset {offset:#x} is {found:#010x}, {recorded:#010x} was recorded: \
         the file is damaged",
        path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The name of the RAM block.
        block: String,
        /// The chunk's offset inside the block, in bytes.
        offset: u64,
        /// The crc32c in the trailer.
        recorded: u32,
        /// The crc32c of the file's present contents.
        found: u32,
    },
    /// The file has changed since it was opened.
    #[error("{}: changed while it was open: {what}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// The difference.
        what: String,
    },
    /// Every page bitmap is empty: restoring would give a guest without memory.
    #[error(
        "{}: no RAM block has a stored page: the memory was never written (QEMU 10.0 does that to a mapped-ram file when the \
         capability background-snapshot is on); save again with that capability off",
        path.display()
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The stream brings something that a snapshot file cannot hold.
    #[error("{}: cannot be stored: {what}", path.display())]
    Unsupported {
        /// The file that would have held it.
        path: PathBuf,
        /// The item.
        what: String,
    },
    /// A caller asked for something that cannot be: an engine's mistake, never the file's.
    #[error("{}: {what}", path.display())]
    Misuse {
        /// The file.
        path: PathBuf,
        /// The request.
        what: String,
    },
    /// The file beside a snapshot is not its working set.
    #[error("{}: cannot be used: {why}", path.display())]
    WorkingSet {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: InvalidWorkingSet,
    },
    /// A bug of limosa, found before the file got its name.
    #[error("{}: {broken}", path.display())]
    Internal {
        /// The file.
        path: PathBuf,
        /// The invariant that does not hold.
        broken: limosa_page::BrokenInvariant,
    },
}

/// The reason why a file is not the working set of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidWorkingSet {
    /// It does not begin as one.
    #[error("it is not a working set")]
    Foreign,
    /// A later limosa wrote it.
    #[error("its version is {0}, and this limosa reads version 1")]
    Version(u32),
    /// It is cut short, or its contents have changed.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    /// It was recorded from a guest of another snapshot.
    #[error("it is of another snapshot, {0}")]
    OfAnother(Uuid),
    /// Its snapshot's name is another file's by now.
    #[error("its snapshot was replaced or removed during the recording")]
    SnapshotGone,
}

impl SnapshotError {
    /// Returns the error for a failed system call: `Full` if room is missing, else `Io`.
    pub(crate) fn io(
        operation: impl Into<String>,
        path: &Path,
        offset: Option<u64>,
        source: impl Into<io::Error>,
    ) -> Self {
        let source = source.into();
        let path = path.to_path_buf();
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Self::Full { path, offset, source },
            _ => Self::Io { operation: operation.into(), path, offset, source },
        }
    }

    /// Returns the error for a file that holds no VM and begins with these bytes.
    pub(crate) fn unrecognized(path: PathBuf, head: &[u8]) -> Self {
        let why = match head {
            [] => "it is empty",
            [b'Q', b'E', b'V', b'M', ..] => "it ends inside the header of a migration stream",
            _ => "it does not begin with QEVM",
        };
        Self::Unrecognized { path, why }
    }

    /// Returns the error for a file whose stream begins at `base` and cannot be decoded; `prefix` is the kind of file
    /// that it should be.
    pub(crate) fn undecoded(path: &Path, base: u64, prefix: &str, error: &StreamError) -> Self {
        let path = path.to_path_buf();
        match error.kind() {
            ErrorKind::Truncated { available: 0, .. } if error.offset() == base => {
                return Self::unrecognized(path, b"");
            }
            // The magic is all that is checked at the first byte.
            ErrorKind::Truncated { available: 1..=3, .. } | ErrorKind::Unexpected { .. } if error.offset() == base => {
                return Self::unrecognized(path, b"?");
            }
            _ => {}
        }
        let what = match error.kind() {
            ErrorKind::BeyondFile { .. } => format!("the file is cut short: {}", error.kind()),
            ErrorKind::Truncated { .. } => format!("the file is cut short: {}: {}", error.context(), error.kind()),
            _ => format!("{prefix}{}: {}", error.context(), error.kind()),
        };
        Self::Structure { path, offset: error.offset(), what, feature: error.kind().feature().cloned() }
    }

    /// Whether room was missing, so that a caller can suggest another directory.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }
}

/// Shows " at offset 0x…" where there is an offset.
struct At(Option<u64>);

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(offset) => write!(f, " at offset {offset:#x}"),
            None => Ok(()),
        }
    }
}
