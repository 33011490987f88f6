//! Dirty logs: the pages that were written.
//!
//! **Law: a write after a fetch is seen by the next fetch.** In every implementation, a page written at any time after
//! [`DirtyLog::start`] returned is reported by the first fetch that begins after the write, or by an earlier one that
//! ended after the write *and* before the page was read because of that fetch. A log may report pages that were not
//! written; it may never miss one.
//!
//! One exception: a write of a running vCPU may reach KVM's dirty ring only when the vCPU leaves `KVM_RUN`, so such a
//! log may report it in a later fetch; the first fetch after all vCPUs have left it reports everything. A paused VM has
//! no vCPU inside, and the fetch that decides a switchover is of a paused VM.
//!
//! A page that is [discarded](crate::MemoryBlock::discard) or [released](crate::MemoryBlock::release) (by a balloon)
//! counts as written in every log, because its contents change. No log sees pages that are discarded in another way, by
//! another process (a balloon behind vhost-user) or by a VMM's own call, and [`UffdWpSyncLog`] does not even see the
//! next write to them. A device's write to pages that were pinned before a fetch appears in no page table: its driver
//! marks them in a [`SoftwareDirtyLog`].
//!
//! No log sees everything: KVM sees what its vCPUs write, not what a device model in this process writes; userfaultfd
//! sees what this process writes through the mapping, not what another process writes through its own. So each log says
//! which [`Writers`] it covers, a VM says which it has, and [`DirtyLogs::new`] refuses what is not covered.
//!
//! | log | sees | needs |
//! |---|---|---|
//! | [`UffdWpAsyncLog`] | vCPUs and devices of this process | kernel 6.7 |
//! | [`UffdWpSyncLog`] | the same, at a higher price for the guest | kernel 5.19 (private memory: 6.4), and the right to the kernel's faults |
//! | `KvmLog` | vCPUs of KVM | feature `kvm` |
//! | `KvmRingLog` | the same; costs what was written, not what there is | feature `kvm`; chosen before the first vCPU |
//! | [`VhostLog`] | vhost back ends that log | back ends with `VHOST_F_LOG_ALL` |
//! | [`SoftwareDirtyLog`] | writers that mark what they write | every such writer's care |

mod hand_over;
#[cfg(feature = "kvm")]
mod kvm;
mod log;
mod software;
mod uffd_wp;
mod uffd_wp_async;
mod uffd_wp_sync;
mod vhost;

use std::sync::Arc;

use crate::GuestMemory;

#[cfg(feature = "kvm")]
pub use kvm::{KvmLog, KvmRingLog, KvmRings, KvmSlot, KvmSlots};
pub use log::{DirtyLog, DirtyPages, LogError, Writers};
pub use software::{SoftwareDirtyBitmap, SoftwareDirtyLog};
pub use uffd_wp_async::UffdWpAsyncLog;
pub use uffd_wp_sync::UffdWpSyncLog;
pub use vhost::{LogBase, VhostLog};

/// The logs of a VM, as one.
pub struct DirtyLogs {
    logs: Vec<Box<dyn DirtyLog>>,
}

impl std::fmt::Debug for DirtyLogs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.logs.iter().map(|log| log.name())).finish()
    }
}

impl DirtyLogs {
    /// Combines the logs of a VM with these writers.
    ///
    /// # Errors
    /// [`LogError::Uncovered`]: no log sees one of the writers.
    pub fn new(writers: Writers, logs: Vec<Box<dyn DirtyLog>>) -> Result<Self, LogError> {
        let logs = Self { logs };
        logs.check_covered(writers)?;
        Ok(logs)
    }

    /// Adds a log.
    #[must_use]
    pub fn with_log(mut self, log: Box<dyn DirtyLog>) -> Self {
        self.logs.push(log);
        self
    }

    /// Checks that the logs see the writes of `writers`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn check_covered(&self, writers: Writers) -> Result<(), LogError> {
        let covered = self.logs.iter().fold(Writers::NONE, |covered, log| covered | log.writers());
        match writers.without(covered) {
            Writers::NONE => Ok(()),
            uncovered => Err(LogError::Uncovered(uncovered)),
        }
    }

    /// Starts all logs; if one fails, those that were started are stopped again.
    ///
    /// # Errors
    /// The first failure.
    pub fn start(&mut self) -> Result<(), LogError> {
        for index in 0..self.logs.len() {
            if let Some(Err(error)) = self.logs.get_mut(index).map(|log| log.start()) {
                self.logs.iter_mut().take(index).for_each(|log| drop(log.stop()));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Adds to `into` the pages that any log saw since the last fetch.
    ///
    /// # Errors
    /// The first failure. Pages fetched before it are in `into`.
    pub fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        self.logs.iter_mut().try_for_each(|log| log.fetch(into))
    }

    /// Stops all logs.
    ///
    /// # Errors
    /// The first failure; the others are stopped anyway.
    pub fn stop(&mut self) -> Result<(), LogError> {
        self.logs.iter_mut().map(|log| log.stop()).fold(Ok(()), Result::and)
    }
}

/// Returns the best log that this kernel has for writes of this process (vCPUs and devices) through the mappings of
/// `memory`.
///
/// # Errors
/// No log is available; the reason of the last one that was tried.
pub fn best_uffd_log(memory: &Arc<GuestMemory>) -> Result<Box<dyn DirtyLog>, LogError> {
    match UffdWpAsyncLog::new(Arc::clone(memory)) {
        Ok(log) => Ok(Box::new(log)),
        Err(_) => Ok(Box::new(UffdWpSyncLog::new(Arc::clone(memory))?)),
    }
}
