//! Zeroing, discard, allocation, length and clones: blocking calls, made by threads of the pool.
//!
//! **Law: only the given range changes, and no concurrent request's bytes are cut off.** A file grows by allocating its
//! new end, never by setting a length: a concurrent request may have made it longer.
#![allow(unsafe_code, reason = "FICLONERANGE and BLKZEROOUT are ioctls")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

use limosa_page::to_usize;
use rustix::fs::{FallocateFlags, fallocate, ftruncate};

use crate::buffer::{Buffer, IoVector};
use crate::error::StorageError;
use crate::file::align::MAX_OFFSET;
use crate::file::open::OpenFile;
use crate::file::{bounce, ioctl_request};
use crate::storage::ZeroOptions;
use crate::striped::StripedArc;

/// Zeros written by one call, in bytes, where the filesystem has no other way to zero a range.
const ZEROS: u64 = 1 << 20;
/// Block size of most filesystems, in bytes.
const USUAL_BLOCK: u64 = 4096;
/// `BLKZEROOUT` of linux/fs.h.
const BLKZEROOUT: libc::Ioctl = ioctl_request(0x127f);
/// `FICLONERANGE` of linux/fs.h.
const FICLONERANGE: libc::Ioctl = ioctl_request(0x4020_940d);

/// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR` of linux/fs.h.
const GET_ATTRIBUTES: libc::Ioctl = ioctl_request(0x801c_581f);
const SET_ATTRIBUTES: libc::Ioctl = ioctl_request(0x401c_5820);
/// `FS_XFLAG_EXTSIZE` of linux/fs.h.
const HAS_EXTENT_SIZE: u32 = 0x800;

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    padding: [u8; 8],
}

/// Asks the filesystem to allocate space in pieces of this many bytes.
pub(crate) fn set_extent_size_hint(file: &OpenFile, bytes: u32) -> io::Result<()> {
    let mut attributes = Attributes::default();
    let call = |request, attributes: &mut Attributes| {
        // SAFETY: reads or writes the attributes, which have the layout of the kernel's structure.
        let result = unsafe { libc::ioctl(file.fd.as_raw_fd(), request, std::ptr::from_mut(attributes)) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    call(GET_ATTRIBUTES, &mut attributes)?;
    attributes.flags |= HAS_EXTENT_SIZE;
    attributes.extent_size = bytes;
    call(SET_ATTRIBUTES, &mut attributes)
}

/// Whether a call failed because kernel, filesystem or device do not support it.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    let missing = [libc::EOPNOTSUPP, libc::ENOSYS, libc::ENOTTY, libc::ENODEV, libc::EINVAL];
    error.raw_os_error().is_some_and(|number| missing.contains(&number))
}

/// Checks that a range may be changed. Returns the file's length; `None` if the range is empty.
fn changeable(file: &OpenFile, range: &Range<u64>) -> io::Result<Option<u64>> {
    if range.is_empty() {
        return Ok(None);
    }
    if file.read_only {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is open read-only"));
    }
    if range.end > MAX_OFFSET {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let length = file.length()?;
    if file.is_block_device && range.end > length {
        return Err(io::ErrorKind::StorageFull.into());
    }
    Ok(Some(length))
}

fn call(file: &OpenFile, flags: FallocateFlags, range: &Range<u64>) -> io::Result<()> {
    if range.is_empty() { Ok(()) } else { Ok(fallocate(&file.fd, flags, range.start, range.end - range.start)?) }
}

fn punch(file: &OpenFile, range: &Range<u64>) -> io::Result<()> {
    call(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, range)
}

/// Makes a range read as zeros.
pub(crate) fn write_zeroes(file: &StripedArc<OpenFile>, range: Range<u64>, how: ZeroOptions) -> io::Result<()> {
    let Some(length) = changeable(file, &range)? else { return Ok(()) };
    file.counters.own().zeroes.add(range.end - range.start);
    let held = file.hold(&range);
    let fast = if file.is_block_device { zero_device(file, &range, how) } else { zero_file(file, &range, length, how) };
    drop(held);
    match fast {
        Ok(()) => {}
        Err(error) if is_unsupported(&error) && how.only_fast => return Err(io::ErrorKind::Unsupported.into()),
        Err(error) if is_unsupported(&error) => zero_plainly(file, range).map_err(|error| plain(&error))?,
        Err(error) => return Err(error),
    }
    file.sync_if_synchronous()
}

fn zero_file(file: &OpenFile, range: &Range<u64>, length: u64, how: ZeroOptions) -> io::Result<()> {
    if how.unmap {
        punch(file, &(range.start..range.end.min(length)))?;
        return if range.end > length {
            call(file, FallocateFlags::empty(), &(range.end - 1..range.end))
        } else {
            Ok(())
        };
    }
    match call(file, FallocateFlags::ZERO_RANGE, range) {
        Err(error) if is_unsupported(&error) => {
            punch(file, &(range.start..range.end.min(length)))?;
            call(file, FallocateFlags::empty(), range)
        }
        result => result,
    }
}

/// Zeroes a range of a block device: by a command of the device, or, unless it has to be fast, by writes of the kernel.
fn zero_device(file: &OpenFile, range: &Range<u64>, how: ZeroOptions) -> io::Result<()> {
    // A discarded range of a device may have no space behind it.
    if how.unmap {
        match punch(file, range) {
            Err(error) if is_unsupported(&error) && !how.only_fast => {}
            result => return result,
        }
    }
    if how.only_fast {
        // The kernel does not report whether it uses a command or writes.
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    let start_and_length = [range.start, range.end - range.start];
    // SAFETY: reads the two numbers.
    let result = unsafe { libc::ioctl(file.fd.as_raw_fd(), BLKZEROOUT, start_and_length.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Writes zeros, a buffer at a time.
fn zero_plainly(file: &StripedArc<OpenFile>, range: Range<u64>) -> Result<(), StorageError> {
    let len = to_usize(ZEROS.min(range.end - range.start));
    let zeros = Buffer::zeroed(len);
    let mut at = range.start;
    while at < range.end {
        let here = zeros.slice(0..to_usize(range.end - at));
        let len = here.len() as u64;
        bounce::write(file, at, &IoVector::from(here))?;
        at += len;
    }
    Ok(())
}

/// The kernel's error alone: the caller adds its own operation and offset.
fn plain(error: &StorageError) -> io::Error {
    error.source.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

/// Deallocates space, where it is supported.
pub(crate) fn discard(file: &OpenFile, range: Range<u64>) -> io::Result<()> {
    let Ok(length) = file.length() else { return Ok(()) };
    let range = range.start..range.end.min(length);
    if changeable(file, &range)?.is_none() {
        return Ok(());
    }
    file.counters.own().discards.add(range.end - range.start);
    let _held = file.hold(&range);
    match punch(file, &range) {
        Err(error) if !is_unsupported(&error) => Err(error),
        Err(_) => Ok(()),
        Ok(()) => file.sync_if_synchronous(),
    }
}

/// Allocates space.
pub(crate) fn allocate(file: &OpenFile, range: Range<u64>) -> io::Result<()> {
    if changeable(file, &range)?.is_none() {
        return Ok(());
    }
    file.counters.own().allocations.add(range.end - range.start);
    if file.is_block_device {
        return Ok(());
    }
    let _held = file.hold(&range);
    call(file, FallocateFlags::empty(), &range)?;
    file.sync_if_synchronous()
}

/// Sets the file's length.
pub(crate) fn set_len(file: &OpenFile, len: u64) -> io::Result<()> {
    if file.read_only {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is open read-only"));
    }
    if file.is_block_device {
        let reason = "the length of a block device cannot be changed";
        return if file.length()? == len { Ok(()) } else { Err(io::Error::new(io::ErrorKind::Unsupported, reason)) };
    }
    let _held = file.hold(&(0..MAX_OFFSET));
    ftruncate(&file.fd, len)?;
    file.sync_if_synchronous()
}

/// Whether two files cannot share extents: they are on different filesystems, or one of them is a swap file.
fn cannot_share(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|number| [libc::EXDEV, libc::ETXTBSY].contains(&number))
}

/// `struct file_clone_range` of linux/fs.h.
#[repr(C)]
struct CloneRange {
    from: i64,
    from_offset: u64,
    length: u64,
    offset: u64,
}

/// Block size of the filesystem, which shares whole blocks.
pub(crate) fn block(file: &OpenFile) -> u64 {
    let size = rustix::fs::fstatfs(&file.fd).ok().and_then(|found| u64::try_from(found.f_bsize).ok());
    size.filter(|size| size.is_power_of_two()).unwrap_or(USUAL_BLOCK)
}

/// Shares extents of another file. False if that is not supported.
pub(crate) fn clone(file: &OpenFile, offset: u64, from: &OwnedFd, from_offset: u64, length: u64) -> io::Result<bool> {
    let end = offset.checked_add(length).ok_or(io::ErrorKind::InvalidInput)?;
    if file.is_block_device || changeable(file, &(offset..end))?.is_none() {
        return Ok(length == 0);
    }
    file.counters.own().clones.add(length);
    // Direct I/O on partial blocks must not meet shared blocks (see the module `align`).
    if file.cache.is_direct() && u64::from(file.alignment.offset) < block(file) {
        return Ok(false);
    }
    let range = CloneRange { from: i64::from(from.as_raw_fd()), from_offset, length, offset };
    let _held = file.hold(&(offset..end));
    // SAFETY: reads the structure, whose layout is the kernel's.
    let result = unsafe { libc::ioctl(file.fd.as_raw_fd(), FICLONERANGE, &raw const range) };
    match io::Error::last_os_error() {
        _ if result == 0 => file.sync_if_synchronous().map(|()| true),
        error if is_unsupported(&error) || cannot_share(&error) => Ok(false),
        error => Err(error),
    }
}

/// Has the kernel copy from another file, or share extents if the filesystem can. False if it cannot, or if the other
/// file ends.
pub(crate) fn copy(file: &OpenFile, offset: u64, from: &OwnedFd, from_offset: u64, length: u64) -> io::Result<bool> {
    let end = offset.checked_add(length).ok_or(io::ErrorKind::InvalidInput)?;
    if file.is_block_device || changeable(file, &(offset..end))?.is_none() {
        return Ok(length == 0);
    }
    let _held = file.hold(&(offset..end));
    let (mut from_at, mut to_at) = (from_offset, offset);
    while to_at < end {
        let left = to_usize(end - to_at);
        match rustix::fs::copy_file_range(from, Some(&mut from_at), &file.fd, Some(&mut to_at), left)
            .map_err(io::Error::from)
        {
            Ok(0) => return Ok(false),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // One of them is not a regular file: copy_file_range(2).
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(false),
            Err(error) if is_unsupported(&error) || cannot_share(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    file.sync_if_synchronous().map(|()| true)
}
