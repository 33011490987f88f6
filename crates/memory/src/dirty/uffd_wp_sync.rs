//! userfaultfd-wp in synchronous mode, for kernels before 6.7: a thread of this process lifts the protection.
//!
//! A write to a protected page makes its writer wait; a thread marks the page, lets it be written and wakes the writer.
//! A fetch protects the marked pages again *before* it reports them; `hand_over` synchronizes the two. The first write
//! to a page after each fetch costs two thread switches.
//!
//! If the thread fails, it unregisters all memory: the guest keeps running, and the next fetch fails.
//!
//! A discarded page loses its protection. The log learns of a [discard](crate::MemoryBlock::discard) or a
//! [release](crate::MemoryBlock::release), and protects the page again. It does not learn of pages that another process
//! discards, by punching a hole into shared memory, and misses the next write to them. Otherwise it sees the same
//! writes as [`UffdWpAsyncLog`](super::UffdWpAsyncLog).

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use limosa_page::{PAGE_SIZE, PageNumber, PageRange};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::hand_over::Writable;
use super::log::{DirtyLog, DirtyPages, LogError, Writers};
use super::uffd_wp::{WriteProtection, whole_slice};
use crate::GuestMemory;
use crate::discarding::DiscardWatch;
use crate::faults::FaultOrigin;
use crate::userfaultfd::{Features, Message, NOT_ALLOWED, Userfaultfd};

const NAME: &str = "userfaultfd's write protection with a fault handler";

/// Pages that a fetch protects before it lets waiting writers in between (64 MiB).
const SLICE: u64 = (64 << 20) / PAGE_SIZE;

/// The log: kernel 5.19 or newer for shared memory and huge pages, 6.4 for private memory; requires permission for
/// faults of the kernel.
#[derive(Debug)]
pub struct UffdWpSyncLog {
    memory: Arc<GuestMemory>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    handler: Arc<Handler>,
    discards: DiscardWatch,
    stop: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Handler {
    protection: WriteProtection,
    writable: Vec<Writable>,
    failed: Mutex<Option<io::Error>>,
}

impl UffdWpSyncLog {
    /// Creates a log for all blocks of `memory`. Nothing is protected before it starts.
    ///
    /// # Errors
    /// [`LogError::Unavailable`]: the kernel is too old, or this process lacks permission.
    pub fn new(memory: Arc<GuestMemory>) -> Result<Self, LogError> {
        open(&memory)?;
        Ok(Self { memory, running: None })
    }
}

/// Opens a userfaultfd that can protect `memory`.
fn open(memory: &GuestMemory) -> Result<Userfaultfd, LogError> {
    let unavailable = |why: String| LogError::Unavailable { log: NAME, why };
    let other = "use KVM's dirty log, or have every writer mark its pages";
    let kernel = |error: io::Error| {
        let how = if error.kind() == io::ErrorKind::PermissionDenied { NOT_ALLOWED } else { "the kernel has none" };
        unavailable(format!("userfaultfd: {error}; {how}; or {other}"))
    };
    // KVM and system calls write too, and must not fail with EFAULT at a protected page.
    let features = Userfaultfd::available(FaultOrigin::Everything).map_err(kernel)?;
    let mut wanted = Features::PROTECT;
    if !features.contains(wanted) {
        return Err(unavailable(format!("the kernel is older than 5.7; {other}")));
    }
    for block in memory.blocks() {
        let (needed, since) = if block.is_shared() || block.page_size() > PAGE_SIZE {
            (Features::PROTECT_SHARED, "shared memory and huge pages can be write-protected since kernel 5.19")
        } else {
            // Before that, writes to untouched pages would be missed.
            (Features::PROTECT_UNPOPULATED, "all of private memory can be write-protected since kernel 6.4")
        };
        if !features.contains(needed) {
            return Err(unavailable(format!("RAM block {}: {since}; {other}", block.name())));
        }
        wanted = wanted.and(needed);
    }
    Userfaultfd::open(FaultOrigin::Everything, wanted).map_err(kernel)
}

impl Handler {
    /// Serves faults until `stop` is readable.
    fn run(&self, stop: &OwnedFd) {
        if let Err(error) = self.serve(stop) {
            *self.failed.lock() = Some(error);
            // Waiting threads must not wait for ever.
            let _ = self.protection.unregister();
        }
    }

    fn serve(&self, stop: &OwnedFd) -> io::Result<()> {
        let mut messages = Vec::new();
        loop {
            let mut ready = [PollFd::new(self.protection.uffd(), PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            match poll(&mut ready, None) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result?,
            };
            if !ready[1].revents().is_empty() {
                return Ok(());
            }
            self.protection.uffd().read(&mut messages)?;
            for message in messages.drain(..) {
                if let Message::Fault { address, .. } = message {
                    self.admit(address)?;
                }
            }
        }
    }

    fn admit(&self, address: u64) -> io::Result<()> {
        for (block, writable) in self.protection.memory().blocks().iter().zip(&self.writable) {
            let start = block.host_address().addr() as u64;
            if let Some(offset) = address.checked_sub(start).filter(|offset| *offset < block.len()) {
                let pages_in_one = block.page_size() / PAGE_SIZE;
                let page = PageNumber::containing(offset);
                let pages = PageRange::starting_at(PageNumber(page.0 - page.0 % pages_in_one), pages_in_one);
                return writable.admit(pages, || self.protection.protect(block, pages, false));
            }
        }
        Err(io::Error::other(format!("a page fault at {address:#x}, where there is no guest memory")))
    }
}

fn failed(operation: &'static str) -> impl Fn(io::Error) -> LogError {
    move |source| LogError::Failed { log: NAME, operation, source }
}

impl DirtyLog for UffdWpSyncLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn writers(&self) -> Writers {
        Writers::VCPUS | Writers::DEVICES
    }

    fn start(&mut self) -> Result<(), LogError> {
        self.stop()?;
        let memory = Arc::clone(&self.memory);
        // From here on no page is freed lazily, and discards are noted.
        let discards = memory.discardable().watch();
        for block in memory.blocks() {
            block.keep_lazily_freed().map_err(failed("keeping lazily freed pages"))?;
        }
        let writable = memory.blocks().iter().map(|block| Writable::none(block.pages().len())).collect();
        let protection = WriteProtection::new(NAME, Arc::clone(&memory), open(&memory)?);
        let handler = Arc::new(Handler { protection, writable, failed: Mutex::new(None) });
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| failed("eventfd")(e.into()))?);
        let thread = std::thread::Builder::new().name("dirty-log".into()).spawn({
            let (handler, stop) = (Arc::clone(&handler), Arc::clone(&stop));
            move || handler.run(&stop)
        });
        // From here on an error undoes the start, as `stop` does.
        self.running = Some(Running {
            handler: Arc::clone(&handler),
            discards,
            stop,
            thread: thread.map_err(failed("starting a thread"))?,
        });
        let begin = || {
            for block in self.memory.blocks() {
                handler.protection.register(block)?;
                handler.protection.protect_all(block, SLICE)?;
            }
            Ok(())
        };
        let begun = begin();
        if begun.is_err() {
            let _ = self.stop();
        }
        begun
    }

    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        let Some(Running { handler, discards, .. }) = &self.running else {
            return Err(LogError::NotStarted { log: NAME });
        };
        discards.take(|block, pages| {
            if let Some(writable) = handler.writable.get(block) {
                writable.lost(pages);
            }
        });
        for (index, (block, writable)) in self.memory.blocks().iter().zip(&handler.writable).enumerate() {
            let protect = |pages| handler.protection.protect(block, pages, true);
            let taken = |pages| into.add(index, pages);
            writable.take(whole_slice(block, SLICE), protect, taken).map_err(failed("UFFDIO_WRITEPROTECT"))?;
        }
        // Checked last: until then the handler let no write pass unmarked.
        match &*handler.failed.lock() {
            Some(error) => Err(failed("the fault handler")(io::Error::new(error.kind(), error.to_string()))),
            None => Ok(()),
        }
    }

    fn stop(&mut self) -> Result<(), LogError> {
        let Some(Running { handler, stop, thread, .. }) = self.running.take() else { return Ok(()) };
        // The thread first: a thread that faults meanwhile waits, and continues when the memory is unregistered.
        let stopped = match rustix::io::write(stop.as_fd(), &1_u64.to_ne_bytes()) {
            Ok(_) => thread.join().map_err(|_| io::Error::other("it panicked")),
            Err(error) => Err(error.into()),
        };
        let unregistered = handler.protection.unregister().map_err(failed("UFFDIO_UNREGISTER"));
        stopped.map_err(failed("the fault handler"))?;
        unregistered
    }
}

impl Drop for UffdWpSyncLog {
    fn drop(&mut self) {
        // Closing the descriptor ends the protection anyway.
        let _ = self.stop();
    }
}
