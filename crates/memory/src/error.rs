//! Errors of guest memory.

use std::io;

/// An error of guest memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The layout is invalid.
    #[error("RAM block {block}: {why}")]
    Layout {
        /// The block.
        block: String,
        /// The conflict.
        why: String,
    },

    /// A system call failed.
    #[error("RAM block {block}: {operation} failed")]
    Kernel {
        /// The block.
        block: String,
        /// The operation.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },

    /// Bytes outside the block.
    #[error("RAM block {block} of {length} bytes has no {wanted} bytes at {offset:#x}")]
    Outside {
        /// The block.
        block: String,
        /// Its length in bytes.
        length: u64,
        /// Offset in the block, in bytes.
        offset: u64,
        /// Number of bytes at that offset.
        wanted: usize,
    },

    /// There is no block with this index.
    #[error("RAM block number {index} does not exist")]
    NoBlock {
        /// Its index.
        index: usize,
    },

    /// A bug of limosa.
    #[error(transparent)]
    Internal(#[from] limosa_page::BrokenInvariant),
}
