//! Returning the memory of pages that the guest does not need to the host.
//!
//! **Law: never a byte outside the guest's own blocks.** The device names guest-physical ranges that are in one range
//! of [`Reclaim::ram`]; a [`GuestRam`] finds their block and passes its pages to limosa-memory, which checks them again
//! and waits for borrowed parts of the block.
//!
//! # Which call
//!
//! | [`Strategy`] | call | for |
//! |---|---|---|
//! | `Auto` | that of `MemoryBlock::discard` | any memory, freed for good; of a private copy of a file only its holes |
//! | `Method(PunchHole)` | `fallocate(FALLOC_FL_PUNCH_HOLE)` | memfd, tmpfs, hugetlbfs: what vhost-user front ends share |
//! | `Method(Remove)` | `madvise(MADV_REMOVE)` | the same through the mapping |
//! | `Method(DontNeed)` | `madvise(MADV_DONTNEED)` | private memory without a file |
//! | `Method(Free)` | `madvise(MADV_FREE)` | private memory without a file, taken only when the host is short of it |
//! | `Nothing` | none | memory that may not move: pinned for a device that is passed through |
//!
//! Measured (`examples/discard.rs`; 256 MiB of touched memory, least of five rounds, two virtual cores, Linux 6.18): a
//! memfd takes 267 ms page by page and 57 ms in runs of 1 MiB, by `fallocate` as by `MADV_REMOVE`; private memory 103
//! ms and 18 ms, by `MADV_DONTNEED` as by `MADV_FREE`. Touching memory again after `MADV_FREE` costs a fifth of what it
//! costs after the others, because the host has not received it: so `Auto` never chooses `MADV_FREE`.
//!
//! Discarded pages of a private mapping of a file show the contents of the file again, and a guest that fills its free
//! pages with zeros (`init_on_free=1`) relies on zeros. Writing zeros would allocate memory where a balloon should free
//! it. So only pages in holes of the file are discarded, and the rest is unchanged.
//!
//! Pages of 4 KiB inside a host's huge page are given back when the huge page is free as a whole, and kept until then.

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use limosa_memory::{GuestMemory, MemoryBlock, MemoryError, ReleaseMethod};
use limosa_page::{PAGE_SIZE, PageNumber, PageRange, holes};

/// Gives memory back to the host.
pub trait Reclaim: Send + Sync + fmt::Debug {
    /// Guest-physical ranges of bytes that are RAM, ascending and not adjacent.
    fn ram(&self) -> &[Range<u64>];

    /// Size in bytes of the host pages that hold the memory of `ram()[index]`, 4096 or more.
    fn host_page_size(&self, index: usize) -> u64;

    /// Gives back what it can of `run`: whole pages that are in one range of [`ram`](Self::ram). They read as zero
    /// afterwards, or are unchanged. Returns the number of bytes that were given back. It may wait, but not for the
    /// guest.
    ///
    /// # Errors
    /// The kernel's refusal.
    fn discard(&self, run: &Range<u64>) -> Result<u64, MemoryError>;
}

/// How memory is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Strategy {
    /// According to the kind of memory.
    #[default]
    Auto,
    /// By this method, where the memory [takes](limosa_memory::MemoryBlock::supports_release) it; where it does not,
    /// not at all.
    Method(ReleaseMethod),
    /// Not at all.
    Nothing,
}

/// A guest's memory in limosa-memory.
#[derive(Debug)]
pub struct GuestRam {
    memory: Arc<GuestMemory>,
    ram: Vec<Range<u64>>,
    strategy: Strategy,
}

impl GuestRam {
    /// All of this memory that the guest sees.
    pub fn new(memory: Arc<GuestMemory>, strategy: Strategy) -> Self {
        let regions = memory.regions().iter();
        let ram = regions.map(|region| {
            let start = region.guest_address;
            start..start.saturating_add(region.pages.len().saturating_mul(PAGE_SIZE))
        });
        let ram = ram.collect();
        Self { memory, ram, strategy }
    }
}

impl Reclaim for GuestRam {
    fn ram(&self) -> &[Range<u64>] {
        &self.ram
    }

    fn host_page_size(&self, index: usize) -> u64 {
        let region = self.memory.regions().get(index);
        let block = region.and_then(|region| self.memory.block(region.block).ok());
        block.map_or(PAGE_SIZE, MemoryBlock::page_size)
    }

    fn discard(&self, run: &Range<u64>) -> Result<u64, MemoryError> {
        let pages = PageRange::inside_bytes(run).len();
        let Some((index, first)) = self.memory.page_at(run.start).filter(|_| pages > 0) else { return Ok(0) };
        let block = self.memory.block(index)?;
        let pages = PageRange::starting_at(first, pages);
        let given_back = match self.strategy {
            Strategy::Auto => match block.file() {
                Some((file, offset)) if !block.is_shared() => discard_holes(block, pages, file, offset)?,
                _ => discard_whole(block, pages)?,
            },
            Strategy::Method(method) if block.supports_release(method) => block.release(pages, method)?,
            Strategy::Method(_) | Strategy::Nothing => 0,
        };
        Ok(given_back.saturating_mul(PAGE_SIZE))
    }
}

/// Only whole host pages: the rest keeps its contents, instead of being overwritten with zeros.
fn discard_whole(block: &MemoryBlock, pages: PageRange) -> Result<u64, MemoryError> {
    let host = (block.page_size() / PAGE_SIZE).max(1);
    let start = PageNumber(pages.start.0.div_ceil(host).saturating_mul(host));
    let whole = PageRange::new(start, PageNumber(pages.end.0 / host * host));
    if whole.is_empty() { Ok(0) } else { Ok(block.discard(whole)?.given_back) }
}

/// The pages that read as zero when they are discarded from a private mapping of a file.
fn discard_holes(block: &MemoryBlock, pages: PageRange, file: BorrowedFd<'_>, offset: u64) -> Result<u64, MemoryError> {
    let kernel =
        |source| MemoryError::Kernel { block: block.name().to_owned(), operation: "lseek, to find holes", source };
    let (mut given_back, mut from) = (0, pages.start);
    for data in holes::data_pages(file, offset, pages).map_err(kernel)? {
        let data = data.map_err(kernel)?;
        given_back += discard_whole(block, PageRange::new(from, data.start))?;
        from = data.end;
    }
    Ok(given_back + discard_whole(block, PageRange::new(from, pages.end))?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use limosa_memory::{BlockOptions, GuestRegion};

    use super::*;

    /// Two blocks of 16 pages, the second one's upper half seen below the first one.
    fn memory() -> Arc<GuestMemory> {
        let blocks = vec![
            BlockOptions::memfd("a", 16 * PAGE_SIZE).map().unwrap(),
            BlockOptions::anonymous("b", 16 * PAGE_SIZE).map().unwrap(),
        ];
        for block in &blocks {
            block.write(0, &vec![7; 16 << 12]).unwrap();
        }
        let upper = PageRange::new(PageNumber(8), PageNumber(16));
        let regions = vec![
            GuestRegion { guest_address: 8 * PAGE_SIZE, block: 0, pages: PageRange::whole_block(16) },
            GuestRegion { guest_address: 0, block: 1, pages: upper },
        ];
        Arc::new(GuestMemory::with_regions(blocks, regions).unwrap())
    }

    /// Pages of a block that read as zero.
    fn zeros(memory: &GuestMemory, block: usize) -> Vec<u64> {
        let block = memory.block(block).unwrap();
        let zero = |page: &PageNumber| {
            let mut bytes = [1; 4096];
            block.read(page.offset(), &mut bytes).unwrap();
            assert!(bytes == [0; 4096] || bytes == [7; 4096]);
            bytes[0] == 0
        };
        block.pages().iter().filter(zero).map(|page| page.0).collect()
    }

    #[test]
    fn a_run_is_given_back_where_the_guest_sees_it() {
        let memory = memory();
        let ram = GuestRam::new(Arc::clone(&memory), Strategy::Auto);
        assert_eq!(ram.ram(), [0..8 * PAGE_SIZE, 8 * PAGE_SIZE..24 * PAGE_SIZE]);
        assert_eq!(ram.discard(&(PAGE_SIZE..3 * PAGE_SIZE)).unwrap(), 2 * PAGE_SIZE);
        assert_eq!(ram.discard(&(10 * PAGE_SIZE..11 * PAGE_SIZE)).unwrap(), PAGE_SIZE);
        assert_eq!((zeros(&memory, 0), zeros(&memory, 1)), (vec![2], vec![9, 10]));
    }

    #[test]
    fn a_method_that_the_memory_does_not_take_and_none_leave_it_alone() {
        let memory = memory();
        for strategy in [Strategy::Method(ReleaseMethod::DontNeed), Strategy::Nothing] {
            let ram = GuestRam::new(Arc::clone(&memory), strategy);
            assert_eq!(ram.discard(&(8 * PAGE_SIZE..12 * PAGE_SIZE)).unwrap(), 0);
        }
        assert!(zeros(&memory, 0).is_empty());
        let ram = GuestRam::new(Arc::clone(&memory), Strategy::Method(ReleaseMethod::Remove));
        assert_eq!(ram.discard(&(8 * PAGE_SIZE..12 * PAGE_SIZE)).unwrap(), 4 * PAGE_SIZE);
        assert_eq!(zeros(&memory, 0), [0, 1, 2, 3]);
    }

    #[test]
    fn of_a_private_copy_of_a_file_only_what_lies_in_its_holes_is_given_back() {
        // Pages 4 to 7 of the file are a hole.
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * PAGE_SIZE).unwrap();
        file.write_all_at(&[5; 4 << 12], 0).unwrap();
        file.write_all_at(&[5; 8 << 12], 8 << 12).unwrap();
        let block = BlockOptions::file("pc.ram", 16 * PAGE_SIZE, file.into(), 0).private().map().unwrap();
        block.write(2 << 12, &[7; 8 << 12]).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![block]).unwrap());
        let first_bytes = || {
            (0..16u64).map(|page| {
                let mut byte = [1];
                memory.block(0).unwrap().read(page << 12, &mut byte).unwrap();
                byte[0]
            })
        };
        for strategy in [Strategy::Method(ReleaseMethod::DontNeed), Strategy::Method(ReleaseMethod::Free)] {
            let ram = GuestRam::new(Arc::clone(&memory), strategy);
            assert_eq!(ram.discard(&(0..16 * PAGE_SIZE)).unwrap(), 0, "the file would be seen again");
        }
        let ram = GuestRam::new(Arc::clone(&memory), Strategy::Auto);
        assert_eq!(ram.discard(&(PAGE_SIZE..16 * PAGE_SIZE)).unwrap(), 4 * PAGE_SIZE);
        let expected = [5, 5, 7, 7, 0, 0, 0, 0, 7, 7, 5, 5, 5, 5, 5, 5];
        assert!(first_bytes().eq(expected), "{:?}", first_bytes().collect::<Vec<_>>());
    }

    #[test]
    fn ranges_outside_of_memory_are_not_given_back() {
        let memory = memory();
        let ram = GuestRam::new(Arc::clone(&memory), Strategy::Auto);
        assert_eq!(ram.discard(&(1 << 40..(1 << 40) + PAGE_SIZE)).unwrap(), 0);
        assert_eq!(ram.discard(&(PAGE_SIZE..PAGE_SIZE)).unwrap(), 0);
        assert!(ram.discard(&(23 * PAGE_SIZE..25 * PAGE_SIZE)).is_err());
        assert_eq!((zeros(&memory, 0), zeros(&memory, 1)), (vec![], vec![]));
    }
}
