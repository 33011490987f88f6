//! Which pages are still to be sent, so that each is sent exactly once whichever thread sends it.
//!
//! A destination in postcopy takes a page once: a second copy of it breaks the migration off, and a page left out becomes
//! a silent zero page when the stream ends. So a page is *claimed*, atomically, before it is sent, and the stream may end
//! only when nothing is left to claim.

use limosa_page::{AtomicPageBitmap, PageBitmap, PageNumber, PageRange};

use crate::pages::PageSource;

/// Pages that one claim of the background push covers at most: 1 MiB.
pub(crate) const CLAIM_PAGES: u64 = 256;

#[derive(Debug)]
struct BlockLedger {
    /// Pages with contents that nobody has claimed.
    to_send: AtomicPageBitmap,
    /// Zero pages that were asked for and answered.
    zero_sent: AtomicPageBitmap,
    pages: u64,
}

/// What is still to be sent, over all RAM blocks.
#[derive(Debug)]
pub(crate) struct Ledger {
    blocks: Vec<BlockLedger>,
}

/// What became of a claim on one requested page.
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

impl Ledger {
    /// All stored pages are to be sent.
    pub(crate) fn new<S: PageSource + ?Sized>(source: &S) -> Self {
        let blocks = (0..source.start().blocks.len()).map(|block| {
            let stored = source.stored(block);
            BlockLedger {
                to_send: AtomicPageBitmap::from(stored.clone()),
                zero_sent: AtomicPageBitmap::new(stored.len()),
                pages: stored.len(),
            }
        });
        Self { blocks: blocks.collect() }
    }

    /// Takes the pages that the destination has already off the ledger.
    pub(crate) fn received(&self, block: usize, received: &PageBitmap) {
        let Some(ledger) = self.blocks.get(block) else { return };
        for run in received.runs() {
            ledger.to_send.clear_range(run);
            ledger.zero_sent.set_range(run);
        }
    }

    /// Pages with contents that are still to be claimed.
    pub(crate) fn left(&self) -> u64 {
        self.blocks.iter().map(|block| block.to_send.count()).sum()
    }

    /// Claims one page that was asked for.
    pub(crate) fn claim(&self, block: usize, page: PageNumber, stored: &PageBitmap) -> Claim {
        let Some(ledger) = self.blocks.get(block) else { return Claim::Taken };
        if ledger.to_send.clear(page) {
            Claim::Contents
        } else if stored.get(page) || ledger.zero_sent.set(page) {
            Claim::Taken
        } else {
            Claim::Zero
        }
    }

    /// Claims the next run of pages with contents at or behind the cursor, going round once, and moves the cursor behind
    /// it. `None` if nothing is left anywhere.
    pub(crate) fn claim_run(&self, cursor: &mut Cursor, at_most: u64) -> Option<(usize, PageRange)> {
        // One more turn than there are blocks: the block that the search starts in is looked at again from its beginning.
        for _ in 0..=self.blocks.len() {
            if cursor.block >= self.blocks.len() {
                *cursor = Cursor { block: 0, page: PageNumber(0) };
            }
            let ledger = self.blocks.get(cursor.block)?;
            let rest = PageRange::new(cursor.page, PageNumber(ledger.pages));
            if let Some(run) = ledger.to_send.take_run(rest, at_most) {
                cursor.page = run.end;
                return Some((cursor.block, run));
            }
            *cursor = Cursor { block: cursor.block + 1, page: PageNumber(0) };
        }
        None
    }
}
