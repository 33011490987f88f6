//! The pages that are not sent yet. Each is sent exactly once, by any thread.
//!
//! A destination in postcopy takes a page once: a second copy of it breaks the migration off, and a page left out
//! becomes a silent zero page when the stream ends. So a page is *claimed*, atomically, before it is sent, and the
//! stream may end only when nothing is left to claim.
//!
//! What is claimed is a whole *host page* of the block, because the destination can only place a whole one: the thread
//! that has claimed it sends all of its pages, the zero ones among them too. In a block of 4 KiB pages that is one
//! page.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use limosa_page::{AtomicPageBitmap, BrokenInvariant, PageBitmap, PageNumber, PageRange, broken_invariant, invariant};
use limosa_stream::RamBlock;

use super::host_pages;
use crate::pages::{BlockRange, PageSource};

/// Pages that one claim of the background push covers at most, 1 MiB, unless a single host page is larger.
pub(crate) const CLAIM_PAGES: u64 = 256;

#[derive(Debug)]
struct UnsentBlock<'a> {
    /// Pages with contents, as they were saved.
    stored: &'a PageBitmap,
    /// Pages of a host page.
    each: u64,
    /// Host pages with contents that are not claimed yet.
    to_send: AtomicPageBitmap,
    /// Host pages without contents that were asked for and answered.
    zero_sent: AtomicPageBitmap,
}

/// The pages that are not sent yet, over all RAM blocks.
#[derive(Debug)]
pub(crate) struct UnsentPages<'a> {
    blocks: Vec<UnsentBlock<'a>>,
    /// Host pages with contents that were to be claimed at first, and that were claimed since.
    to_claim: AtomicU64,
    claimed: AtomicU64,
}

/// The result of a claim on one requested host page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Send its contents.
    Contents,
    /// Say that it is zero.
    Zero,
    /// It has been sent, or another thread is about to.
    Taken,
}

/// The next page of the background push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// Index of the RAM block.
    pub(crate) block: usize,
    /// The page to look at next.
    pub(crate) page: PageNumber,
}

impl<'a> UnsentBlock<'a> {
    fn new(stored: &'a PageBitmap, each: u64) -> Self {
        let to_send = if each == 1 {
            stored.clone()
        } else {
            let mut host_pages = PageBitmap::new(stored.len().div_ceil(each));
            for run in stored.runs() {
                host_pages
                    .set_range(PageRange::new(PageNumber(run.start.0 / each), PageNumber(run.end.0.div_ceil(each))));
            }
            host_pages
        };
        let zero_sent = AtomicPageBitmap::new(to_send.len());
        Self { stored, each, to_send: AtomicPageBitmap::from(to_send), zero_sent }
    }

    /// The pages of a run of host pages.
    fn pages(&self, host_pages: PageRange) -> PageRange {
        let page = |host_page: PageNumber| PageNumber(host_page.0.saturating_mul(self.each).min(self.stored.len()));
        PageRange::new(page(host_pages.start), page(host_pages.end))
    }

    fn has_contents(&self, host_page: PageNumber) -> bool {
        if self.each == 1 {
            return self.stored.get(host_page);
        }
        let pages = self.pages(PageRange::starting_at(host_page, 1));
        self.stored.next_set(pages.start).is_some_and(|page| page < pages.end)
    }

    fn left(&self) -> u64 {
        if self.each == 1 {
            return self.to_send.count();
        }
        let (mut left, mut from) = (0, PageNumber(0));
        while let Some(host_page) = self.to_send.next_set(from) {
            left += self.stored.count_in(self.pages(PageRange::starting_at(host_page, 1)));
            from = host_page.saturating_add(1);
        }
        left
    }
}

impl<'a> UnsentPages<'a> {
    /// All stored pages of `source`, for a destination whose blocks are `blocks`.
    pub(crate) fn new<S: PageSource + ?Sized>(source: &'a S, blocks: &[RamBlock]) -> Self {
        let blocks = blocks.iter().enumerate();
        let unsent =
            blocks.map(|(index, block)| UnsentBlock::new(source.stored_bitmap(index), host_pages::pages_of(block)));
        Self { blocks: unsent.collect(), to_claim: AtomicU64::new(0), claimed: AtomicU64::new(0) }
    }

    /// Takes off the pages that the destination has already. A host page that it has in part was not placed:
    /// that part is lost, and it counts as missing.
    pub(crate) fn received(&self, block: usize, received: &PageBitmap) -> Result<(), BrokenInvariant> {
        let unsent = self.block(block)?;
        for run in received.runs() {
            let whole =
                PageRange::new(PageNumber(run.start.0.div_ceil(unsent.each)), PageNumber(run.end.0 / unsent.each));
            unsent.to_send.clear_range(whole);
            unsent.zero_sent.set_range(whole);
        }
        Ok(())
    }

    /// Notes the number of host pages to claim: once the destination's pages are known, and before the first
    /// claim.
    pub(crate) fn begin(&self) {
        self.to_claim.store(self.blocks.iter().map(|block| block.to_send.count()).sum(), Relaxed);
        self.claimed.store(0, Relaxed);
    }

    /// Makes sure that each host page with contents was claimed once. No thread claims any more.
    pub(crate) fn check_claimed(&self) -> Result<(), BrokenInvariant> {
        invariant(self.left() == 0, "a stream ends when every page with contents is claimed")?;
        invariant(self.claimed.load(Relaxed) == self.to_claim.load(Relaxed), "each host page is claimed once")
    }

    fn block(&self, block: usize) -> Result<&UnsentBlock<'a>, BrokenInvariant> {
        self.blocks.get(block).ok_or_else(|| broken_invariant("pages that are claimed belong to blocks of the stream"))
    }

    /// Pages with contents whose host pages are still to be claimed.
    pub(crate) fn left(&self) -> u64 {
        self.blocks.iter().map(UnsentBlock::left).sum()
    }

    /// The host pages that these pages are in, each as the pages that it consists of.
    pub(crate) fn host_pages(
        &self,
        block: usize,
        pages: PageRange,
    ) -> Result<impl Iterator<Item = PageRange> + use<'_, 'a>, BrokenInvariant> {
        let unsent = self.block(block)?;
        let (first, end) = (pages.start.0 / unsent.each, pages.end.0.div_ceil(unsent.each));
        let host_pages = if pages.is_empty() { 0..0 } else { first..end };
        Ok(host_pages.map(|host_page| unsent.pages(PageRange::starting_at(PageNumber(host_page), 1))))
    }

    /// Claims one host page that was asked for, by its first page.
    pub(crate) fn claim(&self, block: usize, first: PageNumber) -> Result<Claim, BrokenInvariant> {
        let unsent = self.block(block)?;
        let host_page = PageNumber(first.0 / unsent.each);
        Ok(if unsent.to_send.clear(host_page) {
            self.claimed.fetch_add(1, Relaxed);
            Claim::Contents
        } else if unsent.has_contents(host_page) || unsent.zero_sent.set(host_page) {
            Claim::Taken
        } else {
            Claim::Zero
        })
    }

    /// Claims the next run of host pages with contents of these pages; at most `at_most` pages, but one host page at
    /// least. `None` if nothing of them is left, or there is no such block.
    pub(crate) fn claim_within(&self, range: BlockRange, at_most: u64) -> Option<PageRange> {
        let unsent = self.blocks.get(range.block)?;
        let end = range.pages.end.0.div_ceil(unsent.each).min(unsent.to_send.len());
        let host_pages = PageRange::new(PageNumber((range.pages.start.0 / unsent.each).min(end)), PageNumber(end));
        let run = unsent.to_send.take_run(host_pages, (at_most / unsent.each).max(1))?;
        self.claimed.fetch_add(run.len(), Relaxed);
        Some(unsent.pages(run))
    }

    /// Claims the next run of host pages with contents at or behind the cursor, going round once, and moves the cursor
    /// behind it; at most `at_most` pages, but one host page at least. `None` if nothing is left anywhere.
    pub(crate) fn claim_run(&self, cursor: &mut Cursor, at_most: u64) -> Option<(usize, PageRange)> {
        // One more turn than there are blocks: the block that the search starts in is looked at again from its
        // beginning.
        for _ in 0..=self.blocks.len() {
            if cursor.block >= self.blocks.len() {
                *cursor = Cursor { block: 0, page: PageNumber(0) };
            }
            let unsent = self.blocks.get(cursor.block)?;
            let rest = PageRange::new(PageNumber(cursor.page.0 / unsent.each), PageNumber(unsent.to_send.len()));
            if let Some(run) = unsent.to_send.take_run(rest, (at_most / unsent.each).max(1)) {
                self.claimed.fetch_add(run.len(), Relaxed);
                let pages = unsent.pages(run);
                cursor.page = pages.end;
                return Some((cursor.block, pages));
            }
            *cursor = Cursor { block: cursor.block + 1, page: PageNumber(0) };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::is_noticed;

    fn unsent(stored: &PageBitmap, each: u64) -> UnsentPages<'_> {
        let unsent = UnsentPages {
            blocks: vec![UnsentBlock::new(stored, each)],
            to_claim: AtomicU64::new(0),
            claimed: AtomicU64::new(0),
        };
        unsent.begin();
        unsent
    }

    #[test]
    fn a_host_page_that_is_claimed_twice_or_never_is_noticed() {
        let stored = PageBitmap::full(64);
        for each in [1, 8] {
            let pages = unsent(&stored, each);
            assert!(is_noticed(|| pages.check_claimed()), "none was claimed");
            let mut cursor = Cursor { block: 0, page: PageNumber(0) };
            assert_eq!(pages.claim(0, PageNumber(32)).unwrap(), Claim::Contents);
            while pages.claim_run(&mut cursor, 16).is_some() {}
            assert_eq!(pages.claim(0, PageNumber(32)).unwrap(), Claim::Taken);
            pages.check_claimed().unwrap();
            // As if two threads had been given one page.
            pages.blocks[0].to_send.set(PageNumber(0));
            assert_eq!(pages.claim(0, PageNumber(0)).unwrap(), Claim::Contents);
            assert!(is_noticed(|| pages.check_claimed()), "one was claimed twice");
        }
    }

    #[test]
    fn pages_that_are_wanted_first_are_claimed_once_and_only_within_their_block() {
        let stored = PageBitmap::full(64);
        let range = |start, end| PageRange::new(PageNumber(start), PageNumber(end));
        for each in [1, 8] {
            let pages = unsent(&stored, each);
            let first = |block, start, end| BlockRange { block, pages: range(start, end) };
            assert_eq!(pages.claim(0, PageNumber(16)).unwrap(), Claim::Contents);
            assert_eq!(pages.claim_within(first(0, 8, 16), 256), Some(range(8, 16)));
            assert_eq!(pages.claim_within(first(0, 8, 16), 256), None);
            assert_eq!(pages.claim_within(first(0, 56, u64::MAX), 256), Some(range(56, 64)));
            assert_eq!(pages.claim_within(first(0, 900, 1000), 256), None);
            assert_eq!(pages.claim_within(first(1, 0, 8), 256), None);
            let mut cursor = Cursor { block: 0, page: PageNumber(0) };
            while pages.claim_run(&mut cursor, 16).is_some() {}
            pages.check_claimed().unwrap();
        }
    }

    #[test]
    fn a_block_that_is_not_of_the_stream_is_noticed() {
        let stored = PageBitmap::full(8);
        let pages = unsent(&stored, 1);
        assert!(is_noticed(|| pages.claim(1, PageNumber(0))));
        assert!(is_noticed(|| pages.host_pages(1, PageRange::whole_block(1)).map(drop)));
        assert!(is_noticed(|| pages.received(1, &stored)));
    }
}
