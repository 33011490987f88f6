//! Holes of a storage, and the space that it occupies.

use std::ops::Range;

use limosa_storage::{ExtentKind, Storage, StorageError};

/// Bytes that are examined first.
const FIRST_LOOK: u64 = 64 << 10;

/// Returns how many bytes at the beginning of a range are alike, and whether they are known to be zeros.
///
/// A few extents are examined first, and more as long as all are alike.
pub(crate) fn alike(storage: &dyn Storage, range: &Range<u64>) -> Result<(u64, bool), StorageError> {
    let mut alike = range.start;
    let mut kind = None;
    let mut window = FIRST_LOOK;
    'look: while alike < range.end {
        let begin = alike;
        for extent in storage.extents(begin..range.end.min(begin.saturating_add(window)))? {
            if extent.range.end <= alike {
                continue;
            }
            let is_zero = extent.kind.is_zero();
            if *kind.get_or_insert(is_zero) != is_zero || extent.range.start > alike {
                break 'look;
            }
            alike = extent.range.end.min(range.end);
        }
        if alike == begin {
            break;
        }
        window = window.saturating_mul(4);
    }
    let is_zero = kind.unwrap_or(ExtentKind::Data.is_zero());
    Ok((if alike > range.start { alike } else { range.end } - range.start, is_zero))
}

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
