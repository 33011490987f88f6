//! Finding the populated parts of a file without reading it.
//!
//! Law: unpopulated parts are not read. Reading a hole of shared memory (a memfd, a file on tmpfs) makes the kernel
//! allocate the page; `SEEK_DATA` and `SEEK_HOLE` (lseek(2)) find the holes instead. The result is exact about holes: a
//! byte outside the returned ranges is zero. Bytes inside may be zero too.
//!
//! Where this helps and where not:
//! - tmpfs and memfd know their pages exactly, also those in swap; disk file systems know their extents;
//! - tmpfs goes through its pages one by one, some 60 ns each: a file there that takes as much room as it is long is
//!   not asked, and all of it is data (also what fallocate(2) has allocated and was never written);
//! - hugetlbfs, and file systems that do not know their holes, call everything data: the answer is right and useless;
//! - a private mapping (`MAP_PRIVATE`) has pages of its own that the file knows nothing about: the file's holes say
//!   nothing about what is in memory.

use std::io;
use std::iter::FusedIterator;
use std::ops::Range;

use rustix::fd::BorrowedFd;
use rustix::fs::{SeekFrom, fstat, fstatfs, seek};
use rustix::io::Errno;

use crate::{PAGE_SIZE, PageRange};

/// The largest offset that a file can have.
const MAX_OFFSET: u64 = i64::MAX as u64;

/// The ranges of `range` (bytes of the file) that are not holes, ascending, not touching each other. What lies behind
/// the end of the file is no data.
///
/// Two system calls for each range, made when it is asked for. They move the file's offset, which all descriptors
/// duplicated from `fd` share: use positional reads and writes beside it.
///
/// # Errors
///
/// Those of lseek(2) at once for the first range, later ones in the iterator, which ends with them. `ESPIPE`: the
/// descriptor is a socket or a pipe.
pub fn data_ranges(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<DataRanges<'_>> {
    let mut ranges = DataRanges { fd, rest: range.start..range.end.min(MAX_OFFSET), ahead: None };
    match hole_free_length(fd) {
        Some(length) => {
            let data = ranges.rest.start..ranges.rest.end.min(length);
            (ranges.ahead, ranges.rest) = (Some(data).filter(|data| !data.is_empty()), 0..0);
        }
        None => ranges.ahead = ranges.find()?,
    }
    Ok(ranges)
}

/// The first range of data in `range` (bytes of the file), if there is any. It is empty if it was punched between the
/// two system calls: the bytes behind it are unknown then.
///
/// `SEEK_HOLE` searches until there is a hole, possibly far beyond `range`.
///
/// # Errors
///
/// Those of lseek(2), as [`data_ranges`].
pub fn next_data(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<Option<Range<u64>>> {
    if range.is_empty() {
        return Ok(None);
    }
    let start = match seek(fd, SeekFrom::Data(range.start)) {
        // A file system that goes backwards would keep the caller here for ever.
        Ok(start) => start.max(range.start),
        Err(Errno::NXIO) => return Ok(None),
        // A file system without SEEK_DATA: nothing is known to be a hole. What else is wrong a read tells.
        Err(error @ (Errno::SPIPE | Errno::BADF)) => return Err(error.into()),
        Err(_) => return Ok(Some(range.clone())),
    };
    if start >= range.end {
        return Ok(None);
    }
    match seek(fd, SeekFrom::Hole(start)) {
        Ok(end) => Ok(Some(start..end.clamp(start, range.end))),
        // The file was truncated since: nothing but holes from here on.
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// How long a file on tmpfs is that has no hole, by the room that it takes; `None` if it has some, or is not there.
/// What it takes behind its end (`fallocate` can do that) would hide a hole, which then passes for data.
#[must_use]
pub fn hole_free_length(fd: BorrowedFd<'_>) -> Option<u64> {
    let stat = fstat(fd).ok()?;
    let (length, room) = (u64::try_from(stat.st_size).ok()?, u64::try_from(stat.st_blocks).ok()?.saturating_mul(512));
    let is_full = length > 0 && room == length.next_multiple_of(PAGE_SIZE);
    Some(length).filter(|_| is_full && is_tmpfs(fd))
}

/// Whether a file is on tmpfs, as the file of a memfd is: its holes are known page by page.
#[must_use]
pub fn is_tmpfs(fd: BorrowedFd<'_>) -> bool {
    /// `TMPFS_MAGIC` (`include/uapi/linux/magic.h`).
    const TMPFS: u64 = 0x0102_1994;
    fstatfs(fd).is_ok_and(|system| u64::try_from(system.f_type) == Ok(TMPFS))
}

/// The pages of `pages` that are not holes, where page 0 is at `file_offset` of the file (as `mmap` with that offset
/// has it): [`data_ranges`] rounded outwards to whole pages, ascending, not touching each other.
///
/// # Errors
///
/// As [`data_ranges`].
pub fn data_pages(fd: BorrowedFd<'_>, file_offset: u64, pages: PageRange) -> io::Result<DataPages<'_>> {
    let bytes = pages.bytes();
    let range = file_offset.saturating_add(bytes.start)..file_offset.saturating_add(bytes.end);
    Ok(DataPages { ranges: data_ranges(fd, range)?, file_offset, pages, ahead: None })
}

/// The iterator of [`data_ranges`].
#[derive(Debug)]
pub struct DataRanges<'fd> {
    fd: BorrowedFd<'fd>,
    /// The part without a result yet.
    rest: Range<u64>,
    ahead: Option<Range<u64>>,
}

impl DataRanges<'_> {
    /// The next range of data, which `rest` then begins behind.
    fn find(&mut self) -> io::Result<Option<Range<u64>>> {
        while let Some(data) = next_data(self.fd, &self.rest)? {
            self.rest.start = data.end;
            if !data.is_empty() {
                return Ok(Some(data));
            }
        }
        self.rest = 0..0;
        Ok(None)
    }
}

impl Iterator for DataRanges<'_> {
    type Item = io::Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(range) = self.ahead.take() {
            return Some(Ok(range));
        }
        match self.find() {
            Ok(range) => range.map(Ok),
            Err(error) => {
                self.rest = 0..0;
                Some(Err(error))
            }
        }
    }
}

impl FusedIterator for DataRanges<'_> {}

/// The iterator of [`data_pages`].
#[derive(Debug)]
pub struct DataPages<'fd> {
    ranges: DataRanges<'fd>,
    file_offset: u64,
    pages: PageRange,
    ahead: Option<PageRange>,
}

impl DataPages<'_> {
    fn round(&self, range: &Range<u64>) -> PageRange {
        let from = range.start.saturating_sub(self.file_offset);
        let upto = range.end.saturating_sub(self.file_offset);
        PageRange::covering(&(from..upto)).intersect(self.pages)
    }
}

impl Iterator for DataPages<'_> {
    type Item = io::Result<PageRange>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut pages = match self.ahead.take() {
            Some(pages) => pages,
            None => match self.ranges.next()? {
                Ok(range) => self.round(&range),
                Err(error) => return Some(Err(error)),
            },
        };
        // Two ranges of data that share a page, or whose pages touch, are one.
        loop {
            match self.ranges.next() {
                Some(Ok(range)) => {
                    let next = self.round(&range);
                    if next.start > pages.end {
                        self.ahead = Some(next);
                        break;
                    }
                    pages.end = pages.end.max(next.end);
                }
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        Some(Ok(pages))
    }
}

impl FusedIterator for DataPages<'_> {}
