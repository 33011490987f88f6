//! The error of storage requests.

use std::fmt;
use std::io;
use std::sync::Arc;

/// The operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Opening or creating.
    Open,
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Writing zeros.
    WriteZeroes,
    /// Deallocating space.
    Discard,
    /// Making written data durable.
    Flush,
    /// Allocating space.
    Allocate,
    /// Changing the length.
    SetLength,
    /// Sharing extents with another file.
    Clone,
    /// Querying holes or the length.
    Extents,
    /// Locking.
    Lock,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteZeroes => "write zeros to",
            Self::Discard => "discard",
            Self::Flush => "flush",
            Self::SetLength => "resize",
            Self::Clone => "clone into",
            Self::Allocate => "allocate space in",
            Self::Extents => "find the extent of",
            Self::Lock => "lock",
        })
    }
}

/// Why a request failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[error("cannot {operation} {name}{}: {source}", location(*offset, *length))]
pub struct StorageError {
    /// The operation that failed.
    pub operation: Operation,
    /// Name of the storage: a path.
    pub name: Arc<str>,
    /// Offset of the request in bytes; `None` if it concerns the whole storage.
    pub offset: Option<u64>,
    /// Length of the request in bytes.
    pub length: u64,
    /// The error from the kernel. Shared, because several requests can fail for one reason.
    #[source]
    pub source: Arc<io::Error>,
}

impl StorageError {
    /// A failure of a request for `length` bytes at `offset`.
    pub fn at(operation: Operation, name: &Arc<str>, offset: u64, length: u64, source: impl Into<io::Error>) -> Self {
        Self { operation, name: Arc::clone(name), offset: Some(offset), length, source: Arc::new(source.into()) }
    }

    /// A failure that concerns the whole storage.
    pub fn of(operation: Operation, name: &Arc<str>, source: impl Into<io::Error>) -> Self {
        Self { operation, name: Arc::clone(name), offset: None, length: 0, source: Arc::new(source.into()) }
    }

    /// The kind of the underlying error.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

fn location(offset: Option<u64>, length: u64) -> String {
    offset.map(|offset| format!(" at {offset:#x} ({length} bytes)")).unwrap_or_default()
}
