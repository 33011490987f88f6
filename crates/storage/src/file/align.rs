//! Alignment requirements of direct I/O.
//!
//! **Law: when in doubt, the larger alignment.** The kernel reports it (statx(2), `STATX_DIOALIGN`, since Linux 6.1; a
//! block device reports its sector size). Where it does not, trial reads find it; an empty file gets the largest. On a
//! filesystem whose files share extents it is at least a filesystem block: a write to part of a shared block goes
//! through the page cache, which collides with concurrent direct I/O next to it, and then the next flush fails
//! (`dio_warn_stale_pagecache` of Linux's mm/filemap.c: EIO).
#![allow(unsafe_code, reason = "the sizes that direct I/O accepts are probed with pread")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, StatxFlags, fstatfs, ioctl_blksszget, statx};

use crate::buffer::Buffer;
use crate::storage::Alignment;

/// Maximum offset in a file.
pub(crate) const MAX_OFFSET: u64 = i64::MAX as u64;

/// Enough for every known device.
const LARGEST: u32 = 4096;
/// Sizes of the trial reads, in bytes.
const TRIED: [u32; 3] = [1, 512, 4096];
/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: i64 = 0x0102_1994;
/// Filesystems whose files share extents: `XFS_SUPER_MAGIC` and `BTRFS_SUPER_MAGIC` of linux/magic.h.
const SHARING: [i64; 2] = [0x5846_5342, 0x9123_683e];

/// Alignment that direct I/O on this file needs. The file is open with `O_DIRECT`.
pub(crate) fn direct(fd: &OwnedFd, is_block_device: bool) -> io::Result<Alignment> {
    let found = fstatfs(fd.as_fd()).ok().filter(|_| !is_block_device);
    #[allow(clippy::useless_conversion, reason = "the type depends on the architecture")]
    let kind = found.and_then(|found| i64::try_from(found.f_type).ok());
    let block = found.and_then(|found| u32::try_from(found.f_bsize).ok());
    let shared = block.filter(|block| block.is_power_of_two() && kind.is_some_and(|kind| SHARING.contains(&kind)));
    let least = |found: Alignment| Alignment { offset: found.offset.max(shared.unwrap_or(1)), ..found };
    if let Some(reported) = reported(fd) {
        return Ok(least(reported));
    }
    if is_block_device {
        let sector = ioctl_blksszget(fd)?.clamp(512, 1 << 16).next_power_of_two();
        return Ok(Alignment { offset: sector, memory: sector.max(LARGEST) });
    }
    // tmpfs keeps files in memory only: there is no device.
    if kind == Some(TMPFS) {
        return Ok(Alignment { offset: 1, memory: 1 });
    }
    Ok(least(Alignment { offset: probed(fd), memory: LARGEST }))
}

/// The alignment that the kernel reports.
fn reported(fd: &OwnedFd) -> Option<Alignment> {
    let found = statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if found.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let sizes = [found.stx_dio_offset_align, found.stx_dio_mem_align];
    let is_usable = sizes.iter().all(|size| size.is_power_of_two() && *size <= 1 << 20);
    is_usable.then_some(Alignment { offset: sizes[0], memory: sizes[1] })
}

/// Length of the smallest read that succeeds.
fn probed(fd: &OwnedFd) -> u32 {
    let buffer = Buffer::zeroed(LARGEST as usize);
    let succeeds = |len: &&u32| {
        // SAFETY: reads into the buffer, which is as long as the longest.
        let read = unsafe { libc::pread(fd.as_raw_fd(), buffer.address().cast(), **len as usize, 0) };
        read > 0
    };
    TRIED.iter().find(succeeds).copied().unwrap_or(LARGEST)
}

/// Returns the range of the whole blocks that a range touches.
pub(crate) fn around(alignment: Alignment, range: &Range<u64>) -> Range<u64> {
    let block = u64::from(alignment.offset);
    range.start - range.start % block..range.end.checked_next_multiple_of(block).unwrap_or(MAX_OFFSET)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_around_a_range_are_whole() {
        let alignment = Alignment { offset: 512, memory: 4 };
        assert_eq!(around(alignment, &(0..512)), 0..512);
        assert_eq!(around(alignment, &(511..513)), 0..1024);
        assert_eq!(around(alignment, &(600..601)), 512..1024);
    }
}
