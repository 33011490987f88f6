//! Conversion from and to rust-vmm's `vm-memory`.
//!
//! - [`import`]: the VMM has mapped its memory by `vm-memory`; the same mappings become a [`GuestMemory`].
//! - [`export`]: the memory was mapped here; device models reach it as a [`GuestMemoryMmap`] over the same mappings.
//!
//! Nothing is copied and nothing is mapped twice, so dirty logs and fault handlers see every access. Each side keeps
//! the mappings of the other alive.
//!
//! Writes of device models through `vm-memory` are marked in a [`SoftwareDirtyLog`](crate::dirty::SoftwareDirtyLog) if
//! the regions' bitmap is a [`DirtyMarks`] and [`attach_dirty_bitmap`] was called. (Code that writes through a raw
//! pointer marks the pages itself afterwards, as `vm-memory` requires.)
//!
//! ```
//! use limosa_memory::dirty::{DirtyLogs, DirtyPages, SoftwareDirtyLog, Writers};
//! use limosa_memory::rust_vmm::{DirtyMarks, attach_dirty_bitmap, import};
//! use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let devices = GuestMemoryMmap::<DirtyMarks>::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
//! let memory = import(&devices, |_| "pc.ram".into())?;
//! let log = SoftwareDirtyLog::new(&memory, Writers::DEVICES);
//! attach_dirty_bitmap(&devices, &memory, &log.bitmap())?;
//! let mut logs = DirtyLogs::new(Writers::DEVICES, vec![Box::new(log)])?;
//!
//! logs.start()?;
//! devices.write_slice(b"a packet", GuestAddress(0x5ffc))?;
//! let mut dirty = DirtyPages::new(&memory);
//! logs.fetch(&mut dirty)?;
//! assert_eq!(dirty.count(), 2);
//! # Ok(()) }
//! ```
#![allow(unsafe_code, reason = "shares mappings with vm-memory")]

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use limosa_page::{PAGE_SIZE, PageNumber, PageRange};
use vm_memory::bitmap::{Bitmap, BitmapSlice, NewBitmap, WithBitmapSlice};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

use crate::block::file_page_size;
use crate::dirty::SoftwareDirtyBitmap;
use crate::mapping::Mapping;
use crate::{GuestMemory, GuestRegion, MemoryBlock, MemoryError};

/// Converts memory that a VMM mapped by `vm-memory`: a block for each region, in the order of guest addresses. `name`
/// maps a region's guest address to the block's name. Names and order must match the other end.
///
/// # Errors
/// Two blocks with the same name, a region of partial pages, or a descriptor that cannot be duplicated.
pub fn import<B: Bitmap + Send + Sync + 'static>(
    memory: &GuestMemoryMmap<B>,
    mut name: impl FnMut(GuestAddress) -> String,
) -> Result<GuestMemory, MemoryError> {
    let (mut blocks, mut regions) = (Vec::new(), Vec::new());
    for (index, region) in memory.iter().enumerate() {
        let block = block_over(name(region.start_addr()), region.get_mmap())?;
        regions.push(GuestRegion { guest_address: region.start_addr().0, block: index, pages: block.pages() });
        blocks.push(block);
    }
    GuestMemory::with_regions(blocks, regions)
}

fn block_over<B: Bitmap + Send + Sync + 'static>(
    name: String,
    region: Arc<MmapRegion<B>>,
) -> Result<MemoryBlock, MemoryError> {
    let layout = |why: &str| MemoryError::Layout { block: name.clone(), why: why.into() };
    let kernel = |operation, source| MemoryError::Kernel { block: name.clone(), operation, source };
    let shared = region.flags() & libc::MAP_SHARED != 0;
    let file = match region.file_offset() {
        Some(place) => {
            let file =
                place.file().as_fd().try_clone_to_owned().map_err(|e| kernel("duplicating its descriptor", e))?;
            Some((file, place.start()))
        }
        None => None,
    };
    let page_size = match &file {
        Some((file, _)) => file_page_size(file).map_err(|e| kernel("fstatfs", e))?,
        None if region.flags() & libc::MAP_HUGETLB != 0 => huge_page_size(region.flags()),
        None => PAGE_SIZE,
    };
    let (start, length) = (region.as_ptr(), region.size());
    if length == 0 || !(length as u64).is_multiple_of(page_size) || !(start.addr() as u64).is_multiple_of(page_size) {
        return Err(layout("its region is not a whole number of pages"));
    }
    if region.prot() & (libc::PROT_READ | libc::PROT_WRITE) != libc::PROT_READ | libc::PROT_WRITE {
        return Err(layout("its region is not mapped for reading and writing"));
    }
    let start = NonNull::new(start).ok_or_else(|| layout("its region has no address"))?;
    // SAFETY: the region is mapped as long as it lives, which the mapping sees to, and vm-memory makes no references to
    // it.
    let mapping = unsafe { Mapping::over(start, length, region) };
    Ok(MemoryBlock::over(name, mapping, file, page_size, shared))
}

/// Returns the huge page size of mmap(2) flags: its binary logarithm in six bits from `MAP_HUGE_SHIFT` (26) on; 0 means
/// the system's default.
fn huge_page_size(flags: i32) -> u64 {
    match (flags >> 26) & 63 {
        0 => {
            let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"));
            let size = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
            size.map_or(2 << 20, |size| size * 1024)
        }
        log => 1 << log,
    }
}

/// Converts memory for device models, at its guest-physical addresses. It stays mapped as long as the result lives.
///
/// # Errors
/// No memory is mapped for the guest, or `vm-memory` rejects a region.
pub fn export(memory: &Arc<GuestMemory>) -> Result<GuestMemoryMmap<DirtyMarks>, MemoryError> {
    let mut regions = Vec::new();
    for region in memory.regions() {
        let block = memory.block(region.block)?;
        let layout = |why: String| MemoryError::Layout { block: block.name().to_owned(), why };
        let place = block.iovec(region.pages).ok_or_else(|| layout("a region is not inside it".into()))?;
        let marks = DirtyMarks { attached: OnceLock::new(), _owner: Some(Arc::clone(memory)) };
        let sharing = if block.is_shared() { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let mut builder = MmapRegionBuilder::new_with_bitmap(place.iov_len, marks)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_NORESERVE | sharing)
            .with_hugetlbfs(block.page_size() != PAGE_SIZE);
        if let Some((file, offset)) = block.file() {
            let file = file.try_clone_to_owned().map_err(|source| MemoryError::Kernel {
                block: block.name().to_owned(),
                operation: "duplicating its descriptor",
                source,
            })?;
            builder = builder.with_file_offset(FileOffset::new(file.into(), offset + region.pages.bytes().start));
        }
        // SAFETY: the pages are mapped as long as the memory lives, and the region's bitmap keeps it alive.
        let built = unsafe { builder.with_raw_mmap_pointer(place.iov_base.cast()) }.build();
        let built = built.map_err(|error| layout(error.to_string()))?;
        let built = GuestRegionMmap::new(built, GuestAddress(region.guest_address));
        regions.push(built.ok_or_else(|| layout("a region reaches behind the last guest address".into()))?);
    }
    GuestMemoryMmap::from_regions(regions)
        .map_err(|error| MemoryError::Layout { block: "(all)".into(), why: error.to_string() })
}

/// Marks writes through `vm-memory` by `marker`, which belongs to a log of `memory`: both are of one VM. A region that
/// has a marker keeps it.
///
/// # Errors
/// A region that does not match a region of `memory`.
pub fn attach_dirty_bitmap(
    devices: &GuestMemoryMmap<DirtyMarks>,
    memory: &GuestMemory,
    marker: &SoftwareDirtyBitmap,
) -> Result<(), MemoryError> {
    for region in devices.iter() {
        let at = region.start_addr().0;
        let known = memory.regions().iter().find(|known| known.guest_address == at);
        let known = known.filter(|known| known.pages.len().saturating_mul(PAGE_SIZE) == region.len());
        let known = known.ok_or_else(|| MemoryError::Layout {
            block: format!("(at guest address {at:#x})"),
            why: format!("{} bytes of the devices' memory are not the guest memory's", region.len()),
        })?;
        let attached = Attached { marker: marker.clone(), block: known.block, first: known.pages.start };
        let _ = region.get_mmap().bitmap().attached.set(attached);
    }
    Ok(())
}

/// The bitmap of a `vm-memory` region that marks writes in a dirty log, once it is [attached](attach_dirty_bitmap).
#[derive(Debug, Default)]
pub struct DirtyMarks {
    attached: OnceLock<Attached>,
    /// The memory below an exported region.
    _owner: Option<Arc<GuestMemory>>,
}

#[derive(Debug)]
struct Attached {
    marker: SoftwareDirtyBitmap,
    block: usize,
    /// The page at the region's first byte.
    first: PageNumber,
}

impl DirtyMarks {
    fn mark(&self, offset: usize, length: usize) {
        let Some(Attached { marker, block, first }) = self.attached.get() else { return };
        let bytes = offset as u64..(offset as u64).saturating_add(length as u64);
        let pages = PageRange::covering(&bytes);
        marker.mark(*block, PageRange::starting_at(first.saturating_add(pages.start.0), pages.len()));
    }

    fn is_marked(&self, offset: usize) -> bool {
        self.attached.get().is_some_and(|Attached { marker, block, first }| {
            marker.is_marked(*block, first.saturating_add(PageNumber::containing(offset as u64).0))
        })
    }
}

impl<'a> WithBitmapSlice<'a> for DirtyMarks {
    type S = DirtyMarksSlice<'a>;
}

impl Bitmap for DirtyMarks {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.mark(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.is_marked(offset)
    }

    fn slice_at(&self, offset: usize) -> DirtyMarksSlice<'_> {
        DirtyMarksSlice { marks: self, offset }
    }
}

impl NewBitmap for DirtyMarks {
    fn with_len(_len: usize) -> Self {
        Self::default()
    }
}

/// The part of a [`DirtyMarks`] from an offset on.
#[derive(Debug, Clone, Copy)]
pub struct DirtyMarksSlice<'a> {
    marks: &'a DirtyMarks,
    offset: usize,
}

impl<'a> WithBitmapSlice<'_> for DirtyMarksSlice<'a> {
    type S = DirtyMarksSlice<'a>;
}

impl BitmapSlice for DirtyMarksSlice<'_> {}

impl<'a> Bitmap for DirtyMarksSlice<'a> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.marks.mark(self.offset.saturating_add(offset), len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.marks.is_marked(self.offset.saturating_add(offset))
    }

    fn slice_at(&self, offset: usize) -> DirtyMarksSlice<'a> {
        DirtyMarksSlice { offset: self.offset.saturating_add(offset), ..*self }
    }
}
