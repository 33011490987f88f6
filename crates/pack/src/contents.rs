//! The bytes of a mapped-ram file by what they are: pages, and everything else.
//!
//! Law: a page that is not stored is zeros, also if its place holds old bytes. Stored pages come verified, where there
//! are checksums.

use std::ops::Range;

use limosa_migrate::stored::PageSource as _;
use limosa_page::{PAGE_BITS, PAGE_SIZE, PageNumber, PageRange, to_usize};
use limosa_snapshot::{Snapshot, SnapshotError};

/// A stored VM as the bytes of its mapped-ram file.
#[derive(Debug)]
pub(crate) struct Contents<'a> {
    pub(crate) snapshot: &'a Snapshot,
    /// Places of the blocks' pages, in the order of the file.
    areas: Vec<Area>,
}

#[derive(Debug)]
struct Area {
    range: Range<u64>,
    block: usize,
}

/// A part of a range.
enum Part {
    /// Pages of a block.
    Pages { block: usize, pages: PageRange },
    /// Bytes that are no pages, or parts of some.
    Bytes,
}

impl<'a> Contents<'a> {
    pub(crate) fn new(snapshot: &'a Snapshot) -> Self {
        let blocks = snapshot.layout().blocks.iter().enumerate();
        let mut areas: Vec<_> = blocks.map(|(block, place)| Area { range: place.pages_range(), block }).collect();
        areas.retain(|area| !area.range.is_empty());
        areas.sort_by_key(|area| area.range.start);
        Self { snapshot, areas }
    }

    /// Bytes of the file.
    pub(crate) fn length(&self) -> u64 {
        self.snapshot.length()
    }

    /// Whether a range may have anything but zeros.
    pub(crate) fn has_data(&self, range: &Range<u64>) -> bool {
        self.parts(range).any(|(_, part)| match part {
            Part::Bytes => true,
            Part::Pages { block, pages } => {
                self.snapshot.stored_bitmap(block).next_set(pages.start).is_some_and(|page| page < pages.end)
            }
        })
    }

    /// Reads a range; what is behind the end is zeros.
    pub(crate) fn read(&self, range: &Range<u64>, into: &mut [u8]) -> Result<(), SnapshotError> {
        into.fill(0);
        for (bytes, part) in self.parts(range) {
            let place = to_usize(bytes.start - range.start)..to_usize(bytes.end - range.start);
            let Some(into) = into.get_mut(place) else { continue };
            match part {
                Part::Bytes => self.snapshot.read_bytes(bytes.start, into)?,
                Part::Pages { block, pages } => {
                    let stored = self.snapshot.stored_bitmap(block);
                    if stored.next_set(pages.start).is_some_and(|page| page < pages.end) {
                        self.snapshot.read_pages(block, pages, into)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads a range as it is in the file, old bytes included: an increment falls back to exactly these.
    pub(crate) fn read_raw(&self, range: &Range<u64>, into: &mut [u8]) -> Result<(), SnapshotError> {
        let count = to_usize(self.length().saturating_sub(range.start)).min(into.len());
        let (there, behind) = into.split_at_mut(count);
        behind.fill(0);
        self.snapshot.read_bytes(range.start, there)
    }

    /// Number of stored pages in a range.
    pub(crate) fn stored_pages(&self, range: &Range<u64>) -> u64 {
        let stored = |(_, part)| match part {
            Part::Bytes => 0,
            Part::Pages { block, pages } => self.snapshot.stored_bitmap(block).count_in(pages),
        };
        self.parts(range).map(stored).sum()
    }

    /// The parts of a range that are in the file, in order.
    fn parts(&self, range: &Range<u64>) -> impl Iterator<Item = (Range<u64>, Part)> + '_ {
        let mut at = range.start;
        let end = range.end.min(self.length());
        let mut next = self.areas.partition_point(|area| area.range.end <= at);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let begin = at;
            let Some(area) = self.areas.get(next).filter(|area| area.range.start < end) else {
                at = end;
                return Some((begin..end, Part::Bytes));
            };
            if begin < area.range.start {
                at = area.range.start;
                return Some((begin..at, Part::Bytes));
            }
            at = area.range.end.min(end);
            if at == area.range.end {
                next += 1;
            }
            // Pages are at multiples of their size in the file as in the block, and so is what is asked for.
            let page = |offset: u64| PageNumber((offset - area.range.start) >> PAGE_BITS);
            let is_whole = begin.is_multiple_of(PAGE_SIZE) && at.is_multiple_of(PAGE_SIZE);
            let pages = PageRange::new(page(begin), page(at));
            Some((begin..at, if is_whole { Part::Pages { block: area.block, pages } } else { Part::Bytes }))
        })
    }
}

/// Why the pages of one snapshot are not in the places of the other's; `None`: they are.
pub(crate) fn layout_difference(one: &Snapshot, other: &Snapshot) -> Option<String> {
    let (one, other) = (&one.layout().blocks, &other.layout().blocks);
    if one.len() != other.len() {
        return Some(format!("it has {} RAM blocks, and the base has {}", one.len(), other.len()));
    }
    let differs = one
        .iter()
        .zip(other)
        .find(|(a, b)| (&a.block.name, a.pages, a.pages_offset) != (&b.block.name, b.pages, b.pages_offset));
    differs.map(|(a, b)| match a.block.name == b.block.name {
        true => format!("RAM block {} has another length or place than in the base", a.block.name),
        false => format!("it has RAM block {} where the base has {}", a.block.name, b.block.name),
    })
}
