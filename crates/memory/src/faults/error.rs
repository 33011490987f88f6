//! What the fault handler fails with.

use std::io;

use limosa_page::PageRange;

use crate::userfaultfd::NOT_ALLOWED;

/// Why missing pages cannot be handled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// This process may not have a userfaultfd.
    #[error("this process may not use userfaultfd: {NOT_ALLOWED}")]
    NotAllowed {
        /// The kernel's reason.
        source: io::Error,
    },

    /// The kernel cannot do it.
    #[error("userfaultfd of this kernel has no {what}")]
    Unsupported {
        /// The missing ability.
        what: &'static str,
    },

    /// The layout is none, or is not that of the memory.
    #[error("fault layout, block {block}: {why}")]
    Layout {
        /// Its index.
        block: usize,
        /// The conflict.
        why: String,
    },

    /// Pages that the block does not have, that are no whole host pages, or of a block that is not registered.
    #[error("block {block} cannot take {pages}: {why}")]
    Pages {
        /// Its index.
        block: usize,
        /// The pages.
        pages: PageRange,
        /// The reason.
        why: &'static str,
    },

    /// The kernel refused.
    #[error("block {block}, {pages}: {operation} failed")]
    Kernel {
        /// Its index.
        block: usize,
        /// The pages.
        pages: PageRange,
        /// The operation.
        operation: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },

    /// A call that is about no block in particular failed.
    #[error("{operation} failed")]
    Descriptor {
        /// The operation.
        operation: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },

    /// There is no memory for a page: the thread that needs it waits on.
    #[error("block {block}, {pages}: out of memory for the page; the limit of the control group may be too low")]
    NoMemory {
        /// Its index.
        block: usize,
        /// The pages.
        pages: PageRange,
    },

    /// Other threads kept changing the memory.
    #[error(
        "block {block}, {pages}: the memory has been changed by others for {seconds} s, and nothing can be placed meanwhile"
    )]
    Busy {
        /// Its index.
        block: usize,
        /// What was not placed.
        pages: PageRange,
        /// How long it was tried.
        seconds: u64,
    },

    /// The process whose memory it is has ended.
    #[error("the process whose memory it is has ended")]
    Gone,

    /// A thread waits for memory that is in no block, so it would wait for ever.
    #[error(
        "a thread waits for memory at {address:#x}, which is in no block of the layout: the layout is not this VM's"
    )]
    UnknownAddress {
        /// Where.
        address: u64,
    },

    /// The kernel reported something unknown.
    #[error("unknown userfaultfd event {event:#x}")]
    UnknownEvent {
        /// Its number.
        event: u8,
    },

    /// A bug of limosa.
    #[error(transparent)]
    Internal(#[from] limosa_page::BrokenInvariant),
}
