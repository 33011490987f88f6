//! The hand-over of pages between the fault handler and the fetch of a [`UffdWpSyncLog`](super::UffdWpSyncLog).
//!
//! **Law: while a block's lock is not held, every page of it that can be written has its bit set.** The handler sets
//! the bit of a page and then lifts its protection; the fetch protects the pages whose bits are set and then clears the
//! bits; both do it under the lock. Without it a fetch could come between the handler's two steps: it would protect a
//! page that is still protected, clear the bit and report the page, and the handler would then allow writes without a
//! bit.
//!
//! A discarded page can be written. The next fetch learns of the discard, sets its bit and protects it again; until
//! then the note of the [discard](crate::discarding) replaces the bit.
//!
//! A writer takes no lock: it writes while the page can be written and waits otherwise. If it writes before the fetch
//! protects the page, the page is in that fetch and is read after the write; a later writer waits for the handler,
//! which sets the bit again.

use std::io;
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};

use limosa_page::{PageBitmap, PageNumber, PageRange};
#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};

/// The pages of one block that can be written.
#[derive(Debug)]
pub(super) struct Writable(Mutex<PageBitmap>);

impl Writable {
    /// None of `pages` pages.
    pub(super) fn none(pages: u64) -> Self {
        Self(Mutex::new(PageBitmap::new(pages)))
    }

    /// The handler's step: marks pages, then `unprotect` lets them be written.
    pub(super) fn admit(&self, pages: PageRange, unprotect: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut bits = self.lock();
        bits.set_range(pages);
        unprotect()
    }

    /// Marks pages that lost their protection because they were discarded.
    pub(super) fn lost(&self, pages: &PageBitmap) {
        self.lock().union_with(pages);
    }

    /// The fetch's step: protects all pages that can be written, and passes them to `taken`. The lock is let go after
    /// every `slice` pages, so that a writer does not wait for all of the block.
    pub(super) fn take(
        &self,
        slice: u64,
        mut protect: impl FnMut(PageRange) -> io::Result<()>,
        mut taken: impl FnMut(PageRange),
    ) -> io::Result<()> {
        let mut from = PageNumber(0);
        loop {
            let mut bits = self.lock();
            let Some(first) = bits.next_set(from) else { return Ok(()) };
            // Slices begin at multiples of their length, which is one of the page size.
            let start = PageNumber(first.0 - first.0 % slice.max(1));
            let window = PageRange::starting_at(start, slice.max(1));
            let runs: Vec<PageRange> = bits.runs_in(window).collect();
            for run in runs {
                protect(run)?;
                bits.clear_range(run);
                taken(run);
            }
            from = window.end;
        }
    }

    fn lock(&self) -> MutexGuard<'_, PageBitmap> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For the model checker alone; `cargo xtask test` runs it.
#[cfg(all(test, loom))]
#[allow(clippy::cast_possible_truncation, reason = "there are two pages")]
mod models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// A page as the processor has it: looking at the protection and writing is one step.
    struct Page(Mutex<(bool, usize)>);

    impl Page {
        fn write(&self, value: usize) -> bool {
            let mut page = self.0.lock().unwrap();
            let (protected, contents) = &mut *page;
            if !*protected {
                *contents = value;
            }
            !*protected
        }

        fn protect(&self, protect: bool) -> io::Result<()> {
            self.0.lock().unwrap().0 = protect;
            Ok(())
        }

        fn contents(&self) -> usize {
            self.0.lock().unwrap().1
        }
    }

    fn fetch(writable: &Writable, pages: &[Page], shadow: &mut [usize]) {
        let mut taken = Vec::new();
        let protect = |run: PageRange| run.iter().try_for_each(|page| pages[page.0 as usize].protect(true));
        writable.take(64, protect, |run| taken.extend(run.iter())).unwrap();
        for page in taken {
            shadow[page.0 as usize] = pages[page.0 as usize].contents();
        }
    }

    /// Writers that write these pages, one value after the other, while two fetches are made.
    fn model(writers: &'static [u64]) {
        // Four changes of mind of the scheduler: enough for both steps of two of the three to be torn apart.
        let mut checker = loom::model::Builder::new();
        checker.preemption_bound = Some(4);
        checker.check(move || {
            let pages: Arc<Vec<Page>> = Arc::new((0..2).map(|_| Page(Mutex::new((true, 0)))).collect());
            let writable = Arc::new(Writable::none(2));
            let writers: Vec<_> = writers
                .iter()
                .map(|page| {
                    let (pages, writable, page) = (Arc::clone(&pages), Arc::clone(&writable), *page);
                    thread::spawn(move || {
                        for value in 1..3 {
                            // The handler acts while the writer waits, so it may as well be its thread.
                            while !pages[page as usize].write(value) {
                                let range = PageRange::starting_at(PageNumber(page), 1);
                                writable.admit(range, || pages[page as usize].protect(false)).unwrap();
                            }
                        }
                    })
                })
                .collect();
            let mut shadow = [0; 2];
            fetch(&writable, &pages, &mut shadow);
            fetch(&writable, &pages, &mut shadow);
            for writer in writers {
                writer.join().unwrap();
            }
            fetch(&writable, &pages, &mut shadow);
            assert_eq!(shadow, [pages[0].contents(), pages[1].contents()]);
        });
    }

    #[test]
    fn one_writer_loses_nothing_to_fetches_beside_it() {
        model(&[0]);
    }

    #[test]
    fn two_writers_of_one_page_lose_nothing() {
        model(&[0, 0]);
    }

    #[test]
    fn writers_of_neighbouring_pages_lose_nothing() {
        model(&[0, 1]);
    }
}
