//! Giving pages of a block back: they read as zero afterwards, and cost no memory.
//!
//! What does that depends on what the memory is, and each kind has one call that does it for a run of pages:
//!
//! | memory | call |
//! |---|---|
//! | shared, with a file (memfd, tmpfs, hugetlbfs, disk) | `fallocate(PUNCH_HOLE)`: for all who map it |
//! | shared, without a descriptor | `madvise(MADV_REMOVE)`: the same through the mapping |
//! | private, without a file | `madvise(MADV_DONTNEED)` |
//! | a private copy of a file | `MADV_DONTNEED` where the file has a hole; elsewhere the file would be seen again |
//!
//! What cannot be given back - parts of a huge page, a file system without holes - is made zero by writing.
//! **Law: never a byte outside the pages named.**
#![allow(unsafe_code, reason = "gives guest memory back")]

use std::io;

use limosa_page::{PAGE_SIZE, PageNumber, PageRange, holes, to_usize};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::block::MemoryBlock;
use crate::discarding::Discarding;
use crate::error::MemoryError;

/// What became of pages that were discarded: all of them read as zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Discarded {
    /// Pages whose memory was given back.
    pub given_back: u64,
    /// Pages that had to be made zero by writing, and have memory.
    pub written: u64,
}

impl MemoryBlock {
    /// Makes pages read as zero and gives their memory back, with one call for the whole run. They must not be written
    /// meanwhile.
    ///
    /// If the block is registered with a fault handler that wants to know, this waits until the handler has read of it.
    /// If pages of the block are [pinned](MemoryBlock::pin), it waits until they are back. To
    /// [dirty logs](crate::dirty) it is a write to each of the pages.
    ///
    /// # Errors
    /// [`MemoryError::Outside`], and nothing is changed; [`MemoryError::Kernel`].
    pub fn discard(&self, pages: PageRange) -> Result<Discarded, MemoryError> {
        let outside = || MemoryError::Outside {
            block: self.name().to_owned(),
            length: self.len(),
            offset: pages.bytes().start,
            wanted: to_usize(pages.len().saturating_mul(PAGE_SIZE)),
        };
        if pages.end > self.pages().end {
            return Err(outside());
        }
        let _unpinned = self.pins().wait_unpinned();
        let _discarding = self.discarding(pages);
        let mut done = Discarded::default();
        let whole = self.whole_host_pages(pages);
        if !whole.is_empty() {
            self.discard_whole(whole, &mut done)?;
        }
        let (before, behind) = (pages.split_at(whole.start).0, pages.split_at(whole.end).1);
        for rest in [before, behind] {
            self.write_zeros(rest, &mut done)?;
        }
        Ok(done)
    }

    /// Begins to give pages back: the result is held meanwhile, so that dirty logs learn of it.
    pub(crate) fn discarding(&self, pages: PageRange) -> Discarding<'_> {
        self.discards().begin(self.covering_host_pages(pages))
    }

    fn discard_whole(&self, pages: PageRange, done: &mut Discarded) -> Result<(), MemoryError> {
        let kernel =
            |operation, source: io::Error| MemoryError::Kernel { block: self.name().to_owned(), operation, source };
        let bytes = pages.bytes();
        let (operation, result) = match self.file() {
            Some((file, offset)) if self.is_shared() => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let result = fallocate(file, flags, offset + bytes.start, bytes.end - bytes.start);
                ("fallocate to punch a hole", result)
            }
            Some((file, offset)) => {
                let kernel = |source| kernel("lseek for holes", source);
                let mut from = pages.start;
                for run in holes::data_pages(file, offset, pages).map_err(kernel)? {
                    let run = self.covering_host_pages(run.map_err(kernel)?).intersect(pages);
                    self.advise(PageRange::new(from, run.start), Advice::LinuxDontNeed, done)?;
                    self.write_zeros(PageRange::new(run.start.max(from), run.end), done)?;
                    from = run.end.max(from);
                }
                return self.advise(PageRange::new(from, pages.end), Advice::LinuxDontNeed, done);
            }
            None if self.is_shared() => return self.advise(pages, Advice::LinuxRemove, done),
            None => return self.advise(pages, Advice::LinuxDontNeed, done),
        };
        match result {
            Ok(()) => {
                done.given_back += pages.len();
                Ok(())
            }
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self.write_zeros(pages, done),
            Err(error) => Err(kernel(operation, error.into())),
        }
    }

    /// Gives memory back behind which there is nothing.
    fn advise(&self, pages: PageRange, advice: Advice, done: &mut Discarded) -> Result<(), MemoryError> {
        let Some(place) = self.place(pages).filter(|_| !pages.is_empty()) else { return Ok(()) };
        // SAFETY: the pages are of this mapping, and no reference to them exists.
        match unsafe { madvise(place.iov_base, place.iov_len, advice) } {
            Ok(()) => {
                done.given_back += pages.len();
                Ok(())
            }
            // Locked memory, and huge pages of the pool before Linux 5.18.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => self.write_zeros(pages, done),
            Err(error) => Err(MemoryError::Kernel {
                block: self.name().to_owned(),
                operation: "madvise to discard",
                source: error.into(),
            }),
        }
    }

    fn write_zeros(&self, pages: PageRange, done: &mut Discarded) -> Result<(), MemoryError> {
        if pages.is_empty() {
            return Ok(());
        }
        // What is zero because it was never populated would get memory by being written.
        let populated = self.populated(pages).map_err(|source| MemoryError::Kernel {
            block: self.name().to_owned(),
            operation: "lseek for holes",
            source,
        })?;
        for run in populated.runs_in(pages) {
            let bytes = run.bytes();
            self.fill_zero(bytes.start, bytes.end - bytes.start)?;
            done.written += run.len();
        }
        Ok(())
    }

    /// The host pages that lie in `pages` as a whole; where there is none, an empty range at its start.
    pub(crate) fn whole_host_pages(&self, pages: PageRange) -> PageRange {
        let host = (self.page_size() / PAGE_SIZE).max(1);
        let start = PageNumber(pages.start.0.div_ceil(host).saturating_mul(host));
        let whole = PageRange::new(start, PageNumber(pages.end.0 / host * host));
        if whole.is_empty() { PageRange::new(pages.start, pages.start) } else { whole }
    }

    /// The host pages that have any of `pages`.
    pub(crate) fn covering_host_pages(&self, pages: PageRange) -> PageRange {
        let host = (self.page_size() / PAGE_SIZE).max(1);
        PageRange::new(
            PageNumber(pages.start.0 / host * host),
            PageNumber(pages.end.0.div_ceil(host).saturating_mul(host)),
        )
    }
}
