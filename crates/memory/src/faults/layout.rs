//! Addresses of registered blocks in the VM's process.
//!
//! Plain numbers, so that they can be sent to a pager in another process, where they are no addresses.

use std::ops::Range;

use limosa_page::{PAGE_SIZE, PageNumber, PageRange};

use super::{FaultError, FaultMode};

/// A registered block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultBlock {
    /// Address of its first byte in the VM's process.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// Size of a host page in bytes.
    pub page_size: u64,
    /// How its pages are placed.
    pub mode: FaultMode,
}

impl FaultBlock {
    /// Returns its pages.
    pub fn pages(&self) -> PageRange {
        PageRange::whole_block(self.length / PAGE_SIZE)
    }

    /// Returns its addresses.
    pub fn addresses(&self) -> Range<u64> {
        self.address..self.address.saturating_add(self.length)
    }

    /// Returns the number of 4 KiB pages in a host page.
    pub(super) fn host_pages(&self) -> u64 {
        (self.page_size / PAGE_SIZE).max(1)
    }

    /// Returns the addresses of pages; fails with a reason unless they are whole host pages of the block.
    pub(super) fn place(&self, pages: PageRange) -> Result<Range<u64>, &'static str> {
        if pages.is_empty() || pages.end > self.pages().end {
            return Err("they are outside the block");
        }
        if !pages.start.0.is_multiple_of(self.host_pages()) || !pages.end.0.is_multiple_of(self.host_pages()) {
            return Err("they are not whole host pages");
        }
        let bytes = pages.bytes();
        Ok(self.address.saturating_add(bytes.start)..self.address.saturating_add(bytes.end))
    }

    /// Returns the host pages with these addresses.
    fn pages_of(&self, addresses: &Range<u64>) -> PageRange {
        let own = self.addresses();
        let (start, end) = (addresses.start.max(own.start), addresses.end.min(own.end));
        let host = self.host_pages();
        let covered = PageRange::covering(&(start.saturating_sub(self.address)..end.saturating_sub(self.address)));
        let start = covered.start.0 / host * host;
        PageRange::new(PageNumber(start), PageNumber(covered.end.0.next_multiple_of(host))).intersect(self.pages())
    }
}

/// The blocks that are registered, by index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultLayout {
    blocks: Vec<Option<FaultBlock>>,
}

impl FaultLayout {
    /// Creates a layout of these blocks, `None` for those that are not registered.
    ///
    /// # Errors
    /// [`FaultError::Layout`]: an invalid page size, a block that is not whole host pages, or two blocks that overlap.
    pub fn new(blocks: Vec<Option<FaultBlock>>) -> Result<Self, FaultError> {
        let mut ends = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            let Some(block) = block else { continue };
            let layout = |why: &str| Err(FaultError::Layout { block: index, why: why.into() });
            if !block.page_size.is_power_of_two() || block.page_size < PAGE_SIZE {
                return layout("the page size is not a power of two of at least 4096");
            }
            if !block.length.is_multiple_of(block.page_size) || !block.address.is_multiple_of(block.page_size) {
                return layout("it does not begin or end with a host page");
            }
            if block.length == 0 || block.address.checked_add(block.length).is_none() {
                return layout("its length is 0 or more than there are addresses");
            }
            ends.push((index, block.addresses()));
        }
        ends.sort_by_key(|(_, addresses)| addresses.start);
        for pair in ends.windows(2) {
            if let [(_, before), (index, after)] = pair
                && after.start < before.end
            {
                return Err(FaultError::Layout { block: *index, why: "it overlaps another".into() });
            }
        }
        Ok(Self { blocks })
    }

    /// Returns the blocks, by index.
    pub fn blocks(&self) -> &[Option<FaultBlock>] {
        &self.blocks
    }

    /// Returns a registered block.
    pub fn block(&self, index: usize) -> Option<&FaultBlock> {
        self.blocks.get(index)?.as_ref()
    }

    /// Returns the layout with one more block.
    pub(super) fn with(&self, index: usize, block: FaultBlock) -> Result<Self, FaultError> {
        let mut blocks = self.blocks.clone();
        if blocks.len() <= index {
            blocks.resize(index + 1, None);
        }
        match blocks.get_mut(index) {
            Some(Some(_)) => Err(FaultError::Layout { block: index, why: "it is registered already".into() }),
            Some(place) => {
                *place = Some(block);
                Self::new(blocks)
            }
            None => Err(FaultError::Layout { block: index, why: "there is no such block".into() }),
        }
    }

    /// Returns the registered blocks with their indexes.
    pub(super) fn registered(&self) -> impl Iterator<Item = (usize, &FaultBlock)> {
        self.blocks.iter().enumerate().filter_map(|(index, block)| Some((index, block.as_ref()?)))
    }

    /// Returns the block and host page of an address.
    pub(super) fn host_page_at(&self, address: u64) -> Option<(usize, PageRange)> {
        self.pieces(&(address..address.saturating_add(1))).next()
    }

    /// Returns the host pages of all blocks with these addresses.
    pub(super) fn pieces(&self, addresses: &Range<u64>) -> impl Iterator<Item = (usize, PageRange)> {
        self.registered()
            .map(|(index, block)| (index, block.pages_of(addresses)))
            .filter(|(_, pages)| !pages.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block(address: u64, length: u64, page_size: u64) -> Option<FaultBlock> {
        Some(FaultBlock { address, length, page_size, mode: FaultMode::Missing })
    }

    #[test]
    fn a_layout_that_no_memory_has_is_refused() {
        let refused = |blocks: Vec<Option<FaultBlock>>| FaultLayout::new(blocks).unwrap_err().to_string();
        assert!(refused(vec![block(0x1000, 0x3000, 0x3000)]).contains("power of two"));
        assert!(refused(vec![block(0x1000, 0x1000, 512)]).contains("power of two"));
        assert!(refused(vec![block(0x1000, 0x20_0000, 0x20_0000)]).contains("host page"));
        assert!(refused(vec![block(0x1000, 0x1800, 0x1000)]).contains("host page"));
        assert!(refused(vec![block(0x1000, 0, 0x1000)]).contains("length is 0"));
        assert!(refused(vec![block(u64::MAX - 0xfff, 0x2000, 0x1000)]).contains("addresses"));
        assert!(
            refused(vec![
                block(0x4000, 0x2000, 0x1000),
                None,
                block(0x3000, 0x1001 & !0xfff, 0x1000),
                block(0x5000, 0x1000, 0x1000)
            ])
            .contains("overlaps")
        );
        assert!(FaultLayout::new(vec![None, block(0x3000, 0x1000, 0x1000), block(0x4000, 0x1000, 0x1000)]).is_ok());
    }

    #[test]
    fn pages_are_placed_only_as_whole_host_pages_of_the_block() {
        let huge = block(0x4000_0000, 0x40_0000, 0x20_0000).unwrap();
        let range = |start, end| PageRange::new(PageNumber(start), PageNumber(end));
        assert_eq!(huge.place(range(512, 1024)), Ok(0x4020_0000..0x4040_0000));
        for wrong in [range(0, 511), range(1, 512), range(512, 1536), range(0, 0), range(u64::MAX - 511, u64::MAX)] {
            assert!(huge.place(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn an_address_belongs_to_the_host_page_that_has_it(
            sizes in prop::collection::vec((1u64..6, prop::bool::ANY, 0u64..3), 1..6),
            at in 0u64..(40 << 21),
        ) {
            let mut next = 1u64 << 30;
            let mut blocks = Vec::new();
            for (host_pages, huge, gap) in sizes {
                let page_size = if huge { 2 << 20 } else { 4096 };
                next = next.next_multiple_of(page_size) + gap * page_size;
                blocks.push(block(next, host_pages * page_size, page_size));
                next += host_pages * page_size;
            }
            let layout = FaultLayout::new(blocks.clone()).unwrap();
            let address = (1 << 30) + at;
            let expected = blocks.iter().flatten().position(|block| block.addresses().contains(&address));
            let found = layout.host_page_at(address);
            prop_assert_eq!(found.map(|(index, _)| index), expected);
            if let Some((index, pages)) = found {
                let block = layout.block(index).unwrap();
                prop_assert_eq!(pages.len() * PAGE_SIZE, block.page_size);
                prop_assert!(block.place(pages).unwrap().contains(&address));
            }
        }
    }
}
