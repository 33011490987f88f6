//! Discarding pages of a block: they read as zero afterwards, and use no memory.
//!
//! Each kind of memory has one system call that discards a run of pages:
//!
//! | memory | call |
//! |---|---|
//! | shared, with a file (memfd, tmpfs, hugetlbfs, disk) | `fallocate(PUNCH_HOLE)`: for everyone who maps it |
//! | shared, without a descriptor | `madvise(MADV_REMOVE)`: the same through the mapping |
//! | private, without a file | `madvise(MADV_DONTNEED)` |
//! | a private copy of a file | `MADV_DONTNEED` where the file has a hole; elsewhere the file's bytes would reappear |
//!
//! Memory that cannot be freed (parts of a huge page, a file system without holes) is overwritten with zeros.
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

/// Result of a discard: all pages read as zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Discarded {
    /// Pages whose memory was freed.
    pub given_back: u64,
    /// Pages that were overwritten with zeros, and still use memory.
    pub overwritten: u64,
}

impl MemoryBlock {
    /// Makes pages read as zero and frees their memory, with one system call for the whole run. They must not be
    /// written meanwhile.
    ///
    /// Waits until a fault handler with [`removals`](crate::FaultOptions::removals) has read the event, and until no
    /// page of the block is [pinned](MemoryBlock::pin). For [dirty logs](crate::dirty) it is a write to each of the
    /// pages.
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

    /// Frees memory that reads as zero afterwards.
    fn advise(&self, pages: PageRange, advice: Advice, done: &mut Discarded) -> Result<(), MemoryError> {
        let Some(place) = self.iovec(pages).filter(|_| !pages.is_empty()) else { return Ok(()) };
        // SAFETY: the pages are of this mapping, and no reference to them exists.
        match unsafe { madvise(place.iov_base, place.iov_len, advice) } {
            Ok(()) => {
                done.given_back += pages.len();
                Ok(())
            }
            // Locked memory, and huge pages of the pool before Linux 5.18, cannot be freed.
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
        // Only populated pages: writing to others would allocate memory.
        let populated = self.populated(pages).map_err(|source| MemoryError::Kernel {
            block: self.name().to_owned(),
            operation: "lseek for holes",
            source,
        })?;
        for run in populated.runs_in(pages) {
            let bytes = run.bytes();
            self.fill_zero(bytes.start, bytes.end - bytes.start)?;
            done.overwritten += run.len();
        }
        Ok(())
    }

    /// Returns the host pages that are wholly in `pages`; an empty range at its start if there are none.
    pub(crate) fn whole_host_pages(&self, pages: PageRange) -> PageRange {
        let host = (self.page_size() / PAGE_SIZE).max(1);
        let start = PageNumber(pages.start.0.div_ceil(host).saturating_mul(host));
        let whole = PageRange::new(start, PageNumber(pages.end.0 / host * host));
        if whole.is_empty() { PageRange::new(pages.start, pages.start) } else { whole }
    }

    /// Returns the host pages that contain any of `pages`.
    pub(crate) fn covering_host_pages(&self, pages: PageRange) -> PageRange {
        let host = (self.page_size() / PAGE_SIZE).max(1);
        PageRange::new(
            PageNumber(pages.start.0 / host * host),
            PageNumber(pages.end.0.div_ceil(host).saturating_mul(host)),
        )
    }
}
