//! The pair itself: which of its files is what, and when.
//!
//! Law of this module: before a page is received both files have the same pages, and each page in which they may differ
//! is noted before the spare is written to. So what is noted is all that catching up has to copy, after a checkpoint
//! that counts as well as after one that was cut off.

use std::io::IoSlice;
use std::path::Path;
use std::time::{Duration, Instant};

use limosa_migrate::stored::{PageError, PageSink, StreamSetup};
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange, invariant, to_u64, to_usize};
use uuid::Uuid;

use super::changes::{STRIDE, buffer, changed_pages};
use super::description::Description;
use super::directory::{CheckpointDirectory, admit_readers, claim};
use super::spare::{Differences, PairFile, SpareUse};
use crate::error::SnapshotError;
use crate::lock;
use crate::manifest::{self, Manifest, Published};
use crate::unnamed_file::Durability;
use crate::writer::PublishedFile;

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

/// The step that a pair expects next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Pages of the next checkpoint, or its end.
    Receiving,
    /// [`CheckpointPair::catch_up`]: the spare may lack pages of the checkpoint, or has pages that it has not.
    Behind,
}

/// Pages that were received for a checkpoint, by what became of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CheckpointPages {
    /// Pages that came with contents.
    pub contents: u64,
    /// Those of `contents` that were not written, because the file had them already.
    pub equal: u64,
    /// Pages that came as zero.
    pub zero: u64,
}

/// A checkpoint that counts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Checkpoint {
    /// Its number: the base is 0.
    pub number: u64,
    /// Its identity as a snapshot.
    pub id: Uuid,
    /// The pages that were received for it.
    pub pages: CheckpointPages,
    /// Length of its file in bytes, holes included.
    pub length: u64,
    /// Time for writing what is not pages, and for making the file durable.
    pub seal: Duration,
    /// Time for exchanging the names, and for making them durable.
    pub flip: Duration,
}

/// Two snapshot files with the checkpoints of a VM: a [`PageSink`] for the pages of the next one.
///
/// Takes memory for about eight bits a page of the VM.
///
/// Dropping it leaves the newest whole checkpoint.
#[derive(Debug)]
pub struct CheckpointPair {
    options: CheckpointOptions,
    current: PairFile,
    spare: PairFile,
    spare_use: SpareUse,
    differences: Differences,
    phase: Phase,
    /// Whether the names would survive a power cut, or need not.
    names_are_durable: bool,
    received: CheckpointPages,
    newest: Published,
    /// Its device state.
    tail: Vec<u8>,
    /// The manifest that each checkpoint begins with.
    manifest: Manifest,
    description: Description,
    buffer: Vec<u8>,
    /// The last to be dropped: who has the directory next finds both files unlocked.
    directory: CheckpointDirectory,
}

impl CheckpointPair {
    /// The pair whose checkpoint is a base that was just published.
    pub(super) fn new(
        directory: CheckpointDirectory,
        options: CheckpointOptions,
        base: PublishedFile,
        tail: &[u8],
        manifest: Manifest,
    ) -> Result<Self, SnapshotError> {
        let PublishedFile { published, file, pages } = base;
        lock::shared(file.fd(), file.path())?;
        let devices = pages.parse_devices(&file, tail)?;
        let current = PairFile::new(file, pages);
        let (spare, differences) = PairFile::spare_for(&current, &directory)?;
        Ok(Self {
            directory,
            options,
            current,
            spare,
            spare_use: SpareUse::Claimed,
            differences,
            phase: Phase::Behind,
            names_are_durable: true,
            received: CheckpointPages::default(),
            newest: published,
            tail: tail.to_vec(),
            manifest,
            description: Description::of(&devices),
            buffer: buffer(),
        })
    }

    /// The newest whole checkpoint.
    pub fn newest(&self) -> &Published {
        &self.newest
    }

    /// Number of the newest whole checkpoint.
    pub fn number(&self) -> u64 {
        self.newest.manifest.checkpoint.unwrap_or(0)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The pages that were received for the next checkpoint so far.
    pub fn received(&self) -> CheckpointPages {
        self.received
    }

    /// The device state of the newest whole checkpoint: its device sections, the byte that ends them and their
    /// description, as they are at the end of a stream.
    pub fn tail(&self) -> &[u8] {
        &self.tail
    }

    /// Pages of a RAM block that a loader of the newest whole checkpoint needs: those with contents, and in small
    /// blocks (firmware, video memory) those that came as zero. `None` if there is no such block.
    pub fn needed_pages(&self, block: usize) -> Option<PageBitmap> {
        let known = self.current.pages.blocks().get(block)?;
        let mut needed = known.stored.clone();
        if let Some(explicit) = known.explicit_zeros() {
            needed.union_with(&explicit);
        }
        Some(needed)
    }

    /// Pages of a RAM block in which the newest whole checkpoint differs from the one before: between
    /// [`commit`](Self::commit) and [`catch_up`](Self::catch_up). `None` if there is no such block.
    pub fn changed_pages(&self, block: usize) -> Option<&PageBitmap> {
        self.differences.block(block)
    }

    /// Reads pages of the newest whole checkpoint.
    ///
    /// # Errors
    /// They are not in a block, `into` is too short, or the file cannot be read.
    pub fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), SnapshotError> {
        let PairFile { file, pages: known } = &self.current;
        match known.blocks().get(block) {
            Some(known) if pages.end.0 <= known.place.pages => {
                file.read_pages(&known.place, &known.stored, pages, into)
            }
            _ => Err(file.misuse(format!("{pages} of RAM block number {block}"))),
        }
    }

    /// Ends the series; the directory stays this process's, for another base.
    #[must_use]
    pub fn into_directory(self) -> CheckpointDirectory {
        self.directory
    }

    /// Copies up to `limit` of the pages that the spare lacks; returns how many are left. At 0 the next checkpoint can
    /// be received.
    ///
    /// Does nothing while one is being received.
    ///
    /// # Errors
    /// The pages cannot be copied, or a new spare is needed and cannot be made. It may be tried again.
    pub fn catch_up(&mut self, limit: u64) -> Result<u64, SnapshotError> {
        if self.phase == Phase::Receiving {
            return Ok(0);
        }
        // What has lost its name may be what the name leads to after a power cut: not to be written to before.
        self.sync_names()?;
        self.claim_spare()?;
        let left = self.differences.settle(&self.current, &mut self.spare, limit, &mut self.buffer)?;
        if left == 0 {
            self.spare.pages.clear_stale(&self.spare.file)?;
            self.spare.pages.copy_resent(&self.current.pages);
            self.check_equal()?;
            self.received = CheckpointPages::default();
            self.phase = Phase::Receiving;
        }
        Ok(left)
    }

    /// Gives up the checkpoint that is being received: the newest one stays. [`catch_up`](Self::catch_up) is next.
    pub fn abort(&mut self) {
        self.phase = Phase::Behind;
    }

    /// Ends the checkpoint that was received: from here on it counts. [`catch_up`](Self::catch_up) is next.
    ///
    /// `devices` are the FULL device sections and the end mark behind them. The VM description is that of the base, in
    /// which sections of another length than there become one field of bytes.
    ///
    /// # Errors
    /// The checkpoint before stays, and this one is given up, with one exception that the error states: the fsync of
    /// the directory failed, so that the names are exchanged but may not be after a power cut.
    /// [`catch_up`](Self::catch_up) tries that again.
    pub fn commit(&mut self, devices: &[u8]) -> Result<Checkpoint, SnapshotError> {
        self.check_receiving()?;
        // Also if a step below fails: before pages are received again, the files have to be made equal.
        self.phase = Phase::Behind;
        let began = Instant::now();
        let (manifest, length, tail) = self.seal(devices)?;
        let sealed = Instant::now();
        self.spare_use = SpareUse::Open;
        admit_readers(&self.spare.file)?;
        self.directory.flip(&mut self.current.file, &mut self.spare.file)?;
        std::mem::swap(&mut self.current, &mut self.spare);
        let (number, id) = (self.number() + 1, manifest.id);
        self.newest = Published { path: self.directory.checkpoint(), manifest, length, write_behind_requests: 0 };
        self.tail = tail;
        self.names_are_durable = self.options.durability == Durability::Unsynced;
        self.sync_names()?;
        let (pages, seal) = (self.received, sealed - began);
        Ok(Checkpoint { number, id, pages, length, seal, flip: sealed.elapsed() })
    }

    /// Makes the spare a whole file; returns its manifest, its length and its device state.
    fn seal(&mut self, devices: &[u8]) -> Result<(Manifest, u64, Vec<u8>), SnapshotError> {
        let manifest = Manifest {
            id: Uuid::new_v4(),
            created: manifest::now(),
            finished: 0,
            checkpoint: Some(self.number() + 1),
            ..self.manifest.clone()
        };
        let PairFile { file, pages } = &mut self.spare;
        let devices = self.description.complete(devices).map_err(|why| pages.unusable_devices(file, why))?;
        let (manifest, length) = pages.seal(file, &devices, manifest, self.options.checksum)?;
        // A trailer is the last in its file.
        if file.stat()?.st_size.cast_unsigned() > length {
            file.truncate(length)?;
        }
        if self.options.durability == Durability::Synced {
            // The kernel may forget what it could not write, so that a second fsync succeeds all the same.
            file.sync().inspect_err(|_| self.spare_use = SpareUse::Suspect)?;
        }
        Ok((manifest, length, devices.bytes().to_vec()))
    }

    fn sync_names(&mut self) -> Result<(), SnapshotError> {
        if !self.names_are_durable {
            self.directory.sync()?;
            self.names_are_durable = true;
        }
        Ok(())
    }

    /// Keeps readers from the spare, or makes a new one, if it has some.
    fn claim_spare(&mut self) -> Result<(), SnapshotError> {
        match self.spare_use {
            SpareUse::Claimed => return Ok(()),
            SpareUse::Open if self.directory.has_spare(&self.spare.file) => match claim(&self.spare.file) {
                Ok(()) => {
                    self.spare_use = SpareUse::Claimed;
                    return Ok(());
                }
                Err(SnapshotError::Locked { .. }) => {}
                Err(error) => return Err(error),
            },
            SpareUse::Open | SpareUse::Suspect => {}
        }
        self.spare_use = SpareUse::Suspect;
        (self.spare, self.differences) = PairFile::spare_for(&self.current, &self.directory)?;
        self.spare_use = SpareUse::Claimed;
        Ok(())
    }

    fn check_receiving(&self) -> Result<(), SnapshotError> {
        match self.phase {
            Phase::Receiving => Ok(()),
            Phase::Behind => Err(self.spare.file.misuse("used before it has caught up with the checkpoint before")),
        }
    }

    /// Asserts that both files have the same pages.
    fn check_equal(&self) -> Result<(), SnapshotError> {
        let mut blocks = self.current.pages.blocks().iter().zip(self.spare.pages.blocks());
        let are_equal = blocks.all(|(current, spare)| {
            (&current.stored, &current.seen) == (&spare.stored, &spare.seen) && spare.written == spare.stored
        });
        invariant(are_equal, "after catching up both files have the same pages")
            .map_err(|broken| SnapshotError::Internal { path: self.spare.file.path().to_path_buf(), broken })
    }
}

impl PageSink for CheckpointPair {
    /// Refuses: the layout is that of the base.
    fn begin(&mut self, _start: &StreamSetup) -> Result<(), PageError> {
        Err(self.spare.file.misuse("a second layout for one series of checkpoints").into())
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        self.check_receiving()?;
        let Self { spare: PairFile { file, pages: known }, differences, received, buffer, .. } = self;
        let all = PageRange::starting_at(first, to_u64(pages.len()));
        known.block_mut(file, block, all)?;
        for (range, pages) in all.chunks(STRIDE).zip(pages.chunks(to_usize(STRIDE))) {
            let changed = changed_pages(file, known.block_mut(file, block, range)?, range, pages, buffer)?;
            for run in changed.runs() {
                let start = range.start.saturating_add(run.start.0);
                let (_, pages) = pages.split_at(to_usize(run.start.0));
                let (pages, _) = pages.split_at(to_usize(run.len()));
                differences.add(block, PageRange::starting_at(start, run.len()));
                known.put_pages(file, block, start, pages)?;
            }
            for run in changed.gaps() {
                let start = range.start.saturating_add(run.start.0);
                known.see(file, block, PageRange::starting_at(start, run.len()))?;
                received.equal += run.len();
            }
            received.contents += range.len();
        }
        Ok(())
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        self.check_receiving()?;
        let Self { spare: PairFile { file, pages: known }, differences, received, .. } = self;
        let before = known.block_mut(file, block, pages)?;
        // A zero page that was mentioned before changes nothing.
        for run in before.stored.runs_in(pages).chain(before.seen.gaps_in(pages)) {
            differences.add(block, run);
        }
        known.put_zero(file, block, pages)?;
        received.zero += pages.len();
        Ok(())
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        self.check_receiving()?;
        let PairFile { file, pages } = &mut self.spare;
        Ok(pages.read_back(file, block, page, into)?)
    }
}
