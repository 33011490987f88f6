//! The part of a ring that other threads use.
//!
//! **Law: only the ring's thread accesses its queues.** Other threads change its registrations, by calls that the
//! kernel serializes. A ring without `IORING_SETUP_SINGLE_ISSUER` accepts these calls from every thread, and costs the
//! same.

use std::fmt;
use std::io;
use std::process;

use io_uring::IoUring;

use crate::ring::files::{Owners, SLOTS};
use crate::ring::memory::ArenaRegistration;

/// The shared part of a ring.
pub(crate) struct Handle {
    pub(crate) uring: IoUring,
    pub(crate) owners: Owners,
    pub(crate) memory: ArenaRegistration,
    has_table: bool,
    process: u32,
}

impl Handle {
    pub(crate) fn new(uring: IoUring) -> Self {
        // Linux 5.19. Without a file table, requests use descriptors.
        let has_table = uring.submitter().register_files_sparse(SLOTS).is_ok();
        Self {
            uring,
            owners: Owners::new(has_table),
            memory: ArenaRegistration::default(),
            has_table,
            process: process::id(),
        }
    }

    /// Whether it has a file table, which means Linux 5.19 or later.
    pub(crate) fn has_table(&self) -> bool {
        self.has_table
    }

    /// Whether this process created it, and not the parent before a fork.
    pub(crate) fn is_ours(&self) -> bool {
        self.process == process::id()
    }

    /// Unregisters all files at once. Destroying the ring would do that some time later.
    pub(crate) fn unregister_files(&self) -> io::Result<()> {
        if self.is_ours() { self.uring.submitter().unregister_files() } else { Ok(()) }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}
