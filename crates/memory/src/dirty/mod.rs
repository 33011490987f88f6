//! Dirty logs: which pages were written.
//!
//! **Law: a write after a fetch is seen by the next fetch.** In every implementation, a page that is written at any
//! moment after [`DirtyLog::start`] returned is named by the first fetch that begins after the write, or by an earlier
//! one that ended after the write *and* before the page was read on the strength of that fetch. A log may name pages
//! that were not written; it may never miss one.
//!
//! One exception: what a vCPU writes while it runs may reach KVM's dirty ring only when it leaves `KVM_RUN`, so such a
//! log may name it in a later fetch; the first one after all vCPUs have left it has named everything. A VM that is
//! paused has no vCPU inside, and the fetch that decides a switchover is of a paused VM.
//!
//! A page that is [discarded](crate::MemoryBlock::discard) or [released](crate::MemoryBlock::release) (a balloon's) has been written,
//! to every log: its contents are others. No log sees what is given back in another way, by another process (a balloon
//! behind vhost-user) or by a VMM's own call, and [`UffdWpSyncLog`] does not even see what is written there next. What
//! a device writes into pages that were pinned before a fetch no page table knows of: it marks them in an
//! [`SoftwareDirtyLog`].
//!
//! No log sees everything: KVM sees what its vCPUs write, not what a device model in this process writes; userfaultfd
//! sees what this process writes through the mapping, not what another process writes through its own. So each log says
//! which
//! [`Writers`] it covers, a VM says which it has, and [`DirtyLogs::new`] refuses what is not covered.
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
mod software;
mod uffd_wp;
mod uffd_wp_async;
mod uffd_wp_sync;
mod vhost;

use std::io;
use std::ops::BitOr;
use std::sync::Arc;

use limosa_page::{PageBitmap, PageRange, to_usize};

use crate::discarding::DiscardWatch;
use crate::{GuestMemory, GuestRegion};

#[cfg(feature = "kvm")]
pub use kvm::{KvmLog, KvmRingLog, KvmRings, KvmSlot, KvmSlots};
pub use software::{SoftwareDirtyBitmap, SoftwareDirtyLog};
pub use uffd_wp_async::UffdWpAsyncLog;
pub use uffd_wp_sync::UffdWpSyncLog;
pub use vhost::{LogBase, VhostLog};

/// Who writes guest memory: a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Writers(u8);

impl Writers {
    /// No writer.
    pub const NONE: Self = Self(0);
    /// The guest's processors.
    pub const VCPUS: Self = Self(1);
    /// Device models in the VMM's own process, and what they have the kernel write there (`read` into guest memory).
    pub const DEVICES: Self = Self(2);
    /// Back ends in other processes that map the memory (vhost-user), and the kernel's own (vhost).
    pub const VHOST: Self = Self(4);

    /// Whether all of `others` are in it.
    #[must_use]
    pub fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Those that are not in `others`.
    #[must_use]
    pub fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }
}

impl BitOr for Writers {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl std::fmt::Display for Writers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = [(Self::VCPUS, "vCPUs"), (Self::DEVICES, "devices of the VMM"), (Self::VHOST, "vhost back ends")];
        let names: Vec<_> = names.iter().filter(|(one, _)| self.contains(*one)).map(|(_, name)| *name).collect();
        f.write_str(if names.is_empty() { "no writer".into() } else { names.join(", ") }.as_str())
    }
}

/// Pages of all blocks of a VM: one bitmap a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirtyPages {
    blocks: Vec<PageBitmap>,
}

impl DirtyPages {
    /// None of the pages of `memory`.
    pub fn new(memory: &GuestMemory) -> Self {
        Self { blocks: memory.blocks().iter().map(|block| PageBitmap::new(block.pages().len())).collect() }
    }

    /// All of the pages of `memory`.
    pub fn all(memory: &GuestMemory) -> Self {
        Self { blocks: memory.blocks().iter().map(|block| PageBitmap::full(block.pages().len())).collect() }
    }

    /// Adds pages of a block; what the block does not have is passed over.
    pub fn add(&mut self, block: usize, pages: PageRange) {
        if let Some(bitmap) = self.blocks.get_mut(block) {
            bitmap.set_range(pages.intersect(PageRange::first(bitmap.len())));
        }
    }

    /// Adds what a log has noted of discards.
    fn add_discards(&mut self, watch: Option<&DiscardWatch>) {
        if let Some(watch) = watch {
            watch.take(|block, pages| {
                if let Some(bitmap) = self.blocks.get_mut(block) {
                    bitmap.union_with(pages);
                }
            });
        }
    }

    /// Adds pages of a region: 64 a word, from its page `first` on. Bits behind the region's end mean nothing.
    fn add_words(&mut self, region: &GuestRegion, first: u64, words: &[u64]) {
        let Some(bitmap) = self.blocks.get_mut(region.block) else { return };
        let at = region.pages.start.saturating_add(first);
        let room = region.pages.end.0.saturating_sub(at.0);
        let whole = words.len().min(to_usize(room / 64));
        let (words, behind) = words.split_at(whole);
        bitmap.union_words(at, words);
        if let Some(last) = behind.first() {
            let at = at.saturating_add(64 * whole as u64);
            bitmap.union_words(at, &[last & ((1 << (room % 64)) - 1)]);
        }
    }

    /// The pages of one block.
    pub fn block(&self, block: usize) -> Option<&PageBitmap> {
        self.blocks.get(block)
    }

    /// The pages of one block, to be changed.
    pub fn block_mut(&mut self, block: usize) -> Option<&mut PageBitmap> {
        self.blocks.get_mut(block)
    }

    /// The bitmaps, by block.
    pub fn blocks(&self) -> &[PageBitmap] {
        &self.blocks
    }

    /// Pages in it.
    pub fn count(&self) -> u64 {
        self.blocks.iter().map(PageBitmap::count).sum()
    }

    /// Adds all pages of another one, of the same VM.
    pub fn union_with(&mut self, other: &Self) {
        for (mine, others) in self.blocks.iter_mut().zip(&other.blocks) {
            mine.union_with(others);
        }
    }
}

/// Why a log cannot be had or does not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The kernel does not have what the log needs.
    #[error("{log} cannot be used: {why}")]
    Unavailable {
        /// The log.
        log: &'static str,
        /// What is missing, and what to use instead.
        why: String,
    },

    /// A call failed. Pages may have been written that no fetch will name: what was sent is worth nothing.
    #[error("{log}: {operation} failed")]
    Failed {
        /// The log.
        log: &'static str,
        /// The operation.
        operation: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },

    /// A fetch from a log that is not on.
    #[error("{log} has not been started: writes are not recorded")]
    NotStarted {
        /// The log.
        log: &'static str,
    },

    /// Guest memory has a writer that no log covers.
    #[error("guest memory is written by {0} without a dirty log: the VM cannot be migrated while it runs")]
    Uncovered(Writers),
}

/// A log of which pages were written. The contract is this module's law.
pub trait DirtyLog: Send {
    /// What it is, for messages: `KVM's dirty log`.
    fn name(&self) -> &'static str;

    /// Whose writes it sees.
    fn covers(&self) -> Writers;

    /// Begins to log; nothing is dirty then. When it returns, every write is seen.
    ///
    /// # Errors
    /// The kernel does not do it; nothing has been changed.
    fn start(&mut self) -> Result<(), LogError>;

    /// Adds to `into` what was written since the last fetch (or the start), and forgets it. Pages that were discarded
    /// count as written: the logs of this crate are told of them; a log of another crate marks them by itself, or is
    /// used with a [`SoftwareDirtyLog`].
    ///
    /// # Errors
    /// What was written is not known any more, or the log is not on.
    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError>;

    /// Ends the log, and with it what it costs the guest. Without effect if it is not on.
    ///
    /// # Errors
    /// The kernel's; the log is over all the same.
    fn stop(&mut self) -> Result<(), LogError>;
}

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
    /// The logs of a VM that `writers` write to.
    ///
    /// # Errors
    /// [`LogError::Uncovered`]: one of the writers is seen by none of the logs.
    pub fn new(writers: Writers, logs: Vec<Box<dyn DirtyLog>>) -> Result<Self, LogError> {
        let logs = Self { logs };
        logs.check_covered(writers)?;
        Ok(logs)
    }

    /// These, and one more.
    #[must_use]
    pub fn and(mut self, log: Box<dyn DirtyLog>) -> Self {
        self.logs.push(log);
        self
    }

    /// Makes sure that they see what `writers` write.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn check_covered(&self, writers: Writers) -> Result<(), LogError> {
        let covered = self.logs.iter().fold(Writers::NONE, |covered, log| covered | log.covers());
        match writers.without(covered) {
            Writers::NONE => Ok(()),
            uncovered => Err(LogError::Uncovered(uncovered)),
        }
    }

    /// Starts all of them; if one refuses, those that have begun are stopped again.
    ///
    /// # Errors
    /// The first refusal.
    pub fn start(&mut self) -> Result<(), LogError> {
        for index in 0..self.logs.len() {
            if let Some(Err(error)) = self.logs.get_mut(index).map(|log| log.start()) {
                self.logs.iter_mut().take(index).for_each(|log| drop(log.stop()));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Adds to `into` what any of them saw since the last fetch.
    ///
    /// # Errors
    /// The first failure. What was fetched before it is in `into`.
    pub fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        self.logs.iter_mut().try_for_each(|log| log.fetch(into))
    }

    /// Stops all of them.
    ///
    /// # Errors
    /// The first failure; the others are stopped all the same.
    pub fn stop(&mut self) -> Result<(), LogError> {
        self.logs.iter_mut().map(|log| log.stop()).fold(Ok(()), Result::and)
    }
}

/// The best log that this kernel has for what this process writes: vCPUs and devices, through the mappings of `memory`.
///
/// # Errors
/// There is none; why the last one that was tried cannot be used.
pub fn best_for(memory: &Arc<GuestMemory>) -> Result<Box<dyn DirtyLog>, LogError> {
    match UffdWpAsyncLog::new(Arc::clone(memory)) {
        Ok(log) => Ok(Box::new(log)),
        Err(_) => Ok(Box::new(UffdWpSyncLog::new(Arc::clone(memory))?)),
    }
}
