//! The guest's memory, as a front end shares it.
//!
//! A region is a part of a file that the front end has open. It is mapped here, writable, and excluded from core dumps.
//! The front end's description is checked before: the file has pages and is long enough, and no two regions overlap. If
//! the file is truncated afterwards, every access raises a signal that ends this process, as with any shared memory:
//! the front end, that is the VMM, can do that; its guest cannot.
#![allow(unsafe_code, reason = "advises the kernel about mappings")]

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use limosa_page::to_usize;
use rustix::fs::{FileType, fstat};
use rustix::mm::{Advice, madvise};
use vm_memory::mmap::MmapRegionError;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::RamError;

/// Granularity of the addresses and offsets of mappings, in bytes.
const PAGE: u64 = 4096;

/// Maximum number of regions of a table.
pub const MAX_REGIONS: usize = 64;

/// One region of guest memory.
#[derive(Clone, Debug)]
pub struct RamRegion {
    /// Guest-physical address of its first byte.
    pub guest_address: u64,
    /// Length in bytes.
    pub length: u64,
    /// Address of its first byte in the front end's address space: messages give the addresses of rings in it.
    pub user_address: u64,
    /// Offset of its first byte in the file.
    pub file_offset: u64,
    file: Arc<File>,
    mapping: Arc<MmapRegion>,
}

impl RamRegion {
    /// Maps a region. It may end within a page: libblkio shares its rings so.
    ///
    /// # Errors
    /// The descriptor is not a regular file (memfds are), the file is too short, the region is empty, does not begin on
    /// a page or exceeds the address space, or the kernel refuses.
    pub fn map(
        guest_address: u64,
        length: u64,
        user_address: u64,
        file: OwnedFd,
        file_offset: u64,
    ) -> Result<Self, RamError> {
        let refuse = |why: &str| RamError::Region { guest_address, length, why: why.into() };
        let kernel = |operation, source| RamError::Kernel { guest_address, length, operation, source };
        let whole = |value: u64| value.is_multiple_of(PAGE);
        if length == 0 {
            return Err(refuse("it is empty"));
        }
        if !whole(guest_address) || !whole(file_offset) {
            return Err(refuse("it does not begin on a page"));
        }
        // Rings are looked up by user address, so the end of that range must exist, too.
        if guest_address.checked_add(length).is_none() || user_address.checked_add(length).is_none() {
            return Err(refuse("it reaches beyond the end of the address space"));
        }
        let end = file_offset.checked_add(length).and_then(|end| i64::try_from(end).ok());
        let Some(end) = end else { return Err(refuse("it reaches beyond the end of any file")) };
        let status = fstat(&file).map_err(|errno| kernel("fstat", errno.into()))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(refuse("its descriptor is not a regular file"));
        }
        if status.st_size < end {
            return Err(refuse(&format!("its file has {} bytes, {end} are needed", status.st_size)));
        }
        let size = usize::try_from(length).map_err(|_| refuse("it is larger than the address space"))?;
        let file = Arc::new(File::from(file));
        let mapping =
            MmapRegion::from_file(FileOffset::from_arc(file.clone(), file_offset), size).map_err(|error| {
                let source = match error {
                    MmapRegionError::Mmap(source) => source,
                    other => io::Error::other(other.to_string()),
                };
                kernel("mmap", source)
            })?;
        // Secrets of the guest do not belong in a core dump.
        // SAFETY: advice about whether memory is dumped does not change it; the mapping was made above and lives.
        unsafe { madvise(mapping.as_ptr().cast(), size, Advice::LinuxDontDump) }
            .map_err(|errno| kernel("madvise", errno.into()))?;
        Ok(Self { guest_address, length, user_address, file_offset, file, mapping: Arc::new(mapping) })
    }

    /// The file that it is a part of.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its mapping in this process.
    pub fn mapping(&self) -> &Arc<MmapRegion> {
        &self.mapping
    }
}

/// The guest's memory.
#[derive(Debug)]
pub struct Ram {
    regions: Vec<RamRegion>,
    memory: Arc<GuestMemoryMmap>,
}

impl Ram {
    /// The memory of these regions, in any order.
    ///
    /// # Errors
    /// More than [`MAX_REGIONS`], or two that overlap in guest or user addresses.
    pub fn new(mut regions: Vec<RamRegion>) -> Result<Self, RamError> {
        if regions.len() > MAX_REGIONS {
            return Err(RamError::TooMany { got: regions.len(), most: MAX_REGIONS });
        }
        let overlap = |region: &RamRegion, of: &str| RamError::Region {
            guest_address: region.guest_address,
            length: region.length,
            why: format!("it overlaps another region in {of} addresses"),
        };
        let mut by_user: Vec<_> = regions.iter().collect();
        by_user.sort_by_key(|region| region.user_address);
        for pair in by_user.windows(2) {
            if pair[0].user_address + pair[0].length > pair[1].user_address {
                return Err(overlap(pair[1], "user"));
            }
        }
        regions.sort_by_key(|region| region.guest_address);
        for pair in regions.windows(2) {
            if pair[0].guest_address + pair[0].length > pair[1].guest_address {
                return Err(overlap(&pair[1], "guest"));
            }
        }
        let mapped = regions.iter().filter_map(|region| {
            GuestRegionMmap::with_arc(region.mapping.clone(), GuestAddress(region.guest_address)).map(Arc::new)
        });
        let memory = if regions.is_empty() {
            Ok(GuestMemoryMmap::new())
        } else {
            GuestMemoryMmap::from_arc_regions(mapped.collect())
        };
        let memory = memory.map_err(|error| RamError::Region {
            guest_address: regions.first().map_or(0, |region| region.guest_address),
            length: regions.iter().map(|region| region.length).sum(),
            why: error.to_string(),
        })?;
        Ok(Self { regions, memory: Arc::new(memory) })
    }

    /// Its regions, by ascending guest address.
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }

    /// The same memory, as rings and descriptors are read from it.
    pub fn memory(&self) -> &Arc<GuestMemoryMmap> {
        &self.memory
    }

    /// Visits the addresses in this process of `length` bytes of guest memory, in order: one range, or one for each
    /// region that they are in. Returns false if not all of them are memory; what was visited before is then of no use.
    ///
    /// The addresses are valid as long as this `Ram` lives, and the guest may write there at any time.
    #[must_use]
    pub fn visit_host_ranges(&self, address: u64, length: u64, mut visit: impl FnMut(*mut u8, usize)) -> bool {
        let Some(end) = address.checked_add(length) else { return false };
        let mut at = address;
        let first = self.regions.partition_point(|region| region.guest_address + region.length <= at);
        for region in self.regions.iter().skip(first) {
            if at >= end {
                break;
            }
            let Some(within) = at.checked_sub(region.guest_address) else { return false };
            let bytes = (region.length - within).min(end - at);
            visit(region.mapping.as_ptr().wrapping_add(to_usize(within)), to_usize(bytes));
            at += bytes;
        }
        at >= end
    }

    /// The same memory, with reference counts of its own: threads that use it often do not write to one cache line.
    pub(crate) fn separate(&self) -> Arc<Self> {
        Arc::new(Self { regions: self.regions.clone(), memory: Arc::new(GuestMemoryMmap::clone(&self.memory)) })
    }

    /// The guest address of a byte in the front end's address space.
    pub fn to_guest_address(&self, user_address: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|region| {
            let within = user_address.checked_sub(region.user_address)?;
            (within < region.length).then(|| GuestAddress(region.guest_address + within))
        })
    }
}
