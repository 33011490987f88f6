//! Holes and unwritten extents of a file.
//!
//! **Law: a range is reported as zeros only where the kernel guarantees it.** lseek(2) (`SEEK_DATA`, `SEEK_HOLE`)
//! decides whether a range reads as zeros, because it takes the page cache into account. FIEMAP decides whether such
//! zeros have space: only it reports unwritten extents, but it does not know which of them have data in the cache.
#![allow(unsafe_code, reason = "FIEMAP is an ioctl")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use limosa_page::holes::data_ranges;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::file::ioctl_request;
use crate::file::open::OpenFile;
use crate::storage::{ContentRun, Extent, ExtentKind};

/// `FS_IOC_FIEMAP` of linux/fs.h.
const FIEMAP: libc::Ioctl = ioctl_request(0xc020_660b);
/// `FIEMAP_EXTENT_LAST` and `FIEMAP_EXTENT_UNWRITTEN` of linux/fiemap.h.
const LAST: u32 = 0x1;
const UNWRITTEN: u32 = 0x800;
/// Extents queried per call.
const AT_A_TIME: u32 = 32;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` and the extents behind it.
#[repr(C)]
struct Map {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [MapExtent; AT_A_TIME as usize],
}

/// The extents of `range`.
pub(crate) fn extents(file: &OpenFile, range: Range<u64>) -> io::Result<Vec<Extent>> {
    let mut found = Found(Vec::new());
    let end = file.length()?.clamp(range.start, range.end.max(range.start));
    let mut at = range.start;
    if file.is_block_device {
        found.push(at..end, ExtentKind::Data);
    } else {
        for data in data_ranges(file.as_fd(), at..end)? {
            let data = data?;
            zeros(file, at..data.start, &mut found);
            at = data.end;
            found.push(data, ExtentKind::Data);
        }
        zeros(file, at..end, &mut found);
    }
    found.push(end..range.end, ExtentKind::Hole);
    Ok(found.0)
}

/// Returns the beginning of a range, with a seek for each kind; `None`: extents have to tell. It needs no FIEMAP, which
/// only tells what kind of zeros there are.
pub(crate) fn first_run(file: &OpenFile, range: &Range<u64>) -> io::Result<Option<ContentRun>> {
    if file.is_block_device || range.is_empty() {
        return Ok(None);
    }
    let data = match seek(&file.fd, SeekFrom::Data(range.start)) {
        Ok(data) => data,
        Err(Errno::NXIO) => range.end,
        // A filesystem without it. What else is wrong a read tells.
        Err(_) => return Ok(None),
    };
    if data > range.start {
        return Ok(Some(ContentRun::new(data.min(range.end) - range.start, true)));
    }
    match seek(&file.fd, SeekFrom::Hole(range.start)) {
        Ok(hole) if hole > range.start => Ok(Some(ContentRun::new(hole.min(range.end) - range.start, false))),
        // It has changed between the two.
        _ => Ok(None),
    }
}

/// A list of extents; adjacent ones differ in kind.
struct Found(Vec<Extent>);

impl Found {
    fn push(&mut self, range: Range<u64>, kind: ExtentKind) {
        match self.0.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.kind == kind => last.range.end = range.end,
            _ => self.0.push(Extent { range, kind }),
        }
    }
}

/// Splits a range that reads as zeros into unwritten extents and holes.
fn zeros(file: &OpenFile, range: Range<u64>, found: &mut Found) {
    let mut at = range.start;
    while at < range.end {
        let Some((extents, is_last)) = map(file, at..range.end) else { break };
        let before = at;
        for extent in &extents {
            let begin = extent.logical.clamp(at, range.end);
            let end = extent.logical.saturating_add(extent.length).clamp(begin, range.end);
            found.push(at..begin, ExtentKind::Hole);
            // An extent with data was written after lseek: it is not guaranteed to read as zeros.
            let kind = if extent.flags & UNWRITTEN != 0 { ExtentKind::Unwritten } else { ExtentKind::Data };
            found.push(begin..end, kind);
            at = end;
        }
        // A filesystem that makes no progress would loop forever.
        if is_last || at == before {
            break;
        }
    }
    found.push(at..range.end, ExtentKind::Hole);
}

/// The extents of a range, and whether the last one is the file's last. `None` if the filesystem does not support
/// FIEMAP.
fn map(file: &OpenFile, range: Range<u64>) -> Option<(Vec<MapExtent>, bool)> {
    let mut map = Map {
        start: range.start,
        length: range.end - range.start,
        flags: 0,
        mapped: 0,
        count: AT_A_TIME,
        reserved: 0,
        extents: [MapExtent::default(); AT_A_TIME as usize],
    };
    // SAFETY: the structure has the kernel's layout and room for `count` extents, and outlives the call.
    let result = unsafe { libc::ioctl(file.fd.as_raw_fd(), FIEMAP, &raw mut map) };
    if result != 0 {
        return None;
    }
    let extents = map.extents.get(..usize::try_from(map.mapped).ok()?)?.to_vec();
    let is_last = extents.last().is_none_or(|extent| extent.flags & LAST != 0);
    Some((extents, is_last))
}
