//! A snapshot file being filled from a migration stream.
//!
//! Law of this module: a page goes from the caller's receive buffer straight to its place in the file, in one vectored
//! write for a whole run, and the published file has exactly the last state of each page in the stream:
//!
//! - a page that was last sent with contents has its bit set and those contents;
//! - a page that was last sent as zero, or that was never mentioned, is a hole of the file, also if it had contents in
//!   between: old contents are never left in a published file;
//! - in blocks under 64 MiB (firmware, option ROMs, video memory) a page that *arrived* as zero has its bit set over
//!   that hole. A destination QEMU fills such blocks itself before it loads, and its loader (10.0) does not clear what
//!   has a clear bit; a set bit over a hole makes it load zeros, and costs no room.

use std::fs::File;
use std::io::IoSlice;
use std::path::Path;

use limosa_channel::Counters;
use limosa_migrate::stored::{PageError, PageSink, StreamSetup};
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange};
use limosa_stream::configuration::IGNORE_SHARED;
use limosa_stream::mapped_ram::{EARLY_SECTIONS_LIMIT, Layout, MappedBlock};

use crate::error::SnapshotError;
use crate::layout::{DeviceBytes, MEMORY_PAGES_MAX, Memory};
use crate::manifest::{Manifest, PageStatistics, Published};
use crate::seal;
use crate::store::{StoreFile, StoredRange};
use crate::unnamed_file::{Durability, UnnamedFile};
use crate::write_behind::WriteBehind;

/// How a snapshot file is finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteOptions {
    /// Whether the file must survive a power cut before it gets its name.
    pub durability: Durability,
    /// Whether the trailer records a checksum of each MiB of guest memory.
    pub checksum: bool,
    /// Whether write-back begins while pages still arrive. Off for files in memory (tmpfs), where there is nothing to
    /// write back.
    pub write_behind: bool,
}

impl WriteOptions {
    /// The default: synced, without checksums, written back early.
    #[must_use]
    pub const fn new() -> Self {
        Self { durability: Durability::Synced, checksum: false, write_behind: true }
    }
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// A [`PageSink`] that is a snapshot file.
///
/// Dropping it before [`finish`](SnapshotWriter::finish) leaves nothing.
#[derive(Debug)]
pub struct SnapshotWriter {
    pending: UnnamedFile,
    file: StoreFile,
    options: WriteOptions,
    write_behind: Option<WriteBehind>,
    layout: Option<Layout>,
    blocks: Vec<Receiving>,
    resent: u64,
}

/// Pages that arrived for one RAM block.
#[derive(Debug)]
struct Receiving {
    place: StoredRange,
    /// Pages that were last sent with contents.
    stored: PageBitmap,
    /// Pages that have, or had, contents in the file.
    written: PageBitmap,
    /// Pages that were mentioned at all.
    seen: PageBitmap,
}

impl SnapshotWriter {
    /// Fills `pending`.
    ///
    /// # Errors
    /// If the file's descriptor cannot be duplicated.
    pub fn new(pending: UnnamedFile, options: WriteOptions) -> Result<Self, SnapshotError> {
        let file = StoreFile::duplicate(pending.file(), pending.target())?;
        // Without the thread everything is right, only later: no reason to refuse a save.
        let write_behind = if options.write_behind { WriteBehind::for_own_writes(&pending).ok() } else { None };
        Ok(Self { pending, file, options, write_behind, layout: None, blocks: Vec::new(), resent: 0 })
    }

    /// Returns the page statistics, as they will be in the trailer.
    pub fn statistics(&self) -> PageStatistics {
        // Of a virtio-mem device, memory that is not plugged is not mentioned.
        let all_is_plugged = self.layout.as_ref().is_some_and(|layout| layout.early_sections.is_empty());
        let hinted = all_is_plugged.then(|| self.blocks.iter().map(Receiving::unmentioned).sum());
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

    /// The name that the file is to have.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The counters of the file's channel: system calls, bytes, partial writes.
    pub fn counters(&self) -> Counters {
        self.file.channel().counters()
    }

    /// Ends the file with the device state and publishes it.
    ///
    /// `tail` is what the stream had from the first FULL section to the end of the VM description, inclusive; it is
    /// stored as it is. The manifest's page statistics, RAM length and finishing time are filled in here; machine, uuid
    /// and run state are if it lacks them.
    ///
    /// # Errors
    /// The writer is gone then and nothing is left of the file: the disk is full, the tail is not whole, the stream
    /// never brought a page, the name was taken meanwhile.
    pub fn finish(self, tail: &[u8], manifest: Manifest) -> Result<Published, SnapshotError> {
        let (manifest, length) = self.seal(tail, manifest)?;
        let write_behind_requests = self.write_behind.as_ref().map_or(0, WriteBehind::requests);
        let durability = self.options.durability;
        let Self { pending, write_behind, .. } = self;
        drop(write_behind);
        let path = pending.publish(durability)?;
        Ok(Published { path, manifest, length, write_behind_requests })
    }

    /// As [`finish`](Self::finish), but the file never gets a name: it is gone when the returned one is closed.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn finish_nameless(self, tail: &[u8], manifest: Manifest) -> Result<File, SnapshotError> {
        self.seal(tail, manifest)?;
        let Self { pending, write_behind, .. } = self;
        drop(write_behind);
        pending.into_nameless()
    }

    /// Writes everything but the pages; returns the manifest of the file, and the file's length.
    fn seal(&self, tail: &[u8], manifest: Manifest) -> Result<(Manifest, u64), SnapshotError> {
        let Self { file, options, layout, blocks, .. } = self;
        let Some(layout) = layout else { return Err(file.misuse("finished before a stream began")) };
        let (any_page, any_seen) =
            (blocks.iter().any(|block| block.place.pages > 0), blocks.iter().any(|block| !block.seen.is_empty()));
        if any_page && !any_seen {
            return Err(SnapshotError::Empty { path: file.path().to_path_buf() });
        }
        let devices = DeviceBytes::parse(tail.to_vec()).map_err(|why| file.structure(layout.tail_offset, why))?;
        let mut memory = Memory { places: Vec::new(), stored: Vec::new() };
        for block in blocks {
            for run in block.stale().runs() {
                file.punch(&block.place, run)?;
            }
            let mut bits = block.stored.clone();
            if let Some(explicit) = block.explicit_zeros() {
                bits.union_with(&explicit);
            }
            memory.places.push(block.place.clone());
            memory.stored.push(bits);
        }
        seal::write_frame(file, layout, &memory.stored)?;
        file.write("the device state", layout.tail_offset, devices.bytes())?;

        let mut manifest = manifest;
        manifest.pages = self.statistics();
        seal::complete(&mut manifest, &layout.configuration, &memory, &devices);
        let contents = seal::Contents { layout, memory: &memory, devices: &devices };
        let length = seal::append_trailer(file, &contents, &manifest, options.checksum)?;
        Ok((manifest, length))
    }
}

impl Receiving {
    fn new(block: &MappedBlock) -> Self {
        let bitmap = PageBitmap::new(block.pages);
        Self { place: StoredRange::new(block), stored: bitmap.clone(), written: bitmap.clone(), seen: bitmap }
    }

    /// Zero pages that a loader must write, because the destination may have filled the block before.
    fn explicit_zeros(&self) -> Option<PageBitmap> {
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

    /// Notes that pages were mentioned; returns how many of them were before.
    fn see(&mut self, pages: PageRange) -> u64 {
        let before = self.seen.count_in(pages);
        self.seen.set_range(pages);
        before
    }
}

/// The block with that index, if it has those pages.
fn receiving<'a>(
    blocks: &'a mut [Receiving],
    file: &StoreFile,
    index: usize,
    pages: PageRange,
) -> Result<&'a mut Receiving, SnapshotError> {
    let count = blocks.len();
    match blocks.get_mut(index) {
        Some(block) if pages.end.0 <= block.place.pages => Ok(block),
        Some(block) => {
            Err(file.misuse(format!("{pages} of RAM block {}, which has {}", block.place.name, block.place.pages)))
        }
        None => Err(file.misuse(format!("RAM block number {index} of {count}"))),
    }
}

impl PageSink for SnapshotWriter {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        if self.layout.is_some() {
            return Err(self.file.misuse("a second stream for one file").into());
        }
        let unsupported = |what: String| SnapshotError::Unsupported { path: self.file.path().to_path_buf(), what };
        if start.configuration.has_capability(IGNORE_SHARED) {
            let what =
                "the stream leaves shared memory out (capability x-ignore-shared); save again with that capability off";
            return Err(unsupported(what.to_owned()).into());
        }
        let layout = Layout::plan(&start.configuration, start.section_id, &start.blocks)
            .map_err(|e| unsupported(e.to_string()))?;
        let memory: u64 = layout.blocks.iter().map(|block| block.pages).sum();
        if memory > MEMORY_PAGES_MAX {
            let what = format!("a VM with {memory} pages of memory: at most {MEMORY_PAGES_MAX} can be");
            return Err(unsupported(what).into());
        }
        self.blocks = layout.blocks.iter().map(Receiving::new).collect();
        self.layout = Some(layout);
        Ok(())
    }

    fn put_early_sections(&mut self, sections: &[u8]) -> Result<(), PageError> {
        match &mut self.layout {
            Some(layout) if layout.early_sections.len() + sections.len() <= EARLY_SECTIONS_LIMIT => {
                layout.add_early_sections(sections);
                Ok(())
            }
            Some(_) => {
                Err(self.file.misuse(format!("more than {EARLY_SECTIONS_LIMIT} bytes of early device sections")).into())
            }
            None => Err(self.file.misuse("device sections before a stream began").into()),
        }
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        if let Some(odd) = pages.iter().find(|page| page.len() != PAGE_LEN) {
            return Err(self.file.misuse(format!("a page of {} bytes", odd.len())).into());
        }
        let range = PageRange::starting_at(first, pages.len() as u64);
        let receiving = receiving(&mut self.blocks, &self.file, block, range)?;
        let place = &receiving.place;
        self.file.write_vector(|| format!("{range} of RAM block {}", place.name), place.offset(range), pages)?;
        receiving.written.set_range(range);
        receiving.stored.set_range(range);
        self.resent += receiving.see(range);
        if let Some(write_behind) = &self.write_behind {
            write_behind.report_written(range.bytes().end - range.bytes().start);
        }
        Ok(())
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        let receiving = receiving(&mut self.blocks, &self.file, block, pages)?;
        receiving.stored.clear_range(pages);
        self.resent += receiving.see(pages);
        Ok(())
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        let pages = PageRange::starting_at(page, 1);
        let receiving = receiving(&mut self.blocks, &self.file, block, pages)?;
        Ok(self.file.read_pages(&receiving.place, &receiving.stored, pages, into)?)
    }
}
