//! A VM's RAM blocks, and their guest-physical addresses.

use std::collections::BTreeSet;
use std::sync::Arc;

use limosa_page::{PAGE_SIZE, PageNumber, PageRange};

use crate::block::MemoryBlock;
use crate::discarding::Discardable;
use crate::error::MemoryError;
use crate::layout::{GuestLayout, GuestRegion};

/// All RAM blocks of a VM, in stream order.
#[derive(Debug)]
pub struct GuestMemory {
    blocks: Vec<MemoryBlock>,
    regions: Vec<GuestRegion>,
}

impl GuestMemory {
    /// Creates the memory of a VM with its first block at guest address 0, and the others unmapped.
    ///
    /// # Errors
    /// No block, or two with the same name.
    pub fn new(blocks: Vec<MemoryBlock>) -> Result<Self, MemoryError> {
        let pages = blocks.first().map_or(PageRange::whole_block(0), MemoryBlock::pages);
        Self::with_regions(blocks, vec![GuestRegion { guest_address: 0, block: 0, pages }])
    }

    /// Creates the memory of a VM with its blocks at these guest addresses.
    ///
    /// # Errors
    /// No block, two with the same name, a region outside its block or not on a page boundary, or two regions that
    /// overlap.
    pub fn with_regions(blocks: Vec<MemoryBlock>, mut regions: Vec<GuestRegion>) -> Result<Self, MemoryError> {
        let layout = |block: &str, why: String| Err(MemoryError::Layout { block: block.to_owned(), why });
        if blocks.is_empty() {
            return layout("(none)", "a VM has at least one block".into());
        }
        let mut names = BTreeSet::new();
        if let Some(block) = blocks.iter().find(|block| !names.insert(block.name())) {
            return layout(block.name(), "there are two blocks with this name".into());
        }
        regions.sort_by_key(|region| region.guest_address);
        let mut end = 0;
        for region in &regions {
            let block = blocks.get(region.block).ok_or(MemoryError::NoBlock { index: region.block })?;
            let at = region.guest_address;
            if region.pages.is_empty() || region.pages.end > block.pages().end {
                return layout(block.name(), format!("the region at guest address {at:#x} is not inside it"));
            }
            if !at.is_multiple_of(PAGE_SIZE) {
                return layout(block.name(), format!("the region at guest address {at:#x} does not begin with a page"));
            }
            let length = region.pages.bytes().end - region.pages.bytes().start;
            match at.checked_add(length) {
                Some(next) if at >= end => end = next,
                _ => return layout(block.name(), format!("the region at guest address {at:#x} overlaps another")),
            }
        }
        Ok(Self { blocks, regions })
    }

    /// Returns the blocks.
    pub fn blocks(&self) -> &[MemoryBlock] {
        &self.blocks
    }

    /// Returns a block by its index.
    ///
    /// # Errors
    /// [`MemoryError::NoBlock`].
    pub fn block(&self, index: usize) -> Result<&MemoryBlock, MemoryError> {
        self.blocks.get(index).ok_or(MemoryError::NoBlock { index })
    }

    /// Returns the index of a block by its name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.blocks.iter().position(|block| block.name() == name)
    }

    /// Returns the guest-physical regions, ascending by address.
    pub fn regions(&self) -> &[GuestRegion] {
        &self.regions
    }

    /// Returns a copy of the regions that outlives the memory.
    pub fn layout(&self) -> GuestLayout {
        GuestLayout::new(&self.regions)
    }

    /// Returns the blocks, for a log that must learn of their discards.
    pub(crate) fn discardable(&self) -> Discardable {
        let of = |block: &MemoryBlock| (Arc::clone(block.discards()), block.pages().len());
        Discardable::new(self.blocks.iter().map(of))
    }

    /// Returns the number of pages of all blocks.
    pub fn total_pages(&self) -> u64 {
        self.blocks.iter().map(|block| block.pages().len()).sum()
    }

    /// Returns the block and page at a guest-physical address.
    pub fn page_at(&self, guest_address: u64) -> Option<(usize, PageNumber)> {
        let behind = self.regions.partition_point(|region| region.guest_address <= guest_address);
        let region = self.regions.get(behind.checked_sub(1)?)?;
        let page = PageNumber::containing(guest_address - region.guest_address);
        let page = region.pages.start.checked_add(page.0).filter(|page| *page < region.pages.end)?;
        Some((region.block, page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlockOptions;

    fn refused(regions: &[(usize, u64, PageRange)]) -> String {
        let blocks = ["a", "b"].map(|name| BlockOptions::anonymous(name, 16 * PAGE_SIZE).map().unwrap());
        let region = |(block, guest_address, pages): &_| GuestRegion {
            guest_address: *guest_address,
            block: *block,
            pages: *pages,
        };
        GuestMemory::with_regions(blocks.into(), regions.iter().map(region).collect()).unwrap_err().to_string()
    }

    #[test]
    fn regions_that_no_guest_can_see_are_refused() {
        let pages = PageRange::whole_block(16);
        // A log of guest-physical pages would name the wrong ones.
        let unaligned = refused(&[(0, 0x800, pages)]);
        assert!(unaligned.contains("at guest address 0x800 does not begin with a page"), "{unaligned}");
        let overlapping = refused(&[(0, 0, pages), (1, 15 * PAGE_SIZE, pages)]);
        assert!(overlapping.contains("overlaps another"), "{overlapping}");
        let outside = refused(&[(0, 0, PageRange::whole_block(17))]);
        assert!(outside.contains("is not inside it"), "{outside}");
        let behind = refused(&[(0, u64::MAX - 0xfff, pages)]);
        assert!(behind.contains("overlaps another"), "{behind}");
        assert!(refused(&[(2, 0, pages)]).contains('2'));
    }
}
