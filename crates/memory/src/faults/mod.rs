//! The fault handler: guest memory whose pages come when they are touched.

mod error;
mod handler;
mod layout;
mod placement;

use std::os::fd::OwnedFd;

use limosa_page::PageRange;

pub use crate::userfaultfd::FaultAccess;
pub use error::FaultError;
pub use handler::{FaultHandler, FaultOptions, FaultWaker, HeldFaults};
pub use layout::{FaultBlock, FaultLayout};
pub use placement::Placement;

/// How a block's pages get there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultMode {
    /// Pages that are not there are placed by the kernel, as copies or zeros.
    Missing,
    /// The same, and pages that are there have to be let in one by one: shared memory that a pager fills through a
    /// mapping of its own. (After registering, pages that this process has mapped already are not asked for.)
    Minor,
}

/// What the kernel reports to a handler.
#[derive(Debug)]
#[non_exhaustive]
pub enum FaultEvent {
    /// A thread waits for a page.
    Fault(Fault),
    /// Pages were given back by a thread of this process (`MADV_DONTNEED`, `MADV_REMOVE`), which waited until this was
    /// read. Of private memory they are missing again, whether or not they had come. What is placed there from now on
    /// is read by the guest; zeros are what it may expect. (Holes punched in the file are not reported.)
    Removed {
        /// The block.
        block: usize,
        /// Whole host pages.
        pages: PageRange,
    },
    /// Memory of a block was unmapped: nothing can be placed there any more.
    Unmapped {
        /// The block.
        block: usize,
        /// Whole host pages.
        pages: PageRange,
    },
    /// Memory was moved by mremap(2). The layout no longer holds.
    Moved {
        /// Address that it had.
        from: u64,
        /// Address that it has.
        to: u64,
        /// Bytes.
        length: u64,
    },
    /// The process forked. This is the userfaultfd of the child's memory: a child that touches missing pages waits as
    /// long as it is open, and reads zeros once it is closed.
    Forked(OwnedFd),
}

/// A thread waits for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The block.
    pub block: usize,
    /// The host page: one page of 4 KiB, or all of a huge page.
    pub pages: PageRange,
    /// The file has it, and it is to be let in by [`FaultHandler::map_present`], once its contents have come: a page
    /// that is being written, or lies in one huge page with another that was, is there before that.
    pub minor: bool,
    /// It is to be written.
    pub write: bool,
    /// The kernel's number of the thread, as far as the pager's process sees it; 0: not known.
    pub thread: u32,
}
