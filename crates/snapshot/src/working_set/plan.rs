//! The parts of the file that are read ahead, in their order: a pure plan.

use std::ops::Range;

use limosa_page::{PAGE_SIZE, to_u64, to_usize};

use super::WorkingSet;
use crate::layout::Memory;

/// Bytes of the recorded order that are put into the order of the file: a disk reads neighbours together, and what the
/// guest needs first is still read first.
const SORTED: u64 = 32 << 20;
/// Bytes between two ranges that are read along with them: fewer than another request would cost.
const BRIDGED: u64 = 64 << 10;

impl WorkingSet {
    /// Plans the reads of this set from the file of a snapshot whose memory is `memory`: ranges of bytes, each of at
    /// most `piece`. Pages that are not stored are left out.
    pub(crate) fn plan(&self, memory: &Memory, piece: u64) -> Vec<Range<u64>> {
        let (mut planned, mut window, mut bytes) = (Vec::new(), Vec::new(), 0);
        for range in &self.ranges {
            let (Some(place), Some(stored)) = (memory.places.get(range.block), memory.stored.get(range.block)) else {
                continue;
            };
            for run in stored.runs_in(range.pages) {
                let start = place.offset(run);
                let length = run.len().saturating_mul(PAGE_SIZE);
                window.push(start..start.saturating_add(length));
                bytes += length;
                if bytes >= SORTED {
                    planned.extend(merged(std::mem::take(&mut window)));
                    bytes = 0;
                }
            }
        }
        planned.extend(merged(window));
        planned.into_iter().flat_map(|range| pieces(range, piece)).collect()
    }
}

/// Joins ranges that are near each other, in the order of the file.
fn merged(mut window: Vec<Range<u64>>) -> Vec<Range<u64>> {
    window.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(window.len());
    for range in window {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(BRIDGED) => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

fn pieces(range: Range<u64>, piece: u64) -> impl Iterator<Item = Range<u64>> {
    let step = to_usize(piece.max(PAGE_SIZE));
    let end = range.end;
    range.step_by(step).map(move |start| start..start.saturating_add(to_u64(step)).min(end))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use limosa_migrate::stored::BlockRange;
    use limosa_page::{PageBitmap, PageNumber, PageRange};
    use uuid::Uuid;

    use super::super::RecordedMode;
    use super::*;
    use crate::store::StoredRange;

    const PIECE: u64 = 1 << 20;

    fn memory() -> Memory {
        let place = |pages_offset| StoredRange { name: "ram".into(), pages: 100_000, pages_offset };
        Memory {
            places: vec![place(1 << 20), place(1 << 30)],
            stored: vec![PageBitmap::full(100_000), PageBitmap::full(100_000)],
        }
    }

    fn planned(ranges: &[(usize, u64, u64)]) -> Vec<(u64, u64)> {
        planned_of(&memory(), ranges)
    }

    /// The plan as (page of the file, pages).
    fn planned_of(memory: &Memory, ranges: &[(usize, u64, u64)]) -> Vec<(u64, u64)> {
        let ranges = ranges.iter().map(|(block, first, pages)| BlockRange {
            block: *block,
            pages: PageRange::starting_at(PageNumber(*first), *pages),
        });
        let set = WorkingSet {
            snapshot: Uuid::nil(),
            mode: RecordedMode::Mapped,
            begun: 0,
            duration: Duration::ZERO,
            ranges: ranges.collect(),
        };
        set.plan(memory, PIECE).into_iter().map(|range| (range.start >> 12, (range.end - range.start) >> 12)).collect()
    }

    #[test]
    fn near_ranges_are_read_together_in_the_order_of_the_file() {
        assert_eq!(planned(&[(0, 40, 2), (0, 10, 2), (0, 0, 4)]), [(256, 12), (256 + 40, 2)]);
        assert_eq!(planned(&[(1, 0, 1), (0, 0, 1)]), [(256, 1), (1 << 18, 1)]);
    }

    #[test]
    fn a_large_range_is_read_in_pieces() {
        assert_eq!(planned(&[(0, 0, 600)]), [(256, 256), (512, 256), (768, 88)]);
    }

    #[test]
    fn what_was_touched_much_later_is_read_later() {
        let all = planned(&[(0, 50_000, 8192), (0, 0, 8)]);
        assert_eq!(all.first(), Some(&(256 + 50_000, 256)));
        assert_eq!(all.last(), Some(&(256, 8)));
    }

    #[test]
    fn pages_that_are_not_stored_are_not_read() {
        let mut memory = memory();
        memory.stored[0] = PageBitmap::new(100_000);
        memory.stored[0].set_range(PageRange::starting_at(PageNumber(100), 4));
        assert_eq!(planned_of(&memory, &[(0, 0, 1000), (2, 0, 4)]), [(356, 4)]);
    }
}
