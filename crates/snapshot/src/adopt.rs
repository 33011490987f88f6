//! A snapshot file that QEMU wrote itself.
//!
//! QEMU knows when it has handed everything to the kernel, not whether it can be loaded again. Before limosa gives the
//! file its name, the file is taken apart exactly as a restore would, and its stream must end where the file ends.
//!
//! Nor does QEMU (10.0) take a page out of the file that became zero after it was written, it clears its bit; and a
//! loader does nothing about a clear bit. In the small blocks that a destination fills itself the file therefore gets
//! what a [`SnapshotWriter`](crate::SnapshotWriter) gives its own: a hole, and the bit set over it.

use limosa_page::PageRange;
use limosa_stream::mapped_ram::Layout;

use crate::anatomy::{Anatomy, Memory};
use crate::error::SnapshotError;
use crate::manifest::{Manifest, PageStatistics, Published};
use crate::pending::PendingFile;
use crate::seal;
use crate::store::StoreFile;
use crate::writer::WriteOptions;

/// Verifies a file that QEMU has written, makes the zeros of its small blocks explicit, appends limosa's trailer and
/// publishes it.
///
/// The manifest's page statistics are taken from the file's bitmaps; machine, uuid, run state, RAM length and finishing
/// time are filled in as [`SnapshotWriter::finish`](crate::SnapshotWriter::finish) does. `options.write_behind` means
/// nothing here: follow the file with [`WriteBehind::watching`](crate::WriteBehind::watching) while QEMU writes it.
///
/// # Errors
/// [`SnapshotError::Structure`] if it is not a whole mapped-ram file that ends with its VM description,
/// [`SnapshotError::Empty`] if no block has a stored page. That is decided without exception: every machine has
/// firmware in RAM blocks, so a save without one non-zero page is one whose bitmaps were never written.
pub fn adopt(pending: PendingFile, manifest: Manifest, options: WriteOptions) -> Result<Published, SnapshotError> {
    let file = StoreFile::duplicate(pending.file(), pending.target())?;
    let length = u64::try_from(file.stat()?.st_size).unwrap_or(0);
    let Anatomy { layout, mut memory, devices, stream_end } = Anatomy::decode(&file, 0, length)?;
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
    let explicit_zero = make_zeros_explicit(&file, &layout, &mut memory)?;
    manifest.pages = PageStatistics { normal, zero: pages - normal, explicit_zero, hinted: None, ..manifest.pages };
    seal::complete(&mut manifest, &layout.configuration, &memory, &devices);
    let length = seal::append_trailer(&file, &layout, (&memory, &devices), &manifest, options.checksum)?;
    let path = pending.publish(options.durability)?;
    Ok(Published { path, manifest, length, write_behind_requests: 0 })
}

/// Takes out of the file what is left of zero pages in blocks that a destination may fill before it loads, and sets
/// their bits; returns how many they are.
fn make_zeros_explicit(file: &StoreFile, layout: &Layout, memory: &mut Memory) -> Result<u64, SnapshotError> {
    let mut count = 0;
    for ((block, place), stored) in layout.blocks.iter().zip(&memory.places).zip(&mut memory.stored) {
        let zero = place.pages - stored.count();
        if zero == 0 || !place.may_be_prefilled() {
            continue;
        }
        for gap in stored.gaps() {
            file.punch(place, gap)?;
        }
        stored.set_range(PageRange::first(place.pages));
        seal::write_bitmap(file, block, stored)?;
        count += zero;
    }
    Ok(count)
}
