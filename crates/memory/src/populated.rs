//! Which pages of a block were ever populated: every other page is zero, and is not read to find that out.

use std::io;

use limosa_page::{PageBitmap, PageRange, holes};

use crate::block::MemoryBlock;
use crate::pagemap::PageMap;

impl MemoryBlock {
    /// The pages among `pages` that may hold something: any other one of them is zero. The bitmap is as long as the block.
    ///
    /// A page that is populated while this looks may be missing: ask after the dirty log has begun, which then names it.
    /// - Shared memory of a file answers for all who map it (its holes are what nobody populated; hugetlbfs does not know
    ///   them, and all of it counts as populated).
    /// - Shared memory without a descriptor cannot be asked: all of it counts as populated.
    /// - Private memory answers from this process's page tables. A [`WriteFaultLog`](crate::dirty::WriteFaultLog) marks all
    ///   of them, which then pass for populated.
    /// - A private copy of a file has both: pages of its own, and behind the others the file. Every log that protects it
    ///   from being written marks all of it.
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
            let start = self.host_address().expose_provenance() as u64;
            let bytes = pages.bytes();
            let addresses = start + bytes.start..start + bytes.end;
            let looked = PageMap::open().and_then(|mut map| {
                map.present(addresses, |run| {
                    let run = run.start.saturating_sub(start)..run.end.saturating_sub(start);
                    found.set_range(PageRange::covering(&run).intersect(pages));
                })
            });
            if looked.is_err() {
                found.set_range(pages);
            }
        }
        Ok(found)
    }
}
