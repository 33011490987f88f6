//! The base of a series of checkpoints: an ordinary save.

use std::io::IoSlice;

use limosa_migrate::stored::{PageError, PageSink, StreamSetup};
use limosa_page::{PAGE_LEN, PageNumber, PageRange};

use super::directory::CheckpointDirectory;
use super::pair::{CheckpointOptions, CheckpointPair};
use crate::error::SnapshotError;
use crate::manifest::Manifest;
use crate::unnamed_file::{Durability, UnnamedFile};
use crate::writer::{SnapshotWriter, WriteOptions};

/// The [`PageSink`] of a base.
///
/// Dropping it before [`finish`](Self::finish) leaves the checkpoint that was there before, if there was one.
#[derive(Debug)]
pub struct CheckpointBase {
    directory: CheckpointDirectory,
    options: CheckpointOptions,
    writer: SnapshotWriter,
}

impl CheckpointDirectory {
    /// Begins a series of checkpoints with its base, all of the VM.
    ///
    /// # Errors
    /// `checkpoint.limosa` is being served, or no file can be made in the directory.
    pub fn receive_base(self, options: CheckpointOptions) -> Result<CheckpointBase, SnapshotError> {
        self.remove_spare()?;
        let CheckpointOptions { durability, checksum } = options;
        let pending = UnnamedFile::create(&self.checkpoint(), true)?;
        let write = WriteOptions { durability, checksum, write_behind: durability == Durability::Synced };
        Ok(CheckpointBase { directory: self, options, writer: SnapshotWriter::new(pending, write)? })
    }
}

impl CheckpointBase {
    /// Publishes the base: it is checkpoint 0. The spare has nothing yet: [`CheckpointPair::catch_up`] is next.
    ///
    /// `tail` and `manifest` are as of [`SnapshotWriter::finish`]. The manifest is also that of each later checkpoint,
    /// but for id, number, times and page statistics.
    ///
    /// # Errors
    /// As of [`SnapshotWriter::finish`]: the checkpoint that was there before stays. The spare cannot be made: the base
    /// is the checkpoint. The directory is given up in both cases.
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
