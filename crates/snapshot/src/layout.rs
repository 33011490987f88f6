//! A mapped-ram file taken apart: its layout, which pages it stores, its device state.
//!
//! Law of this module: for any bytes, taking them apart ends in an error or in parts that lie inside the file,
//! do not overlap, and use memory in proportion to the contents that the file claims, up to fixed bounds.

use limosa_page::{PAGE_SIZE, PageBitmap};
use limosa_stream::devices::{self, TAIL_LIMIT};
use limosa_stream::mapped_ram::{Layout, MappedBlock};
use limosa_stream::{CompleteTail, ErrorKind, WalkError};

use crate::error::SnapshotError;
use crate::store::{StoreFile, StoredRange};

/// Most pages of guest memory that a snapshot has: 16 TiB, whose bitmaps take 512 MiB.
pub(crate) const MEMORY_PAGES_MAX: u64 = 1 << 32;

/// Where pages are, and which of them: one entry a RAM block in both lists.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    pub(crate) places: Vec<StoredRange>,
    pub(crate) stored: Vec<PageBitmap>,
}

impl Memory {
    /// Length of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.places.iter().map(|place| place.pages * PAGE_SIZE).sum()
    }

    /// Pages of all blocks that are stored.
    pub(crate) fn stored_pages(&self) -> u64 {
        self.stored.iter().map(PageBitmap::count).sum()
    }

    /// Whether the VM has memory, but the file has none of it.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.iter().any(|place| place.pages > 0) && self.stored.iter().all(PageBitmap::is_empty)
    }
}

/// The device sections and the VM description, as they stood in the stream.
#[derive(Debug)]
pub(crate) struct DeviceBytes {
    bytes: Vec<u8>,
    state: CompleteTail,
}

impl DeviceBytes {
    /// Proves that the bytes are a whole device tail, first section to end of description, nothing behind.
    pub(crate) fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        let devices = Self::find(bytes, 0)?;
        let behind = devices.bytes.len() - devices.state.end;
        if behind > 0 {
            return Err(format!("{behind} bytes behind the VM description, where the stream should end"));
        }
        Ok(devices)
    }

    /// Finds the device tail at the beginning of the bytes, which are from `offset` of the file.
    fn find(bytes: Vec<u8>, offset: u64) -> Result<Self, String> {
        let state = devices::find_tail_end(&bytes, offset, TAIL_LIMIT).map_err(|e| {
            format!("the device state is cut, or was saved without its description (-machine suppress-vmdesc=on): {e}")
        })?;
        Ok(Self { bytes, state })
    }

    /// All of it: sections, end mark, description.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The VM description, from its mark on: all that is behind the end mark.
    pub(crate) fn behind_end_mark(&self) -> &[u8] {
        let (_, behind) = self.bytes.split_at(self.state.sections_range.end);
        behind.split_first().map_or(&[], |(_, description)| description)
    }

    /// The sections alone.
    pub(crate) fn sections(&self) -> &[u8] {
        &self.bytes[self.state.sections_range.clone()]
    }

    /// The JSON alone.
    pub(crate) fn description(&self) -> &[u8] {
        &self.bytes[self.state.json_range.clone()]
    }

    pub(crate) fn state(&self) -> &CompleteTail {
        &self.state
    }

    /// The run state that a destination would adopt; none if that section is missing or odd.
    pub(crate) fn run_state(&self) -> Option<String> {
        self.state.global_state(&self.bytes).ok().flatten().map(|state| state.run_state)
    }
}

/// The parts of a mapped-ram file.
#[derive(Debug)]
pub(crate) struct FileLayout {
    pub(crate) layout: Layout,
    pub(crate) memory: Memory,
    pub(crate) devices: DeviceBytes,
    /// Where QEMU's stream ends, and a trailer may begin.
    pub(crate) stream_end: u64,
}

impl FileLayout {
    /// Takes a file of `length` bytes apart whose stream begins at `base`.
    pub(crate) fn decode(file: &StoreFile, base: u64, length: u64) -> Result<Self, SnapshotError> {
        let mut unreadable = None;
        let read_at = |offset: u64, into: &mut [u8]| {
            let Some(lent) = file.lent_bytes() else {
                return rustix::io::pread(file.fd(), into, offset).map_err(std::io::Error::from);
            };
            // Fewer bytes than asked for are left at the end alone.
            let left = usize::try_from(lent.length().saturating_sub(offset)).unwrap_or(usize::MAX);
            let count = left.min(into.len());
            let read = lent.read_exact_at(into.split_at_mut(count).0, offset);
            read.map(|()| count).map_err(|source| {
                unreadable = Some(SnapshotError::Packed { path: file.path().to_path_buf(), offset, source });
                std::io::Error::other("the bytes that are lent")
            })
        };
        let layout = Layout::decode(read_at, base, length);
        if let Some(unreadable) = unreadable {
            return Err(unreadable);
        }
        let layout = layout.map_err(|e| match e {
            WalkError::Stream(e) => match (e.context(), e.kind()) {
                ("configuration", ErrorKind::Unexpected { what: expected, .. }) if expected.contains("mapped-ram") => {
                    let what = format!("a recorded migration stream, not a snapshot: {}", e.kind());
                    SnapshotError::RecordedStream { path: file.path().to_path_buf(), offset: e.offset(), what }
                }
                _ => SnapshotError::undecoded(file.path(), base, "not a whole mapped-ram file: ", &e),
            },
            WalkError::Read { offset, source, .. } => file.io("read it", Some(offset), source),
            other => file.io("read it", None, std::io::Error::other(other)),
        })?;
        let pages = layout.blocks.iter().try_fold(0_u64, |sum, block| sum.checked_add(block.pages));
        if pages.is_none_or(|pages| pages > MEMORY_PAGES_MAX) {
            return Err(file.structure(0, format!("more than {MEMORY_PAGES_MAX} pages of guest memory")));
        }
        let stored = layout.blocks.iter().map(|block| bitmap(file, block)).collect::<Result<_, _>>()?;
        let memory = Memory { places: layout.blocks.iter().map(StoredRange::new).collect(), stored };
        let (devices, stream_end) = device_bytes(file, layout.tail_offset, length)?;
        Ok(Self { layout, memory, devices, stream_end })
    }
}

fn bitmap(file: &StoreFile, block: &MappedBlock) -> Result<PageBitmap, SnapshotError> {
    let what = || format!("the page bitmap of RAM block {}", block.block.name);
    let length = usize::try_from(block.bitmap_length())
        .map_err(|_| file.structure(block.bitmap_offset, format!("{} is larger than memory", what())))?;
    let mut bytes = vec![0; length];
    file.read(&what(), block.bitmap_offset, &mut bytes)?;
    PageBitmap::from_le_bytes(block.pages, &bytes)
        .map_err(|e| file.structure(block.bitmap_offset, format!("{}: {e}", what())))
}

/// The device tail, and where it ends.
fn device_bytes(file: &StoreFile, tail_offset: u64, length: u64) -> Result<(DeviceBytes, u64), SnapshotError> {
    // Room for a trailer behind the longest tail; bytes further out are foreign.
    let available = length.saturating_sub(tail_offset).min(TAIL_LIMIT);
    let available = usize::try_from(available)
        .map_err(|_| file.structure(tail_offset, "the device state is larger than memory"))?;
    let mut bytes = vec![0; available];
    file.read("the device state", tail_offset, &mut bytes)?;
    let mut devices = DeviceBytes::find(bytes, tail_offset).map_err(|why| file.structure(tail_offset, why))?;
    devices.bytes.truncate(devices.state.end);
    devices.bytes.shrink_to_fit();
    let stream_end = tail_offset.saturating_add(devices.bytes.len() as u64);
    Ok((devices, stream_end))
}
