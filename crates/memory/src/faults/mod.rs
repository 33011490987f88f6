//! The fault handler: guest memory whose pages arrive when they are touched.

mod error;
mod handler;
mod layout;
mod placement;

use std::os::fd::OwnedFd;

use limosa_page::PageRange;

pub use crate::userfaultfd::FaultOrigin;
pub use error::FaultError;
pub use handler::{FaultHandler, FaultOptions, FaultWaker, RegistrationGuard};
pub use layout::{FaultBlock, FaultLayout};
pub use placement::PlacedPages;

/// How a block's pages are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultMode {
    /// The kernel places missing pages, as copies or zeros.
    Missing,
    /// As `Missing`, and present pages must be mapped one by one: shared memory that a pager fills through its own
    /// mapping. (Pages that this process mapped before the registration cause no faults.)
    Minor,
}

/// An event that the kernel reports to a handler.
#[derive(Debug)]
#[non_exhaustive]
pub enum FaultEvent {
    /// A thread waits for a page.
    Fault(Fault),
    /// A thread of this process discarded pages (`MADV_DONTNEED`, `MADV_REMOVE`) and waited until this was read. Pages
    /// of private memory are missing again, whether or not they had arrived. The guest reads the contents placed there
    /// from now on, and expects zeros. (Holes punched in the file are not reported.)
    Removed {
        /// The block.
        block: usize,
        /// Whole host pages.
        pages: PageRange,
    },
    /// Memory of a block was unmapped: no page can be placed there any more.
    Unmapped {
        /// The block.
        block: usize,
        /// Whole host pages.
        pages: PageRange,
    },
    /// Memory was moved by mremap(2). The layout no longer holds.
    Moved {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes.
        length: u64,
    },
    /// The process forked. This is the userfaultfd of the child's memory: a child that touches missing pages waits
    /// while it is open, and reads zeros once it is closed.
    Forked(OwnedFd),
}

/// A thread waits for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The block.
    pub block: usize,
    /// The host page: one page of 4 KiB, or all of a huge page.
    pub pages: PageRange,
    /// The file has the page, and [`FaultHandler::map_present`] must map it once its contents have arrived. A page that
    /// is being written, or that shares a huge page with a written one, is present before that.
    pub minor: bool,
    /// The access is a write.
    pub write: bool,
    /// The kernel's number of the thread in the pager's PID namespace; 0: unknown.
    pub thread: u32,
}
