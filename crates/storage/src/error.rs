//! The error of storage requests.

use std::io;
use std::sync::Arc;

/// The operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
#[non_exhaustive]
pub enum Operation {
    /// Opening.
    #[strum(to_string = "open")]
    Open,
    /// Creating a file that does not exist.
    #[strum(to_string = "create")]
    Create,
    /// Reading.
    #[strum(to_string = "read")]
    Read,
    /// Writing.
    #[strum(to_string = "write")]
    Write,
    /// Writing zeros.
    #[strum(to_string = "write zeros to")]
    WriteZeroes,
    /// Deallocating space.
    #[strum(to_string = "discard")]
    Discard,
    /// Making written data durable.
    #[strum(to_string = "flush")]
    Flush,
    /// Allocating space.
    #[strum(to_string = "allocate space in")]
    Allocate,
    /// Changing the length.
    #[strum(to_string = "resize")]
    SetLength,
    /// Listing what is in it.
    #[strum(to_string = "list")]
    List,
    /// Removing.
    #[strum(to_string = "remove")]
    Remove,
    /// Sharing extents with another file.
    #[strum(to_string = "clone into")]
    Clone,
    /// Querying holes or the length.
    #[strum(to_string = "find the extent of")]
    Extents,
    /// Locking.
    #[strum(to_string = "lock")]
    Lock,
}

/// Why a request failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[error("cannot {operation} {name}{}", location(*offset, *length))]
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
    pub fn for_request(
        operation: Operation,
        name: &Arc<str>,
        offset: u64,
        length: u64,
        source: impl Into<io::Error>,
    ) -> Self {
        Self { operation, name: Arc::clone(name), offset: Some(offset), length, source: Arc::new(source.into()) }
    }

    /// A failure that concerns the whole storage.
    pub fn for_storage(operation: Operation, name: &Arc<str>, source: impl Into<io::Error>) -> Self {
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
