//! Write protection of guest memory by userfaultfd: the part that both logs share.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use limosa_page::{PAGE_SIZE, PageRange};

use super::log::LogError;
use crate::userfaultfd::{RegisterMode, Userfaultfd};
use crate::{GuestMemory, MemoryBlock};

/// Guest memory that is registered with a userfaultfd for write protection. Closing it ends the protection.
#[derive(Debug)]
pub(super) struct WriteProtection {
    /// Name of the log, for messages.
    log: &'static str,
    memory: Arc<GuestMemory>,
    uffd: Userfaultfd,
}

impl WriteProtection {
    /// Creates one for `memory`. Nothing is registered yet.
    pub(super) fn new(log: &'static str, memory: Arc<GuestMemory>, uffd: Userfaultfd) -> Self {
        Self { log, memory, uffd }
    }

    /// Returns the memory.
    pub(super) fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Returns the descriptor, to read its messages.
    pub(super) fn uffd(&self) -> &Userfaultfd {
        &self.uffd
    }

    /// Registers a block. Pages that are not protected afterwards can be written.
    pub(super) fn register(&self, block: &MemoryBlock) -> Result<(), LogError> {
        let all = addresses(block, block.pages()).map_err(self.failed("computing addresses"))?;
        let registered = self.uffd.register(all, RegisterMode::PROTECT);
        registered.map_err(|error| self.not_registered(block, &error.into()))
    }

    /// Protects all pages of a block, `slice` pages at a time, so that other threads can change mappings in between.
    pub(super) fn protect_all(&self, block: &MemoryBlock, slice: u64) -> Result<(), LogError> {
        for pages in block.pages().chunks(whole_slice(block, slice)) {
            self.protect(block, pages, true).map_err(self.failed("UFFDIO_WRITEPROTECT"))?;
        }
        Ok(())
    }

    /// Protects pages, or lets them be written and wakes threads that wait for that.
    pub(super) fn protect(&self, block: &MemoryBlock, pages: PageRange, protect: bool) -> io::Result<()> {
        Ok(self.uffd.protect(addresses(block, pages)?, protect)?)
    }

    /// Unregisters all memory and wakes all waiting threads. Continues after a failure, and returns the first one.
    pub(super) fn unregister(&self) -> io::Result<()> {
        let unregister = |block| Ok(self.uffd.unregister(addresses(block, block.pages())?)?);
        self.memory.blocks().iter().map(unregister).fold(Ok(()), Result::and)
    }

    /// Converts the error of an operation.
    pub(super) fn failed(&self, operation: &'static str) -> impl Fn(io::Error) -> LogError {
        let log = self.log;
        move |source| LogError::Failed { log, operation, source }
    }

    fn not_registered(&self, block: &MemoryBlock, error: &io::Error) -> LogError {
        let why = match error.raw_os_error() {
            Some(code) if code == rustix::io::Errno::BUSY.raw_os_error() => {
                "it is registered with another userfaultfd (a pager or a log), which must end first".to_owned()
            }
            _ => format!(
                "it cannot be write-protected ({error}); use KVM's dirty log, or have every writer mark its pages"
            ),
        };
        LogError::Unavailable { log: self.log, why: format!("RAM block {}: {why}", block.name()) }
    }
}

/// Returns the addresses of pages of a block in this process.
pub(super) fn addresses(block: &MemoryBlock, pages: PageRange) -> io::Result<Range<u64>> {
    let place = block.iovec(pages).ok_or_else(|| io::Error::other(format!("{} has no {pages}", block.name())))?;
    let start = place.iov_base.addr() as u64;
    Ok(start..start.saturating_add(place.iov_len as u64))
}

/// Returns the number of pages to protect in one step: `slice`, or one huge page if that is more.
pub(super) fn whole_slice(block: &MemoryBlock, slice: u64) -> u64 {
    slice.max(block.page_size() / PAGE_SIZE)
}
