//! The contract of a dirty log: writers, pages, errors.

use std::io;
use std::ops::BitOr;

use limosa_page::{PageBitmap, PageRange, to_usize};

use crate::discarding::DiscardWatch;
use crate::{GuestMemory, GuestRegion};

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
    pub(in crate::dirty) fn add_discards(&mut self, watch: Option<&DiscardWatch>) {
        if let Some(watch) = watch {
            watch.take(|block, pages| {
                if let Some(bitmap) = self.blocks.get_mut(block) {
                    bitmap.union_with(pages);
                }
            });
        }
    }

    /// Adds pages of a region: 64 a word, from its page `first` on. Bits behind the region's end mean nothing.
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

/// A log of which pages were written. The contract is the law of the [module](super).
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
    /// used with a [`SoftwareDirtyLog`](super::SoftwareDirtyLog).
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
