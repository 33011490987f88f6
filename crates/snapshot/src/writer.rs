//! A snapshot file being filled from a migration stream.
//!
//! Law of this module: the file has no name before it is whole. How pages get to their places in it is the law of
//! `received`.

use std::fs::File;
use std::io::IoSlice;
use std::path::Path;

use limosa_channel::Counters;
use limosa_migrate::stored::{PageError, PageSink, StreamSetup};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange, to_u64};

use crate::error::SnapshotError;
use crate::manifest::{Manifest, PageStatistics, Published};
use crate::received::ReceivedPages;
use crate::store::StoreFile;
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
    /// None before the stream has begun.
    pages: Option<ReceivedPages>,
}

/// A file that was published, still open.
#[derive(Debug)]
pub(crate) struct PublishedFile {
    pub(crate) published: Published,
    pub(crate) file: StoreFile,
    pub(crate) pages: ReceivedPages,
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
        Ok(Self { pending, file, options, write_behind, pages: None })
    }

    /// Returns the page statistics, as they will be in the trailer.
    pub fn statistics(&self) -> PageStatistics {
        self.pages.as_ref().map_or_else(PageStatistics::default, ReceivedPages::statistics)
    }

    /// The name that the file is to have.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The counters of the file's channel: system calls, bytes, partial writes.
    pub fn counters(&self) -> Counters {
        self.file.counters()
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
        self.finish_open(tail, manifest).map(|open| open.published)
    }

    /// As [`finish`](Self::finish), of a file that is written to later, when it has lost its name.
    pub(crate) fn finish_open(mut self, tail: &[u8], manifest: Manifest) -> Result<PublishedFile, SnapshotError> {
        let (manifest, length) = self.seal(tail, manifest)?;
        let write_behind_requests = self.write_behind.as_ref().map_or(0, WriteBehind::requests);
        let Self { pending, file, options, write_behind, pages } = self;
        let pages = pages.ok_or_else(|| unbegun(&file))?;
        drop(write_behind);
        let path = pending.publish(options.durability)?;
        Ok(PublishedFile { published: Published { path, manifest, length, write_behind_requests }, file, pages })
    }

    /// As [`finish`](Self::finish), but the file never gets a name: it is gone when the returned one is closed.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn finish_nameless(mut self, tail: &[u8], manifest: Manifest) -> Result<File, SnapshotError> {
        self.seal(tail, manifest)?;
        let Self { pending, write_behind, .. } = self;
        drop(write_behind);
        pending.into_nameless()
    }

    /// Writes everything but the pages; returns the manifest of the file, and the file's length.
    fn seal(&mut self, tail: &[u8], manifest: Manifest) -> Result<(Manifest, u64), SnapshotError> {
        let checksum = self.options.checksum;
        let (file, pages) = self.begun()?;
        let devices = pages.parse_devices(file, tail)?;
        pages.seal(file, &devices, manifest, checksum)
    }

    /// The file and its pages.
    fn begun(&mut self) -> Result<(&StoreFile, &mut ReceivedPages), SnapshotError> {
        match &mut self.pages {
            Some(pages) => Ok((&self.file, pages)),
            None => Err(unbegun(&self.file)),
        }
    }
}

fn unbegun(file: &StoreFile) -> SnapshotError {
    file.misuse("used before a stream began")
}

impl PageSink for SnapshotWriter {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        if self.pages.is_some() {
            return Err(self.file.misuse("a second stream for one file").into());
        }
        self.pages = Some(ReceivedPages::plan(&self.file, start)?);
        Ok(())
    }

    fn put_early_sections(&mut self, sections: &[u8]) -> Result<(), PageError> {
        let (file, pages) = self.begun()?;
        Ok(pages.put_early_sections(file, sections)?)
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        let (file, received) = self.begun()?;
        received.put_pages(file, block, first, pages)?;
        if let Some(write_behind) = &self.write_behind {
            write_behind.report_written(to_u64(pages.len()) * PAGE_SIZE);
        }
        Ok(())
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        let (file, received) = self.begun()?;
        Ok(received.put_zero(file, block, pages)?)
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        let (file, received) = self.begun()?;
        Ok(received.read_back(file, block, page, into)?)
    }
}
