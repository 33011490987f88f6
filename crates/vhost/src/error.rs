//! Errors of rings and memory tables.

use std::io;

/// Why a ring cannot be processed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// It does not run (any more): the front end has stopped it. This is not a fault.
    #[error("the ring does not run")]
    Stopped,
    /// The driver's ring is invalid, or outside the guest's memory. The ring is not processed until it is set up again.
    #[error("the driver's ring is broken: {0}")]
    Broken(#[from] virtio_queue::Error),
    /// A buffer of the driver's is not what its device type requires. The ring is not processed until it is set up
    /// again.
    #[error("the driver's buffer {head} is invalid: {why}")]
    Buffer {
        /// The index of its first descriptor.
        head: u16,
        /// The reason.
        why: &'static str,
    },
    /// The buffer was not taken out, or was given back before.
    #[error("buffer {head} is not with the device")]
    NotTaken {
        /// The index of its first descriptor.
        head: u16,
    },
    /// The device cannot process it.
    #[error("{0}")]
    Device(String),
    /// A bug of limosa.
    #[error(transparent)]
    Internal(#[from] limosa_page::BrokenInvariant),
}

impl QueueError {
    /// Whether the driver caused it.
    pub(crate) fn is_of_driver(&self) -> bool {
        matches!(self, Self::Broken(_) | Self::Buffer { .. })
    }
}

/// Why a memory table is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// An invalid region.
    #[error("memory region at guest address {guest_address:#x} of {length:#x} bytes: {why}")]
    Region {
        /// Its first byte as the guest sees it.
        guest_address: u64,
        /// Bytes.
        length: u64,
        /// The reason.
        why: String,
    },
    /// The kernel refused to map it.
    #[error("memory region at guest address {guest_address:#x} of {length:#x} bytes: {operation}")]
    Kernel {
        /// Its first byte as the guest sees it.
        guest_address: u64,
        /// Bytes.
        length: u64,
        /// The operation that failed.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// An invalid dirty log.
    #[error("dirty log of {length:#x} bytes: {why}")]
    Log {
        /// Bytes.
        length: u64,
        /// The reason.
        why: String,
    },
    /// More regions than a table may have.
    #[error("{got} memory regions, at most {most} are possible")]
    TooMany {
        /// Number of regions.
        got: usize,
        /// Maximum number of regions.
        most: usize,
    },
}
