//! What direct I/O has to be aligned to.
//!
//! **Law: who is not sure asks for more.** The kernel says it (statx(2), `STATX_DIOALIGN`, since Linux 6.1; a block device its
//! sector size). Where it does not, reads that succeed show it; a file with nothing to read gets the largest. On a filesystem whose files
//! share space it is a block of it at least: what is written to part of a shared block the kernel takes through its cache, which collides
//! with direct I/O beside it, and then the next flush fails (`dio_warn_stale_pagecache` of Linux's mm/filemap.c: EIO).
#![allow(unsafe_code, reason = "the sizes that direct I/O takes are probed by reading")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, StatxFlags, fstatfs, ioctl_blksszget, statx};

use crate::buffer::Buffer;
use crate::storage::Alignment;

/// Enough for every device that can be had.
const LARGEST: u32 = 4096;
/// What is tried.
const TRIED: [u32; 3] = [1, 512, 4096];
/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: i64 = 0x0102_1994;
/// Filesystems whose files share space: `XFS_SUPER_MAGIC` and `BTRFS_SUPER_MAGIC` there.
const SHARING: [i64; 2] = [0x5846_5342, 0x9123_683e];

/// What direct I/O on this file, opened for it, has to be aligned to.
pub(crate) fn direct(fd: &OwnedFd, is_block_device: bool) -> io::Result<Alignment> {
    let found = fstatfs(fd.as_fd()).ok().filter(|_| !is_block_device);
    #[allow(clippy::useless_conversion, reason = "its type is the machine's")]
    let kind = found.and_then(|found| i64::try_from(found.f_type).ok());
    let block = found.and_then(|found| u32::try_from(found.f_bsize).ok());
    let shared = block.filter(|block| block.is_power_of_two() && kind.is_some_and(|kind| SHARING.contains(&kind)));
    let least = |found: Alignment| Alignment { offset: found.offset.max(shared.unwrap_or(1)), ..found };
    if let Some(said) = said(fd) {
        return Ok(least(said));
    }
    if is_block_device {
        let sector = ioctl_blksszget(fd)?.clamp(512, 1 << 16).next_power_of_two();
        return Ok(Alignment { offset: sector, memory: sector.max(LARGEST) });
    }
    // All of it is in memory: there is no device.
    if kind == Some(TMPFS) {
        return Ok(Alignment { offset: 1, memory: 1 });
    }
    Ok(least(Alignment { offset: probed(fd), memory: LARGEST }))
}

/// What the kernel says.
fn said(fd: &OwnedFd) -> Option<Alignment> {
    let found = statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if found.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let sizes = [found.stx_dio_offset_align, found.stx_dio_mem_align];
    let is_usable = sizes.iter().all(|size| size.is_power_of_two() && *size <= 1 << 20);
    is_usable.then_some(Alignment { offset: sizes[0], memory: sizes[1] })
}

/// The smallest read that succeeds.
fn probed(fd: &OwnedFd) -> u32 {
    let buffer = Buffer::zeroed(LARGEST as usize);
    let succeeds = |len: &&u32| {
        // SAFETY: reads into the buffer, which is as long as the longest.
        let read = unsafe { libc::pread(fd.as_raw_fd(), buffer.start().cast(), **len as usize, 0) };
        read > 0
    };
    TRIED.iter().find(succeeds).copied().unwrap_or(LARGEST)
}
