//! Huge pages for memory that comes as a whole.
//!
//! The kernel gives 2 MiB at once for hardly more than it takes for a few pages, if it is asked to; but pages that
//! never come then take memory too. Whether they will come is not known when the first one does, so such pages have a
//! budget. **Law: at most a 32nd of what has come is taken for pages that have not, and 8 MiB where pages come in long
//! runs.** Memory that is full pays for its huge pages with what came just before; of memory with a page here and there
//! none is huge.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use limosa_memory::MemoryBlock;
use limosa_page::{AtomicPageBitmap, PageNumber, PageRange, to_usize};
use parking_lot::{Mutex, MutexGuard};

/// The share of what has come that may be taken for what has not.
const SHARE: u64 = 32;
/// Additional pages that may be taken for those that have not come, where this number comes at once.
const ADVANCE: u64 = 4 * MemoryBlock::PAGES_PER_HUGE_PAGE;
const AT_ONCE: u64 = 64;
/// Pieces that can be taken at the same time.
const LOCKS: usize = 16;

/// Pages that may be populated before they have come, in all blocks together.
#[derive(Debug, Default)]
pub(super) struct PopulateBudget {
    came: AtomicU64,
    /// Taken for pages that have not come.
    ahead: AtomicU64,
}

impl PopulateBudget {
    /// Whether this number of pages may be taken ahead now, with `coming` about to come; they are counted then.
    fn reserve(&self, pages: u64, coming: u64) -> bool {
        let advance = if coming >= AT_ONCE { ADVANCE } else { 0 };
        let most = (self.came.load(Relaxed) + coming) / SHARE + advance;
        let take = |ahead: u64| Some(ahead + pages).filter(|ahead| *ahead <= most);
        self.ahead.fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    fn release(&self, pages: u64) {
        // Pages of a piece may come twice, at once on two channels.
        let _ = self.ahead.fetch_update(Relaxed, Relaxed, |ahead| Some(ahead.saturating_sub(pages)));
    }
}

/// The block whose memory is made ready.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) budget: &'a PopulateBudget,
    pub(super) memory: &'a MemoryBlock,
    /// Pages that may hold something.
    pub(super) written: &'a AtomicPageBitmap,
}

/// The huge pages of one block.
#[derive(Debug)]
pub(super) struct HugePages {
    /// Start of the first one that is in the block as a whole.
    first: PageNumber,
    /// A bit for each of them that was taken as a whole.
    taken: AtomicPageBitmap,
    /// A bit for each of them that is there.
    there: AtomicPageBitmap,
    /// Held while one of them, by its number, is being taken. An access meanwhile would have the kernel clear another
    /// 2 MiB for nothing; threads that populate other pieces do not wait.
    taking: [Mutex<()>; LOCKS],
}

impl HugePages {
    /// None yet; `None` if the block cannot have any.
    pub(super) fn new(memory: &MemoryBlock) -> Option<Self> {
        let pieces = memory.huge_page_range()?;
        let count = pieces.len() / MemoryBlock::PAGES_PER_HUGE_PAGE;
        let [taken, there] = [(); 2].map(|()| AtomicPageBitmap::new(count));
        Some(Self { first: pieces.start, taken, there, taking: Default::default() })
    }

    /// Makes memory ready for pages that are about to come for the first time and were not written.
    pub(super) fn make_ready(&self, target: &Target<'_>, run: PageRange) -> Result<(), limosa_memory::MemoryError> {
        // The rest is populated page by page, as one range where possible.
        let mut small: Option<PageRange> = None;
        let mut rest = run;
        while !rest.is_empty() {
            let piece = self.piece_of(rest.start);
            let (now, behind) = match piece {
                Some((_, pages)) => rest.split_at(pages.end),
                None if rest.start < self.first => rest.split_at(self.first),
                None => rest.split_at(rest.end),
            };
            let ready = match piece {
                Some((number, pages)) => self.take(target, number, pages, now.len()),
                None => false,
            };
            target.budget.came.fetch_add(now.len(), Relaxed);
            if ready {
                small.take().map_or(Ok(true), |pages| target.memory.populate(pages))?;
            } else {
                small = Some(PageRange::new(small.map_or(now.start, |pages| pages.start), now.end));
            }
            rest = behind;
        }
        // One page costs its fault either way.
        small.filter(|pages| pages.len() > 1).map_or(Ok(true), |pages| target.memory.populate(pages)).map(drop)
    }

    /// Whether a piece is there as a whole, or is from now on.
    fn take(&self, target: &Target<'_>, number: PageNumber, pages: PageRange, coming: u64) -> bool {
        let Target { budget, memory, written } = *target;
        if !self.taken.get(number) {
            if written.next_set_in(pages).is_some() {
                return false;
            }
            let ahead = pages.len().saturating_sub(coming);
            if !budget.reserve(ahead, coming) {
                return false;
            }
            let taking = self.lock(number);
            if !self.taken.set(number) {
                let there = memory.populate_huge(pages).unwrap_or(false);
                self.there.set(number);
                if !there {
                    // It is not tried again: there is no such memory at present.
                    budget.release(ahead);
                }
                return there;
            }
            drop(taking);
            // Another channel was first, and has counted all that does not come with its own pages.
            budget.release(ahead);
        }
        budget.release(coming);
        if !self.there.get(number) {
            drop(self.lock(number));
        }
        true
    }

    fn lock(&self, piece: PageNumber) -> MutexGuard<'_, ()> {
        let index = to_usize(piece.0 % LOCKS as u64);
        self.taking[index].lock()
    }

    /// The piece that a page is in: its number, and its pages.
    fn piece_of(&self, page: PageNumber) -> Option<(PageNumber, PageRange)> {
        let number = page.0.checked_sub(self.first.0)? / MemoryBlock::PAGES_PER_HUGE_PAGE;
        let start = PageNumber(self.first.0 + number * MemoryBlock::PAGES_PER_HUGE_PAGE);
        (number < self.taken.len())
            .then(|| (PageNumber(number), PageRange::starting_at(start, MemoryBlock::PAGES_PER_HUGE_PAGE)))
    }
}

#[cfg(test)]
mod tests {
    use limosa_memory::BlockOptions;
    use limosa_page::PAGE_SIZE;

    use super::*;

    const PIECE: u64 = MemoryBlock::PAGES_PER_HUGE_PAGE;

    /// Returns the pieces of a block that are there after these runs have come.
    fn populated(pieces: u64, runs: impl IntoIterator<Item = PageRange>) -> (u64, u64) {
        let block = BlockOptions::anonymous("ram", pieces * PIECE * PAGE_SIZE).map().unwrap();
        let (budget, written) = (PopulateBudget::default(), AtomicPageBitmap::new(block.pages().len()));
        let huge_pages = HugePages::new(&block).unwrap();
        let mut came = 0;
        for run in runs {
            huge_pages.make_ready(&Target { budget: &budget, memory: &block, written: &written }, run).unwrap();
            block.fill_zero(run.start.offset(), run.len() * PAGE_SIZE).unwrap();
            written.set_range(run);
            came += run.len();
            let there = block.populated(block.pages()).unwrap().count();
            assert!(there <= came + came / SHARE + ADVANCE, "{there} pages there when {came} have come");
        }
        (came, huge_pages.taken.count())
    }

    #[test]
    fn memory_that_is_full_comes_into_huge_pages_as_soon_as_they_are_paid_for() {
        let (came, huge) = populated(64, PageRange::whole_block(64 * PIECE).chunks(128));
        assert_eq!(came, 64 * PIECE);
        assert_eq!(huge, 64);
    }

    #[test]
    fn scattered_pages_take_no_more_than_they_need_and_a_32nd() {
        let scattered = (0..64 * PIECE / 16).map(|number| PageRange::starting_at(PageNumber(number * 16), 1));
        populated(64, scattered);
        let islands = (0..64).map(|piece| PageRange::starting_at(PageNumber(piece * PIECE + 100), 128));
        populated(64, islands);
    }

    #[test]
    fn shared_memory_and_blocks_without_a_whole_piece_have_none() {
        let shared = BlockOptions::memfd("ram", 8 * PIECE * PAGE_SIZE).map().unwrap();
        let small = BlockOptions::anonymous("ram", PIECE / 2 * PAGE_SIZE).map().unwrap();
        assert!(HugePages::new(&shared).is_none() && HugePages::new(&small).is_none());
    }
}
