//! Unpacking: a snapshot of any kind as a mapped-ram file.

use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use limosa_migrate::Handle;
use limosa_migrate::control::{MovedPages, Phase};
use limosa_page::{PAGE_LEN, PAGE_SIZE, is_zero, to_u64, to_usize};
use limosa_snapshot::{Durability, Snapshot, UnnamedFile};

use crate::contents::Contents;
use crate::error::PackError;
use crate::pieces::{PIECE, for_each_piece, runs};

/// The result of unpacking.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnpackedFile {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes, holes included.
    pub length: u64,
    /// Bytes of its pages.
    pub page_bytes: u64,
}

/// Writes a snapshot as a mapped-ram file: QEMU loads it, and where it was mappable before it was packed, it is again.
///
/// # Errors
/// The snapshot would restore to a broken guest, or cannot be read; the file cannot be written. Nothing is left of it
/// then.
pub fn unpack(
    snapshot: &Snapshot,
    pending: UnnamedFile,
    durability: Durability,
    handle: &Handle,
) -> Result<UnpackedFile, PackError> {
    snapshot.check_restorable()?;
    let contents = Contents::new(snapshot);
    let (target, length) = (pending.target().to_path_buf(), contents.length());
    handle.progress.expect_pages(snapshot.stored_pages());
    handle.progress.set_phase(Phase::Active);
    let file = pending.file();
    file.set_len(length).map_err(PackError::io("make it longer", &target))?;
    let work = |buffer: &mut Vec<u8>, piece: Range<u64>| -> Result<(), PackError> {
        handle.control.check().map_err(PackError::Cancelled)?;
        if contents.has_data(&piece) {
            buffer.resize(to_usize(piece.end - piece.start), 0);
            contents.read(&piece, buffer)?;
            let bytes = |range: &Range<u64>| {
                let place = to_usize(range.start - piece.start)..to_usize(range.end - piece.start);
                buffer.get(place).unwrap_or_default()
            };
            let has_contents = |range: &Range<u64>| {
                let bytes = bytes(range);
                if bytes.len() == PAGE_LEN { !is_zero(bytes) } else { bytes.iter().any(|byte| *byte != 0) }
            };
            for run in runs(&piece, PAGE_SIZE, has_contents) {
                file.write_all_at(bytes(&run), run.start).map_err(PackError::io("write it", &target))?;
            }
        }
        handle.progress.add_moved(MovedPages { normal: contents.stored_pages(&piece), zero: 0, resent: 0 });
        Ok(())
    };
    for_each_piece(length, PIECE, || Ok(Vec::new()), work)?;
    snapshot.check_unchanged()?;
    handle.control.check().map_err(PackError::Cancelled)?;
    let path = pending.publish(durability)?;
    handle.progress.set_phase(Phase::Completed);
    Ok(UnpackedFile { path, length, page_bytes: to_u64(PAGE_LEN).saturating_mul(snapshot.stored_pages()) })
}
