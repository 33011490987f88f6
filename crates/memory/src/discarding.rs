//! How dirty logs learn of discards.
//!
//! A discarded page changes its contents without a write, so no log of writes reports it. Worse, its page table entry
//! is gone, and with it the write protection by which userfaultfd's logs would notice the next write.
//!
//! **Law: a discard is a write to each of its pages**, in every log that is on, reported by the first fetch after it. A
//! caller that discards pages holds a [`Discarding`] from before the system call until after it; the pages are noted
//! when it is dropped. A fetch waits for discards in progress, so it never runs between the discard of a page and its
//! note: a log that restores write protection does so for every page that has lost it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use limosa_page::{PageBitmap, PageNumber, PageRange};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

/// Discards of a block that one log has not fetched yet.
type Noted = Mutex<PageBitmap>;

/// The logs that must learn of a block's discards.
#[derive(Debug, Default)]
pub(crate) struct Discards {
    /// Discards hold the lock for reading, fetches for writing.
    logs: RwLock<Vec<Weak<Noted>>>,
    /// Whether the kernel may free pages at any later time. Set while no log is on.
    lazy: AtomicBool,
}

/// A discard in progress.
pub(crate) struct Discarding<'b> {
    pages: PageRange,
    discards: &'b Discards,
    logs: RwLockReadGuard<'b, Vec<Weak<Noted>>>,
}

impl Discarding<'_> {
    /// Whether a log is on.
    pub(crate) fn is_logged(&self) -> bool {
        self.logs.iter().any(|log| log.strong_count() > 0)
    }

    /// Notes that the kernel frees the pages later, or not at all.
    pub(crate) fn mark_lazy(&self) {
        self.discards.set_lazy();
    }
}

impl Drop for Discarding<'_> {
    fn drop(&mut self) {
        for log in self.logs.iter().filter_map(Weak::upgrade) {
            log.lock().set_range(self.pages);
        }
    }
}

impl Discards {
    /// Begins a discard of whole host pages: the result is held while they are given back.
    pub(crate) fn begin(&self, pages: PageRange) -> Discarding<'_> {
        Discarding { pages, discards: self, logs: self.logs.read() }
    }

    /// Whether any discard was lazy since the last call.
    pub(crate) fn take_lazy(&self) -> bool {
        self.lazy.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn set_lazy(&self) {
        self.lazy.store(true, Ordering::Relaxed);
    }
}

/// The blocks of a VM, for a log that must learn of their discards.
#[derive(Debug, Clone)]
pub(crate) struct Discardable(Vec<(Arc<Discards>, u64)>);

impl Discardable {
    /// Creates a list of blocks: the discards and the number of pages of each.
    pub(crate) fn new(blocks: impl Iterator<Item = (Arc<Discards>, u64)>) -> Self {
        Self(blocks.collect())
    }

    /// Starts to note all discards.
    pub(crate) fn watch(&self) -> DiscardWatch {
        let watch = |(discards, pages): &(Arc<Discards>, u64)| {
            let noted = Arc::new(Mutex::new(PageBitmap::new(*pages)));
            discards.logs.write().push(Arc::downgrade(&noted));
            (Arc::clone(discards), noted)
        };
        DiscardWatch(self.0.iter().map(watch).collect())
    }
}

/// A log's notes of discards; dropping it ends them.
#[derive(Debug)]
pub(crate) struct DiscardWatch(Vec<(Arc<Discards>, Arc<Noted>)>);

impl DiscardWatch {
    /// Returns the pages discarded since the last call, by block. Waits for discards in progress.
    pub(crate) fn take(&self, mut discarded: impl FnMut(usize, &PageBitmap)) {
        for (block, (discards, noted)) in self.0.iter().enumerate() {
            let _none_in_progress = discards.logs.write();
            let mut noted = noted.lock();
            if noted.next_set(PageNumber(0)).is_some() {
                discarded(block, &noted);
                let all = PageRange::whole_block(noted.len());
                noted.clear_range(all);
            }
        }
    }
}

impl Drop for DiscardWatch {
    fn drop(&mut self) {
        for (discards, noted) in &self.0 {
            discards.logs.write().retain(|other| other.as_ptr() != Arc::as_ptr(noted));
        }
    }
}
