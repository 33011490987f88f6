//! Guest memory that pages arrive in.
//!
//! Two laws. **What is zero stays untouched:** a page of a block that starts as zeros, and that nothing has come for,
//! needs no memory when it is said to be zero. **What has been received is known:** one atomic bitmap a block, set when
//! a page is in its place and never before.
#![allow(unsafe_code, reason = "vouches for the places of guest memory")]

use std::io::IoSlice;
use std::ops::Range;
use std::sync::OnceLock;

use libc::iovec;
use limosa_memory::{FaultHandler, FaultMode, GuestMemory, MemcgHeadroom, MemoryBlock, Populator};
use limosa_page::{
    AtomicPageBitmap, PAGE_LEN, PAGE_SIZE, PageBitmap, PageKind, PageNumber, PageRange, Scan, ZeroMethod,
};
use limosa_stream::PageSizes;

use super::huge_pages::{HugePages, PopulateBudget, Target};
use super::layout::{blocks_here, check_address};
use super::memory_limit::MemoryLimit;
use crate::error::MigrateError;
use crate::live::SharedMemoryMode;
use crate::pages::{PageError, PageMemory, PageSink, StreamSetup};

/// Pages from which on a run is given back rather than written over.
const GIVEN_BACK: u64 = 64;

/// A block of the stream in the VM here.
pub(super) struct Block<'a> {
    pub(super) memory: &'a MemoryBlock,
    /// It is the source's memory too, and nothing of it is sent.
    left_out: bool,
    /// Its index among the VM's blocks.
    pub(super) index: usize,
    /// Pages that lie in their place, zero ones included.
    pub(super) received: AtomicPageBitmap,
    /// Pages that may hold something: every other one is zero.
    written: AtomicPageBitmap,
    /// Its huge pages, if it may have some.
    huge_pages: Option<HugePages>,
}

/// The memory of a VM, by the blocks of the stream.
pub(super) struct GuestRam<'a> {
    memory: OnceLock<&'a GuestMemory>,
    blocks: OnceLock<Vec<Block<'a>>>,
    /// Whether pages are populated all at once that are about to be read; otherwise they fault one by one.
    at_once: bool,
    /// Populates ahead of what arrives, as soon as it is known where.
    populator: Option<Populator<'a>>,
    budget: PopulateBudget,
    limit: MemoryLimit,
}

impl<'a> GuestRam<'a> {
    /// Nothing yet. `populate`: whether room for what arrives is made by few calls; `ahead`: and by a thread before it
    /// arrives.
    pub(super) fn new(populate: bool, ahead: bool) -> Self {
        let populator = (populate && ahead).then(|| Populator::unbound(MemcgHeadroom::of_this_process()));
        let budget = PopulateBudget::default();
        Self {
            memory: OnceLock::new(),
            blocks: OnceLock::new(),
            at_once: populate,
            populator,
            budget,
            limit: MemoryLimit::new(),
        }
    }

    /// Takes the layout of a stream, of the VM whose memory this is.
    pub(super) fn begin(
        &self,
        memory: &'a GuestMemory,
        shared: SharedMemoryMode,
        start: &StreamSetup,
        advised: Option<PageSizes>,
    ) -> Result<(), MigrateError> {
        shared.check(start, advised.is_some())?;
        let mut blocks = Vec::new();
        for (index, block) in blocks_here(&start.blocks, memory, advised)?.into_iter().zip(&start.blocks) {
            let memory = memory.block(index).map_err(|error| MigrateError::Sink(error.into()))?;
            let left_out = shared.leaves_out(memory);
            if left_out {
                check_address(block, memory)?;
            }
            let written = written(memory).map_err(|error| MigrateError::Sink(error.into()))?;
            let received = AtomicPageBitmap::new(memory.pages().len());
            // What may come on demand later comes by its own pages.
            let may_be_huge = self.at_once && advised.is_none();
            let huge_pages = may_be_huge.then(|| HugePages::new(memory)).flatten();
            blocks.push(Block { memory, left_out, index, received, written, huge_pages });
        }
        let again = || MigrateError::Protocol("a second layout".into());
        self.memory.set(memory).map_err(|_| again())?;
        self.populator.iter().for_each(|populator| populator.bind(memory));
        self.blocks.set(blocks).map_err(|_| again())
    }

    /// The life of a thread that populates: until [`stop_populating`](Self::stop_populating).
    pub(super) fn populate(&self) {
        if let Some(populator) = &self.populator {
            // Where it fails, pages take a little longer to arrive.
            let _ = populator.run();
        }
    }

    /// No more memory is populated from here on.
    pub(super) fn stop_populating(&self) {
        if let Some(populator) = &self.populator {
            populator.stop();
        }
    }

    /// The blocks, in stream order; none before the layout has come.
    pub(super) fn blocks(&self) -> &[Block<'a>] {
        self.blocks.get().map(Vec::as_slice).unwrap_or_default()
    }

    /// The block of the stream that is the VM's of this index, and its own index.
    pub(super) fn block_of(&self, index: usize) -> Option<(usize, &Block<'a>)> {
        self.blocks().iter().enumerate().find(|(_, block)| block.index == index)
    }

    /// Throws parts of a block away: they have not come.
    pub(super) fn discard(&self, block: usize, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        let block = self.block(block).map_err(MigrateError::Sink)?;
        for range in ranges {
            let pages = PageRange::covering(range);
            if block.whole_host_pages(pages) != pages {
                return Err(MigrateError::Protocol(format!(
                    "a discard of {range:#x?} in RAM block {}, which is made of pages of {} bytes",
                    block.memory.name(),
                    block.memory.page_size()
                )));
            }
            block.received.clear_range(pages);
            block.memory.discard(pages).map_err(|error| MigrateError::Sink(error.into()))?;
            block.written.clear_range(pages);
        }
        Ok(())
    }

    /// Makes missing what has not come, and has `faults` report every access to it.
    pub(super) fn seal(&self, faults: &mut FaultHandler) -> Result<(), MigrateError> {
        let Some(memory) = self.memory.get() else { return Ok(()) };
        for block in self.blocks() {
            let missing = block.missing();
            if missing.is_empty() {
                continue;
            }
            // In this order: between the two the kernel could make one huge page of what is there and what is not.
            let registered = faults.register(memory, block.index, FaultMode::Missing);
            registered.map_err(|error| MigrateError::Sink(error.into()))?;
            block.give_back(&missing).map_err(MigrateError::Sink)?;
        }
        Ok(())
    }

    /// A block that pages may come for.
    fn block(&self, block: usize) -> Result<&Block<'a>, PageError> {
        let block = self.blocks().get(block).ok_or_else(|| format!("RAM block number {block} does not exist"))?;
        if block.left_out {
            return Err(format!("the source sends pages of RAM block {}, which it shares", block.memory.name()).into());
        }
        Ok(block)
    }
}

/// Pages of a block that may hold something before anything has come.
fn written(block: &MemoryBlock) -> std::io::Result<AtomicPageBitmap> {
    Ok(AtomicPageBitmap::from(block.populated(block.pages())?))
}

impl Block<'_> {
    /// Pages of 4 KiB in a host page.
    pub(super) fn host_pages(&self) -> u64 {
        (self.memory.page_size() / PAGE_SIZE).max(1)
    }

    /// The host pages that lie in `pages` as a whole.
    fn whole_host_pages(&self, pages: PageRange) -> PageRange {
        let each = self.host_pages();
        let start = pages.start.0.div_ceil(each).saturating_mul(each);
        PageRange::new(PageNumber(start), PageNumber(pages.end.0 / each * each))
    }

    /// Runs of whole host pages that have not come.
    ///
    /// Of a huge page that has come in part the rest is zero and stays: the source discards such pages as a whole, and
    /// those that it has never mentioned are zero there.
    fn missing(&self) -> Vec<PageRange> {
        let received = self.received.to_bitmap();
        let mut missing = Vec::new();
        for gap in received.gaps() {
            let whole = self.whole_host_pages(gap);
            if whole.is_empty() {
                self.received.set_range(gap);
                continue;
            }
            self.received.set_range(gap.split_at(whole.start).0);
            self.received.set_range(gap.split_at(whole.end).1);
            missing.push(whole);
        }
        missing
    }

    /// Gives back what is there of pages that are missing: a page is missing only if it is not.
    fn give_back(&self, missing: &[PageRange]) -> Result<(), PageError> {
        // What was populated for pages that did not come, or written before.
        let populated = self.memory.populated(self.memory.pages())?;
        let all = self.is_allocated_beyond(&populated)?;
        for gap in missing {
            self.written.clear_range(*gap);
            if all {
                self.memory.discard(*gap)?;
                continue;
            }
            for there in populated.runs_in(*gap) {
                self.memory.discard(there)?;
            }
        }
        Ok(())
    }

    /// Whether its file has pages that pass for holes: those that were allocated (`fallocate`, as VMMs do that want to
    /// be sure of their memory) and never touched. Who touches one of them reads zeros and is not waited for.
    fn is_allocated_beyond(&self, populated: &PageBitmap) -> Result<bool, PageError> {
        match self.memory.file().filter(|_| self.memory.is_shared()) {
            Some((file, _)) => {
                let sectors = u64::try_from(rustix::fs::fstat(file)?.st_blocks)?;
                Ok(sectors.saturating_mul(512) > populated.count().saturating_mul(PAGE_SIZE))
            }
            None => Ok(false),
        }
    }

    /// Makes pages zero that may not be: long runs by giving them back, short ones by writing where that is needed.
    fn make_zero(&self, pages: PageRange) -> Result<(), PageError> {
        let mut from = pages.start;
        while let Some(start) = self.written.next_set_in(PageRange::new(from, pages.end)) {
            let behind = pages.split_at(start).1.iter().find(|page| !self.written.get(*page));
            let run = PageRange::new(start, behind.unwrap_or(pages.end));
            if run.len() >= GIVEN_BACK {
                self.memory.discard(run)?;
            } else {
                for found in Scan::new(self.memory.guest_pages(), run, ZeroMethod::best())
                    .filter(|run| run.kind == PageKind::Data)
                {
                    let bytes = found.pages.bytes();
                    self.memory.fill_zero(bytes.start, bytes.end - bytes.start)?;
                }
            }
            self.written.clear_range(run);
            from = run.end;
        }
        Ok(())
    }

    /// Notes pages as received; how many were before.
    fn receive(&self, pages: PageRange) -> u64 {
        pages.iter().map(|page| u64::from(self.received.set(page))).sum()
    }
}

// SAFETY: the memory is borrowed, stays mapped as long, and is never made a reference to.
unsafe impl PageMemory for GuestRam<'_> {
    fn prepare(&self, block: usize, runs: &[PageRange]) -> Result<(), PageError> {
        let known = self.block(block)?;
        // By its first page a run is new or it is not: runs are of one round.
        let new = || runs.iter().filter(|run| !known.received.get(run.start));
        self.limit.reserve(new().map(PageRange::len).sum::<u64>().saturating_mul(PAGE_SIZE), known.memory)?;
        for run in new().filter(|_| self.at_once) {
            if let Some(huge_pages) = &known.huge_pages {
                let target = Target { budget: &self.budget, memory: known.memory, written: &known.written };
                huge_pages.make_ready(&target, *run)?;
                continue;
            }
            if let Some(populator) = &self.populator {
                populator.note_arrived(known.index, *run);
            }
            // Faults of private memory cost more one by one than all at once; those of a file do not.
            if known.memory.file().is_none() && run.len() > 1 {
                known.memory.populate(*run)?;
            }
        }
        Ok(())
    }

    fn iovec(&self, block: usize, pages: PageRange) -> Result<iovec, PageError> {
        let block = self.block(block)?;
        let place = block.memory.iovec(pages);
        place.ok_or_else(|| format!("RAM block {} has no pages {pages:?}", block.memory.name()).into())
    }

    fn mark_filled(&self, block: usize, pages: PageRange) -> u64 {
        let Some(block) = self.blocks().get(block) else { return 0 };
        block.written.set_range(pages);
        block.receive(pages)
    }

    fn put_pages(&self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<u64, PageError> {
        let range = PageRange::starting_at(first, u64::try_from(pages.len())?);
        self.prepare(block, &[range])?;
        let memory = self.block(block)?.memory;
        for (page, bytes) in range.iter().zip(pages) {
            memory.write(page.offset(), bytes)?;
        }
        Ok(self.mark_filled(block, range))
    }

    fn put_zero(&self, block: usize, pages: PageRange) -> Result<u64, PageError> {
        let block = self.block(block)?;
        block.make_zero(pages)?;
        Ok(block.receive(pages))
    }

    fn read_back(&self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        let block = self.block(block)?;
        if block.written.get(page) {
            block.memory.read(page.offset(), into)?;
        } else {
            into.fill(0);
        }
        Ok(())
    }
}

/// The sink that the engine is given.
pub(super) struct RamSink<'r, 'a>(pub(super) &'r GuestRam<'a>);

impl PageSink for RamSink<'_, '_> {
    /// The layout was checked before, where it is known whether postcopy may follow.
    fn begin(&mut self, _start: &StreamSetup) -> Result<(), PageError> {
        Ok(())
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        self.0.put_pages(block, first, pages).map(drop)
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        self.0.put_zero(block, pages).map(drop)
    }

    fn memory(&self) -> Option<&dyn PageMemory> {
        Some(self.0)
    }
}
