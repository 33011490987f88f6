//! The pages of a round, handed out in windows.
//!
//! Law: a window is handed out once, so no page is sent twice in a round; and they go out in order, so that all
//! channels together read the memory from front to back.
//!
//! A page that the guest has called free is taken out while the round runs. **Law: a list takes pages out only while
//! it is open, and it is closed before the dirty log is read.** What the guest wrote before that reading is in the log
//! or was written before the page was free; behind it a late hint would take out what the log has just told. Both are
//! decided under the lock that hands pages out, so a page is handed out or taken out, never both, and no thread waits
//! for a list.

use limosa_page::{BrokenInvariant, PageBitmap, PageNumber, PageRange, invariant};
use parking_lot::{Mutex, MutexGuard};

/// Pages of a window: 1 MiB, aligned to that, which is what a checksum of a snapshot covers.
pub(crate) const WINDOW_PAGES: u64 = 256;

/// The pages to send, of all blocks, cut into windows.
#[derive(Debug, Default)]
pub(crate) struct DirtyPageQueue {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pages: Vec<PageBitmap>,
    /// Block and page behind the last window.
    block: usize,
    page: PageNumber,
    /// Pages of this round, and how many of them were handed out: with those that were taken out they add up to all.
    total: u64,
    handed_out: u64,
    /// Lists that were opened, and whether the last one still is.
    lists: u64,
    open: bool,
    /// Pages that were taken out of this round.
    taken: u64,
    /// Pages that were taken out of any round; of no block, if they need not be known.
    free: Vec<PageBitmap>,
}

impl DirtyPageQueue {
    /// A queue of these pages, one bitmap a block.
    #[cfg(test)]
    pub(crate) fn new(pages: Vec<PageBitmap>) -> Self {
        let queue = Self::default();
        queue.start(pages);
        queue
    }

    /// Hands these out from now on, from the beginning.
    pub(crate) fn start(&self, pages: Vec<PageBitmap>) {
        let mut state = self.lock();
        state.total = pages.iter().map(PageBitmap::count).sum();
        (state.pages, state.block, state.page) = (pages, 0, PageNumber(0));
        (state.handed_out, state.taken) = (0, 0);
    }

    /// The pages of the next window that has any, as `runs`, and their block. `None` when all were handed out.
    pub(crate) fn claim(&self, runs: &mut Vec<PageRange>) -> Option<usize> {
        runs.clear();
        let State { pages, block, page, handed_out, .. } = &mut *self.lock();
        loop {
            let bitmap = pages.get(*block)?;
            let Some(first) = bitmap.next_set(*page) else {
                (*block, *page) = (*block + 1, PageNumber(0));
                continue;
            };
            *page = PageNumber((first.0 / WINDOW_PAGES).saturating_add(1).saturating_mul(WINDOW_PAGES));
            runs.extend(bitmap.runs_in(PageRange::new(first, *page)));
            *handed_out += runs.iter().map(PageRange::len).sum::<u64>();
            return Some(*block);
        }
    }

    /// The next pages of one block, `most` at most, as `runs`, and their block: for a single sender, which needs no
    /// windows. `None` when all were handed out.
    pub(crate) fn claim_pages(&self, runs: &mut Vec<PageRange>, most: u64) -> Option<usize> {
        runs.clear();
        let State { pages, block, page, handed_out, .. } = &mut *self.lock();
        loop {
            let bitmap = pages.get(*block)?;
            let mut room = most;
            for run in bitmap.runs_in(PageRange::new(*page, PageNumber(bitmap.len()))) {
                let (now, _) = run.split_at(run.start.saturating_add(room));
                runs.push(now);
                *page = now.end;
                room -= now.len();
                if room == 0 {
                    break;
                }
            }
            if !runs.is_empty() {
                *handed_out += most - room;
                return Some(*block);
            }
            (*block, *page) = (*block + 1, PageNumber(0));
        }
    }

    /// Stops handing out: what was not handed out, one bitmap a block.
    pub(crate) fn take_rest(&self) -> Result<Vec<PageBitmap>, BrokenInvariant> {
        let mut state = self.lock();
        let mut rest = std::mem::take(&mut state.pages);
        for (block, pages) in rest.iter_mut().enumerate() {
            match block.cmp(&state.block) {
                std::cmp::Ordering::Less => pages.clear_range(PageRange::whole_block(pages.len())),
                std::cmp::Ordering::Equal => pages.clear_range(PageRange::whole_block(state.page.0.min(pages.len()))),
                std::cmp::Ordering::Greater => {}
            }
        }
        let left: u64 = rest.iter().map(PageBitmap::count).sum();
        invariant(state.handed_out + state.taken + left == state.total, "each page of a round is claimed once")?;
        Ok(rest)
    }

    /// Makes sure that every page of the round was handed out once, or taken out.
    pub(crate) fn check_spent(&self) -> Result<(), BrokenInvariant> {
        let state = self.lock();
        invariant(state.handed_out + state.taken == state.total, "each page of a round is claimed once")
    }

    /// Remembers from now on which pages are taken out: `none` yet, one bitmap a block.
    pub(crate) fn remember_free(&self, none: Vec<PageBitmap>) {
        self.lock().free = none;
    }

    /// A list that is asked for now may take pages out, and none before it: its number. What the dirty log has told is
    /// in the pages that are handed out.
    pub(crate) fn open_list(&self) -> u64 {
        let mut state = self.lock();
        state.lists += 1;
        state.open = true;
        state.lists
    }

    /// From now on no list takes anything out. To be called before the dirty log is read, each time.
    pub(crate) fn close_lists(&self) {
        self.lock().open = false;
    }

    /// Takes the rule out: for the proof that its loss is noticed.
    #[cfg(test)]
    pub(crate) fn stay_open(&self) {
        self.lock().open = true;
    }

    /// Takes pages out that this list calls free, of those that were not handed out yet: how many. `None`: it comes too
    /// late.
    pub(crate) fn take_out(&self, list: u64, block: usize, range: PageRange) -> Option<u64> {
        let state = &mut *self.lock();
        if !state.open || state.lists != list {
            return None;
        }
        let begin = match block.cmp(&state.block) {
            std::cmp::Ordering::Less => return Some(0),
            std::cmp::Ordering::Equal => state.page,
            std::cmp::Ordering::Greater => PageNumber(0),
        };
        let Some(pages) = state.pages.get_mut(block) else { return Some(0) };
        let range = PageRange::new(range.start.max(begin), range.end);
        let taken = pages.count_in(range);
        if taken == 0 {
            return Some(0);
        }
        if let Some(free) = state.free.get_mut(block) {
            pages.runs_in(range).for_each(|run| free.set_range(run));
        }
        pages.clear_range(range);
        state.taken += taken;
        Some(taken)
    }

    /// Pages of a block that are not handed out yet, as runs.
    pub(crate) fn left(&self, block: usize, within: PageRange) -> Vec<PageRange> {
        self.lock().pages.get(block).map_or_else(Vec::new, |pages| pages.runs_in(within).collect())
    }

    /// Does not hand these pages of a block out: they are not needed. Of `dropped` remains what would have been handed
    /// out.
    pub(crate) fn drop_pages(&self, block: usize, dropped: &mut PageBitmap) {
        let State { pages, total, .. } = &mut *self.lock();
        if let Some(pages) = pages.get_mut(block) {
            dropped.intersect_with(pages);
            pages.subtract(dropped);
            *total -= dropped.count();
        }
    }

    /// Pages that were taken out of this round.
    pub(crate) fn taken(&self) -> u64 {
        self.lock().taken
    }

    /// Pages taken out of any round, if that is remembered. They may have been written, and sent, since.
    pub(crate) fn take_free(&self) -> Vec<PageBitmap> {
        std::mem::take(&mut self.lock().free)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::error::is_noticed;

    fn bitmap(pages: u64, wanted: fn(u64) -> bool) -> PageBitmap {
        let mut bitmap = PageBitmap::new(pages);
        (0..pages).filter(|page| wanted(*page)).for_each(|page| {
            bitmap.set(PageNumber(page));
        });
        bitmap
    }

    fn blocks() -> Vec<PageBitmap> {
        vec![bitmap(0, |_| true), bitmap(9_999, |page| page % 7 != 3), bitmap(5_000, |_| false), bitmap(300, |_| true)]
    }

    #[test]
    fn every_page_is_handed_out_once_over_all_threads() {
        let queue = DirtyPageQueue::new(blocks());
        let claimed = thread::scope(|scope| {
            let thread = || {
                let (mut runs, mut all) = (Vec::new(), Vec::new());
                while let Some(block) = queue.claim(&mut runs) {
                    assert!(!runs.is_empty());
                    assert!(runs.iter().all(|run| run.start.0 / 256 == (run.end.0 - 1) / 256), "{runs:?}");
                    all.extend(runs.iter().map(|run| (block, *run)));
                }
                all
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(thread)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let mut found: Vec<_> = blocks().iter().map(|bitmap| PageBitmap::new(bitmap.len())).collect();
        for (block, page) in claimed.into_iter().flat_map(|(block, run)| run.iter().map(move |page| (block, page))) {
            assert!(!found[block].set(page), "page {page} of block {block} twice");
        }
        assert!(found == blocks());
    }

    #[test]
    fn a_single_sender_gets_as_many_pages_at_a_time_as_it_takes_wherever_they_lie() {
        let all = vec![bitmap(0, |_| true), bitmap(100_000, |page| page % 100 == 0), bitmap(1300, |page| page != 700)];
        let queue = DirtyPageQueue::new(all.clone());
        let (mut runs, mut claims) = (Vec::new(), Vec::new());
        let mut found: Vec<_> = all.iter().map(|bitmap| PageBitmap::new(bitmap.len())).collect();
        while let Some(block) = queue.claim_pages(&mut runs, 512) {
            claims.push((block, runs.iter().map(PageRange::len).sum::<u64>()));
            for page in runs.iter().flat_map(PageRange::iter) {
                assert!(!found[block].set(page), "page {page} of block {block} twice");
            }
        }
        assert_eq!(claims, [(1, 512), (1, 488), (2, 512), (2, 512), (2, 275)]);
        assert!(found == all);
    }

    #[test]
    fn pages_that_are_handed_out_twice_or_never_are_noticed() {
        let mut runs = Vec::new();
        let claimed_twice = DirtyPageQueue::new(blocks());
        while claimed_twice.claim(&mut runs).is_some() {}
        claimed_twice.check_spent().unwrap();
        (claimed_twice.lock().block, claimed_twice.lock().page) = (0, PageNumber(0));
        claimed_twice.claim(&mut runs).unwrap();
        assert!(is_noticed(|| claimed_twice.check_spent()));
        assert!(is_noticed(|| claimed_twice.take_rest()));
        let left_behind = DirtyPageQueue::new(blocks());
        left_behind.claim(&mut runs).unwrap();
        assert!(is_noticed(|| left_behind.check_spent()));
    }

    #[test]
    fn what_was_handed_out_and_what_is_left_are_together_all_of_it() {
        for (claims, most) in
            [0, 1, 5, 39, 40, 41, 42, 100].into_iter().flat_map(|claims| [(claims, None), (claims, Some(300))])
        {
            let queue = DirtyPageQueue::new(blocks());
            let mut found: Vec<_> = blocks().iter().map(|bitmap| PageBitmap::new(bitmap.len())).collect();
            let mut runs = Vec::new();
            let claim = |runs: &mut _| match most {
                None => queue.claim(runs),
                Some(most) => queue.claim_pages(runs, most),
            };
            for _ in 0..claims {
                let Some(block) = claim(&mut runs) else { break };
                runs.iter().for_each(|run| found[block].set_range(*run));
            }
            let rest = queue.take_rest().unwrap();
            assert_eq!(claim(&mut runs), None);
            for (block, (found, rest)) in found.iter_mut().zip(&rest).enumerate() {
                assert!(rest.runs().all(|run| found.count_in(run) == 0), "block {block} after {claims}");
                found.union_with(rest);
            }
            assert!(found == blocks(), "after {claims}");
        }
    }
}
