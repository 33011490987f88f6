//! One RAM block: a name, a role, and mapped memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use libc::iovec;
use limosa_page::{GuestPages, PAGE_SIZE, PageNumber, PageRange, to_usize};
use rustix::fs::{FsWord, MemfdFlags, SealFlags, fcntl_add_seals, fstat, fstatfs, ftruncate, memfd_create};

use crate::discarding::Discards;
use crate::error::MemoryError;
use crate::mapping::Mapping;
use crate::pin::{PinnedPages, Pins};

/// `HUGETLBFS_MAGIC`
const HUGETLBFS: FsWord = 0x9584_58f6;

/// The role of a RAM block for the guest. Only [`Ram`](Self::Ram) can be assumed to be zero at a destination that has
/// just started: firmware fills the others before any page arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BlockRole {
    /// Memory.
    #[default]
    Ram,
    /// Firmware, option ROMs.
    Rom,
    /// A graphics card's memory.
    Video,
    /// Parallel flash with a variable store.
    Flash,
}

/// The source of a block's memory.
#[derive(Debug)]
enum Backing {
    Anonymous,
    Memfd,
    File { file: OwnedFd, offset: u64 },
}

/// Options for mapping a block.
#[derive(Debug)]
pub struct BlockOptions {
    name: String,
    length: u64,
    role: BlockRole,
    backing: Backing,
    shared: bool,
    huge_page: Option<u64>,
    region_address: u64,
}

impl BlockOptions {
    fn new(name: impl Into<String>, length: u64, backing: Backing, shared: bool) -> Self {
        let (role, huge_page, region_address) = (BlockRole::Ram, None, 0);
        Self { name: name.into(), length, role, backing, shared, huge_page, region_address }
    }

    /// Creates options for private memory that starts as zeros.
    pub fn anonymous(name: impl Into<String>, length: u64) -> Self {
        Self::new(name, length, Backing::Anonymous, false)
    }

    /// Creates options for shared memory that starts as zeros and has a descriptor, which can be passed on.
    pub fn memfd(name: impl Into<String>, length: u64) -> Self {
        Self::new(name, length, Backing::Memfd, true)
    }

    /// Creates options for a file's bytes from `offset` on, shared with everyone who maps it: of tmpfs, hugetlbfs, a
    /// disk, or a memfd that another process passed.
    pub fn file(name: impl Into<String>, length: u64, file: OwnedFd, offset: u64) -> Self {
        Self::new(name, length, Backing::File { file, offset }, true)
    }

    /// Sets the role of the block (default: RAM).
    #[must_use]
    pub fn role(mut self, role: BlockRole) -> Self {
        self.role = role;
        self
    }

    /// Sets the address of the block's region inside the region that contains it (default: 0, as for a machine's main
    /// memory). QEMU compares it for memory that is [shared](crate::PassedBlock) with the other end.
    #[must_use]
    pub fn region_address(mut self, address: u64) -> Self {
        self.region_address = address;
        self
    }

    /// Uses huge pages of `size` bytes from the system's pool (2 MiB, 1 GiB). A file keeps its own page size.
    #[must_use]
    pub fn huge_pages(mut self, size: u64) -> Self {
        self.huge_page = Some(size);
        self
    }

    /// Maps the file privately: writes go to a copy of this process, not to the file.
    #[must_use]
    pub fn private(mut self) -> Self {
        self.shared = false;
        self
    }

    /// Maps the block.
    ///
    /// # Errors
    /// A length that is 0 or no multiple of the page size, a file that is shorter, or an error of the kernel.
    pub fn map(self) -> Result<MemoryBlock, MemoryError> {
        let Self { name, length, role, backing, shared, huge_page, region_address } = self;
        let layout = |why: String| MemoryError::Layout { block: name.clone(), why };
        let kernel = |operation, source: io::Error| MemoryError::Kernel { block: name.clone(), operation, source };
        let mapped = usize::try_from(length).map_err(|_| layout(format!("{length} bytes are too many to map")))?;
        if huge_page.is_some_and(|size| !size.is_power_of_two() || size <= PAGE_SIZE) {
            return Err(layout("the size of a huge page is a power of two above 4096".into()));
        }
        let (file, page_size) = match backing {
            Backing::Anonymous => (None, huge_page.unwrap_or(PAGE_SIZE)),
            Backing::Memfd => {
                let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                if let Some(size) = huge_page {
                    flags |= MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(size.trailing_zeros() << 26);
                }
                let file = memfd_create(&*name, flags).map_err(|e| kernel("memfd_create", e.into()))?;
                ftruncate(&file, length).map_err(|e| kernel("ftruncate", e.into()))?;
                // Without the seals, a process with the descriptor could truncate the mapped memory. (Holes can still
                // be punched.)
                let seals = SealFlags::SHRINK | SealFlags::GROW;
                fcntl_add_seals(&file, seals).map_err(|e| kernel("sealing its length", e.into()))?;
                (Some((file, 0)), huge_page.unwrap_or(PAGE_SIZE))
            }
            Backing::File { file, offset } => {
                let stat = fstat(&file).map_err(|e| kernel("fstat", e.into()))?;
                let size = stat.st_size.cast_unsigned();
                if offset.checked_add(length).is_none_or(|end| end > size) {
                    return Err(layout(format!("its file has {size} bytes, and {length} at {offset} are wanted")));
                }
                let page_size = file_page_size(&file).map_err(|e| kernel("fstatfs", e))?;
                (Some((file, offset)), page_size)
            }
        };
        if length == 0 || !length.is_multiple_of(page_size) {
            return Err(layout(format!("{length} bytes are no number of pages of {page_size}")));
        }
        let from = file.as_ref().map(|(file, offset)| (file.as_fd(), *offset));
        let mapping = Mapping::new(from, mapped, shared, huge_page).map_err(|e| kernel("mmap", e))?;
        let (pins, discards) = (Pins::default(), Arc::default());
        Ok(MemoryBlock { name, role, mapping, file, page_size, shared, region_address, pins, discards })
    }
}

/// Returns the page size with which the kernel maps a file: on hugetlbfs its block size, otherwise 4 KiB. (The
/// preferred block size proves nothing elsewhere: tmpfs with transparent huge pages reports 2 MiB, and so do some
/// disks.)
pub(crate) fn file_page_size(file: impl AsFd) -> io::Result<u64> {
    let system = fstatfs(file)?;
    Ok(match u64::try_from(system.f_bsize) {
        Ok(size) if system.f_type == HUGETLBFS => size,
        _ => PAGE_SIZE,
    })
}

/// A mapped RAM block.
#[derive(Debug)]
pub struct MemoryBlock {
    name: String,
    role: BlockRole,
    mapping: Mapping,
    file: Option<(OwnedFd, u64)>,
    page_size: u64,
    shared: bool,
    region_address: u64,
    pins: Pins,
    discards: Arc<Discards>,
}

impl MemoryBlock {
    /// Creates a block over memory that is mapped already.
    #[cfg(feature = "vm-memory")]
    pub(crate) fn over(
        name: String,
        mapping: Mapping,
        file: Option<(OwnedFd, u64)>,
        page_size: u64,
        shared: bool,
    ) -> Self {
        let (role, region_address, pins, discards) = (BlockRole::Ram, 0, Pins::default(), Arc::default());
        Self { name, role, mapping, file, page_size, shared, region_address, pins, discards }
    }

    /// Returns its name, QEMU's idstr, e.g. `pc.ram`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its role for the guest.
    pub fn role(&self) -> BlockRole {
        self.role
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Always false: a block has at least one page.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns its pages of 4 KiB.
    pub fn pages(&self) -> PageRange {
        PageRange::whole_block(self.len() / PAGE_SIZE)
    }

    /// Returns the size of its host pages in bytes.
    pub fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Whether the memory is shared, so that others may map it too.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Returns the address set by [`BlockOptions::region_address`].
    pub fn region_address(&self) -> u64 {
        self.region_address
    }

    /// Returns the file behind it, and the file offset of its first byte.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.file.as_ref().map(|(file, offset)| (file.as_fd(), *offset))
    }

    /// Pins the block's pages: none is discarded until the result is dropped. `None` while a discard is in progress or
    /// waits.
    pub fn pin(&self) -> Option<PinnedPages<'_>> {
        self.pins.pin()
    }

    /// Whether `pinned` are pages of this block.
    pub fn is_pinned_by(&self, pinned: &PinnedPages<'_>) -> bool {
        pinned.is_of(&self.pins)
    }

    /// Returns the pins of the block.
    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Returns the logs that must learn of discards of the block.
    pub(crate) fn discards(&self) -> &Arc<Discards> {
        &self.discards
    }

    /// Returns the address of its first byte in this process, for the kernel and for KVM. It is valid as long as the
    /// block exists.
    pub fn host_address(&self) -> *mut u8 {
        self.mapping.start()
    }

    /// Returns its memory for zero detection and scans.
    #[allow(unsafe_code, reason = "vouches for the mapping")]
    pub fn guest_pages(&self) -> GuestPages<'_> {
        // SAFETY: the mapping is readable as long as the block is borrowed.
        unsafe { GuestPages::new(self.mapping.start(), self.mapping.len(), PageNumber(0)) }
    }

    /// Returns the address and length of pages, for a gather or scatter list; `None` if some are outside the block.
    /// Valid as long as the block exists.
    pub fn iovec(&self, pages: PageRange) -> Option<iovec> {
        let bytes = pages.bytes();
        if bytes.end > self.len() {
            return None;
        }
        let (start, end) = (usize::try_from(bytes.start).ok()?, usize::try_from(bytes.end).ok()?);
        Some(iovec { iov_base: self.mapping.start().wrapping_add(start).cast(), iov_len: end.checked_sub(start)? })
    }

    /// Copies bytes out of the block.
    ///
    /// # Errors
    /// [`MemoryError::Outside`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let wanted = into.len();
        let done = usize::try_from(offset).ok().and_then(|offset| self.mapping.read(offset, into));
        done.ok_or_else(|| self.outside(offset, wanted))
    }

    /// Copies bytes into the block.
    ///
    /// # Errors
    /// [`MemoryError::Outside`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let done = usize::try_from(offset).ok().and_then(|offset| self.mapping.write(offset, bytes));
        done.ok_or_else(|| self.outside(offset, bytes.len()))
    }

    /// Writes zeros.
    ///
    /// # Errors
    /// [`MemoryError::Outside`].
    pub fn fill_zero(&self, offset: u64, length: u64) -> Result<(), MemoryError> {
        let wanted = to_usize(length);
        let done = usize::try_from(offset).ok().and_then(|offset| self.mapping.fill_zero(offset, wanted));
        done.ok_or_else(|| self.outside(offset, wanted))
    }

    /// Forbids writes by this process (a write raises SIGSEGV), or allows them again: detects writers that should be
    /// paused.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn set_writable(&self, writable: bool) -> Result<(), MemoryError> {
        self.mapping.protect(writable).map_err(|source| MemoryError::Kernel {
            block: self.name.clone(),
            operation: "mprotect",
            source,
        })
    }

    fn outside(&self, offset: u64, wanted: usize) -> MemoryError {
        MemoryError::Outside { block: self.name.clone(), length: self.len(), offset, wanted }
    }
}
