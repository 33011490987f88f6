//! What a storage fails with.

use std::fmt;
use std::io;
use std::sync::Arc;

/// What was to be done.
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
    /// Giving space back.
    Discard,
    /// Making durable.
    Flush,
    /// Making sure of space.
    Allocate,
    /// Changing the length.
    SetLength,
    /// Sharing another file's space.
    Clone,
    /// Asking for holes, or for the length.
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

/// Why a request was not carried out.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot {operation} {name}{}: {source}", place(*offset, *length))]
pub struct StorageError {
    /// What was to be done.
    pub operation: Operation,
    /// The storage: a path.
    pub name: Arc<str>,
    /// Bytes into it, where the request has a place.
    pub offset: Option<u64>,
    /// Its length in bytes.
    pub length: u64,
    /// The kernel's reason. Shared, because several requests can fail for one reason.
    #[source]
    pub source: Arc<io::Error>,
}

impl StorageError {
    /// A failure at a place.
    pub fn at(operation: Operation, name: &Arc<str>, offset: u64, length: u64, source: impl Into<io::Error>) -> Self {
        Self { operation, name: Arc::clone(name), offset: Some(offset), length, source: Arc::new(source.into()) }
    }

    /// A failure of the whole.
    pub fn of(operation: Operation, name: &Arc<str>, source: impl Into<io::Error>) -> Self {
        Self { operation, name: Arc::clone(name), offset: None, length: 0, source: Arc::new(source.into()) }
    }

    /// The kernel's reason, as a kind.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

fn place(offset: Option<u64>, length: u64) -> String {
    offset.map(|offset| format!(" at {offset:#x} ({length} bytes)")).unwrap_or_default()
}
