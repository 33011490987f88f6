//! The guest-physical layout of a VM's memory, independent of the memory itself.

use std::ops::Range;

use limosa_page::{PAGE_SIZE, PageNumber, PageRange};

/// Pages of a block at guest-physical addresses. A block may be mapped at several (RAM below and above 4 GiB), or at
/// none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestRegion {
    /// Guest-physical address of its first byte.
    pub guest_address: u64,
    /// Index of the block.
    pub block: usize,
    /// Pages of the block.
    pub pages: PageRange,
}

/// The guest-physical addresses of blocks: a copy of the regions of a [`GuestMemory`], for code that receives addresses
/// from a device.
///
/// [`GuestMemory`]: crate::GuestMemory
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GuestLayout {
    /// Ascending, without overlap.
    regions: Vec<GuestRegion>,
}

impl GuestLayout {
    /// Creates a layout of the regions of a [`GuestMemory`](crate::GuestMemory).
    pub(crate) fn new(regions: &[GuestRegion]) -> Self {
        Self { regions: regions.to_vec() }
    }

    /// Returns the pages that are wholly within a range of guest-physical bytes, by block, ascending by address.
    /// Addresses without memory and partial pages are ignored; any numbers are valid.
    pub fn pages_within(&self, bytes: Range<u64>) -> impl Iterator<Item = (usize, PageRange)> + use<'_> {
        let first = self.regions.partition_point(|region| end(region) <= bytes.start);
        let regions = self.regions[first..].iter();
        regions.take_while(move |region| region.guest_address < bytes.end).filter_map(move |region| {
            let from = bytes.start.saturating_sub(region.guest_address).div_ceil(PAGE_SIZE);
            let upto = bytes.end.saturating_sub(region.guest_address) / PAGE_SIZE;
            let page = |page: u64| PageNumber(region.pages.start.0.saturating_add(page).min(region.pages.end.0));
            let pages = PageRange::new(page(from), page(upto));
            (pages.start < pages.end).then_some((region.block, pages))
        })
    }
}

/// Returns the guest-physical end address of a region, which a checked region has.
fn end(region: &GuestRegion) -> u64 {
    region.guest_address.saturating_add(region.pages.len().saturating_mul(PAGE_SIZE))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{BlockOptions, GuestMemory};

    /// Two blocks of 64 pages, the first one below and above a hole, the second one behind it.
    fn memory() -> GuestMemory {
        let blocks = ["a", "b"].map(|name| BlockOptions::anonymous(name, 64 * PAGE_SIZE).map().unwrap());
        let region = |page: u64, block, start, count| GuestRegion {
            guest_address: page * PAGE_SIZE,
            block,
            pages: PageRange::starting_at(PageNumber(start), count),
        };
        GuestMemory::with_regions(blocks.into(), vec![region(1, 0, 0, 16), region(40, 0, 16, 48), region(88, 1, 3, 61)])
            .unwrap()
    }

    #[test]
    fn a_range_over_several_regions_names_the_pages_of_each() {
        let layout = memory().layout();
        let run = |start: u64, count| PageRange::starting_at(PageNumber(start), count);
        let found: Vec<_> = layout.pages_within(2 * PAGE_SIZE..90 * PAGE_SIZE).collect();
        assert_eq!(found, [(0, run(1, 15)), (0, run(16, 48)), (1, run(3, 2))]);
        // Parts of pages are not free.
        let found: Vec<_> = layout.pages_within(2 * PAGE_SIZE + 1..4 * PAGE_SIZE - 1).collect();
        assert_eq!(found, []);
        let all: u64 = layout.pages_within(0..u64::MAX).map(|(_, pages)| pages.len()).sum();
        assert_eq!(all, 125);
    }

    proptest! {
        #[test]
        fn any_numbers_name_only_pages_that_lie_within_them(start in any::<u64>(), end in any::<u64>(), near in any::<bool>()) {
            let (memory, layout) = (memory(), memory().layout());
            let (start, end) = if near { (start % (160 * PAGE_SIZE), end % (160 * PAGE_SIZE)) } else { (start, end) };
            let found: Vec<_> = layout.pages_within(start..end).flat_map(|(block, run)| run.iter().map(move |page| (block, page))).collect();
            let expected: Vec<_> = (0..160)
                .filter(|page| page * PAGE_SIZE >= start && (page + 1) * PAGE_SIZE <= end)
                .filter_map(|page| memory.page_at(page * PAGE_SIZE))
                .collect();
            prop_assert_eq!(found, expected);
        }
    }
}
