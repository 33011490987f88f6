//! Sequential readers among the reads of an object: a pure plan.
//!
//! Law: reads in no order fetch nothing ahead. A reader that continues where it was has a window of blocks fetched
//! ahead of it, as soon as it has done that for [`PROOF`] blocks, if three of four blocks that it passed were read;
//! readers in several places have one each.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

/// Readers that are remembered.
const READERS: usize = 4;

/// Blocks that a reader's next read may be before or behind its last one: several threads of one reader overtake each
/// other, and what images hold is not quite in their order.
const SLACK: u64 = 8;

/// Blocks in order that make a reader sequential.
const PROOF: u64 = 4;

/// Blocks before the next one that a reader is judged by: a search for tables in the beginning of an image reads near
/// places as well, and few of the blocks between them.
const JUDGED: u64 = 64;

/// The readers.
#[derive(Debug)]
pub(super) struct ReadAhead {
    /// The one that has read last comes last.
    readers: VecDeque<Reader>,
    /// Threads that overtake each other by more than [`SLACK`] are several readers of the same blocks, so each is
    /// judged by what all have read.
    read: RecentlyRead,
    /// Blocks ahead of a reader.
    window: u64,
}

#[derive(Debug)]
struct Reader {
    /// The first block that it has read.
    began: u64,
    /// The block behind the last one that it has read.
    next: u64,
    /// The block behind the last one that was fetched ahead of it.
    ahead: u64,
}

impl ReadAhead {
    pub(super) fn new(window: u64) -> Self {
        Self { readers: VecDeque::new(), read: RecentlyRead::default(), window }
    }

    /// Notes a read of these blocks. Returns blocks to be fetched ahead; empty: none.
    pub(super) fn note(&mut self, blocks: &Range<u64>) -> Range<u64> {
        self.read.note(blocks);
        let near = |reader: &Reader| blocks.start.abs_diff(reader.next) <= SLACK;
        let found = self.readers.iter().position(near).and_then(|index| self.readers.remove(index));
        // One long read alone is no sequence.
        let continues = found.is_some();
        let mut reader = found.unwrap_or(Reader { began: blocks.start, next: blocks.start, ahead: blocks.start });
        reader.next = reader.next.max(blocks.end);
        let start = reader.ahead.max(reader.next);
        let end = reader.next.saturating_add(self.window);
        // A part of the window at a time, so that requests are long.
        let is_due = continues && end.saturating_sub(start) >= (self.window / 2).max(1);
        let wanted = if is_due && reader.is_sequential(&self.read) { start..end } else { start..start };
        reader.ahead = reader.ahead.max(wanted.end);
        if self.readers.len() == READERS {
            self.readers.pop_front();
        }
        self.readers.push_back(reader);
        wanted
    }
}

impl Reader {
    fn is_sequential(&self, read: &RecentlyRead) -> bool {
        let passed = self.began.max(self.next.saturating_sub(JUDGED))..self.next;
        let blocks = passed.end - passed.start;
        blocks >= PROOF && read.count(passed) * 4 >= blocks * 3
    }
}

/// The blocks that were read last, by all readers.
#[derive(Debug, Default)]
struct RecentlyRead {
    blocks: BTreeSet<u64>,
    /// Order in which they were first read, the oldest first.
    order: VecDeque<u64>,
}

impl RecentlyRead {
    /// Blocks that are remembered: [`JUDGED`] of each reader, and as many that were read in no order between them.
    const MOST: usize = 128 * READERS;

    fn note(&mut self, blocks: &Range<u64>) {
        for block in blocks.start.max(blocks.end.saturating_sub(JUDGED))..blocks.end {
            if !self.blocks.insert(block) {
                continue;
            }
            self.order.push_back(block);
            if self.order.len() > Self::MOST
                && let Some(oldest) = self.order.pop_front()
            {
                self.blocks.remove(&oldest);
            }
        }
    }

    fn count(&self, blocks: Range<u64>) -> u64 {
        self.blocks.range(blocks).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_sequential_reader_has_a_window_ahead_also_among_others() {
        let mut plan = ReadAhead::new(16);
        let mut fetched = Vec::new();
        for block in 0..40 {
            assert!(plan.note(&(1000 * (block + 1)..1000 * (block + 1) + 1)).is_empty(), "a read in no order");
            let ahead = plan.note(&(block..block + 1));
            fetched.extend(ahead);
        }
        assert_eq!(fetched, (4..fetched.last().unwrap() + 1).collect::<Vec<_>>(), "each once, and in order");
        assert!((47..=56).contains(fetched.last().unwrap()));
    }

    #[test]
    fn a_reader_that_jumps_between_near_places_is_not_sequential_until_it_reads_on() {
        let mut plan = ReadAhead::new(256);
        // The opening of a packed snapshot: its header, its tables, the beginning of its contents.
        for blocks in
            [0..1, 0..1, 0..2, 6..7, 6..7, 8..9, 10..11, 8..9, 268..269, 268..269, 276..277, 274..275, 272..273]
        {
            assert!(plan.note(&blocks).is_empty(), "{blocks:?}");
        }
        // Several threads of one reader overtake each other.
        let read_on = [13..15, 11..13, 17..19, 15..17, 21..23, 19..21, 23..25, 27..29, 25..27];
        assert!(read_on.into_iter().any(|blocks| !plan.note(&blocks).is_empty()));
    }

    #[test]
    fn threads_that_overtake_each_other_are_sequential_also_if_they_leave_some_out() {
        let mut plan = ReadAhead::new(256);
        // Each read is delayed by up to 31 places, and every sixth block is left out.
        let mut reads: Vec<(u64, u64)> = (0..4000).map(|block| (block + block * 7 % 32, block)).collect();
        reads.retain(|(_, block)| block % 6 != 5);
        reads.sort_unstable();
        let mut ahead = 0;
        for (_, block) in reads {
            assert!(block < 200 || block < ahead, "block {block} was not fetched ahead");
            ahead = ahead.max(plan.note(&(block..block + 1)).end);
        }
    }

    proptest! {
        #[test]
        fn reads_far_from_each_other_fetch_nothing(blocks in prop::collection::vec(0_u64..1 << 40, 1..100)) {
            let mut plan = ReadAhead::new(64);
            for block in blocks {
                let block = block * 100;
                prop_assert!(plan.note(&(block..block + 1)).is_empty());
            }
        }

        #[test]
        fn a_plan_never_fails_and_stays_in_its_window(
            reads in prop::collection::vec((prop_oneof![9 => 0_u64..300, 1 => any::<u64>()], 0_u64..50), 0..200),
        ) {
            let mut plan = ReadAhead::new(64);
            for (start, length) in reads {
                let blocks = start..start.saturating_add(length);
                let ahead = plan.note(&blocks);
                prop_assert!(ahead.end.saturating_sub(ahead.start) <= 64);
            }
        }
    }
}
