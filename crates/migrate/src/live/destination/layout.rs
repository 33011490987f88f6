//! The source's RAM blocks, found among those of the VM here.
//!
//! The law: **not a page is accepted before the layouts are known to be the same**: the same names, in any
//! order, the same lengths, and where the source says what pages its memory is made of, the same sizes.

use limosa_memory::{GuestMemory, MemoryBlock};
use limosa_page::PAGE_SIZE;
use limosa_stream::{PageSizes, RamBlock};

/// The first difference between the source's memory and the VM's here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutDifference {
    /// The source has a block that is not here.
    #[error("RAM block {name:?} of {length} bytes is not here (here are {here})")]
    Missing {
        /// Its name.
        name: String,
        /// Its length in bytes.
        length: u64,
        /// The names here.
        here: String,
    },

    /// A block here is not at the source.
    #[error("RAM block {name:?} of {length} bytes is only here")]
    Surplus {
        /// Its name.
        name: String,
        /// Its length in bytes.
        length: u64,
    },

    /// A block has another length.
    #[error("RAM block {name:?} has {} bytes at the source and {length} here", .source_length)]
    Length {
        /// Its name.
        name: String,
        /// Bytes at the source.
        source_length: u64,
        /// Bytes here.
        length: u64,
    },

    /// A block is made of other pages.
    #[error(
        "RAM block {name:?} is made of pages of {} bytes at the source and of {size} here; postcopy needs the same at \
         both ends",
        .source_size
    )]
    PageSize {
        /// Its name.
        name: String,
        /// Bytes at the source.
        source_size: u64,
        /// Bytes here.
        size: u64,
    },

    /// Memory that both ends have is at another address.
    #[error("shared RAM block {name:?} has region address {:#x} at the source and {address:#x} here", .source_address)]
    Address {
        /// Its name.
        name: String,
        /// Address at the source.
        source_address: u64,
        /// Address here.
        address: u64,
    },

    /// The guest has other pages.
    #[error("the source's guest has pages of {} bytes, and 4096 are expected", .source_size)]
    TargetPageSize {
        /// Bytes.
        source_size: u64,
    },
}

/// For each block of the stream its index among the blocks here. `advised`: what the source announced for postcopy.
///
/// # Errors
/// The first difference.
pub(super) fn blocks_here(
    stream: &[RamBlock],
    memory: &GuestMemory,
    advised: Option<PageSizes>,
) -> Result<Vec<usize>, LayoutDifference> {
    if let Some(source_size) = advised.map(|sizes| sizes.target).filter(|size| *size != PAGE_SIZE) {
        return Err(LayoutDifference::TargetPageSize { source_size });
    }
    let found: Result<Vec<usize>, _> = stream.iter().map(|block| find(block, memory, advised.is_some())).collect();
    let found = found?;
    // Names differ within the stream and within the memory, so what is left over is only here.
    match memory.blocks().iter().enumerate().find(|(index, _)| !found.contains(index)) {
        Some((_, block)) => Err(LayoutDifference::Surplus { name: block.name().to_owned(), length: block.len() }),
        None => Ok(found),
    }
}

/// Whether a block that both ends have lies where it does at the source.
///
/// # Errors
/// It does not.
pub(super) fn check_address(block: &RamBlock, here: &MemoryBlock) -> Result<(), LayoutDifference> {
    let address = here.region_address();
    match block.address.filter(|source| *source != address) {
        Some(source_address) => Err(LayoutDifference::Address { name: block.name.clone(), source_address, address }),
        None => Ok(()),
    }
}

fn find(block: &RamBlock, memory: &GuestMemory, advised: bool) -> Result<usize, LayoutDifference> {
    let name = block.name.clone();
    let index = memory.index_of(&name).and_then(|index| Some((index, memory.blocks().get(index)?)));
    let Some((index, here)) = index else {
        let names: Vec<_> = memory.blocks().iter().map(|block| format!("{:?}", block.name())).collect();
        return Err(LayoutDifference::Missing { name, length: block.used_length, here: names.join(", ") });
    };
    if block.used_length != here.len() {
        return Err(LayoutDifference::Length { name, source_length: block.used_length, length: here.len() });
    }
    // A size is only named where it is not 4096; and only a source that announced sizes names any.
    let source_size = block.page_size.or(advised.then_some(PAGE_SIZE));
    match source_size.filter(|size| *size != here.page_size()) {
        Some(source_size) => Err(LayoutDifference::PageSize { name, source_size, size: here.page_size() }),
        None => Ok(index),
    }
}

#[cfg(test)]
mod tests {
    use limosa_memory::BlockOptions;

    use super::*;

    fn memory(blocks: &[(&str, u64)]) -> GuestMemory {
        GuestMemory::new(
            blocks.iter().map(|(name, length)| BlockOptions::anonymous(*name, *length).map().unwrap()).collect(),
        )
        .unwrap()
    }

    fn stream(blocks: &[(&str, u64)]) -> Vec<RamBlock> {
        blocks.iter().map(|(name, length)| RamBlock::new(*name, *length)).collect()
    }

    #[test]
    fn blocks_are_found_by_name_in_any_order() {
        let here = memory(&[("ram", 0x4000), ("vga", 0x1000), ("rom", 0x2000)]);
        let found = blocks_here(&stream(&[("rom", 0x2000), ("ram", 0x4000), ("vga", 0x1000)]), &here, None);
        assert_eq!(found, Ok(vec![2, 0, 1]));
    }

    #[test]
    fn each_difference_is_named() {
        let here = memory(&[("ram", 0x4000), ("vga", 0x1000)]);
        for (blocks, said) in [
            (vec![("ram", 0x4000), ("vgb", 0x1000)], r#""vgb" of 4096 bytes is not here (here are "ram", "vga")"#),
            (vec![("ram", 0x4000)], r#""vga" of 4096 bytes is only here"#),
            (vec![("ram", 0x5000), ("vga", 0x1000)], "20480 bytes at the source and 16384 here"),
            (vec![("ram", 0x4000), ("vga", 0x1000), ("x", 0)], r#""x" of 0 bytes is not here"#),
        ] {
            let error = blocks_here(&stream(&blocks), &here, None).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn page_sizes_count_only_where_postcopy_may_follow() {
        let here = memory(&[("ram", 2 << 20)]);
        let huge = vec![RamBlock { page_size: Some(2 << 20), ..RamBlock::new("ram", 2 << 20) }];
        let sizes = |target| Some(PageSizes { summary: 4096, target });
        assert!(matches!(blocks_here(&huge, &here, sizes(4096)), Err(LayoutDifference::PageSize { .. })));
        assert_eq!(blocks_here(&stream(&[("ram", 2 << 20)]), &here, sizes(4096)), Ok(vec![0]));
        let other = blocks_here(&stream(&[("ram", 2 << 20)]), &here, sizes(65536));
        assert_eq!(other, Err(LayoutDifference::TargetPageSize { source_size: 65536 }));
    }
}
