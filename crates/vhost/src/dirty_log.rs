//! The dirty log: pages of the guest's memory that were written while its VM migrates.
//!
//! Shared memory of the front end, one bit for each page of 4 KiB by guest-physical address, the lowest bit of byte 0
//! first (QEMU's docs/interop/vhost-user.rst, "Migration").
//!
//! **Law: a page is marked after it was written, and before the driver or the front end can know that it was.** The
//! front end takes marks away before it copies a page, so a mark that comes after the copy has it copied again.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

use rustix::fs::{FileType, fstat};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory as _};

use crate::RamError;

/// Bytes of a page of the log (`VHOST_LOG_PAGE`).
const PAGE: u64 = 4096;

/// A log.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    bits: MmapRegion,
}

impl DirtyLog {
    /// Maps `length` bytes of a file at an offset.
    ///
    /// # Errors
    /// The file is too short, is no memory, or the kernel refuses.
    pub(crate) fn map(file: OwnedFd, offset: u64, length: u64) -> Result<Self, RamError> {
        let refuse = |why: &str| RamError::Log { length, why: why.into() };
        let status = fstat(&file).map_err(|errno| refuse(&errno.to_string()))?;
        let end = offset.checked_add(length).and_then(|end| i64::try_from(end).ok());
        let is_inside = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile
            && end.is_some_and(|end| end <= status.st_size)
            && length > 0
            && offset.is_multiple_of(PAGE);
        if !is_inside {
            return Err(refuse("it does not fit its file"));
        }
        let file = FileOffset::from_arc(Arc::new(File::from(file)), offset);
        let bits = MmapRegion::from_file(file, limosa_page::to_usize(length));
        Ok(Self { bits: bits.map_err(|error| refuse(&error.to_string()))? })
    }

    /// Marks the pages of a range that was written. Pages behind the log's end are not marked: the front end has no
    /// memory there.
    pub(crate) fn mark(&self, address: u64, length: u64) {
        let Some(last) = length.checked_sub(1).and_then(|more| address.checked_add(more)) else { return };
        let bits = self.bits.as_volatile_slice();
        // What was written is visible before a bit is looked at: one that is set is taken away before the page is copied.
        fence(Ordering::SeqCst);
        for page in address / PAGE..=last / PAGE {
            let Ok(byte) = bits.get_atomic_ref::<AtomicU8>(limosa_page::to_usize(page / 8)) else { return };
            let bit = 1 << (page % 8);
            // Most pages are marked already: no cache line is written for them.
            if byte.load(Ordering::SeqCst) & bit == 0 {
                byte.fetch_or(bit, Ordering::SeqCst);
            }
        }
    }
}
