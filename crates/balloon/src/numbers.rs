//! Arrays of page numbers: decoded, sorted, merged into runs.
//!
//! Linux sends up to 256 numbers an array, ascending or descending; a balloon of gigabytes is some hundred thousand
//! pages, and a system call for each would be most of the work. Sorted and merged, an idle guest's array is one or two
//! runs.

use std::ops::Range;

use limosa_page::PAGE_SIZE;

/// Runs of pages, and the number of page numbers that were left out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Runs {
    /// Guest-physical ranges of bytes in RAM, ascending and not adjacent.
    pub(crate) runs: Vec<Range<u64>>,
    /// Pages of all runs.
    pub(crate) pages: u64,
    /// Numbers of pages that are not in RAM as a whole.
    pub(crate) outside: u64,
}

/// Decodes little-endian page numbers (4 KiB each); an incomplete number at the end is ignored.
pub(crate) fn decode(bytes: &[u8], numbers: &mut Vec<u32>) {
    numbers.clear();
    numbers.extend(bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)));
}

/// Sorts page numbers, leaves out duplicates and numbers that are not in `ram` (ascending, not adjacent), and merges
/// neighbours. A run never extends beyond its range of `ram`.
pub(crate) fn runs(numbers: &mut Vec<u32>, ram: &[Range<u64>]) -> Runs {
    let mut found = Runs::default();
    numbers.sort_unstable();
    numbers.dedup();
    let mut ranges = ram.iter().peekable();
    for number in &*numbers {
        let start = u64::from(*number) * PAGE_SIZE;
        let end = start + PAGE_SIZE;
        while ranges.next_if(|range| range.end <= start).is_some() {}
        let Some(range) = ranges.peek().filter(|range| range.start <= start && end <= range.end) else {
            found.outside += 1;
            continue;
        };
        found.pages += 1;
        match found.runs.last_mut() {
            Some(last) if last.end == start && range.start < start => last.end = end,
            _ => found.runs.push(start..end),
        }
    }
    found
}

/// A range of bytes from the guest, if it consists of whole pages and is in one range of `ram` (ascending, not
/// adjacent).
pub(crate) fn inside(address: u64, length: u64, ram: &[Range<u64>]) -> Option<Range<u64>> {
    let end = address.checked_add(length)?;
    let whole = length > 0 && address.is_multiple_of(PAGE_SIZE) && length.is_multiple_of(PAGE_SIZE);
    let behind = ram.partition_point(|range| range.start <= address);
    let range = ram.get(behind.checked_sub(1)?)?;
    (whole && end <= range.end).then_some(address..end)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = PAGE_SIZE;

    #[test]
    fn numbers_in_any_order_become_runs() {
        let ram = [0..64 * PAGE];
        let mut numbers = vec![9, 3, 5, 4, 9, 8, 63];
        let found = runs(&mut numbers, &ram);
        assert_eq!(found.runs, [3 * PAGE..6 * PAGE, 8 * PAGE..10 * PAGE, 63 * PAGE..64 * PAGE]);
        assert_eq!((found.pages, found.outside), (6, 0));
    }

    #[test]
    fn what_is_not_in_ram_is_left_out_and_no_run_leaves_its_range() {
        let ram = [2 * PAGE..4 * PAGE, 4 * PAGE..6 * PAGE, 1 << 32..(1 << 32) + PAGE];
        let mut numbers = vec![0, 1, 2, 3, 4, 5, 6, 1 << 20, (1 << 20) + 1, u32::MAX];
        let found = runs(&mut numbers, &ram);
        assert_eq!(found.runs, ram);
        assert_eq!((found.pages, found.outside), (5, 5));
    }

    #[test]
    fn a_range_of_bytes_is_of_whole_pages_in_one_piece_of_ram() {
        let ram = [PAGE..4 * PAGE, 4 * PAGE..8 * PAGE];
        assert_eq!(inside(PAGE, 3 * PAGE, &ram), Some(PAGE..4 * PAGE));
        assert_eq!(inside(6 * PAGE, 2 * PAGE, &ram), Some(6 * PAGE..8 * PAGE));
        for (address, length) in [
            (PAGE, 4 * PAGE),
            (0, PAGE),
            (PAGE + 1, PAGE),
            (PAGE, PAGE - 1),
            (PAGE, 0),
            (8 * PAGE, PAGE),
            (u64::MAX - PAGE + 1, PAGE),
        ] {
            assert_eq!(inside(address, length, &ram), None, "{address:#x} {length:#x}");
        }
        assert_eq!(inside(0, PAGE, &[]), None);
    }

    proptest! {
        #[test]
        fn runs_are_the_set_of_numbers_that_are_in_ram(
            numbers in proptest::collection::vec(0u32..40, 0..60),
            cuts in proptest::collection::btree_set(0u64..40, 0..8),
        ) {
            let cuts: Vec<_> = cuts.into_iter().collect();
            let ram: Vec<_> = cuts.chunks_exact(2).map(|cut| cut[0] * PAGE..cut[1] * PAGE).collect();
            let mut sorted = numbers.clone();
            let found = runs(&mut sorted, &ram);
            let all: BTreeSet<u64> = numbers.iter().map(|number| u64::from(*number)).collect();
            let is_ram = |page: &u64| ram.iter().any(|range| range.contains(&(page * PAGE)));
            let expected: Vec<u64> = all.iter().copied().filter(is_ram).collect();
            let got: Vec<u64> = found.runs.iter().flat_map(|run| run.start / PAGE..run.end / PAGE).collect();
            prop_assert_eq!(&got, &expected);
            prop_assert_eq!(found.pages, expected.len() as u64);
            prop_assert_eq!(found.outside, (all.len() - expected.len()) as u64);
            for run in &found.runs {
                prop_assert!(inside(run.start, run.end - run.start, &ram).is_some());
            }
            // As few as possible.
            for pair in found.runs.windows(2) {
                prop_assert!(pair[0].end < pair[1].start || !ram.iter().any(|range| range.contains(&(pair[1].start - 1)) && range.contains(&pair[1].start)));
            }
        }
    }
}
