//! What guest memory fails with.

use std::io;

/// Why guest memory cannot be had, or not be used as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The layout cannot be.
    #[error("RAM block {block}: {why}")]
    Layout {
        /// The block.
        block: String,
        /// The conflict.
        why: String,
    },

    /// The kernel refused.
    #[error("RAM block {block}: {operation} failed")]
    Kernel {
        /// The block.
        block: String,
        /// The operation.
        operation: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },

    /// Bytes that the block does not have.
    #[error("RAM block {block} of {length} bytes has no {wanted} bytes at {offset:#x}")]
    Outside {
        /// The block.
        block: String,
        /// Its length in bytes.
        length: u64,
        /// Bytes into it.
        offset: u64,
        /// Bytes wanted there.
        wanted: usize,
    },

    /// There is no such block.
    #[error("RAM block number {index} does not exist")]
    NoBlock {
        /// Its index.
        index: usize,
    },

    /// A bug of limosa.
    #[error(transparent)]
    Internal(#[from] limosa_page::BrokenInvariant),
}
