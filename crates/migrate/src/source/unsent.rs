//! Which pages are still to be sent, so that each is sent exactly once whichever thread sends it.
//!
//! A destination in postcopy takes a page once: a second copy of it breaks the migration off, and a page left out becomes
//! a silent zero page when the stream ends. So a page is *claimed*, atomically, before it is sent, and the stream may end
//! only when nothing is left to claim.
//!
//! What is claimed is a whole *host page* of the block, because the destination can only place a whole one: the thread
//! that has claimed it sends all of its pages, the zero ones among them too. In a block of 4 KiB pages that is one page.

use limosa_page::{AtomicPageBitmap, PageBitmap, PageNumber, PageRange};
use limosa_stream::RamBlock;

use super::host_pages;
use crate::pages::PageSource;

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

/// What is still to be sent, over all RAM blocks.
#[derive(Debug)]
pub(crate) struct UnsentPages<'a> {
    blocks: Vec<UnsentBlock<'a>>,
}

/// What became of a claim on one requested host page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Send its contents.
    Contents,
    /// Say that it is zero.
    Zero,
    /// It has been sent, or another thread is about to.
    Taken,
}

/// Where the background push goes on.
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
    /// All stored pages of `source` are to be sent, to a destination whose blocks are `blocks`.
    pub(crate) fn new<S: PageSource + ?Sized>(source: &'a S, blocks: &[RamBlock]) -> Self {
        let blocks = blocks.iter().enumerate();
        let unsent = blocks.map(|(index, block)| UnsentBlock::new(source.stored(index), host_pages::pages_of(block)));
        Self { blocks: unsent.collect() }
    }

    /// Takes off the pages that the destination has already. A host page of which it has a part was not placed:
    /// that part is lost, and it counts as missing.
    pub(crate) fn received(&self, block: usize, received: &PageBitmap) {
        let Some(unsent) = self.blocks.get(block) else { return };
        for run in received.runs() {
            let whole =
                PageRange::new(PageNumber(run.start.0.div_ceil(unsent.each)), PageNumber(run.end.0 / unsent.each));
            unsent.to_send.clear_range(whole);
            unsent.zero_sent.set_range(whole);
        }
    }

    /// Pages with contents whose host pages are still to be claimed.
    pub(crate) fn left(&self) -> u64 {
        self.blocks.iter().map(UnsentBlock::left).sum()
    }

    /// The host pages that these pages are in, each as the pages that it consists of.
    pub(crate) fn host_pages(&self, block: usize, pages: PageRange) -> impl Iterator<Item = PageRange> + use<'_> {
        let unsent = self.blocks.get(block).filter(|_| !pages.is_empty());
        unsent.into_iter().flat_map(move |unsent| {
            let (first, end) = (pages.start.0 / unsent.each, pages.end.0.div_ceil(unsent.each));
            (first..end).map(|host_page| unsent.pages(PageRange::starting_at(PageNumber(host_page), 1)))
        })
    }

    /// Claims one host page that was asked for, by its first page.
    pub(crate) fn claim(&self, block: usize, first: PageNumber) -> Claim {
        let Some(unsent) = self.blocks.get(block) else { return Claim::Taken };
        let host_page = PageNumber(first.0 / unsent.each);
        if unsent.to_send.clear(host_page) {
            Claim::Contents
        } else if unsent.has_contents(host_page) || unsent.zero_sent.set(host_page) {
            Claim::Taken
        } else {
            Claim::Zero
        }
    }

    /// Claims the next run of host pages with contents at or behind the cursor, going round once, and moves the cursor
    /// behind it; `at_most` so many pages, but one host page at least. `None` if nothing is left anywhere.
    pub(crate) fn claim_run(&self, cursor: &mut Cursor, at_most: u64) -> Option<(usize, PageRange)> {
        // One more turn than there are blocks: the block that the search starts in is looked at again from its beginning.
        for _ in 0..=self.blocks.len() {
            if cursor.block >= self.blocks.len() {
                *cursor = Cursor { block: 0, page: PageNumber(0) };
            }
            let unsent = self.blocks.get(cursor.block)?;
            let rest = PageRange::new(PageNumber(cursor.page.0 / unsent.each), PageNumber(unsent.to_send.len()));
            if let Some(run) = unsent.to_send.take_run(rest, (at_most / unsent.each).max(1)) {
                let pages = unsent.pages(run);
                cursor.page = pages.end;
                return Some((cursor.block, pages));
            }
            *cursor = Cursor { block: cursor.block + 1, page: PageNumber(0) };
        }
        None
    }
}
