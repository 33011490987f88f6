//! Errors of the fault handler.

use std::io;

use limosa_page::PageRange;

use crate::userfaultfd::NOT_ALLOWED;

/// An error of the fault handler.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// This process may not use userfaultfd.
    #[error("this process may not use userfaultfd: {NOT_ALLOWED}")]
    NotAllowed {
        /// The kernel's error.
        source: io::Error,
    },

    /// The kernel does not support it.
    #[error("userfaultfd of this kernel has no {what}")]
    Unsupported {
        /// The missing ability.
        what: &'static str,
    },

    /// The layout is invalid, or not that of the memory.
    #[error("fault layout, block {block}: {why}")]
    Layout {
        /// Index of the block.
        block: usize,
        /// The conflict.
        why: String,
    },

    /// Pages outside the block, partial host pages, or a block that is not registered.
    #[error("block {block} cannot take {pages}: {why}")]
    Pages {
        /// Index of the block.
        block: usize,
        /// The pages.
        pages: PageRange,
        /// The reason.
        why: &'static str,
    },

    /// A system call on pages failed.
    #[error("block {block}, {pages}: {operation} failed")]
    Kernel {
        /// Index of the block.
        block: usize,
        /// The pages.
        pages: PageRange,
        /// The operation.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },

    /// A system call on the descriptor failed.
    #[error("{operation} failed")]
    Descriptor {
        /// The operation.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },

    /// There is no memory for a page: the thread that needs it keeps waiting.
    #[error("block {block}, {pages}: out of memory for the page; the limit of the control group may be too low")]
    NoMemory {
        /// Index of the block.
        block: usize,
        /// The pages.
        pages: PageRange,
    },

    /// Other threads kept changing the memory.
    #[error(
        "block {block}, {pages}: other threads have changed the memory for {seconds} s, and no page can be placed meanwhile"
    )]
    Busy {
        /// Index of the block.
        block: usize,
        /// Pages that were not placed.
        pages: PageRange,
        /// Seconds of attempts.
        seconds: u64,
    },

    /// The process with the memory has ended.
    #[error("the process with the memory has ended")]
    Gone,

    /// A thread waits for memory outside all blocks, and would wait for ever.
    #[error(
        "a thread waits for memory at {address:#x}, which is in no block of the layout: the layout is not this VM's"
    )]
    UnknownAddress {
        /// The address.
        address: u64,
    },

    /// The kernel reported an unknown event.
    #[error("unknown userfaultfd event {event:#x}")]
    UnknownEvent {
        /// Number of the event.
        event: u8,
    },

    /// A bug of limosa.
    #[error(transparent)]
    Internal(#[from] limosa_page::BrokenInvariant),
}
