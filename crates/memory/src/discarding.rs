//! Discards, as dirty logs learn of them.
//!
//! A page that is given back has other contents afterwards, and no processor has written it: no log of writes names it
//! by itself. Worse, its page table entry is gone, and with it the write protection by which userfaultfd's logs would
//! notice the next write.
//!
//! **Law: a discard is a write to each of its pages**, in every log that is on, named by the first fetch behind it. A
//! caller that gives pages of a block back holds what [`MemoryBlock::discarding`] returns from before the call until
//! behind it; the pages are noted when it is dropped. A fetch waits for discards that are under way, so it never comes
//! between a page that has gone and its note: a log that has to protect pages anew does that with all pages that have
//! lost their protection.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use limosa_page::{PageBitmap, PageNumber, PageRange};

use crate::block::MemoryBlock;
use crate::memory::GuestMemory;

/// What one log has not fetched yet of the discards of a block.
type Noted = Mutex<PageBitmap>;

/// Who wants to know of a block's discards.
#[derive(Debug, Default)]
pub(crate) struct Discards {
    /// Discards hold it for reading, fetches for writing.
    logs: RwLock<Vec<Weak<Noted>>>,
    /// Whether the kernel may take pages at any later moment. Set while no log is on.
    lazy: AtomicBool,
}

/// A discard under way.
pub(crate) struct Discarding<'b> {
    pages: PageRange,
    discards: &'b Discards,
    logs: RwLockReadGuard<'b, Vec<Weak<Noted>>>,
}

impl MemoryBlock {
    /// To be held while these pages are given back.
    pub(crate) fn discarding(&self, pages: PageRange) -> Discarding<'_> {
        let discards = self.discards();
        Discarding { pages: self.covering_host_pages(pages), discards, logs: discards.read() }
    }
}

impl Discarding<'_> {
    /// Whether a log is on.
    pub(crate) fn is_logged(&self) -> bool {
        self.logs.iter().any(|log| log.strong_count() > 0)
    }

    /// The kernel takes the pages later, or not at all.
    pub(crate) fn is_lazy(&self) {
        self.discards.set_lazy();
    }
}

impl Drop for Discarding<'_> {
    fn drop(&mut self) {
        for log in self.logs.iter().filter_map(Weak::upgrade) {
            lock(&log).set_range(self.pages);
        }
    }
}

impl Discards {
    /// Whether any discard was lazy since this was asked last.
    pub(crate) fn take_lazy(&self) -> bool {
        self.lazy.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn set_lazy(&self) {
        self.lazy.store(true, Ordering::Relaxed);
    }

    // Nothing panics while one of the locks is held.
    fn read(&self) -> RwLockReadGuard<'_, Vec<Weak<Noted>>> {
        self.logs.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Weak<Noted>>> {
        self.logs.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock(noted: &Noted) -> MutexGuard<'_, PageBitmap> {
    noted.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The blocks of a VM, for a log that has to know of their discards.
#[derive(Debug, Clone)]
pub(crate) struct Discardable(Vec<(Arc<Discards>, u64)>);

impl Discardable {
    pub(crate) fn new(memory: &GuestMemory) -> Self {
        Self(memory.blocks().iter().map(|block| (Arc::clone(block.discards()), block.pages().len())).collect())
    }

    /// Notes all discards from now on.
    pub(crate) fn watch(&self) -> DiscardWatch {
        let watch = |(discards, pages): &(Arc<Discards>, u64)| {
            let noted = Arc::new(Mutex::new(PageBitmap::new(*pages)));
            discards.write().push(Arc::downgrade(&noted));
            (Arc::clone(discards), noted)
        };
        DiscardWatch(self.0.iter().map(watch).collect())
    }
}

/// A log's notes of what was discarded, until it is dropped.
#[derive(Debug)]
pub(crate) struct DiscardWatch(Vec<(Arc<Discards>, Arc<Noted>)>);

impl DiscardWatch {
    /// Hands over what was discarded since the last time, by block. Discards that are under way are waited for.
    pub(crate) fn take(&self, mut discarded: impl FnMut(usize, &PageBitmap)) {
        for (block, (discards, noted)) in self.0.iter().enumerate() {
            let _none_under_way = discards.write();
            let mut noted = lock(noted);
            if noted.next_set(PageNumber(0)).is_some() {
                discarded(block, &noted);
                let all = PageRange::first(noted.len());
                noted.clear_range(all);
            }
        }
    }
}

impl Drop for DiscardWatch {
    fn drop(&mut self) {
        for (discards, noted) in &self.0 {
            discards.write().retain(|other| other.as_ptr() != Arc::as_ptr(noted));
        }
    }
}
