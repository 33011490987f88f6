//! Sequential readers among the reads of an object: a pure plan.
//!
//! Law: reads in no order fetch nothing ahead. A reader that continues where it was has a window of blocks fetched
//! ahead of it, as soon as it has done that for [`PROOF`] blocks, if it has read three of four blocks that it passed;
//! readers in several places have one each.

use std::collections::VecDeque;
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
const JUDGED: u32 = u64::BITS;

/// The readers.
#[derive(Debug)]
pub(super) struct ReadAhead {
    /// The one that has read last comes last.
    readers: VecDeque<Reader>,
    /// Blocks ahead of a reader.
    window: u64,
}

#[derive(Debug)]
struct Reader {
    /// Blocks that it has passed, at most [`JUDGED`].
    passed: u64,
    /// Those that it has read of them: the lowest bit is the block before the next one.
    read: u64,
    /// The block behind the last one that it has read.
    next: u64,
    /// The block behind the last one that was fetched ahead of it.
    ahead: u64,
}

impl ReadAhead {
    pub(super) fn new(window: u64) -> Self {
        Self { readers: VecDeque::new(), window }
    }

    /// Notes a read of these blocks. Returns blocks to be fetched ahead; empty: none.
    pub(super) fn note(&mut self, blocks: &Range<u64>) -> Range<u64> {
        let near = |reader: &Reader| blocks.start.abs_diff(reader.next) <= SLACK;
        let found = self.readers.iter().position(near).and_then(|index| self.readers.remove(index));
        // One long read alone is no sequence.
        let continues = found.is_some();
        let new = Reader { passed: 0, read: 0, next: blocks.start, ahead: blocks.start };
        let mut reader = found.unwrap_or(new);
        reader.pass(blocks);
        let start = reader.ahead.max(reader.next);
        let end = reader.next.saturating_add(self.window);
        // A part of the window at a time, so that requests are long.
        let is_due = continues && reader.is_sequential() && end.saturating_sub(start) >= (self.window / 2).max(1);
        let wanted = if is_due { start..end } else { start..start };
        reader.ahead = reader.ahead.max(wanted.end);
        if self.readers.len() == READERS {
            self.readers.pop_front();
        }
        self.readers.push_back(reader);
        wanted
    }
}

impl Reader {
    /// Notes a read near the last one.
    fn pass(&mut self, blocks: &Range<u64>) {
        let further = blocks.end.saturating_sub(self.next);
        self.read = u32::try_from(further).ok().and_then(|further| self.read.checked_shl(further)).unwrap_or(0);
        self.passed = self.passed.saturating_add(further).min(JUDGED.into());
        self.next = self.next.max(blocks.end);
        let judged = self.next.saturating_sub(JUDGED.into())..self.next;
        for block in blocks.start.max(judged.start)..blocks.end {
            self.read |= 1 << (judged.end - 1 - block);
        }
    }

    fn is_sequential(&self) -> bool {
        self.passed >= PROOF && u64::from(self.read.count_ones()) * 4 >= self.passed * 3
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
