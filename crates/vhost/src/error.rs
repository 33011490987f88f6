//! What rings, memory and messages fail with.

use std::io;

/// Why a ring cannot be worked on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// It does not run (any more): whoever drives the guest has stopped it. No fault of anybody's.
    #[error("the ring does not run")]
    Stopped,
    /// The driver's ring makes no sense, or lies outside its memory. The ring is left alone until it is set up anew.
    #[error("the driver's ring is broken: {0}")]
    Broken(#[from] virtio_queue::Error),
    /// A buffer was to be given back that was not taken out, or was given back before.
    #[error("buffer {head} is not with the device")]
    NotTaken {
        /// The index of its first descriptor.
        head: u16,
    },
    /// The device cannot work on it.
    #[error("{0}")]
    Device(String),
}

/// Why a memory table is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// A region that cannot be.
    #[error("memory region at guest address {guest_address:#x} of {length:#x} bytes: {why}")]
    Region {
        /// Its first byte as the guest sees it.
        guest_address: u64,
        /// Bytes.
        length: u64,
        /// What does not fit.
        why: String,
    },
    /// The kernel does not map it.
    #[error("memory region at guest address {guest_address:#x} of {length:#x} bytes: {operation}: {source}")]
    Kernel {
        /// Its first byte as the guest sees it.
        guest_address: u64,
        /// Bytes.
        length: u64,
        /// What was to be done.
        operation: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
    /// More regions than a table may have.
    #[error("{got} memory regions, at most {most} are possible")]
    TooMany {
        /// Regions there would be.
        got: usize,
        /// Regions there may be.
        most: usize,
    },
}
