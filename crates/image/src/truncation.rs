//! Files that end before what is read from them.
//!
//! Law: what is lost is not taken for zeros. A storage reads as zeros behind its end, and a file can be cut off by
//! others at any time; to ask how long it is costs a call, so it is asked when what was read ends with a sector of
//! zeros: else it was there.

use limosa_storage::{IoVector, Storage, StorageError};

/// The fate of contents past a file's end, and what to do.
pub(crate) const TRUNCATED: &str = "what lay there is lost: get it back from a copy of the file";

/// How many of the last bytes are looked at.
const LOOKED_AT: usize = 512;

/// Returns the end of the storage, if it is before `end`, the end of the range that was read into `found`.
pub(crate) fn truncated_to(storage: &dyn Storage, found: &IoVector, end: u64) -> Result<Option<u64>, StorageError> {
    let tail = found.slice(found.len().saturating_sub(LOOKED_AT)..found.len());
    if tail.is_empty() || !tail.is_zero() {
        return Ok(None);
    }
    let length = storage.length()?;
    Ok((length < end).then_some(length))
}
