//! Positional reads and writes of a snapshot file, with errors that name it.
//!
//! Law of this module: a page that is stored comes from the file or is an error. There is no mapping of the file, so a
//! truncation or an I/O error is a short or failed call with a path and an offset, never SIGBUS and never a zero page.
//!
//! The bytes are those of the file, or lent by another crate ([`SnapshotBytes`]): then they are only read.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_channel::{ChannelError, Counters, FileChannel};
use limosa_page::{PAGE_SIZE, PageBitmap, PageRange, to_usize};
use limosa_stream::mapped_ram::MappedBlock;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::bytes::SnapshotBytes;
use crate::error::SnapshotError;

/// Blocks shorter than this, in bytes, may be filled by a destination before it loads: firmware, option ROMs, video
/// memory.
const PREFILLED_BELOW: u64 = 64 << 20;

/// Where a RAM block is in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredRange {
    /// The block's name.
    pub(crate) name: String,
    /// Its length in pages.
    pub(crate) pages: u64,
    /// The file offset of its page 0.
    pub(crate) pages_offset: u64,
}

impl StoredRange {
    pub(crate) fn new(block: &MappedBlock) -> Self {
        Self { name: block.block.name.clone(), pages: block.pages, pages_offset: block.pages_offset }
    }

    /// Whether a destination may have filled the block before it loads, so that its zeros have to be loaded too.
    pub(crate) fn may_be_prefilled(&self) -> bool {
        self.pages < PREFILLED_BELOW / PAGE_SIZE
    }

    /// The file offset of a page; the decoder or planner of the layout made sure that it fits.
    pub(crate) fn offset(&self, pages: PageRange) -> u64 {
        self.pages_offset.saturating_add(pages.start.offset())
    }
}

/// An open snapshot file and its name.
#[derive(Debug)]
pub(crate) struct StoreFile {
    channel: FileChannel,
    path: PathBuf,
    /// The snapshot's bytes, if they are not those of the file.
    lent: Option<Arc<dyn SnapshotBytes>>,
}

impl StoreFile {
    pub(crate) fn new(file: File, path: &Path) -> Self {
        Self { channel: FileChannel::from_file(file, 0), path: path.to_path_buf(), lent: None }
    }

    /// A file that is an image of these bytes.
    pub(crate) fn with_bytes(file: File, bytes: Arc<dyn SnapshotBytes>, path: &Path) -> Self {
        Self { lent: Some(bytes), ..Self::new(file, path) }
    }

    /// The same open file under a descriptor of its own.
    pub(crate) fn duplicate(file: &File, path: &Path) -> Result<Self, SnapshotError> {
        let copy = file.try_clone().map_err(|e| SnapshotError::io("duplicate its descriptor", path, None, e))?;
        Ok(Self::new(copy, path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Exchanges the paths of two files whose names were exchanged.
    pub(crate) fn swap_paths(&mut self, other: &mut Self) {
        std::mem::swap(&mut self.path, &mut other.path);
    }

    /// The snapshot's bytes, if they are not those of the file.
    pub(crate) fn lent_bytes(&self) -> Option<&Arc<dyn SnapshotBytes>> {
        self.lent.as_ref()
    }

    /// Counters of the transfers so far.
    pub(crate) fn counters(&self) -> Counters {
        self.lent.as_ref().map_or_else(|| self.channel.counters(), |bytes| bytes.counters())
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    pub(crate) fn io(
        &self,
        operation: impl Into<String>,
        offset: Option<u64>,
        e: impl Into<io::Error>,
    ) -> SnapshotError {
        SnapshotError::io(operation, &self.path, offset, e)
    }

    pub(crate) fn structure(&self, offset: u64, what: impl Into<String>) -> SnapshotError {
        SnapshotError::Structure { path: self.path.clone(), offset, what: what.into(), feature: None }
    }

    pub(crate) fn misuse(&self, what: impl Into<String>) -> SnapshotError {
        SnapshotError::Misuse { path: self.path.clone(), what: what.into() }
    }

    /// The length, and the other facts that show whether the file is still the same.
    pub(crate) fn stat(&self) -> Result<rustix::fs::Stat, SnapshotError> {
        rustix::fs::fstat(&self.channel).map_err(|errno| self.io("look at it", None, errno))
    }

    /// Makes the written data durable.
    pub(crate) fn sync(&self) -> Result<(), SnapshotError> {
        rustix::fs::fsync(&self.channel).map_err(|errno| self.io("make it durable (fsync)", None, errno))
    }

    /// Cuts off everything from `length` on.
    pub(crate) fn truncate(&self, length: u64) -> Result<(), SnapshotError> {
        rustix::fs::ftruncate(&self.channel, length).map_err(|errno| self.io("cut it", Some(length), errno))
    }

    /// Reads exactly `into.len()` bytes.
    pub(crate) fn read(&self, what: &str, offset: u64, into: &mut [u8]) -> Result<(), SnapshotError> {
        if into.is_empty() {
            return Ok(());
        }
        self.read_exact_at(into, offset, || format!("read {what}"))
    }

    fn read_exact_at(
        &self,
        into: &mut [u8],
        offset: u64,
        operation: impl FnOnce() -> String,
    ) -> Result<(), SnapshotError> {
        match &self.lent {
            Some(bytes) => bytes.read_exact_at(into, offset).map_err(|source| SnapshotError::Packed {
                path: self.path.clone(),
                offset,
                source,
            }),
            None => self.channel.read_exact_at(into, offset).map_err(|e| self.transfer(operation(), offset, e)),
        }
    }

    /// Writes all of `bytes`.
    pub(crate) fn write(&self, what: &str, offset: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.write_vector(|| what.to_owned(), offset, &[IoSlice::new(bytes)])
    }

    /// Writes all of a gather list.
    pub(crate) fn write_vector(
        &self,
        what: impl FnOnce() -> String,
        offset: u64,
        list: &[IoSlice<'_>],
    ) -> Result<(), SnapshotError> {
        self.channel
            .write_all_vectored_at(list, offset)
            .map_err(|e| self.transfer(format!("write {}", what()), offset, e))
    }

    /// Reads whole pages of a block: stored ones from the file, the others are zero.
    pub(crate) fn read_pages(
        &self,
        place: &StoredRange,
        stored: &PageBitmap,
        pages: PageRange,
        mut into: &mut [u8],
    ) -> Result<(), SnapshotError> {
        let mut rest = pages;
        let mut take = |pages: PageRange| {
            let length = to_usize(pages.bytes().end - pages.bytes().start);
            let short = || self.misuse(format!("a buffer too short for {pages} of RAM block {}", place.name));
            into.split_off_mut(..length).ok_or_else(short)
        };
        for run in stored.runs_in(pages) {
            let (gap, behind) = rest.split_at(run.start);
            take(gap)?.fill(0);
            rest = behind.split_at(run.end).1;
            let (part, offset) = (take(run)?, place.offset(run));
            self.read_exact_at(part, offset, || format!("read {run} of RAM block {}", place.name))?;
        }
        take(rest)?.fill(0);
        Ok(())
    }

    /// Takes pages out of the file: a hole where the file system has holes, zeros where it has none.
    pub(crate) fn punch(&self, place: &StoredRange, pages: PageRange) -> Result<(), SnapshotError> {
        let what = || format!("take {pages} of RAM block {} out of it", place.name);
        let (offset, bytes) = (place.offset(pages), pages.bytes());
        let length = bytes.end - bytes.start;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&self.channel, flags, offset, length) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return self.zero(place, pages),
                Err(errno) => return Err(self.io(what(), Some(offset), errno)),
            }
        }
    }

    /// Writes zeros over pages.
    pub(crate) fn zero(&self, place: &StoredRange, pages: PageRange) -> Result<(), SnapshotError> {
        static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
        let what = || format!("zero {pages} of RAM block {}", place.name);
        let (offset, bytes) = (place.offset(pages), pages.bytes());
        let length = bytes.end - bytes.start;
        let mut done = 0;
        while done < length {
            let now = to_usize(length - done).min(ZEROS.len());
            self.write_vector(what, offset + done, &[IoSlice::new(ZEROS.split_at(now).0)])?;
            done += now as u64;
        }
        Ok(())
    }

    /// A failed transfer, in this crate's words: the channel names its peer, here it is the file's name that helps.
    fn transfer(&self, operation: String, offset: u64, e: ChannelError) -> SnapshotError {
        match e {
            ChannelError::Io { source, offset: at, .. } => self.io(operation, at.or(Some(offset)), source),
            ChannelError::Closed { offset, got, wanted, .. } => {
                let what = format!("cannot {operation}: the file ends after {got} of {wanted} bytes; it was truncated");
                self.structure(offset, what)
            }
            other => self.io(operation, Some(offset), io::Error::other(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use limosa_page::PageNumber;

    use super::*;

    #[test]
    fn pages_are_taken_out_with_and_without_holes_and_their_neighbours_stay() {
        let place = StoredRange { name: "pc.bios".to_owned(), pages: 40, pages_offset: 1000 };
        let out = PageRange::new(PageNumber(3), PageNumber(37));
        for take_out in [StoreFile::punch, StoreFile::zero] {
            let file = tempfile::tempfile().unwrap();
            let mut wanted = vec![0x5a; 1000 + 40 * 4096];
            file.write_all_at(&wanted, 0).unwrap();
            take_out(&StoreFile::duplicate(&file, Path::new("vm")).unwrap(), &place, out).unwrap();
            wanted[1000 + 3 * 4096..1000 + 37 * 4096].fill(0);
            let mut found = vec![0; wanted.len()];
            file.read_exact_at(&mut found, 0).unwrap();
            assert!(found == wanted);
            assert_eq!(file.metadata().unwrap().len(), wanted.len() as u64);
        }
    }
}
