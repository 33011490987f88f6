//! The parts that are written last, when the pages are in place: the frame around them, and the trailer behind the
//! stream.

use limosa_page::{BrokenInvariant, PageBitmap, error_with_causes, invariant, to_u64};
use limosa_stream::Configuration;
use limosa_stream::mapped_ram::{Layout, MappedBlock};
use uuid::Uuid;

use crate::checksum;
use crate::error::SnapshotError;
use crate::layout::{DeviceBytes, Memory};
use crate::manifest::{self, Manifest};
use crate::store::StoreFile;
use crate::trailer::{self, Checksums};

/// Writes everything but the pages: the frame of the stream, and the bitmaps.
pub(crate) fn write_frame(file: &StoreFile, layout: &Layout, stored: &[PageBitmap]) -> Result<(), SnapshotError> {
    let chunks = layout.chunks().map_err(|e| file.misuse(format!("a layout that has no bytes: {e}")))?;
    for chunk in chunks {
        file.write("the stream's frame", chunk.offset, &chunk.bytes)?;
    }
    for (block, stored) in layout.blocks.iter().zip(stored) {
        write_bitmap(file, block, stored)?;
    }
    Ok(())
}

/// Writes the bitmap of a block's stored pages.
pub(crate) fn write_bitmap(file: &StoreFile, block: &MappedBlock, stored: &PageBitmap) -> Result<(), SnapshotError> {
    let what = format!("the page bitmap of RAM block {}", block.block.name);
    file.write(&what, block.bitmap_offset, &stored.to_le_bytes())
}

/// Adds the facts from the file itself that the manifest lacks. Nothing but stored pages is in the places of pages:
/// every caller has seen to it.
pub(crate) fn complete(manifest: &mut Manifest, configuration: &Configuration, memory: &Memory, devices: &DeviceBytes) {
    manifest.ram_bytes = memory.bytes();
    manifest.mappable = true;
    if manifest.finished == 0 {
        manifest.finished = manifest::now();
    }
    manifest.machine.get_or_insert_with(|| configuration.machine.clone());
    if manifest.vm_uuid.is_none() {
        manifest.vm_uuid = configuration.uuid.map(Uuid::from_bytes);
    }
    if manifest.run_state.is_none() {
        manifest.run_state = devices.run_state();
    }
}

/// The contents that a trailer describes.
pub(crate) struct Contents<'a> {
    /// Places of the file.
    pub(crate) layout: &'a Layout,
    /// The stored pages.
    pub(crate) memory: &'a Memory,
    /// The device state.
    pub(crate) devices: &'a DeviceBytes,
}

/// Writes the trailer behind the stream, which ends with the device state; returns the file's length then.
pub(crate) fn append_trailer(
    file: &StoreFile,
    contents: &Contents<'_>,
    manifest: &Manifest,
    checksum: bool,
) -> Result<u64, SnapshotError> {
    let Contents { layout, memory, devices } = *contents;
    let stream_end = layout.tail_offset.saturating_add(devices.bytes().len() as u64);
    is_behind_stream(layout, devices.state().end, stream_end)
        .map_err(|broken| SnapshotError::Internal { path: file.path().to_path_buf(), broken })?;
    let checksums = match checksum {
        false => None,
        true => Some(Checksums {
            chunks: checksum::compute(file, &memory.places, &memory.stored)?,
            devices: checksum::of_devices(layout, devices.bytes()),
        }),
    };
    write_trailer(file, stream_end, manifest, checksums.as_ref())
}

/// Asserts that QEMU reads no byte from `offset` on: a trailer there would become guest memory or device state.
fn is_behind_stream(layout: &Layout, devices_end: usize, offset: u64) -> Result<(), BrokenInvariant> {
    let read = layout.tail_offset.saturating_add(to_u64(devices_end));
    invariant(offset >= read, "a trailer begins behind the device state")?;
    let pages_end = layout.blocks.iter().map(MappedBlock::end).max();
    invariant(pages_end.is_none_or(|end| end <= layout.tail_offset), "the device state is behind all pages")
}

/// Writes a trailer at `offset`; returns where it ends.
pub(crate) fn write_trailer(
    file: &StoreFile,
    offset: u64,
    manifest: &Manifest,
    checksums: Option<&Checksums>,
) -> Result<u64, SnapshotError> {
    let bytes = trailer::encode(manifest, checksums, offset)
        .map_err(|e| file.misuse(format!("a manifest that cannot be written: {}", error_with_causes(&e))))?;
    file.write("limosa's trailer", offset, &bytes)?;
    Ok(offset.saturating_add(bytes.len() as u64))
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use limosa_stream::ram::RamBlock;

    use super::*;

    fn layout() -> Layout {
        Layout::plan(&Configuration::new("pc-i440fx-10.0"), 2, &[RamBlock::new("pc.ram", 4096)]).unwrap()
    }

    #[test]
    fn a_trailer_may_begin_where_the_device_state_ends() {
        let layout = layout();
        assert_eq!(is_behind_stream(&layout, 100, layout.tail_offset + 100), Ok(()));
    }

    #[test]
    #[should_panic(expected = "a trailer begins behind the device state")]
    fn a_trailer_in_the_device_state_is_a_broken_invariant() {
        let layout = layout();
        let _ = is_behind_stream(&layout, 100, layout.tail_offset + 99);
    }

    #[test]
    #[should_panic(expected = "the device state is behind all pages")]
    fn device_state_in_the_pages_is_a_broken_invariant() {
        let mut layout = layout();
        layout.tail_offset = layout.blocks[0].pages_offset;
        let _ = is_behind_stream(&layout, 100, layout.tail_offset + 100);
    }
}
