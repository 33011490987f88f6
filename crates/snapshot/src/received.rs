//! The pages of a stream at their places in a file, and the parts around them that are written last.
//!
//! Law of this module: a page goes from the caller's receive buffer straight to its place in the file, in one vectored
//! write for a whole run, and a sealed file has exactly the last state of each page in the stream:
//!
//! - a page that was last sent with contents has its bit set and those contents;
//! - a page that was last sent as zero, or that was never mentioned, is a hole of the file, or zeros there, also if it
//!   had contents in between: old contents are never left in a sealed file;
//! - in blocks under 64 MiB (firmware, option ROMs, video memory) a page that *arrived* as zero has its bit set over
//!   that hole or those zeros. A destination QEMU fills such blocks itself before it loads, and its loader (10.0) does
//!   not clear what has a clear bit; a set bit makes it load zeros, and over a hole costs no room.

use std::io::IoSlice;

use limosa_migrate::stored::StreamSetup;
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange};
use limosa_stream::configuration::IGNORE_SHARED;
use limosa_stream::mapped_ram::{EARLY_SECTIONS_LIMIT, Layout, MappedBlock};

use crate::error::SnapshotError;
use crate::layout::{DeviceBytes, MEMORY_PAGES_MAX, Memory};
use crate::manifest::{Manifest, PageStatistics};
use crate::seal;
use crate::store::{StoreFile, StoredRange};

/// The pages that a file has, and its layout. Every method is given that file.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedPages {
    layout: Layout,
    blocks: Vec<BlockPages>,
    resent: u64,
    /// Number of consecutive pages that become zero from which they are made a hole of the file; fewer are overwritten.
    shortest_hole: u64,
}

/// The pages of one RAM block.
#[derive(Debug, Clone)]
pub(crate) struct BlockPages {
    pub(crate) place: StoredRange,
    /// Pages that were last sent with contents.
    pub(crate) stored: PageBitmap,
    /// Pages that have, or had, contents in the file.
    pub(crate) written: PageBitmap,
    /// Pages that were mentioned at all.
    pub(crate) seen: PageBitmap,
}

impl BlockPages {
    fn new(block: &MappedBlock) -> Self {
        let bitmap = PageBitmap::new(block.pages);
        Self { place: StoredRange::new(block), stored: bitmap.clone(), written: bitmap.clone(), seen: bitmap }
    }

    /// Zero pages that a loader must write, because the destination may have filled the block before.
    pub(crate) fn explicit_zeros(&self) -> Option<PageBitmap> {
        if !self.place.may_be_prefilled() {
            return None;
        }
        let mut explicit = self.seen.clone();
        explicit.subtract(&self.stored);
        Some(explicit)
    }

    /// Pages whose contents in the file are outdated.
    fn stale(&self) -> PageBitmap {
        let mut stale = self.written.clone();
        stale.subtract(&self.stored);
        stale
    }

    /// Pages that the stream did not mention.
    fn unmentioned(&self) -> u64 {
        self.place.pages - self.seen.count()
    }
}

impl ReceivedPages {
    /// Plans the file of a stream that begins like this.
    ///
    /// # Errors
    /// A stream that such a file cannot hold.
    pub(crate) fn plan(file: &StoreFile, start: &StreamSetup) -> Result<Self, SnapshotError> {
        let unsupported = |what: String| SnapshotError::Unsupported { path: file.path().to_path_buf(), what };
        if start.configuration.has_capability(IGNORE_SHARED) {
            let what =
                "the stream leaves shared memory out (capability x-ignore-shared); save again with that capability off";
            return Err(unsupported(what.to_owned()));
        }
        let layout = Layout::plan(&start.configuration, start.section_id, &start.blocks)
            .map_err(|e| unsupported(e.to_string()))?;
        let memory: u64 = layout.blocks.iter().map(|block| block.pages).sum();
        if memory > MEMORY_PAGES_MAX {
            return Err(unsupported(format!("a VM with {memory} pages of memory: at most {MEMORY_PAGES_MAX} can be")));
        }
        let blocks = layout.blocks.iter().map(BlockPages::new).collect();
        Ok(Self { layout, blocks, resent: 0, shortest_hole: 1 })
    }

    /// Returns the same layout without a page.
    pub(crate) fn without_pages(&self) -> Self {
        let blocks = self.layout.blocks.iter().map(BlockPages::new).collect();
        Self { layout: self.layout.clone(), blocks, ..*self }
    }

    /// Makes no more holes of fewer than `pages` pages.
    pub(crate) fn set_shortest_hole(&mut self, pages: u64) {
        self.shortest_hole = pages;
    }

    pub(crate) fn blocks(&self) -> &[BlockPages] {
        &self.blocks
    }

    /// Counts no pages that came again but those that another file's count has.
    pub(crate) fn copy_resent(&mut self, from: &Self) {
        self.resent = from.resent;
    }

    /// Changes what is known of the pages of a block, without touching the file.
    ///
    /// # Errors
    /// [`SnapshotError::Misuse`] if there is no such block, or it has not all of these pages.
    pub(crate) fn block_mut(
        &mut self,
        file: &StoreFile,
        index: usize,
        pages: PageRange,
    ) -> Result<&mut BlockPages, SnapshotError> {
        let count = self.blocks.len();
        match self.blocks.get_mut(index) {
            Some(block) if pages.end.0 <= block.place.pages => Ok(block),
            Some(block) => {
                Err(file.misuse(format!("{pages} of RAM block {}, which has {}", block.place.name, block.place.pages)))
            }
            None => Err(file.misuse(format!("RAM block number {index} of {count}"))),
        }
    }

    /// Takes device sections that come before the pages.
    pub(crate) fn put_early_sections(&mut self, file: &StoreFile, sections: &[u8]) -> Result<(), SnapshotError> {
        if self.layout.early_sections.len().saturating_add(sections.len()) > EARLY_SECTIONS_LIMIT {
            return Err(file.misuse(format!("more than {EARLY_SECTIONS_LIMIT} bytes of early device sections")));
        }
        self.layout.add_early_sections(sections);
        Ok(())
    }

    /// Writes consecutive pages of a block, one slice of 4096 bytes a page.
    pub(crate) fn put_pages(
        &mut self,
        file: &StoreFile,
        block: usize,
        first: PageNumber,
        pages: &[IoSlice<'_>],
    ) -> Result<(), SnapshotError> {
        if let Some(odd) = pages.iter().find(|page| page.len() != PAGE_LEN) {
            return Err(file.misuse(format!("a page of {} bytes", odd.len())));
        }
        let range = PageRange::starting_at(first, pages.len() as u64);
        let known = self.block_mut(file, block, range)?;
        let place = &known.place;
        // Before the write: one that fails half-way has written something.
        known.written.set_range(range);
        file.write_vector(|| format!("{range} of RAM block {}", place.name), place.offset(range), pages)?;
        known.stored.set_range(range);
        self.see(file, block, range)
    }

    /// Makes pages of a block zero.
    pub(crate) fn put_zero(&mut self, file: &StoreFile, block: usize, pages: PageRange) -> Result<(), SnapshotError> {
        self.block_mut(file, block, pages)?.stored.clear_range(pages);
        self.see(file, block, pages)
    }

    /// Notes that pages were mentioned.
    pub(crate) fn see(&mut self, file: &StoreFile, block: usize, pages: PageRange) -> Result<(), SnapshotError> {
        let seen = &mut self.block_mut(file, block, pages)?.seen;
        let again = seen.count_in(pages);
        seen.set_range(pages);
        self.resent += again;
        Ok(())
    }

    /// Reads a page with its last contents.
    pub(crate) fn read_back(
        &mut self,
        file: &StoreFile,
        block: usize,
        page: PageNumber,
        into: &mut [u8; PAGE_LEN],
    ) -> Result<(), SnapshotError> {
        let pages = PageRange::starting_at(page, 1);
        let known = self.block_mut(file, block, pages)?;
        file.read_pages(&known.place, &known.stored, pages, into)
    }

    /// Takes the contents of pages that became zero out of the file.
    pub(crate) fn clear_stale(&mut self, file: &StoreFile) -> Result<(), SnapshotError> {
        for BlockPages { place, stored, written, .. } in &mut self.blocks {
            let mut stale = written.clone();
            stale.subtract(stored);
            for run in stale.runs() {
                let is_zeroed = run.len() < self.shortest_hole
                    && match file.zero(place, run) {
                        Ok(()) => true,
                        // A hole needs no room: nothing was written where the disk was full before.
                        Err(error) if error.is_full() => false,
                        Err(error) => return Err(error),
                    };
                if !is_zeroed {
                    file.punch(place, run)?;
                }
                written.clear_range(run);
            }
        }
        Ok(())
    }

    /// Returns the page statistics, as they would be in the trailer.
    pub(crate) fn statistics(&self) -> PageStatistics {
        // Of a virtio-mem device, memory that is not plugged is not mentioned.
        let all_is_plugged = self.layout.early_sections.is_empty();
        let hinted = all_is_plugged.then(|| self.blocks.iter().map(BlockPages::unmentioned).sum());
        let mut statistics = PageStatistics { resent: self.resent, hinted, ..PageStatistics::default() };
        for block in &self.blocks {
            let normal = block.stored.count();
            statistics.normal += normal;
            statistics.zero += block.place.pages - normal - hinted.map_or(0, |_| block.unmentioned());
            statistics.explicit_zero += block.explicit_zeros().map_or(0, |explicit| explicit.count());
            statistics.punched += block.stale().count();
        }
        statistics
    }

    /// Parses the device state up to the end of the VM description.
    pub(crate) fn parse_devices(&self, file: &StoreFile, tail: &[u8]) -> Result<DeviceBytes, SnapshotError> {
        DeviceBytes::parse(tail.to_vec()).map_err(|why| self.unusable_devices(file, why))
    }

    /// The error for a device state that cannot be stored.
    pub(crate) fn unusable_devices(&self, file: &StoreFile, why: String) -> SnapshotError {
        file.structure(self.layout.tail_offset, why)
    }

    /// Writes everything but the pages; returns the manifest of the file, and the file's length.
    pub(crate) fn seal(
        &mut self,
        file: &StoreFile,
        devices: &DeviceBytes,
        mut manifest: Manifest,
        checksum: bool,
    ) -> Result<(Manifest, u64), SnapshotError> {
        let (any_page, any_seen) = (
            self.blocks.iter().any(|block| block.place.pages > 0),
            self.blocks.iter().any(|block| !block.seen.is_empty()),
        );
        if any_page && !any_seen {
            return Err(SnapshotError::Empty { path: file.path().to_path_buf() });
        }
        manifest.pages = self.statistics();
        self.clear_stale(file)?;
        let Self { layout, blocks, .. } = self;
        let mut memory = Memory { places: Vec::new(), stored: Vec::new() };
        for block in &*blocks {
            let mut bits = block.stored.clone();
            if let Some(explicit) = block.explicit_zeros() {
                bits.union_with(&explicit);
            }
            memory.places.push(block.place.clone());
            memory.stored.push(bits);
        }
        seal::write_frame(file, layout, &memory.stored)?;
        file.write("the device state", layout.tail_offset, devices.bytes())?;
        seal::complete(&mut manifest, &layout.configuration, &memory, devices);
        let contents = seal::Contents { layout, memory: &memory, devices };
        let length = seal::append_trailer(file, &contents, &manifest, checksum)?;
        Ok((manifest, length))
    }
}
