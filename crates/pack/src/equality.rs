//! Two files that have to hold the same snapshot: before the old one goes, all of the new one is read.

use std::ops::Range;

use limosa_migrate::Handle;
use limosa_page::to_usize;
use limosa_snapshot::Snapshot;

use crate::contents::Contents;
use crate::error::PackError;
use crate::pieces::{PIECE, for_each_piece};

/// Compares the bytes of two mapped-ram files, but for old bytes in the places of pages that are not stored.
///
/// # Errors
/// [`PackError::Differs`]; one cannot be read; the job was cancelled.
pub(crate) fn check_equal(old: &Snapshot, new: &Snapshot, handle: &Handle) -> Result<(), PackError> {
    let differs = || PackError::Differs { path: old.path().to_path_buf() };
    let (old, new) = (Contents::new(old), Contents::new(new));
    if old.length() != new.length() || old.snapshot.layout() != new.snapshot.layout() {
        return Err(differs());
    }
    let work = |(a, b): &mut (Vec<u8>, Vec<u8>), piece: Range<u64>| -> Result<(), PackError> {
        handle.control.check().map_err(PackError::Cancelled)?;
        if !old.has_data(&piece) && !new.has_data(&piece) {
            return Ok(());
        }
        for (contents, bytes) in [(&old, &mut *a), (&new, &mut *b)] {
            bytes.resize(to_usize(piece.end - piece.start), 0);
            contents.read(&piece, bytes)?;
        }
        if a == b { Ok(()) } else { Err(differs()) }
    };
    for_each_piece(old.length(), PIECE, || Ok((Vec::new(), Vec::new())), work)
}
