//! Plans the pages to populate next from the pages that have arrived. Pure.

use limosa_page::{PageNumber, PageRange};

/// The share of arrived pages that may be populated in vain.
const SHARE: u64 = 32;
/// Maximum number of pages ahead: 16 MiB.
const MOST: u64 = 4096;
/// Minimum number of pages worth a call: 256 KiB.
const FEWEST: u64 = 64;

/// Plans ahead of the position where pages arrive.
///
/// Pages of a block arrive mostly in order, with gaps where the guest has zeros. **Law: the pages populated in vain are
/// at most a 32nd of those that have arrived**: a guest of zeros costs nothing, one of short runs almost nothing, and a
/// full one is populated 16 MiB ahead.
#[derive(Debug, Clone)]
pub struct PrefaultAhead {
    blocks: Vec<BlockProgress>,
    /// Pages that have arrived.
    arrived: u64,
    /// Pages that were planned and skipped by the sender.
    wasted: u64,
}

#[derive(Debug, Clone, Copy)]
struct BlockProgress {
    pages: PageRange,
    /// Pages of 4 KiB in a host page.
    host: u64,
    /// Behind the last page that has arrived.
    next: PageNumber,
    /// Behind the last page that was planned.
    planned: PageNumber,
}

impl PrefaultAhead {
    /// Creates a plan for blocks: the pages of each, and the number of 4 KiB pages in its host pages.
    pub fn new(blocks: impl IntoIterator<Item = (PageRange, u64)>) -> Self {
        let progress = |(pages, host): (PageRange, u64)| BlockProgress {
            pages,
            host: host.max(1),
            next: pages.start,
            planned: pages.start,
        };
        Self { blocks: blocks.into_iter().map(progress).collect(), arrived: 0, wasted: 0 }
    }

    /// Notes that pages have arrived; returns the pages to populate now, if any.
    pub fn note_arrived(&mut self, block: usize, pages: PageRange) -> Option<PageRange> {
        let progress = self.blocks.get_mut(block)?;
        let pages = pages.intersect(progress.pages);
        self.arrived = self.arrived.saturating_add(pages.len());
        if pages.end <= progress.next {
            // Late, from another channel: these pages were not skipped after all.
            self.wasted = self.wasted.saturating_sub(pages.len());
            return None;
        }
        // Planned pages between the last page and this one were skipped, unless they arrive late.
        let gap = PageRange::new(progress.next, pages.start.min(progress.planned));
        self.wasted = self.wasted.saturating_add(gap.len());
        if pages.start > progress.planned.max(progress.next) {
            progress.planned = pages.end;
        }
        progress.next = pages.end;
        progress.planned = progress.planned.max(pages.end);

        let ahead = (self.arrived / SHARE).saturating_sub(self.wasted).min(MOST);
        let end =
            PageNumber(progress.next.saturating_add(ahead).min(progress.pages.end).0 / progress.host * progress.host);
        let plan = PageRange::new(progress.planned, end);
        let rest = PageRange::new(progress.planned, progress.pages.end);
        if plan.len() < (ahead / 4).max(FEWEST).min(rest.len().max(1)) {
            return None;
        }
        progress.planned = plan.end;
        Some(plan)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn run(start: u64, pages: u64) -> PageRange {
        PageRange::starting_at(PageNumber(start), pages)
    }

    #[test]
    fn a_full_guest_is_populated_ahead_of_what_comes() {
        let mut ahead = PrefaultAhead::new([(run(0, 1 << 18), 1)]);
        let (mut planned, mut behind) = (BTreeSet::new(), 0);
        for chunk in run(0, 1 << 18).chunks(128) {
            behind += u64::from(chunk.iter().any(|page| !planned.contains(&page)));
            if let Some(plan) = ahead.note_arrived(0, chunk) {
                assert!(plan.start >= chunk.end, "{plan} was there when {chunk} came");
                planned.extend(plan.iter());
            }
        }
        // The first 2048 pages earn the first plan of 64.
        assert!(behind < 64, "{behind} of 2048 pieces came into memory that was not populated");
    }

    #[test]
    fn a_guest_of_scattered_pages_is_not_populated() {
        let mut ahead = PrefaultAhead::new([(run(0, 1 << 20), 1)]);
        let planned: u64 =
            (0..5000).filter_map(|i| ahead.note_arrived(0, run(i * 200, 3))).map(|plan| plan.len()).sum();
        assert!(planned <= 15_000 / SHARE + FEWEST, "{planned}");
    }

    #[test]
    fn whole_host_pages_are_planned() {
        let mut ahead = PrefaultAhead::new([(run(0, 1 << 18), 512)]);
        let plans: Vec<_> = run(0, 1 << 17).chunks(512).filter_map(|chunk| ahead.note_arrived(0, chunk)).collect();
        assert!(!plans.is_empty());
        assert!(plans.iter().all(|plan| plan.start.0 % 512 == 0 && plan.end.0 % 512 == 0), "{plans:?}");
    }

    proptest! {
        #[test]
        fn what_is_populated_in_vain_is_a_small_share_of_what_came(
            runs in prop::collection::vec((0u64..2, 0u64..3000, 1u64..6000), 1..200),
            host in prop::sample::select(vec![1u64, 512]),
        ) {
            let blocks = [run(0, 1 << 17), run(0, 99 * 512)];
            let mut ahead = PrefaultAhead::new(blocks.map(|pages| (pages, host)));
            let (mut came, mut planned) = (BTreeSet::new(), BTreeSet::new());
            let mut at = [0, 0];
            for (block, gap, length) in runs {
                let index = usize::try_from(block).unwrap();
                let pages = run(at[index] + gap, length);
                at[index] = pages.end.0;
                for chunk in pages.chunks(128) {
                    came.extend(chunk.intersect(blocks[index]).iter().map(|page| (block, page)));
                    if let Some(plan) = ahead.note_arrived(index, chunk) {
                        prop_assert!(!plan.is_empty() && plan.end <= blocks[index].end);
                        planned.extend(plan.iter().map(|page| (block, page)));
                    }
                }
            }
            let wasted = planned.difference(&came).count() as u64;
            // Both blocks may be ahead of their next pages at once.
            let came = came.len() as u64;
            prop_assert!(wasted <= 2 * came / SHARE, "{} of {}", wasted, came);
        }
    }
}
