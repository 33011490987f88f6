//! A log that writers keep themselves: a writer of guest memory marks the pages afterwards.
//!
//! For device models of the VMM's own process. The writer must **write first, then mark.** A mark before the write
//! could be fetched, and the page read, before the write happens, and no fetch would report that write.
//!
//! A mark and a fetch are both read-modify-writes of the same word. If the mark comes first, the fetch sees it and with
//! it the write, so a reader of the page reads the new contents. If it comes later, the bit is still set after the
//! fetch.

use std::sync::Arc;
use std::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, fence};

use limosa_page::{AtomicPageBitmap, PageNumber, PageRange};
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, fence};

use super::log::{DirtyLog, DirtyPages, LogError, Writers};
use crate::GuestMemory;
use crate::discarding::{DiscardWatch, Discardable};

#[derive(Debug)]
struct Marks {
    on: AtomicBool,
    blocks: Vec<AtomicPageBitmap>,
    discardable: Discardable,
}

/// The log.
#[derive(Debug)]
pub struct SoftwareDirtyLog {
    marks: Arc<Marks>,
    writers: Writers,
    discards: Option<DiscardWatch>,
}

/// A writer's handle to the log. Cheap to clone, for any thread.
#[derive(Debug, Clone)]
pub struct SoftwareDirtyBitmap(Arc<Marks>);

impl SoftwareDirtyBitmap {
    /// Marks pages of a block as written: call it after the write. Pages outside the block are ignored. Costs a fence
    /// and a load while the log is off.
    pub fn mark(&self, block: usize, pages: PageRange) {
        // The fence orders the load after the preceding write. If this fence comes before the one in `start`, a reader
        // of memory after `start` reads the new contents; otherwise the load finds the log on.
        fence(Ordering::SeqCst);
        if self.0.on.load(Ordering::Relaxed)
            && let Some(bitmap) = self.0.blocks.get(block)
        {
            bitmap.set_range(pages.intersect(PageRange::whole_block(bitmap.len())));
        }
    }

    /// Creates a log of the same marks for another migration. Use one log at a time.
    pub fn new_log(&self, writers: Writers) -> SoftwareDirtyLog {
        SoftwareDirtyLog { marks: Arc::clone(&self.0), writers, discards: None }
    }

    /// Whether a page has a mark that no fetch has taken yet.
    pub fn is_marked(&self, block: usize, page: PageNumber) -> bool {
        self.0.blocks.get(block).is_some_and(|bitmap| bitmap.get(page))
    }
}

impl SoftwareDirtyLog {
    /// Creates a log for `memory`, marked by `writers`.
    pub fn new(memory: &GuestMemory, writers: Writers) -> Self {
        let blocks = memory.blocks().iter().map(|block| AtomicPageBitmap::new(block.pages().len())).collect();
        let marks = Marks { on: AtomicBool::new(false), blocks, discardable: memory.discardable() };
        Self { marks: Arc::new(marks), writers, discards: None }
    }

    /// Returns the handle by which writers mark pages.
    pub fn bitmap(&self) -> SoftwareDirtyBitmap {
        SoftwareDirtyBitmap(Arc::clone(&self.marks))
    }
}

impl DirtyLog for SoftwareDirtyLog {
    fn name(&self) -> &'static str {
        "the software dirty log"
    }

    fn writers(&self) -> Writers {
        self.writers
    }

    fn start(&mut self) -> Result<(), LogError> {
        self.discards = Some(self.marks.discardable.watch());
        for bitmap in &self.marks.blocks {
            bitmap.clear_range(PageRange::whole_block(bitmap.len()));
        }
        self.marks.on.store(true, Ordering::Relaxed);
        // See `SoftwareDirtyBitmap::mark`.
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        if !self.marks.on.load(Ordering::Relaxed) {
            return Err(LogError::NotStarted { log: self.name() });
        }
        for (index, bitmap) in self.marks.blocks.iter().enumerate() {
            let taken = bitmap.take(PageRange::whole_block(bitmap.len()));
            if let Some(pages) = into.block_mut(index) {
                pages.union_with(&taken);
            }
        }
        into.add_discards(self.discards.as_ref());
        Ok(())
    }

    fn stop(&mut self) -> Result<(), LogError> {
        self.marks.on.store(false, Ordering::Relaxed);
        self.discards = None;
        Ok(())
    }
}

/// For the model checker alone; `cargo xtask test` runs it.
#[cfg(all(test, loom))]
mod models {
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    use super::*;
    use crate::BlockOptions;

    #[test]
    fn a_write_beside_start_or_fetch_is_in_what_was_read_before_or_in_a_fetch() {
        // Only as memory that has a length: what is written is the number below.
        let memory = GuestMemory::new(vec![BlockOptions::anonymous("ram", 4096).map().unwrap()]).unwrap();
        let memory = Arc::new(memory);
        loom::model(move || {
            let mut log = SoftwareDirtyLog::new(&memory, Writers::DEVICES);
            let marker = log.bitmap();
            let page = loom::sync::Arc::new(AtomicUsize::new(0));
            let writer = {
                let page = loom::sync::Arc::clone(&page);
                thread::spawn(move || {
                    for value in 1..3 {
                        page.store(value, Ordering::Relaxed);
                        marker.mark(0, PageRange::whole_block(1));
                    }
                })
            };
            log.start().unwrap();
            let mut shadow = page.load(Ordering::Relaxed);
            let fetch = |log: &mut SoftwareDirtyLog, shadow: &mut usize| {
                let mut dirty = DirtyPages::new(&memory);
                log.fetch(&mut dirty).unwrap();
                if dirty.count() > 0 {
                    *shadow = page.load(Ordering::Relaxed);
                }
            };
            fetch(&mut log, &mut shadow);
            writer.join().unwrap();
            fetch(&mut log, &mut shadow);
            assert_eq!(shadow, 2);
        });
    }
}
