//! Finding data in a part of a tmpfs file without searching the rest.
//!
//! `SEEK_HOLE` (lseek(2)) searches until it finds a hole, even far past the range: for a page before gigabytes of data
//! it searches all of them. cachestat(2), since Linux 6.5, counts the pages of a range in memory or in swap, and reads
//! nothing else. So the pages are counted first, and holes are sought only if the count is not decisive.
//!
//! Law: pages are holes only if nothing was counted among them, or if a seek skipped them, and never because counts add
//! up: another thread may populate a page meanwhile, and be counted in place of another.

#![allow(unsafe_code, reason = "the system call cachestat")]

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use limosa_page::{PAGE_SIZE, PageRange, holes};
use rustix::fd::BorrowedFd;

/// The number of cachestat, the same on all architectures supported here.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`. A length of zero means: up to the end of the file.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// `struct cachestat`, in pages.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Calls `found` with the pages of a run that may have data, where page 0 is at `offset` of a file on tmpfs.
///
/// # Errors
/// An error of the kernel.
pub(super) fn look(
    fd: BorrowedFd<'_>,
    offset: u64,
    run: PageRange,
    found: &mut impl FnMut(PageRange),
) -> io::Result<()> {
    let bytes = run.bytes();
    let (start, end) = (offset.saturating_add(bytes.start), offset.saturating_add(bytes.end));
    let pages = |bytes: Range<u64>| {
        let bytes = bytes.start.saturating_sub(offset)..bytes.end.saturating_sub(offset);
        PageRange::covering(&bytes).intersect(run)
    };
    let mut rest = start..end;
    let mut left = 0;
    while !rest.is_empty() {
        if left == 0 {
            left = count(fd, &rest)?;
        }
        if left == 0 {
            break;
        }
        if left >= (rest.end - rest.start).div_ceil(PAGE_SIZE) {
            found(pages(rest));
            break;
        }
        let Some(data) = holes::next_data(fd, &rest)? else { break };
        left = left.saturating_sub((data.end - data.start).div_ceil(PAGE_SIZE));
        rest.start = data.end;
        if !data.is_empty() {
            found(pages(data));
        }
    }
    Ok(())
}

/// Counts the pages of a range that are in memory or in swap. The range is not empty.
fn count(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<u64> {
    stat(fd, range).map(|found| found.cached.saturating_add(found.evicted))
}

/// Counts the pages of a range of a file that are in the page cache, also those that are being read. Nothing is read.
/// Linux 6.5 and newer; from 6.15 on for a file that this user owns or may write.
///
/// # Errors
/// An error of the kernel.
pub fn cached_pages(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<u64> {
    if range.is_empty() { Ok(0) } else { stat(fd, range).map(|found| found.cached) }
}

/// The range is not empty.
fn stat(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<Cachestat> {
    let asked = CachestatRange { offset: range.start, length: range.end - range.start };
    let mut found = Cachestat::default();
    // SAFETY: the kernel reads the one and writes the other, each of the layout that it knows; the descriptor is open.
    let done = unsafe {
        libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), std::ptr::from_ref(&asked), std::ptr::from_mut(&mut found), 0)
    };
    match done {
        0 => Ok(found),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether this kernel has cachestat, and allows it for this file (from 6.15 on it requires write permission).
pub(super) fn can_count(fd: BorrowedFd<'_>) -> bool {
    count(fd, &(0..PAGE_SIZE)).is_ok()
}

const _: () = assert!(size_of::<Cachestat>() == 40 && size_of::<CachestatRange>() == 16);
