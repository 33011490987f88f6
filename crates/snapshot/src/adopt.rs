//! A snapshot file that QEMU wrote itself.
//!
//! QEMU knows when it has handed everything to the kernel, not whether it can be loaded again. Before limosa gives the
//! file its name, the file is taken apart exactly as a restore would, and its stream must end where the file ends.
//!
//! Nor does QEMU (10.0) take a page out of the file that became zero after it was written, it clears its bit; and a
//! loader does nothing about a clear bit. The file therefore gets what a [`SnapshotWriter`](crate::SnapshotWriter)
//! gives its own: holes, so that it may be mapped, and in the small blocks that a destination fills itself the bit set
//! over them.

use crate::error::SnapshotError;
use crate::layout::FileLayout;
use crate::manifest::{Manifest, PageStatistics, Published};
use crate::mappable;
use crate::seal;
use crate::store::StoreFile;
use crate::unnamed_file::UnnamedFile;
use crate::writer::WriteOptions;

/// Verifies a file that QEMU has written, makes it mappable and the zeros of its small blocks explicit, appends
/// limosa's trailer and publishes it.
///
/// The manifest's page statistics are taken from the file's bitmaps; machine, uuid, run state, RAM length and finishing
/// time are filled in as [`SnapshotWriter::finish`](crate::SnapshotWriter::finish) does. `options.write_behind` means
/// nothing here: follow the file with [`WriteBehind::for_other_writer`](crate::WriteBehind::for_other_writer) while
/// QEMU writes it.
///
/// # Errors
/// [`SnapshotError::Structure`] if it is not a whole mapped-ram file that ends with its VM description,
/// [`SnapshotError::Empty`] if no block has a stored page. That is decided without exception: every machine has
/// firmware in RAM blocks, so a save without one non-zero page is one whose bitmaps were never written.
pub fn publish_qemu_file(
    pending: UnnamedFile,
    manifest: Manifest,
    options: WriteOptions,
) -> Result<Published, SnapshotError> {
    let file = StoreFile::duplicate(pending.file(), pending.target())?;
    let length = file.stat()?.st_size.cast_unsigned();
    let FileLayout { layout, mut memory, devices, stream_end } = FileLayout::decode(&file, 0, length)?;
    if stream_end != length {
        let behind = length.saturating_sub(stream_end);
        return Err(
            file.structure(stream_end, format!("{behind} bytes behind QEMU's stream, where the file should end"))
        );
    }
    if memory.is_empty() {
        return Err(SnapshotError::Empty { path: file.path().to_path_buf() });
    }
    let mut manifest = manifest;
    let normal = memory.stored_pages();
    let pages: u64 = memory.places.iter().map(|place| place.pages).sum();
    let punched = mappable::clear_unstored(&file, &memory)?;
    let explicit_zero = mappable::make_zeros_explicit(&file, &layout, &mut memory)?;
    manifest.pages =
        PageStatistics { normal, zero: pages - normal, explicit_zero, hinted: None, punched, ..manifest.pages };
    seal::complete(&mut manifest, &layout.configuration, &memory, &devices);
    let contents = seal::Contents { layout: &layout, memory: &memory, devices: &devices };
    let length = seal::append_trailer(&file, &contents, &manifest, options.checksum)?;
    let path = pending.publish(options.durability)?;
    Ok(Published { path, manifest, length, write_behind_requests: 0 })
}
