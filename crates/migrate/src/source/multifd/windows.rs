//! What is left for the channels, handed out in windows.
//!
//! Law: a window is handed out once, so no page is sent twice; and they go out in order, so that all channels together
//! read the store from front to back.

use std::sync::{Mutex, PoisonError};

use limosa_page::{PageBitmap, PageNumber, PageRange};

use crate::pages::PageSource;

/// Pages of a window: 1 MiB, aligned to that, which is what a checksum of a snapshot covers.
pub(super) const WINDOW_PAGES: u64 = 256;

/// The stored pages of all blocks, cut into windows.
#[derive(Debug)]
pub(super) struct Windows<'a> {
    stored: Vec<&'a PageBitmap>,
    /// Block and page behind the last window.
    next: Mutex<(usize, PageNumber)>,
}

impl<'a> Windows<'a> {
    pub(super) fn new<S: PageSource + ?Sized>(source: &'a S) -> Self {
        let stored = (0..source.start().blocks.len()).map(|block| source.stored(block)).collect();
        Self { stored, next: Mutex::new((0, PageNumber(0))) }
    }

    /// The stored pages of the next window that has any, as `runs`, and their block. `None` when all were handed out.
    pub(super) fn claim(&self, runs: &mut Vec<PageRange>) -> Option<usize> {
        runs.clear();
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let (block, from) = *next;
            let stored = self.stored.get(block)?;
            let Some(first) = stored.next_set(from) else {
                *next = (block + 1, PageNumber(0));
                continue;
            };
            let end = PageNumber((first.0 / WINDOW_PAGES).saturating_add(1).saturating_mul(WINDOW_PAGES));
            *next = (block, end);
            drop(next);
            runs.extend(stored.runs_in(PageRange::new(first, end)));
            return Some(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn every_stored_page_is_handed_out_once_over_all_threads() {
        let bitmap = |pages: u64, stored: fn(u64) -> bool| {
            let mut bitmap = PageBitmap::new(pages);
            (0..pages).filter(|page| stored(*page)).for_each(|page| {
                bitmap.set(PageNumber(page));
            });
            bitmap
        };
        let blocks =
            [bitmap(0, |_| true), bitmap(9_999, |page| page % 7 != 3), bitmap(5_000, |_| false), bitmap(300, |_| true)];
        let windows = Windows { stored: blocks.iter().collect(), next: Mutex::new((0, PageNumber(0))) };
        let claimed = thread::scope(|scope| {
            let thread = || {
                let (mut runs, mut all) = (Vec::new(), Vec::new());
                while let Some(block) = windows.claim(&mut runs) {
                    assert!(!runs.is_empty());
                    assert!(runs.iter().all(|run| run.start.0 / 256 == (run.end.0 - 1) / 256), "{runs:?}");
                    all.extend(runs.iter().map(|run| (block, *run)));
                }
                all
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(thread)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let mut found: Vec<_> = blocks.iter().map(|bitmap| PageBitmap::new(bitmap.len())).collect();
        for (block, page) in claimed.into_iter().flat_map(|(block, run)| run.iter().map(move |page| (block, page))) {
            assert!(!found[block].set(page), "page {page} of block {block} twice");
        }
        assert!(found == blocks);
    }
}
