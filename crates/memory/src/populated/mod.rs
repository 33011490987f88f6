//! Finding the pages of a block that were ever populated: every other page is zero, without being read.

use std::io;

use limosa_page::{PageBitmap, PageRange, holes};
use rustix::fd::BorrowedFd;

use crate::block::MemoryBlock;
use crate::pagemap::PageMap;

mod cachestat;

pub use cachestat::cached_pages;

impl MemoryBlock {
    /// Returns the pages among `pages` that may have data: the others are zero. The bitmap is as long as the block.
    ///
    /// A page that is populated meanwhile may be missing: call it after the dirty log has started, which reports the
    /// page.
    /// - Shared memory of a file answers for all who map it (its holes are what was never populated; hugetlbfs does not
    ///   know them, and all of it counts as populated).
    /// - Shared memory without a descriptor cannot be asked: all of it counts as populated.
    /// - Private memory answers from this process's page tables. A [`UffdWpSyncLog`](crate::dirty::UffdWpSyncLog) marks
    ///   all of them, which then pass for populated.
    /// - A private copy of a file has both: pages of its own, and behind the others the file. Every log that protects
    ///   it from being written marks all of it.
    ///
    /// # Errors
    /// The file's holes cannot be looked for. Page tables that cannot be read make everything count as populated.
    pub fn populated(&self, pages: PageRange) -> io::Result<PageBitmap> {
        let pages = pages.intersect(self.pages());
        let mut found = PageBitmap::new(self.pages().len());
        if let Some((file, offset)) = self.file() {
            for run in holes::data_pages(file, offset, pages)? {
                found.set_range(run?);
            }
        }
        if self.is_shared() && self.file().is_none() {
            found.set_range(pages);
        }
        if !self.is_shared() {
            self.own_pages([pages], |run| found.set_range(run));
        }
        Ok(found)
    }

    /// Whether [`for_each_populated`](Self::for_each_populated) looks at nothing else than it is asked about; if not,
    /// at all of the block each time. The kernel can report a part of private memory, and of a file on tmpfs since
    /// Linux 6.5.
    pub fn can_query_ranges(&self) -> bool {
        self.file().is_none_or(|(file, _)| is_asked_in_parts(file))
    }

    /// Tells `found` which pages of these runs may hold something, as [`populated`](Self::populated) says it of all:
    /// for a few pages of a block whose others are of no interest, and are [not looked at](Self::can_query_ranges) if
    /// possible. The runs ascend; what `found` receives lies within them, some of it perhaps twice.
    ///
    /// # Errors
    /// As [`populated`](Self::populated).
    pub fn for_each_populated(
        &self,
        runs: impl IntoIterator<Item = PageRange> + Clone,
        mut found: impl FnMut(PageRange),
    ) -> io::Result<()> {
        let within = |run: PageRange| run.intersect(self.pages());
        if self.is_shared() && self.file().is_none() {
            runs.into_iter().map(within).for_each(found);
            return Ok(());
        }
        if runs.clone().into_iter().next().is_none() {
            return Ok(());
        }
        if let Some((file, offset)) = self.file() {
            if is_asked_in_parts(file) && holes::hole_free_length(file).is_none() {
                for run in runs.clone() {
                    cachestat::look(file, offset, within(run), &mut found)?;
                }
            } else {
                let mut all = PageBitmap::new(self.pages().len());
                for run in holes::data_pages(file, offset, self.pages())? {
                    all.set_range(run?);
                }
                runs.clone().into_iter().for_each(|run| all.runs_in(within(run)).for_each(&mut found));
            }
        }
        if !self.is_shared() {
            self.own_pages(runs.into_iter().map(within), found);
        }
        Ok(())
    }

    /// Pages of this process's own among private memory: all of them, if they cannot be looked for.
    fn own_pages(&self, runs: impl IntoIterator<Item = PageRange>, mut found: impl FnMut(PageRange)) {
        let start = self.host_address().expose_provenance() as u64;
        let mut map = PageMap::open().ok();
        for run in runs {
            let bytes = run.bytes();
            let looked = map.as_mut().map(|map| {
                map.present(start + bytes.start..start + bytes.end, |there| {
                    let there = there.start.saturating_sub(start)..there.end.saturating_sub(start);
                    found(PageRange::covering(&there).intersect(run));
                })
            });
            if !matches!(looked, Some(Ok(()))) {
                found(run);
            }
        }
    }
}

fn is_asked_in_parts(file: BorrowedFd<'_>) -> bool {
    holes::is_tmpfs(file) && cachestat::can_count(file)
}
