//! userfaultfd-wp in asynchronous mode: the kernel lifts the protection by itself, and `PAGEMAP_SCAN` reads it.
//!
//! All memory is write-protected at the start, except private memory that was never touched: a page that exists there
//! later was written, or read and is reported without need. A write lifts the protection of its page inside the kernel,
//! at the cost of a page fault without a switch to another thread. A fetch finds the unprotected pages and protects
//! them again, each page in one atomic step. So a write is either before that step, and the page is in this fetch, or
//! after it, and the page is in the next one.
//!
//! It does not see other processes' writes through their own mappings, nor a device's (VFIO, `O_DIRECT`, `io_uring`'s
//! registered buffers) into pages that were pinned for writing before a fetch. The code that completes such a request
//! marks its pages in a [`SoftwareDirtyLog`](super::SoftwareDirtyLog).

use std::io;
use std::ops::Range;
use std::sync::Arc;

use limosa_page::PageRange;

use super::log::{DirtyLog, DirtyPages, LogError, Writers};
use super::uffd_wp::{WriteProtection, addresses};
use crate::discarding::DiscardWatch;
use crate::faults::FaultOrigin;
use crate::pagemap::PageMap;
use crate::userfaultfd::{Features, NOT_ALLOWED, Userfaultfd};
use crate::{GuestMemory, MemoryBlock};

const NAME: &str = "userfaultfd's asynchronous write protection";

/// Pages that one call protects at the start: other threads can change mappings between two calls.
const SLICE: u64 = (1 << 30) / limosa_page::PAGE_SIZE;

/// The log: kernel 6.7 or newer, memory of any kind, no privilege.
#[derive(Debug)]
pub struct UffdWpAsyncLog {
    memory: Arc<GuestMemory>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    protection: WriteProtection,
    map: PageMap,
    discards: DiscardWatch,
}

impl UffdWpAsyncLog {
    /// Creates a log for all blocks of `memory`. Nothing is protected before it starts.
    ///
    /// # Errors
    /// [`LogError::Unavailable`]: the kernel is too old, or this process lacks permission.
    pub fn new(memory: Arc<GuestMemory>) -> Result<Self, LogError> {
        open()?;
        Ok(Self { memory, running: None })
    }
}

/// Opens the descriptors that the log needs.
fn open() -> Result<(Userfaultfd, PageMap), LogError> {
    let unavailable = |why: String| LogError::Unavailable { log: NAME, why };
    let kernel = |what: &str, source: io::Error| {
        let how = if source.kind() == io::ErrorKind::PermissionDenied { NOT_ALLOWED } else { "use KVM's dirty log" };
        unavailable(format!("{what}: {source}; {how}; or have every writer mark its pages"))
    };
    // No process receives these faults, so the access mode does not matter; `UserOnly` needs the fewest permissions.
    let access = FaultOrigin::UserOnly;
    let features = Userfaultfd::available(access).map_err(|e| kernel("userfaultfd", e))?;
    if !features.contains(Features::PROTECT_ASYNC) {
        return Err(unavailable(
            "the kernel is older than 6.7; use the log with a fault handler (UffdWpSyncLog)".into(),
        ));
    }
    let wanted = Features::PROTECT.and(Features::PROTECT_SHARED).and(Features::PROTECT_UNPOPULATED);
    let uffd = Userfaultfd::open(access, wanted.and(Features::PROTECT_ASYNC));
    let uffd = uffd.map_err(|e| kernel("write protection by userfaultfd", e))?;
    let map = PageMap::open().map_err(|error| {
        unavailable(format!(
            "/proc/self/pagemap: {error}; the kernel refuses it to processes that are not dumpable (prctl PR_SET_DUMPABLE): \
             make the process dumpable (RAM blocks have MADV_DONTDUMP), or use UffdWpSyncLog"
        ))
    })?;
    Ok((uffd, map))
}

/// Whether a page without a page table entry has never been written. Untouched pages then need no mark, which would
/// cost page tables, and make them look populated.
fn is_private(block: &MemoryBlock) -> bool {
    !block.is_shared() && block.file().is_none()
}

impl DirtyLog for UffdWpAsyncLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn writers(&self) -> Writers {
        Writers::VCPUS | Writers::DEVICES
    }

    fn start(&mut self) -> Result<(), LogError> {
        self.stop()?;
        let (uffd, map) = open()?;
        let protection = WriteProtection::new(NAME, Arc::clone(&self.memory), uffd);
        let mut running = Running { protection, map, discards: self.memory.discardable().watch() };
        for block in self.memory.blocks() {
            // Closing the descriptor undoes what was done before a failure.
            running.protection.register(block)?;
            if is_private(block) {
                let failed = |operation| running.protection.failed(operation);
                let all = addresses(block, block.pages()).map_err(failed("computing addresses"))?;
                running.map.take_written_private(all, |_| {}).map_err(failed("PAGEMAP_SCAN"))?;
            } else {
                running.protection.protect_all(block, SLICE)?;
            }
        }
        self.running = Some(running);
        Ok(())
    }

    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        let Running { protection, map, discards } = self.running.as_mut().ok_or(LogError::NotStarted { log: NAME })?;
        let failed = |operation| protection.failed(operation);
        for (index, block) in self.memory.blocks().iter().enumerate() {
            let all = addresses(block, block.pages()).map_err(failed("computing addresses"))?;
            let start = all.start;
            let mut name = |run: &Range<u64>| {
                let bytes = run.start.saturating_sub(start)..run.end.saturating_sub(start);
                into.add(index, PageRange::covering(&bytes));
            };
            if is_private(block) {
                map.take_written_private(all, |run| name(&run)).map_err(failed("PAGEMAP_SCAN"))?;
                continue;
            }
            map.take_written(all.clone(), |run| name(&run)).map_err(failed("PAGEMAP_SCAN"))?;
            if block.page_size() > limosa_page::PAGE_SIZE {
                // For huge pages of the pool, that does not report pages that were written and unmapped since. A write
                // to such a page is either before it is protected here, and the page is reported, or later, and in the
                // next fetch.
                let mut unmarked = Vec::new();
                map.unmarked(all, |run| unmarked.push(run)).map_err(failed("PAGEMAP_SCAN"))?;
                for run in unmarked {
                    protection
                        .uffd()
                        .protect(run.clone(), true)
                        .map_err(|e| failed("UFFDIO_WRITEPROTECT")(e.into()))?;
                    name(&run);
                }
            }
        }
        into.add_discards(Some(discards));
        Ok(())
    }

    fn stop(&mut self) -> Result<(), LogError> {
        let Some(running) = self.running.take() else { return Ok(()) };
        let protection = running.protection;
        protection.unregister().map_err(protection.failed("UFFDIO_UNREGISTER"))
    }
}

impl Drop for UffdWpAsyncLog {
    fn drop(&mut self) {
        // Closing the descriptor ends the protection anyway.
        let _ = self.stop();
    }
}
