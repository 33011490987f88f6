//! What a file has no contents for.
//!
//! **Law: zeros are only promised where the kernel promises them.** Whether a place reads as zeros is lseek(2)'s word
//! (`SEEK_DATA`, `SEEK_HOLE`), which knows what is in the page cache; whether there is space under such zeros is FIEMAP's, which
//! alone knows unwritten extents, and does not know what the cache has for them.
#![allow(unsafe_code, reason = "FIEMAP is an ioctl")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use limosa_page::holes::data_ranges;

use crate::file::open::OpenFile;
use crate::storage::{Extent, ExtentKind};

/// `FS_IOC_FIEMAP` of linux/fs.h.
const FIEMAP: libc::c_ulong = 0xc020_660b;
/// `FIEMAP_EXTENT_LAST` and `FIEMAP_EXTENT_UNWRITTEN` of linux/fiemap.h.
const LAST: u32 = 0x1;
const UNWRITTEN: u32 = 0x800;
/// Extents asked for at a time.
const AT_A_TIME: usize = 32;

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
    extents: [MapExtent; AT_A_TIME],
}

/// What is in `range`.
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

/// Extents that were found: neighbours differ.
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

/// Tells the space under a range of zeros from none.
fn zeros(file: &OpenFile, range: Range<u64>, found: &mut Found) {
    let mut at = range.start;
    while at < range.end {
        let Some((extents, is_last)) = map(file, at..range.end) else { break };
        let before = at;
        for extent in &extents {
            let begin = extent.logical.clamp(at, range.end);
            let end = extent.logical.saturating_add(extent.length).clamp(begin, range.end);
            found.push(at..begin, ExtentKind::Hole);
            // An extent with contents by now was written since lseek looked: its zeros are not promised.
            let kind = if extent.flags & UNWRITTEN != 0 { ExtentKind::Unwritten } else { ExtentKind::Data };
            found.push(begin..end, kind);
            at = end;
        }
        // A filesystem that does not get on would keep us here for ever.
        if is_last || at == before {
            break;
        }
    }
    found.push(at..range.end, ExtentKind::Hole);
}

/// The extents of a range, and whether there are no more; none if the filesystem does not say.
fn map(file: &OpenFile, range: Range<u64>) -> Option<(Vec<MapExtent>, bool)> {
    let mut map = Map {
        start: range.start,
        length: range.end - range.start,
        flags: 0,
        mapped: 0,
        count: u32::try_from(AT_A_TIME).unwrap_or_default(),
        reserved: 0,
        extents: [MapExtent::default(); AT_A_TIME],
    };
    // SAFETY: the structure is as the kernel has it, with room for as many extents as it says, and lives.
    let result = unsafe { libc::ioctl(file.fd.as_raw_fd(), FIEMAP, &raw mut map) };
    if result != 0 {
        return None;
    }
    let extents = map.extents.get(..usize::try_from(map.mapped).ok()?)?.to_vec();
    let is_last = extents.last().is_none_or(|extent| extent.flags & LAST != 0);
    Some((extents, is_last))
}
