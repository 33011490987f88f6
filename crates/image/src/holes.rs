//! The end of a storage, and the space that it occupies.

use limosa_storage::{Storage, StorageError};

/// Returns how many of `length` bytes at `at` are in the storage, whose last `unit` may be incomplete. Bytes further
/// back are no hole, but lost.
pub(crate) fn inside(storage: &dyn Storage, at: u64, length: u64, unit: u64) -> Result<u64, StorageError> {
    let end = storage.length()?;
    Ok(length.min(end.checked_next_multiple_of(unit).unwrap_or(end).saturating_sub(at)))
}

/// Returns the bytes that the file of a storage occupies; `None` without a file, or for a device.
pub(crate) fn taken(storage: &dyn Storage) -> Option<u64> {
    /// The unit of `st_blocks`: stat(2).
    const BLOCK: u64 = 512;
    let found = rustix::fs::fstat(storage.file()?).ok()?;
    let is_file = rustix::fs::FileType::from_raw_mode(found.st_mode).is_file();
    u64::try_from(found.st_blocks).ok().filter(|_| is_file)?.checked_mul(BLOCK)
}
