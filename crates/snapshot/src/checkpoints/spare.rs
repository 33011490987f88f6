//! One file of a pair, and how it comes to have the pages of the other one.

use std::io::IoSlice;

use limosa_page::holes::is_tmpfs;
use limosa_page::{PageBitmap, PageNumber, PageRange};

use super::changes::{STRIDE, part};
use super::directory::CheckpointDirectory;
use crate::error::SnapshotError;
use crate::lock;
use crate::received::{BlockPages, ReceivedPages};
use crate::store::StoreFile;

/// One file of a pair.
#[derive(Debug)]
pub(super) struct PairFile {
    pub(super) file: StoreFile,
    pub(super) pages: ReceivedPages,
}

impl Drop for PairFile {
    fn drop(&mut self) {
        // Said aloud, because a child that was just forked may have a copy of the descriptor.
        lock::release(self.file.fd());
    }
}

/// Length in pages from which zeros become a hole. Shorter runs are overwritten, except on tmpfs: in a file that was
/// written back ext4 takes 0.2 ms to make a hole of one page, and up to 40 ms while it is being written back;
/// overwriting the page takes 5 µs (Linux 6.18).
const SHORTEST_HOLE: u64 = 64;

/// Who may use the spare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpareUse {
    /// It is locked against readers.
    Claimed,
    /// It was the checkpoint, or was about to be: readers may have it open.
    Open,
    /// Nobody: its contents on the disk are unknown, because writing them back failed.
    Suspect,
}

/// Pages that two files may not have in common, one bitmap a RAM block.
#[derive(Debug)]
pub(super) struct Differences(Vec<PageBitmap>);

impl Differences {
    /// None, of files with these pages.
    pub(super) fn none(pages: &ReceivedPages) -> Self {
        Self(pages.blocks().iter().map(|block| PageBitmap::new(block.stored.len())).collect())
    }

    /// All that a file with these pages has, and an empty one has not.
    fn all(pages: &ReceivedPages) -> Self {
        let known = |block: &BlockPages| {
            let mut known = block.stored.clone();
            known.union_with(&block.seen);
            known
        };
        Self(pages.blocks().iter().map(known).collect())
    }

    /// Notes pages of a block.
    pub(super) fn add(&mut self, block: usize, pages: PageRange) {
        if let Some(bitmap) = self.0.get_mut(block) {
            bitmap.set_range(pages);
        }
    }

    /// Those of a block.
    pub(super) fn block(&self, block: usize) -> Option<&PageBitmap> {
        self.0.get(block)
    }

    pub(super) fn count(&self) -> u64 {
        self.0.iter().map(PageBitmap::count).sum()
    }

    /// Copies up to `limit` of them from one file to the other, and forgets them; returns how many are left.
    ///
    /// # Errors
    /// A page cannot be read or written; those that were not copied are still noted.
    pub(super) fn settle(
        &mut self,
        from: &PairFile,
        to: &mut PairFile,
        limit: u64,
        buffer: &mut [u8],
    ) -> Result<u64, SnapshotError> {
        let mut room = limit;
        for (block, noted) in self.0.iter_mut().enumerate() {
            let mut at = PageNumber(0);
            while room > 0
                && let Some(start) = noted.next_set(at)
            {
                let end = noted.next_clear(start).unwrap_or(PageNumber(noted.len()));
                let run = PageRange::starting_at(start, STRIDE.min(room)).intersect(PageRange::new(start, end));
                to.copy(from, block, run, buffer)?;
                noted.clear_range(run);
                room -= run.len();
                at = run.end;
            }
        }
        Ok(self.count())
    }
}

impl PairFile {
    /// A file whose pages change again and again.
    pub(super) fn new(file: StoreFile, mut pages: ReceivedPages) -> Self {
        pages.set_shortest_hole(if is_tmpfs(file.fd()) { 1 } else { SHORTEST_HOLE });
        Self { file, pages }
    }

    /// Makes a spare for a checkpoint, and notes the pages that it lacks: none where the filesystem shares space
    /// between files.
    pub(super) fn spare_for(
        current: &Self,
        directory: &CheckpointDirectory,
    ) -> Result<(Self, Differences), SnapshotError> {
        let file = directory.create_spare()?;
        // The reason of a failure does not matter: if it does, copying the pages fails too.
        if rustix::fs::ioctl_ficlone(file.fd(), current.file.fd()).is_ok() {
            let pages = current.pages.clone();
            return Ok((Self::new(file, pages), Differences::none(&current.pages)));
        }
        let pages = current.pages.without_pages();
        Ok((Self::new(file, pages), Differences::all(&current.pages)))
    }

    /// Makes at most [`STRIDE`] pages of a block what they are in another file of the same layout. Those that are not
    /// stored there are outdated then.
    fn copy(&mut self, from: &Self, block: usize, pages: PageRange, buffer: &mut [u8]) -> Result<(), SnapshotError> {
        let file = &self.file;
        let known = self.pages.block_mut(file, block, pages)?;
        let theirs =
            from.pages.blocks().get(block).ok_or_else(|| file.misuse(format!("no RAM block number {block}")))?;
        known.stored.clear_range(pages);
        known.seen.clear_range(pages);
        for run in theirs.stored.runs_in(pages) {
            let contents = part(file, buffer, run)?;
            from.file.read_pages(&theirs.place, &theirs.stored, run, contents)?;
            let place = &known.place;
            // Before the write: one that fails half-way has written something.
            known.written.set_range(run);
            file.write_vector(
                || format!("{run} of RAM block {}", place.name),
                place.offset(run),
                &[IoSlice::new(contents)],
            )?;
            known.stored.set_range(run);
        }
        theirs.seen.runs_in(pages).for_each(|run| known.seen.set_range(run));
        Ok(())
    }
}
