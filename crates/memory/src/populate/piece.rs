//! Populating pages of one block, by the best method of the kernel.
#![allow(unsafe_code, reason = "advises about guest memory and touches it")]

use std::sync::atomic::{AtomicU8, Ordering};

use limosa_page::{PAGE_LEN, PageNumber, PageRange, to_usize};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::block::MemoryBlock;
use crate::error::MemoryError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// `MADV_POPULATE_WRITE` (Linux 5.14).
    Advise,
    /// Shared memory: fallocate adds the pages to the file, and each is read: before that it counts as a hole.
    Allocate,
    /// Private memory: a zero byte in each page is replaced by a zero.
    Touch,
}

impl MemoryBlock {
    /// Populates pages without changing their contents; returns false if memory is short. It does not check limits that
    /// the kernel enforces by killing: see [`MemcgHeadroom`](super::MemcgHeadroom).
    ///
    /// # Errors
    /// [`MemoryError::Outside`], or an error of the kernel.
    pub fn populate(&self, pages: PageRange) -> Result<bool, MemoryError> {
        match self.populate_by(Way::Advise, pages) {
            Err(MemoryError::Kernel { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                let way = if self.is_shared() { Way::Allocate } else { Way::Touch };
                self.populate_by(way, pages)
            }
            done => done,
        }
    }

    fn populate_by(&self, way: Way, pages: PageRange) -> Result<bool, MemoryError> {
        let place = self.iovec(pages).ok_or_else(|| self.has_not(pages))?;
        let (operation, result) = match (way, self.file()) {
            (Way::Allocate, Some((file, offset))) => {
                let bytes = pages.bytes();
                let length = bytes.end - bytes.start;
                let flags = FallocateFlags::KEEP_SIZE;
                let result = fallocate(file, flags, offset + bytes.start, length);
                if result.is_ok() {
                    for at in (0..place.iov_len).step_by(PAGE_LEN) {
                        let byte = place.iov_base.cast::<u8>().wrapping_add(at);
                        // SAFETY: `place` checked the range; the file has the page, so there is no signal.
                        let _ = unsafe { byte.read_volatile() };
                    }
                }
                ("fallocate to populate", result)
            }
            // Touching a page of an exhausted pool raises SIGBUS, so it is not touched.
            (Way::Touch, _) if self.page_size() != limosa_page::PAGE_SIZE => return Ok(false),
            (Way::Touch, _) => {
                for at in (0..place.iov_len).step_by(PAGE_LEN) {
                    let byte = place.iov_base.cast::<u8>().wrapping_add(at);
                    // SAFETY: `place` checked the range. Zero for zero changes no byte, even with a concurrent writer,
                    // because it is atomic. A page with another byte there is present.
                    let byte = unsafe { AtomicU8::from_ptr(byte) };
                    // (The compiler reduces an atomic "or" of zero to a plain read; this it does not.)
                    let _ = byte.compare_exchange(0, 0, Ordering::SeqCst, Ordering::Relaxed);
                }
                ("touching", Ok(()))
            }
            (Way::Advise | Way::Allocate, _) => {
                // SAFETY: populating changes no contents.
                let result = unsafe { madvise(place.iov_base, place.iov_len, Advice::LinuxPopulateWrite) };
                ("madvise(MADV_POPULATE_WRITE)", result)
            }
        };
        match result {
            Ok(()) => Ok(true),
            // EFAULT: touching the page would raise SIGBUS, as a pool without huge pages or a full tmpfs does.
            Err(Errno::NOMEM | Errno::NOSPC | Errno::FAULT | Errno::DQUOT) => Ok(false),
            Err(error) => Err(MemoryError::Kernel { block: self.name().to_owned(), operation, source: error.into() }),
        }
    }

    /// Pages of 4 KiB in a transparent huge page: 2 MiB, as on x86-64, and on `AArch64` with pages of 4 KiB.
    pub const PAGES_PER_HUGE_PAGE: u64 = 512;

    /// Returns the pages that can become transparent huge pages, a whole number of
    /// [`PAGES_PER_HUGE_PAGE`](Self::PAGES_PER_HUGE_PAGE); `None` if there are none. For private memory only: the
    /// system configures huge pages of shared memory.
    pub fn huge_page_range(&self) -> Option<PageRange> {
        if self.is_shared() || self.file().is_some() || self.page_size() != limosa_page::PAGE_SIZE {
            return None;
        }
        let before = self.host_address().addr() as u64 / limosa_page::PAGE_SIZE;
        let first = before.next_multiple_of(Self::PAGES_PER_HUGE_PAGE) - before;
        let pieces = self.pages().len().checked_sub(first)? / Self::PAGES_PER_HUGE_PAGE;
        (pieces > 0).then(|| PageRange::starting_at(PageNumber(first), pieces * Self::PAGES_PER_HUGE_PAGE))
    }

    /// As [`populate`](Self::populate), with huge pages if available: for pages of
    /// [`huge_page_range`](Self::huge_page_range).
    ///
    /// # Errors
    /// As `populate`; also if the kernel's limit of separate ranges is reached.
    pub fn populate_huge(&self, pages: PageRange) -> Result<bool, MemoryError> {
        self.advise_huge_pages(pages, true)?;
        self.populate(pages)
    }

    /// Requests or forbids transparent huge pages (private memory; shared memory if the system is configured so).
    /// Memory filled on demand must forbid them: one small page written would populate a huge page, and 511 others
    /// would look arrived. Does nothing on huge pages of the pool.
    ///
    /// # Errors
    /// [`MemoryError::Outside`], or an error of the kernel, except that it has no such pages.
    pub fn advise_huge_pages(&self, pages: PageRange, wanted: bool) -> Result<(), MemoryError> {
        if self.page_size() != limosa_page::PAGE_SIZE {
            return Ok(());
        }
        let advice = if wanted { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        let place = self.iovec(pages).ok_or_else(|| self.has_not(pages))?;
        // SAFETY: the advice changes no contents.
        match unsafe { madvise(place.iov_base, place.iov_len, advice) } {
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(MemoryError::Kernel {
                block: self.name().to_owned(),
                operation: if wanted { "madvise(MADV_HUGEPAGE)" } else { "madvise(MADV_NOHUGEPAGE)" },
                source: error.into(),
            }),
        }
    }

    fn has_not(&self, pages: PageRange) -> MemoryError {
        MemoryError::Outside {
            block: self.name().to_owned(),
            length: self.len(),
            offset: pages.bytes().start,
            wanted: to_usize(pages.len()).saturating_mul(PAGE_LEN),
        }
    }
}

#[cfg(test)]
mod tests {
    use limosa_page::PAGE_SIZE;
    use rustix::fs::fstat;

    use super::*;
    use crate::BlockOptions;

    #[test]
    fn every_way_populates_and_changes_nothing() {
        let private = || BlockOptions::anonymous("ram", 64 * PAGE_SIZE);
        let shared = || BlockOptions::memfd("ram", 64 * PAGE_SIZE);
        for (way, options) in
            [(Way::Advise, private()), (Way::Advise, shared()), (Way::Allocate, shared()), (Way::Touch, private())]
        {
            let block = options.map().unwrap();
            block.write(10 * PAGE_SIZE + 7, b"contents").unwrap();
            let pages = PageRange::starting_at(PageNumber(8), 16);
            assert!(block.populate_by(way, pages).unwrap());
            if let Some((file, _)) = block.file() {
                assert_eq!(fstat(file).unwrap().st_blocks, 16 * 8);
            }
            let found: Vec<_> = block.populated(block.pages()).unwrap().runs().collect();
            assert_eq!(found, [pages], "{way:?}");
            let mut bytes = [0; 8];
            block.read(10 * PAGE_SIZE + 7, &mut bytes).unwrap();
            assert_eq!(&bytes, b"contents");
        }
    }

    #[test]
    fn pages_outside_the_block_are_refused() {
        let block = BlockOptions::anonymous("ram", 4 * PAGE_SIZE).map().unwrap();
        for pages in [PageRange::starting_at(PageNumber(3), 2), PageRange::starting_at(PageNumber(u64::MAX - 1), 1)] {
            assert!(matches!(block.populate(pages), Err(MemoryError::Outside { .. })));
        }
    }
}
