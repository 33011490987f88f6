//! Blocks that wait to be fetched, and the order in which they are: a pure plan.
//!
//! **Law: demand goes first.** A prefetch is begun only when nothing that is demanded waits, and never takes the last
//! places.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

/// Blocks that are fetched by one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Their numbers.
    pub(super) blocks: Range<u64>,
    /// Whether a read waits for them.
    pub(super) is_demanded: bool,
}

impl Piece {
    /// The number of its blocks, if it is prefetched.
    pub(super) fn prefetched(&self) -> u64 {
        if self.is_demanded { 0 } else { self.blocks.end - self.blocks.start }
    }
}

/// How much is fetched at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Pieces in flight.
    pub(super) concurrency: usize,
    /// Blocks of a demanded piece: less than of a prefetched one, so that a long read comes over several connections.
    pub(super) demanded: u64,
    /// Blocks of a prefetched piece.
    pub(super) prefetched: u64,
}

impl Limits {
    /// Pieces in flight up to which a prefetch may begin.
    fn for_prefetch(&self) -> usize {
        (self.concurrency - self.concurrency / 4).max(1)
    }
}

/// Blocks that wait.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Demanded blocks in the order in which they came; some may have been fetched with a neighbour.
    order: VecDeque<u64>,
    demanded: BTreeSet<u64>,
    prefetch: VecDeque<Range<u64>>,
    /// Ranges ahead of readers, which come after those that somebody has asked for.
    ahead: VecDeque<Range<u64>>,
}

/// Ranges ahead of readers that wait. Readers have passed older ones.
const AHEAD_MAX: usize = 8;

impl Queue {
    pub(super) fn demand(&mut self, block: u64) {
        if self.demanded.insert(block) {
            self.order.push_back(block);
        }
    }

    pub(super) fn prefetch(&mut self, blocks: Range<u64>) {
        if !blocks.is_empty() {
            self.prefetch.push_back(blocks);
        }
    }

    pub(super) fn read_ahead(&mut self, blocks: Range<u64>) {
        if !blocks.is_empty() {
            if self.ahead.len() == AHEAD_MAX {
                self.ahead.pop_front();
            }
            self.ahead.push_back(blocks);
        }
    }

    pub(super) fn has_prefetch(&self) -> bool {
        !(self.prefetch.is_empty() && self.ahead.is_empty())
    }

    pub(super) fn clear_prefetch(&mut self) {
        self.prefetch.clear();
        self.ahead.clear();
    }

    /// Takes the next piece. `is_wanted` says of a block to be prefetched if it still has to be fetched; `may_prefetch`
    /// is whether there is room for more of them.
    pub(super) fn next(
        &mut self,
        limits: &Limits,
        in_flight: usize,
        may_prefetch: bool,
        mut is_wanted: impl FnMut(u64) -> bool,
    ) -> Option<Piece> {
        if in_flight >= limits.concurrency {
            return None;
        }
        if let Some(blocks) = self.next_demanded(limits.demanded) {
            return Some(Piece { blocks, is_demanded: true });
        }
        if in_flight >= limits.for_prefetch() || !may_prefetch {
            return None;
        }
        let most = limits.prefetched;
        let blocks = take(&mut self.prefetch, most, &mut is_wanted);
        let blocks = blocks.or_else(|| take(&mut self.ahead, most, &mut is_wanted))?;
        Some(Piece { blocks, is_demanded: false })
    }

    /// Takes the oldest demanded block, and its neighbours that wait as well.
    fn next_demanded(&mut self, most: u64) -> Option<Range<u64>> {
        let first = loop {
            let block = self.order.pop_front()?;
            if self.demanded.remove(&block) {
                break block;
            }
        };
        let (mut start, mut end) = (first, first + 1);
        while end - start < most && self.demanded.remove(&end) {
            end += 1;
        }
        while end - start < most && start > 0 && self.demanded.remove(&(start - 1)) {
            start -= 1;
        }
        Some(start..end)
    }
}

/// Takes the first blocks of these ranges that are wanted, at most `most` neighbours.
fn take(ranges: &mut VecDeque<Range<u64>>, most: u64, is_wanted: &mut impl FnMut(u64) -> bool) -> Option<Range<u64>> {
    while let Some(range) = ranges.front_mut() {
        let Some(start) = range.clone().find(|block| is_wanted(*block)) else {
            ranges.pop_front();
            continue;
        };
        let most = range.end.min(start.saturating_add(most));
        let end = (start + 1..most).find(|block| !is_wanted(*block)).unwrap_or(most.max(start + 1));
        range.start = end;
        return Some(start..end);
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { concurrency: 4, demanded: 3, prefetched: 5 };

    #[test]
    fn neighbours_that_wait_are_fetched_together_and_demand_goes_first() {
        let mut queue = Queue::default();
        queue.prefetch(100..107);
        for block in [7, 9, 8, 20, 6, 10] {
            queue.demand(block);
        }
        let mut next = |in_flight| queue.next(&LIMITS, in_flight, true, |_| true);
        assert_eq!(next(4), None);
        let demanded = |blocks| Some(Piece { blocks, is_demanded: true });
        assert_eq!([next(0), next(1), next(3)], [demanded(7..10), demanded(20..21), demanded(6..7)]);
        assert_eq!(next(3), demanded(10..11));
        assert_eq!(next(3), None, "the last place is for demand");
        let prefetched = |blocks| Some(Piece { blocks, is_demanded: false });
        assert_eq!([next(0), next(0), next(0)], [prefetched(100..105), prefetched(105..107), None]);
    }

    #[test]
    fn what_is_there_is_not_prefetched() {
        let mut queue = Queue::default();
        queue.prefetch(0..4);
        queue.prefetch(10..20);
        assert_eq!(queue.next(&LIMITS, 0, false, |_| true), None);
        let mut next = || queue.next(&LIMITS, 0, true, |block| ![0, 1, 2, 3, 10, 13].contains(&block));
        assert_eq!(next().map(|piece| piece.blocks), Some(11..13));
        assert_eq!(next().map(|piece| piece.blocks), Some(14..19));
        assert_eq!(next().map(|piece| piece.blocks), Some(19..20));
        assert_eq!(next(), None);
    }

    #[test]
    fn what_is_ahead_of_readers_comes_last_and_is_not_kept_for_ever() {
        let mut queue = Queue::default();
        (0..20).for_each(|number| queue.read_ahead(100 * number..100 * number + 5));
        queue.prefetch(7..8);
        let found = std::iter::from_fn(|| queue.next(&LIMITS, 0, true, |_| true)).map(|piece| piece.blocks.start);
        assert_eq!(found.collect::<Vec<_>>(), [7, 1200, 1300, 1400, 1500, 1600, 1700, 1800, 1900]);
    }

    proptest! {
        #[test]
        fn each_demanded_block_is_fetched_once(blocks: Vec<u8>) {
            let mut queue = Queue::default();
            blocks.iter().for_each(|block| queue.demand((*block).into()));
            let mut found: Vec<u64> = std::iter::from_fn(|| queue.next(&LIMITS, 0, true, |_| true)).flat_map(|piece| piece.blocks).collect();
            found.sort_unstable();
            let expected: Vec<u64> = blocks.iter().map(|block| u64::from(*block)).collect::<BTreeSet<_>>().into_iter().collect();
            prop_assert_eq!(found, expected);
        }
    }
}
