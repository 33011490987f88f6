//! What direct I/O has to be aligned to.
//!
//! **Law: who is not sure asks for more.** The kernel says it (statx(2), `STATX_DIOALIGN`, since Linux 6.1; a block device its
//! sector size). Where it does not, reads that succeed show it; a file with nothing to read gets the largest.
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

/// What direct I/O on this file, opened for it, has to be aligned to.
pub(crate) fn direct(fd: &OwnedFd, is_block_device: bool) -> io::Result<Alignment> {
    if let Some(said) = said(fd) {
        return Ok(said);
    }
    if is_block_device {
        let sector = ioctl_blksszget(fd)?.clamp(512, 1 << 16).next_power_of_two();
        return Ok(Alignment { offset: sector, memory: sector.max(LARGEST) });
    }
    // All of it is in memory: there is no device.
    #[allow(clippy::useless_conversion, reason = "its type is the machine's")]
    if fstatfs(fd.as_fd()).is_ok_and(|found| i64::try_from(found.f_type) == Ok(TMPFS)) {
        return Ok(Alignment { offset: 1, memory: 1 });
    }
    Ok(Alignment { offset: probed(fd), memory: LARGEST })
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
