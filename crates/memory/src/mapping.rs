//! A mapping of this process, and all accesses to it.
//!
//! **Law: no reference to mapped memory is ever made.** A guest, its devices and other processes write it concurrently;
//! so bytes go in and out by raw copies, and the kernel gets addresses. An owner of a [`Mapping`] that returns an
//! address keeps the mapping alive as long as the address is used.
#![allow(unsafe_code, reason = "maps guest memory and copies from and to it")]

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};

/// Memory of this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
    /// The owner, which unmaps the memory; without one it is unmapped on drop.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the mapping is memory, reached by raw copies alone, which any thread may make.
unsafe impl Send for Mapping {}
// SAFETY: as above; concurrent copies may tear, which is what guest memory does.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes: of `file` from `offset` on, shared or as a private copy, or of nothing (zeros).
    pub(crate) fn new(
        file: Option<(BorrowedFd<'_>, u64)>,
        length: usize,
        shared: bool,
        huge_page: Option<u64>,
    ) -> io::Result<Self> {
        let mut flags = if shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
        flags |= MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let start = match file {
            // SAFETY: a new mapping at an address of the kernel's choice replaces no other one.
            Some((fd, offset)) => unsafe { mmap(ptr::null_mut(), length, access, flags, fd, offset) }?,
            None => {
                if let Some(size) = huge_page {
                    // mmap(2): the binary logarithm of the page size is in the bits from MAP_HUGE_SHIFT (26) on.
                    flags |= MapFlags::HUGETLB | MapFlags::from_bits_retain(size.trailing_zeros() << 26);
                }
                // SAFETY: as above.
                unsafe { mmap_anonymous(ptr::null_mut(), length, access, flags) }?
            }
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { start, length, owner: None };
        // Keeps secrets of the guest out of core files of its VMM.
        // SAFETY: advice about whether memory is dumped does not change it.
        unsafe { madvise(mapping.start.as_ptr().cast(), length, Advice::LinuxDontDump) }?;
        Ok(mapping)
    }

    /// Wraps memory that was mapped elsewhere.
    ///
    /// # Safety
    /// The `length` bytes at `start` are mapped, readable and writable, as long as `owner` lives, and no reference to
    /// them is ever made.
    #[cfg(feature = "vm-memory")]
    pub(crate) unsafe fn over(start: NonNull<u8>, length: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, length, owner: Some(owner) }
    }

    /// Returns the address of its first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Copies bytes out; `None` if some are outside.
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        let from = self.at(offset, into.len())?;
        // SAFETY: `at` checked the range. Concurrent writers may tear the copy, which readers of guest memory must
        // tolerate.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Copies bytes in; `None` if some are outside.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let to = self.at(offset, bytes.len())?;
        // SAFETY: `at` checked the range, and no reference to it exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Some(())
    }

    /// Writes zeros; `None` if some bytes are outside.
    pub(crate) fn fill_zero(&self, offset: usize, length: usize) -> Option<()> {
        let to = self.at(offset, length)?;
        // SAFETY: as in `write`.
        unsafe { ptr::write_bytes(to, 0, length) };
        Some(())
    }

    /// Forbids writes by this process, or allows them again.
    pub(crate) fn protect(&self, writable: bool) -> io::Result<()> {
        let access = if writable { MprotectFlags::READ | MprotectFlags::WRITE } else { MprotectFlags::READ };
        // SAFETY: no reference to the memory exists; a thread that writes it by address gets a signal, which is what
        // was asked for.
        Ok(unsafe { mprotect(self.start.as_ptr().cast(), self.length, access) }?)
    }

    fn at(&self, offset: usize, length: usize) -> Option<*mut u8> {
        let end = offset.checked_add(length)?;
        (end <= self.length).then(|| self.start.as_ptr().wrapping_add(offset))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        // SAFETY: no user of the address is left: they borrow the owner.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}
