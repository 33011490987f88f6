//! The contract of a dirty log: writers, pages, errors.

use std::io;
use std::ops::BitOr;

use limosa_page::{PageBitmap, PageRange, to_usize};

use crate::discarding::DiscardWatch;
use crate::{GuestMemory, GuestRegion};

/// A set of writers of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Writers(u8);

impl Writers {
    /// No writer.
    pub const NONE: Self = Self(0);
    /// The guest's processors.
    pub const VCPUS: Self = Self(1);
    /// Device models in the VMM's own process, and system calls that write guest memory for them (`read`).
    pub const DEVICES: Self = Self(2);
    /// Back ends in other processes that map the memory (vhost-user), and the kernel's own (vhost).
    pub const VHOST: Self = Self(4);

    /// Whether the set contains all of `others`.
    #[must_use]
    pub fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns the writers that are not in `others`.
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

/// A set of pages of a VM: one bitmap for each block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirtyPages {
    blocks: Vec<PageBitmap>,
}

impl DirtyPages {
    /// Creates a set without pages.
    pub fn new(memory: &GuestMemory) -> Self {
        Self { blocks: memory.blocks().iter().map(|block| PageBitmap::new(block.pages().len())).collect() }
    }

    /// Creates a set of all pages of `memory`.
    pub fn full(memory: &GuestMemory) -> Self {
        Self { blocks: memory.blocks().iter().map(|block| PageBitmap::full(block.pages().len())).collect() }
    }

    /// Adds pages of a block; pages outside the block are ignored.
    pub fn add(&mut self, block: usize, pages: PageRange) {
        if let Some(bitmap) = self.blocks.get_mut(block) {
            bitmap.set_range(pages.intersect(PageRange::whole_block(bitmap.len())));
        }
    }

    /// Adds the discards that a log noted.
    pub(in crate::dirty) fn add_discards(&mut self, watch: Option<&DiscardWatch>) {
        if let Some(watch) = watch {
            watch.take(|block, pages| {
                if let Some(bitmap) = self.blocks.get_mut(block) {
                    bitmap.union_with(pages);
                }
            });
        }
    }

    /// Adds pages of a region: 64 a word, from its page `first` on. Bits past the region's end are ignored.
    pub(in crate::dirty) fn add_words(&mut self, region: &GuestRegion, first: u64, words: &[u64]) {
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

    /// Returns the pages of one block.
    pub fn block(&self, block: usize) -> Option<&PageBitmap> {
        self.blocks.get(block)
    }

    /// Returns the pages of one block for changes.
    pub fn block_mut(&mut self, block: usize) -> Option<&mut PageBitmap> {
        self.blocks.get_mut(block)
    }

    /// Returns the bitmaps, by block.
    pub fn blocks(&self) -> &[PageBitmap] {
        &self.blocks
    }

    /// Returns the number of pages.
    pub fn count(&self) -> u64 {
        self.blocks.iter().map(PageBitmap::count).sum()
    }

    /// Adds all pages of another set of the same VM.
    pub fn union_with(&mut self, other: &Self) {
        for (mine, others) in self.blocks.iter_mut().zip(&other.blocks) {
            mine.union_with(others);
        }
    }
}

/// An error of a dirty log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The kernel does not support the log.
    #[error("{log} cannot be used: {why}")]
    Unavailable {
        /// The log.
        log: &'static str,
        /// The missing feature, and an alternative.
        why: String,
    },

    /// A call failed. Written pages may be missing from every fetch: data sent so far is useless.
    #[error("{log}: {operation} failed")]
    Failed {
        /// The log.
        log: &'static str,
        /// The operation.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },

    /// The log has not been started.
    #[error("{log} has not been started: writes are not recorded")]
    NotStarted {
        /// The log.
        log: &'static str,
    },

    /// No log covers one of the writers.
    #[error("guest memory is written by {0} without a dirty log: the VM cannot be migrated while it runs")]
    Uncovered(Writers),
}

/// A log of the pages that were written. The contract is the law of the [module](super).
pub trait DirtyLog: Send {
    /// Returns its name for messages: `KVM's dirty log`.
    fn name(&self) -> &'static str;

    /// Returns the writers that it sees.
    fn writers(&self) -> Writers;

    /// Starts to log; no page is dirty then. Every write after it returns is seen.
    ///
    /// # Errors
    /// An error of the kernel; nothing has been changed.
    fn start(&mut self) -> Result<(), LogError>;

    /// Adds to `into` the pages written since the last fetch (or the start), and forgets them. Discarded pages count as
    /// written: the logs of this crate learn of them; a log of another crate marks them by itself, or is used with a
    /// [`SoftwareDirtyLog`](super::SoftwareDirtyLog).
    ///
    /// # Errors
    /// Written pages were lost, or the log is not on.
    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError>;

    /// Stops the log and its cost for the guest. Does nothing if it is not on.
    ///
    /// # Errors
    /// An error of the kernel; the log is stopped anyway.
    fn stop(&mut self) -> Result<(), LogError>;
}
