//! Host pages: what the destination's kernel places at once, 4 KiB or a huge page, by RAM block.
//!
//! A destination in postcopy collects a host page from its 4 KiB pages, which must follow each other on one channel,
//! and places it when it is whole. Its page sizes are the *destination's* affair: where a VM was saved says nothing
//! about them, so they are told to the source role, which has to announce exactly the destination's.

use std::collections::BTreeMap;

use limosa_page::PAGE_SIZE;
use limosa_stream::RamBlock;

use crate::error::MigrateError;

/// The blocks with the page sizes that the destination has, as a postcopy stream lists them.
pub(crate) fn with_page_sizes(
    blocks: &[RamBlock],
    page_sizes: &BTreeMap<String, u64>,
) -> Result<Vec<RamBlock>, MigrateError> {
    let unfit = |block: &str, page_size, why| MigrateError::PageSize { block: block.to_owned(), page_size, why };
    if let Some((name, size)) = page_sizes.iter().find(|(name, _)| !blocks.iter().any(|block| block.name == **name)) {
        return Err(unfit(name, *size, "the VM has no such block"));
    }
    let sized = blocks.iter().map(|block| {
        let size = page_sizes.get(&block.name).copied().unwrap_or(PAGE_SIZE);
        if !size.is_power_of_two() || size < PAGE_SIZE {
            return Err(unfit(&block.name, size, "a page size is a power of two of at least 4096"));
        }
        // The last host page would never be whole, and QEMU refuses postcopy with such a block for the same reason.
        if !block.used_length.is_multiple_of(size) {
            return Err(unfit(&block.name, size, "the block's length is no multiple of it"));
        }
        Ok(RamBlock { page_size: Some(size), address: None, ..block.clone() })
    });
    sized.collect()
}

/// 4 KiB pages of one host page of such a block.
pub(crate) fn pages_of(block: &RamBlock) -> u64 {
    (block.page_size.unwrap_or(PAGE_SIZE) / PAGE_SIZE).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(of: &[(&str, u64)]) -> BTreeMap<String, u64> {
        of.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect()
    }

    #[test]
    fn blocks_get_the_sizes_of_the_destination_and_4_kib_where_none_is_reported() {
        let here = RamBlock { page_size: Some(1 << 30), ..RamBlock::new("mem", 4 << 20) };
        let blocks = with_page_sizes(&[here, RamBlock::new("vga", 0x3000)], &sizes(&[("mem", 2 << 20)])).unwrap();
        assert_eq!(blocks.iter().map(|block| block.page_size).collect::<Vec<_>>(), [Some(2 << 20), Some(4096)]);
        assert_eq!(blocks.iter().map(pages_of).collect::<Vec<_>>(), [512, 1]);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_by_name() {
        let blocks = [RamBlock::new("mem", 3 << 20)];
        for (name, size, why) in [
            ("mem", 2 << 20, "no multiple"),
            ("mem", 3 << 19, "power of two"),
            ("mem", 0, "power of two"),
            ("mem", 2048, "power of two"),
            ("mem", 1 << 63, "no multiple"),
            ("ram", 4096, "no such block"),
        ] {
            let said = with_page_sizes(&blocks, &sizes(&[(name, size)])).unwrap_err().to_string();
            assert!(said.contains(why) && said.contains(name) && said.contains(&size.to_string()), "{said}");
        }
    }
}
