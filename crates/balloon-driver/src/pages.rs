//! The free pages of a simulated guest.

use std::collections::BTreeMap;
use std::ops::Range;

use limosa_page::PAGE_SIZE;

/// The guest's free pages.
pub trait Pages: Send {
    /// Takes `length` bytes of them, a power of two, aligned to it: their guest-physical address. `None`: there is no
    /// such block.
    fn allocate(&mut self, length: u64) -> Option<u64>;

    /// Gives them back, in pieces of any size.
    fn free(&mut self, block: Range<u64>);

    /// Statistics of the guest's memory: tags and values (virtio 1.2, 5.5.6.3).
    fn statistics(&self) -> Vec<(u16, u64)> {
        Vec::new()
    }
}

/// An allocator that gives the highest free addresses first, as Linux does in a zone, and merges freed ranges.
#[derive(Debug, Clone)]
pub struct Blocks {
    /// Start and end of the free ranges, not adjacent.
    free: BTreeMap<u64, u64>,
    total: u64,
}

impl Blocks {
    /// Everything of `range` is free. (Cut to whole pages.)
    pub fn new(range: Range<u64>) -> Self {
        let mut blocks = Self { free: BTreeMap::new(), total: 0 };
        let whole = range.start.next_multiple_of(PAGE_SIZE)..range.end / PAGE_SIZE * PAGE_SIZE;
        blocks.total = whole.end.saturating_sub(whole.start);
        blocks.free(whole);
        blocks
    }

    /// Bytes that are free.
    pub fn free_bytes(&self) -> u64 {
        self.free.iter().map(|(start, end)| end - start).sum()
    }

    /// The free ranges, ascending and not adjacent.
    pub fn free_ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.free.iter().map(|(start, end)| *start..*end)
    }
}

impl Pages for Blocks {
    fn allocate(&mut self, length: u64) -> Option<u64> {
        let length = length.max(PAGE_SIZE).next_power_of_two();
        let place = self.free.iter().rev().find_map(|(start, end)| {
            let block = end.checked_sub(length)? / length * length;
            (block >= *start).then_some((*start, *end, block))
        });
        let (start, end, block) = place?;
        self.free.remove(&start);
        if start < block {
            self.free.insert(start, block);
        }
        if block + length < end {
            self.free.insert(block + length, end);
        }
        Some(block)
    }

    fn free(&mut self, block: Range<u64>) {
        if block.is_empty() {
            return;
        }
        let (mut start, mut end) = (block.start, block.end);
        if let Some((before, its_end)) = self.free.range(..start).next_back().map(|(start, end)| (*start, *end))
            && its_end == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(its_end) = self.free.remove(&end) {
            end = its_end;
        }
        self.free.insert(start, end);
    }

    fn statistics(&self) -> Vec<(u16, u64)> {
        let free = self.free_bytes();
        vec![(4, free), (5, self.total), (6, free)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_come_from_the_top_and_join_again() {
        let mut blocks = Blocks::new(PAGE_SIZE..16 << 20);
        assert_eq!(blocks.allocate(4 << 20), Some(12 << 20));
        assert_eq!(blocks.allocate(PAGE_SIZE), Some((12 << 20) - PAGE_SIZE));
        assert_eq!(blocks.allocate(4 << 20), Some(4 << 20));
        assert_eq!(blocks.allocate(4 << 20), None);
        for block in [4 << 20..8 << 20, 12 << 20..16 << 20, (12 << 20) - PAGE_SIZE..12 << 20] {
            blocks.free(block);
        }
        let mut free = blocks.free_ranges();
        assert_eq!((free.next(), free.next()), (Some(PAGE_SIZE..16 << 20), None));
    }
}
