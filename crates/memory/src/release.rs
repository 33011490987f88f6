//! Releasing the memory of pages with unneeded contents, by a method of the caller's choice.
//!
//! Unlike after a [discard](MemoryBlock::discard), the contents of the pages are unspecified, so nothing is ever
//! written: memory that cannot be freed is kept. For callers that need one method (a balloon, a measurement).
#![allow(unsafe_code, reason = "gives guest memory back")]

use std::io;

use limosa_page::{PAGE_SIZE, PageRange, to_usize};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{Advice, madvise};

use crate::block::MemoryBlock;
use crate::error::MemoryError;

/// A system call that frees memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseMethod {
    /// `fallocate(FALLOC_FL_PUNCH_HOLE)` on the block's file: for everyone who maps it. The pages read as zero.
    PunchHole,
    /// `madvise(MADV_DONTNEED)`: private memory without a file reads as zero. (A private copy of a file would show the
    /// file again, and shared memory would only be unmapped from this process.)
    DontNeed,
    /// `madvise(MADV_REMOVE)`: punches the hole through the mapping of shared memory. The pages read as zero.
    Remove,
    /// `madvise(MADV_FREE)`: private memory without a file; the kernel frees it when it needs memory. Until then, or if
    /// it is written before, it stays. While a dirty log is on this is `DontNeed`, because no log sees when the kernel
    /// frees a page.
    Free,
}

impl ReleaseMethod {
    /// Returns the name of the system call's flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::PunchHole => "punch-hole",
            Self::DontNeed => "dontneed",
            Self::Remove => "remove",
            Self::Free => "free",
        }
    }
}

impl MemoryBlock {
    /// Whether a method supports memory of this kind.
    pub fn supports_release(&self, method: ReleaseMethod) -> bool {
        match method {
            ReleaseMethod::PunchHole => self.is_shared() && self.file().is_some(),
            ReleaseMethod::Remove => self.is_shared(),
            ReleaseMethod::DontNeed => !self.is_shared() && self.file().is_none(),
            ReleaseMethod::Free => !self.is_shared() && self.file().is_none() && self.page_size() == PAGE_SIZE,
        }
    }

    /// Frees the memory of the whole host pages among `pages`, with one system call; returns the number of 4 KiB pages.
    ///
    /// Waits until no page of the block is [pinned](MemoryBlock::pin). For [dirty logs](crate::dirty) it is a write to
    /// each of the pages.
    ///
    /// # Errors
    /// [`MemoryError::Outside`], or an error of the kernel; [`MemoryError::Layout`]: not
    /// [supported](Self::supports_release) by this memory.
    pub fn release(&self, pages: PageRange, method: ReleaseMethod) -> Result<u64, MemoryError> {
        let kernel = |operation, source: rustix::io::Errno| MemoryError::Kernel {
            block: self.name().to_owned(),
            operation,
            source: source.into(),
        };
        if !self.supports_release(method) {
            let why = format!("memory of this kind does not support {}", method.name());
            return Err(MemoryError::Layout { block: self.name().to_owned(), why });
        }
        let Some(_inside) = self.iovec(pages) else {
            return Err(MemoryError::Outside {
                block: self.name().to_owned(),
                length: self.len(),
                offset: pages.bytes().start,
                wanted: to_usize(pages.len().saturating_mul(PAGE_SIZE)),
            });
        };
        let pages = self.whole_host_pages(pages);
        let Some(place) = self.iovec(pages).filter(|_| !pages.is_empty()) else { return Ok(0) };
        let _unpinned = self.pins().wait_unpinned();
        let discarding = self.discarding(pages);
        let advice = match (method, self.file()) {
            (ReleaseMethod::PunchHole, Some((file, offset))) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let bytes = pages.bytes();
                fallocate(file, flags, offset + bytes.start, bytes.end - bytes.start)
                    .map_err(|error| kernel("fallocate to punch a hole", error))?;
                return Ok(pages.len());
            }
            (ReleaseMethod::DontNeed, _) => Advice::LinuxDontNeed,
            (ReleaseMethod::Free, _) if discarding.is_logged() => Advice::LinuxDontNeed,
            (ReleaseMethod::Free, _) => {
                discarding.mark_lazy();
                Advice::LinuxFree
            }
            (ReleaseMethod::Remove | ReleaseMethod::PunchHole, _) => Advice::LinuxRemove,
        };
        // SAFETY: the pages are of this mapping, and no reference to them exists.
        unsafe { madvise(place.iov_base, place.iov_len, advice) }
            .map_err(|error| kernel("madvise to release", error))?;
        Ok(pages.len())
    }

    /// Makes the kernel keep pages that were released by [`ReleaseMethod::Free`] and are not freed yet, for a log that
    /// would lose a page's mark when the kernel frees it. The log [learns of discards](crate::discarding) already.
    pub(crate) fn keep_lazily_freed(&self) -> io::Result<()> {
        if !self.discards().take_lazy() {
            return Ok(());
        }
        let kept = self.keep_populated();
        if kept.is_err() {
            // The next attempt must keep them.
            self.discards().set_lazy();
        }
        kept
    }

    fn keep_populated(&self) -> io::Result<()> {
        for run in self.populated(self.pages())?.runs() {
            if let Some(place) = self.iovec(run) {
                // SAFETY: it changes no contents, and the pages are of this mapping.
                unsafe { madvise(place.iov_base, place.iov_len, Advice::LinuxPopulateWrite) }?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use limosa_page::PageNumber;

    use super::*;
    use crate::BlockOptions;

    const METHODS: [ReleaseMethod; 4] =
        [ReleaseMethod::PunchHole, ReleaseMethod::DontNeed, ReleaseMethod::Remove, ReleaseMethod::Free];

    fn filled(options: BlockOptions) -> MemoryBlock {
        let block = options.map().unwrap();
        block.write(0, &vec![7; 16 << 12]).unwrap();
        block
    }

    #[test]
    fn each_kind_of_memory_is_given_back_by_its_own_methods_and_refuses_the_others() {
        let kinds = [
            (BlockOptions::memfd("ram", 16 << 12), [true, false, true, false]),
            (BlockOptions::anonymous("ram", 16 << 12), [false, true, false, true]),
        ];
        for (options, possible) in kinds {
            let block = filled(options);
            for (at, (method, possible)) in (0..).zip(METHODS.into_iter().zip(possible)) {
                assert_eq!(block.supports_release(method), possible, "{method:?}");
                let pages = PageRange::starting_at(PageNumber(1 + 2 * at), 1);
                let done = block.release(pages, method);
                if !possible {
                    assert!(done.unwrap_err().to_string().contains(method.name()));
                    continue;
                }
                assert_eq!(done.unwrap(), 1);
                let mut bytes = vec![1; 16 << 12];
                block.read(0, &mut bytes).unwrap();
                let (start, end) =
                    (usize::try_from(pages.bytes().start).unwrap(), usize::try_from(pages.bytes().end).unwrap());
                assert!(method == ReleaseMethod::Free || bytes[start..end].iter().all(|byte| *byte == 0), "{method:?}");
                assert!(bytes[start - 1] == 7 && bytes[end] == 7, "{method:?}");
            }
        }
    }

    #[test]
    fn pinned_pages_are_released_when_they_are_unpinned() {
        let block = filled(BlockOptions::memfd("ram", 16 << 12));
        let pinned = block.pin().unwrap();
        std::thread::scope(|scope| {
            let release = scope.spawn(|| block.release(block.pages(), ReleaseMethod::PunchHole).unwrap());
            while !pinned.blocks_discard() {
                std::thread::yield_now();
            }
            let mut byte = [0];
            block.read(0, &mut byte).unwrap();
            assert_eq!(byte, [7], "it was released while it was pinned");
            drop(pinned);
            assert_eq!(release.join().unwrap(), 16);
        });
    }

    #[test]
    fn pages_that_a_block_has_not_are_refused() {
        let block = filled(BlockOptions::memfd("ram", 16 << 12));
        let error = block.release(PageRange::starting_at(PageNumber(15), 2), ReleaseMethod::PunchHole).unwrap_err();
        assert!(matches!(error, MemoryError::Outside { .. }), "{error}");
        let mut byte = [0];
        block.read(15 << 12, &mut byte).unwrap();
        assert_eq!(byte, [7]);
    }
}
