//! A ring, as far as others than its thread have to do with it.
//!
//! **Law: only its thread touches the queues.** Others change what is registered with it: calls for which the kernel has its own lock. A
//! ring that is not made for a single issuer (`IORING_SETUP_SINGLE_ISSUER`) takes them from every thread, and costs the same.

use std::fmt;
use std::io;
use std::process;

use io_uring::IoUring;

use crate::ring::files::{Owners, SLOTS};
use crate::ring::memory::Known;

/// What of a ring is shared.
pub(crate) struct Handle {
    pub(crate) uring: IoUring,
    pub(crate) owners: Owners,
    pub(crate) memory: Known,
    has_table: bool,
    process: u32,
}

impl Handle {
    pub(crate) fn new(uring: IoUring) -> Self {
        // Linux 5.19. Before, and where the kernel has no room for it, files go by their descriptors.
        let has_table = uring.submitter().register_files_sparse(SLOTS).is_ok();
        Self { uring, owners: Owners::new(has_table), memory: Known::default(), has_table, process: process::id() }
    }

    /// Whether it has a table of files: whether the kernel is Linux 5.19 or later.
    pub(crate) fn has_table(&self) -> bool {
        self.has_table
    }

    /// Whether it is this process's, and not one that a fork has left here.
    pub(crate) fn is_ours(&self) -> bool {
        self.process == process::id()
    }

    /// Has the ring keep no file open any more. Its end alone would do that some time later.
    pub(crate) fn forget_files(&self) -> io::Result<()> {
        if self.is_ours() { self.uring.submitter().unregister_files() } else { Ok(()) }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}
