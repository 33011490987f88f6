//! The base of a series of checkpoints: an ordinary save.

use std::io::IoSlice;

use limosa_migrate::stored::{PageError, PageSink, StreamSetup};
use limosa_page::{PAGE_LEN, PageNumber, PageRange};

use super::directory::CheckpointDirectory;
use super::pair::CheckpointPair;
use crate::error::SnapshotError;
use crate::manifest::Manifest;
use crate::unnamed_file::{Durability, UnnamedFile};
use crate::writer::{SnapshotWriter, WriteOptions};

/// How checkpoints are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointOptions {
    /// Whether a checkpoint must survive a power cut before it counts. [`Unsynced`](Durability::Unsynced) ones survive
    /// the end of any process.
    pub durability: Durability,
    /// Whether the trailer of each checkpoint records a checksum of each MiB of guest memory: all of it is read then,
    /// each time.
    pub checksum: bool,
}

impl CheckpointOptions {
    /// The default: not synced, without checksums.
    #[must_use]
    pub const fn new() -> Self {
        Self { durability: Durability::Unsynced, checksum: false }
    }
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// The [`PageSink`] of a base.
///
/// Dropping it before [`finish`](Self::finish) leaves the checkpoint that was there before, if there was one.
#[derive(Debug)]
pub struct CheckpointBase {
    directory: CheckpointDirectory,
    options: CheckpointOptions,
    writer: SnapshotWriter,
}

impl CheckpointBase {
    pub(super) fn create(directory: CheckpointDirectory, options: CheckpointOptions) -> Result<Self, SnapshotError> {
        let CheckpointOptions { durability, checksum } = options;
        let pending = UnnamedFile::create(&directory.checkpoint(), true)?;
        let write = WriteOptions { durability, checksum, write_behind: durability == Durability::Synced };
        Ok(Self { directory, options, writer: SnapshotWriter::new(pending, write)? })
    }

    /// Publishes the base: it is checkpoint 0. The spare has nothing yet: [`CheckpointPair::catch_up`] is next.
    ///
    /// `tail` and `manifest` are as of [`SnapshotWriter::finish`]. The manifest is also that of each later checkpoint,
    /// but for id, number, times and page statistics.
    ///
    /// # Errors
    /// As of [`SnapshotWriter::finish`]. The directory is given up then, and the checkpoint that was there before
    /// stays.
    pub fn finish(self, tail: &[u8], manifest: Manifest) -> Result<CheckpointPair, SnapshotError> {
        let Self { directory, options, writer } = self;
        let base = writer.finish_open(tail, Manifest { checkpoint: Some(0), ..manifest.clone() })?;
        CheckpointPair::new(directory, options, base, tail, manifest)
    }
}

impl PageSink for CheckpointBase {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        self.writer.begin(start)
    }

    fn put_early_sections(&mut self, sections: &[u8]) -> Result<(), PageError> {
        self.writer.put_early_sections(sections)
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        self.writer.put_pages(block, first, pages)
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        self.writer.put_zero(block, pages)
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        self.writer.read_back(block, page, into)
    }
}
