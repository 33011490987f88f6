//! A guest's pages in its RAM blocks: written as a guest writes, and looked at while it is paused.
//!
//! Pages are numbered over all blocks, in their order. The [heap](HEAP), behind all others, is not the guest's
//! own.
#![allow(unsafe_code, reason = "writes guest memory as a guest does: by volatile stores")]

use std::ops::Range;
use std::sync::Arc;

use limosa_memory::{GuestMemory, MemoryBlock};
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange, holes};

use super::built_in::Verified;
use super::error::GuestError;
use super::pattern::{Contents, Plan, WORDS};

/// Name of the RAM block that is the guest's [heap](super::heap), if it has one: the last one.
pub const HEAP: &str = "heap";

/// A page's expected and found contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Damage {
    pub(super) page: u64,
    pub(super) offset: usize,
    pub(super) generation: u64,
    pub(super) expected: u32,
    pub(super) found: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Ram {
    memory: Arc<GuestMemory>,
    /// Blocks in front that it is about.
    blocks: usize,
}

impl Ram {
    pub(super) fn new(memory: Arc<GuestMemory>) -> Self {
        let blocks = memory.index_of(HEAP).unwrap_or(memory.blocks().len());
        Self { memory, blocks }
    }

    /// With the heap.
    pub(super) fn whole(memory: Arc<GuestMemory>) -> Self {
        let blocks = memory.blocks().len();
        Self { memory, blocks }
    }

    pub(super) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    fn blocks(&self) -> &[MemoryBlock] {
        &self.memory.blocks()[..self.blocks]
    }

    /// How many there are.
    pub(super) fn pages(&self) -> u64 {
        self.blocks().iter().map(|block| block.pages().len()).sum()
    }

    /// Writes a page, by one store after the other.
    pub(super) fn store(&self, page: u64, contents: Contents) {
        let Some(words) = self.words_of(page) else { return };
        for pair in 0..WORDS / 2 {
            let value = u64::from(contents.word(2 * pair)) | u64::from(contents.word(2 * pair + 1)) << 32;
            // SAFETY: `words_of` gave the address of a whole page, which lives as long as `memory`, and every access to
            // it is one of a raw pointer.
            unsafe { words.add(pair).write_volatile(value.to_le()) };
        }
    }

    /// The first word of a page.
    pub(super) fn first_word(&self, page: u64) -> Option<u32> {
        let words = self.words_of(page)?;
        // SAFETY: as in `store`.
        Some(u32::from_le(unsafe { words.cast::<u32>().read_volatile() }))
    }

    /// Compares all pages from the plan's reserved ones on with what `plan` says they hold after `writes` of each
    /// writer.
    pub(super) fn verify(&self, plan: &Plan, writes: &[u64]) -> Result<Verified, GuestError> {
        let mut verified = Verified { writes: writes.iter().sum(), ..Verified::default() };
        let (mut first, mut damaged) = (None, 0);
        let mut page = 0;
        let mut held = [0; PAGE_LEN];
        for block in self.blocks() {
            let populated = populated(block)?;
            for of_block in block.pages().iter() {
                let generation = plan.generation(page, writes);
                let expected = plan.contents(page, generation);
                let known = page >= plan.layout.reserved;
                // A hole is zero, and reading it would fill it.
                if populated.get(of_block) || (known && !expected.is_zero()) {
                    block.read(of_block.offset(), &mut held)?;
                    if let Some(damage) = difference(&held, expected).filter(|_| known) {
                        damaged += 1;
                        first = first.or(Some(Damage { page, generation, ..damage }));
                    }
                    verified.checksum = verified.checksum.rotate_left(1) ^ checksum(page, &held);
                } else {
                    verified.checksum = verified.checksum.rotate_left(1);
                }
                verified.zero_pages += u64::from(known && expected.is_zero());
                page += 1;
            }
        }
        verified.pages = page;
        match first {
            Some(damage) => Err(self.damaged(damage, damaged)),
            None => Ok(verified),
        }
    }

    /// Compares these pages, of one block, with what they are expected to hold, and adds them to what was found before.
    pub(super) fn verify_pages(
        &self,
        pages: Range<u64>,
        generation: u64,
        expected: impl Fn(u64) -> Contents,
        verified: &mut Verified,
    ) -> Result<(), GuestError> {
        let (mut first, mut damaged) = (None, 0);
        let mut held = [0; PAGE_LEN];
        for page in pages {
            let Some((block, of_block)) = self.locate(page) else { continue };
            let expected = expected(page);
            block.read(of_block.offset(), &mut held)?;
            if let Some(damage) = difference(&held, expected) {
                damaged += 1;
                first = first.or(Some(Damage { page, generation, ..damage }));
            }
            verified.checksum = verified.checksum.rotate_left(1) ^ checksum(page, &held);
            verified.zero_pages += u64::from(expected.is_zero());
            verified.pages += 1;
        }
        first.map_or(Ok(()), |damage| Err(self.damaged(damage, damaged)))
    }

    /// The error about damage to `pages` pages.
    pub(super) fn damaged(&self, damage: Damage, pages: u64) -> GuestError {
        let (block, page) =
            self.locate(damage.page).map_or(("(none)", damage.page), |(block, page)| (block.name(), page.0));
        let Damage { offset, generation, expected, found, .. } = damage;
        GuestError::Damaged { block: block.to_owned(), page, offset, generation, expected, found, found_in: pages }
    }

    fn locate(&self, page: u64) -> Option<(&MemoryBlock, PageNumber)> {
        let mut rest = page;
        for block in self.blocks() {
            let pages = block.pages().len();
            if rest < pages {
                return Some((block, PageNumber(rest)));
            }
            rest -= pages;
        }
        None
    }

    fn words_of(&self, page: u64) -> Option<*mut u64> {
        let (block, page) = self.locate(page)?;
        Some(block.iovec(PageRange::starting_at(page, 1))?.iov_base.cast())
    }
}

/// The pages of a block that may be other than zero.
fn populated(block: &MemoryBlock) -> Result<PageBitmap, GuestError> {
    let pages = block.pages();
    let Some((file, offset)) = block.file().filter(|_| block.is_shared()) else {
        return Ok(PageBitmap::full(pages.len()));
    };
    let failed =
        |source| limosa_memory::MemoryError::Kernel { block: block.name().to_owned(), operation: "lseek", source };
    let mut populated = PageBitmap::new(pages.len());
    for data in holes::data_pages(file, offset, pages).map_err(failed)? {
        populated.set_range(data.map_err(failed)?);
    }
    Ok(populated)
}

/// The first word in which a page is not what it should be; page and generation are left open.
fn difference(held: &[u8; PAGE_LEN], expected: Contents) -> Option<Damage> {
    let (words, _) = held.as_chunks::<4>();
    let words = words.iter().map(|word| u32::from_le_bytes(*word)).enumerate();
    let (index, found) = words.into_iter().find(|(index, found)| *found != expected.word(*index))?;
    Some(Damage { page: 0, offset: index * 4, generation: 0, expected: expected.word(index), found })
}

/// 0 for a page of zeros, whichever.
fn checksum(page: u64, held: &[u8; PAGE_LEN]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    let (words, _) = held.as_chunks::<8>();
    // Four sums beside each other, which do not wait for one another.
    let mut sums = [0_u64; 4];
    let (fours, _) = words.as_chunks::<4>();
    for four in fours {
        for (sum, word) in sums.iter_mut().zip(four) {
            *sum = (*sum ^ u64::from_le_bytes(*word)).wrapping_mul(FACTOR);
        }
    }
    let sum = sums.iter().fold(0_u64, |all, sum| (all.rotate_left(17) ^ sum).wrapping_mul(FACTOR));
    if sum == 0 { 0 } else { (sum ^ page).wrapping_mul(FACTOR) }
}

#[cfg(test)]
mod tests {
    use limosa_memory::BlockOptions;

    use super::*;
    use crate::guest::pattern::Layout;

    fn ram() -> Ram {
        let blocks = ["a", "b"].map(|name| BlockOptions::memfd(name, 8 << 12).map().unwrap());
        Ram::new(Arc::new(GuestMemory::new(blocks.into()).unwrap()))
    }

    fn filled(ram: &Ram, plan: &Plan) -> u64 {
        for page in 0..16 {
            if !plan.contents(page, 0).is_zero() {
                ram.store(page, plan.contents(page, 0));
            }
        }
        ram.verify(plan, &[0]).unwrap().checksum
    }

    #[test]
    fn one_wrong_word_a_stale_page_and_one_at_another_place_are_found() {
        let plan = Plan::new(3, Layout { reserved: 0, filled: 12, working: 12 }, 1, 1);
        type Harm = fn(&Ram, &Plan);
        let damage: [(&str, Harm); 4] = [
            ("one word", |ram, _| ram.memory().block(1).unwrap().write(4096 + 40, &[0xff]).unwrap()),
            ("stale", |ram, plan| ram.store(9, plan.contents(9, 1))),
            ("of another page", |ram, plan| ram.store(9, plan.contents(8, 0))),
            ("should be zero", |ram, plan| ram.store(14, plan.contents(8, 0))),
        ];
        for (what, damage) in damage {
            let ram = ram();
            let before = filled(&ram, &plan);
            damage(&ram, &plan);
            let error = ram.verify(&plan, &[0]).unwrap_err().to_string();
            assert!(error.contains("RAM block b"), "{what}: {error}");
            let other = ram
                .verify(&Plan { layout: Layout { reserved: 16, ..plan.layout }, ..plan.clone() }, &[0])
                .unwrap()
                .checksum;
            assert_ne!(before, other, "{what}");
        }
    }

    #[test]
    fn verifying_does_not_populate_what_is_zero() {
        let (ram, plan) = (ram(), Plan::new(3, Layout { reserved: 0, filled: 4, working: 4 }, 1, 1));
        filled(&ram, &plan);
        let (file, _) = ram.memory().block(1).unwrap().file().unwrap();
        assert_eq!(rustix::fs::fstat(file).unwrap().st_blocks, 0);
    }
}
