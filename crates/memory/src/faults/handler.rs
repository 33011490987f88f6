//! The handler itself: its descriptor, what is registered, and waiting for events.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use limosa_page::{PAGE_SIZE, to_usize};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::{Fault, FaultBlock, FaultError, FaultEvent, FaultLayout, FaultMode};
use crate::GuestMemory;
use crate::mapping::Mapping;
use crate::userfaultfd::{FaultOrigin, Features, Message, RegisterMode, Userfaultfd};

/// The events that a handler receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultOptions {
    /// Faults of threads only, or of the kernel too.
    pub origin: FaultOrigin,
    /// Report discarded pages. The thread that discards them waits until the handler has read the event, so the pager
    /// itself must not discard.
    pub removals: bool,
    /// Report memory that is unmapped or moved. The thread that does so waits until the handler has read the event.
    pub mappings: bool,
    /// Report forks (needs `CAP_SYS_PTRACE`). Otherwise missing pages of a child's memory become zeros.
    pub forks: bool,
}

impl Default for FaultOptions {
    /// Faults of all threads and of the kernel, and discarded pages.
    fn default() -> Self {
        Self { origin: FaultOrigin::Everything, removals: true, mappings: false, forks: false }
    }
}

/// The descriptor that related handlers and holds of this process share.
#[derive(Debug)]
struct Descriptor {
    fd: ManuallyDrop<Userfaultfd>,
    /// Memory is registered and pages of it may be missing: closing would turn them into zeros.
    needed: AtomicBool,
}

impl Drop for Descriptor {
    #[allow(unsafe_code, reason = "closes a descriptor, or leaves it open")]
    fn drop(&mut self) {
        if !self.needed.load(Ordering::SeqCst) {
            // SAFETY: it is dropped only here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

/// Resolves faults on pages that have not arrived. For any number of threads.
///
/// **Law: a page that has not arrived is never read as zero.** A thread that touches a missing page stops until the
/// page is placed, however many pagers end meanwhile. The kernel does the opposite when the last descriptor of a
/// userfaultfd is closed: it fills missing pages with zeros and lets the guest continue. So dropping a [`FaultHandler`]
/// does not close a descriptor with registered memory: only [`FaultHandler::finish`] (no page is missing) or
/// [`FaultHandler::abandon`] (the guest is gone) do. A [`RegistrationGuard`], made by
/// [`FaultHandler::registration_guard`], creates a new handler when the old one has ended; its descriptor can be passed
/// to another process, which continues by [`FaultHandler::from_fd`].
///
/// How pages are placed:
/// - [`FaultMode::Missing`]: the kernel places a page as a copy ([`FaultHandler::copy`]) or as zeros
///   ([`FaultHandler::zero`]), atomically, so that no reader sees half of it.
/// - [`FaultMode::Minor`], for shared memory: the pager writes the page through its own mapping (from a socket straight
///   to its place) and then maps it for the guest ([`FaultHandler::map_present`]). Nothing is copied.
///
/// **Only accesses through this process's mapping wait.** A missing page of shared memory that another process touches
/// in its own mapping (a vhost-user back end) becomes zeros for everyone, and is present when its contents arrive. A
/// back end may run only when no page is missing, or with a userfaultfd of its own.
///
/// The caller tracks which pages have arrived. A page that is present already is reported, not overwritten. Populating
/// registered memory (`MADV_POPULATE_WRITE`) would wait for a page that is never sent: do it before.
#[derive(Debug)]
pub struct FaultHandler {
    descriptor: Arc<Descriptor>,
    layout: FaultLayout,
    /// Events read while a page was placed, for the next call that waits.
    queue: Mutex<VecDeque<FaultEvent>>,
    wake: Arc<OwnedFd>,
    /// Zeros for huge pages, never written.
    zeros: OnceLock<Mapping>,
}

/// Keeps missing pages missing while no handler exists, and creates a new one.
#[derive(Debug)]
pub struct RegistrationGuard {
    descriptor: Arc<Descriptor>,
    layout: FaultLayout,
}

/// Ends a [`FaultHandler::wait`].
#[derive(Debug, Clone)]
pub struct FaultWaker(Arc<OwnedFd>);

impl FaultWaker {
    /// Makes one [`FaultHandler::wait`], current or later, return with the events there are.
    pub fn wake(&self) {
        // It can only fail if it was called 2^64 times.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

impl FaultHandler {
    /// Opens a handler without registered memory.
    ///
    /// # Errors
    /// [`FaultError::NotAllowed`], [`FaultError::Unsupported`].
    pub fn open(options: FaultOptions) -> Result<Self, FaultError> {
        let available = Userfaultfd::available(options.origin).map_err(not_allowed)?;
        let mappings = Features::EVENT_REMAP.and(Features::EVENT_UNMAP);
        let memory = Features::MISSING_HUGETLBFS.and(Features::MISSING_SHMEM);
        let minor = Features::MINOR_HUGETLBFS.and(Features::MINOR_SHMEM);
        let mut features = available.intersect(memory.and(minor).and(Features::THREAD_ID));
        for (wanted, more, what) in [
            (options.removals, Features::EVENT_REMOVE, "events about memory that is given back"),
            (options.mappings, mappings, "events about memory that is unmapped or moved"),
            (options.forks, Features::EVENT_FORK, "events about forks"),
        ] {
            if wanted && !available.contains(more) {
                return Err(FaultError::Unsupported { what });
            }
            features = if wanted { features.and(more) } else { features };
        }
        let fd = Userfaultfd::open(options.origin, features).map_err(not_allowed)?;
        Self::over(
            Arc::new(Descriptor { fd: ManuallyDrop::new(fd), needed: AtomicBool::new(false) }),
            FaultLayout::default(),
        )
    }

    /// Continues a handler of another process, over a passed descriptor. All waiting faults are reported again.
    ///
    /// # Errors
    /// It is no userfaultfd, or the layout does not match its memory.
    pub fn from_fd(fd: OwnedFd, layout: FaultLayout) -> Result<Self, FaultError> {
        let descriptor = Descriptor { fd: ManuallyDrop::new(Userfaultfd::from_fd(fd)), needed: AtomicBool::new(true) };
        Self::succeeding(Arc::new(descriptor), layout)
    }

    fn succeeding(descriptor: Arc<Descriptor>, layout: FaultLayout) -> Result<Self, FaultError> {
        let new = Self::over(descriptor, layout)?;
        // Without a wake, faults that the old handler read and did not resolve would not be reported again.
        for (index, block) in new.layout.registered() {
            new.fd().wake(block.addresses()).map_err(|error| kernel(index, block.pages(), "UFFDIO_WAKE", error))?;
        }
        Ok(new)
    }

    fn over(descriptor: Arc<Descriptor>, layout: FaultLayout) -> Result<Self, FaultError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| FaultError::Descriptor { operation: "eventfd", source: error.into() })?;
        Ok(Self { descriptor, layout, queue: Mutex::default(), wake: Arc::new(wake), zeros: OnceLock::new() })
    }

    /// Registers a block: from now on a thread that touches a missing page waits for it. Present pages stay.
    ///
    /// # Errors
    /// The kernel does not support this kind of memory.
    pub fn register(&mut self, memory: &GuestMemory, index: usize, mode: FaultMode) -> Result<(), FaultError> {
        let block = memory.block(index).map_err(|error| FaultError::Layout { block: index, why: error.to_string() })?;
        let new = FaultBlock {
            address: block.host_address().expose_provenance() as u64,
            length: block.len(),
            page_size: block.page_size(),
            mode,
        };
        let layout = self.layout.with(index, new)?;
        let modes = match mode {
            FaultMode::Missing => RegisterMode::MISSING,
            FaultMode::Minor => RegisterMode::MISSING.and(RegisterMode::MINOR),
        };
        // From here on, even if the registration fails halfway, closing could turn missing pages into zeros.
        self.descriptor.needed.store(true, Ordering::SeqCst);
        self.fd().register(new.addresses(), modes).map_err(|error| match (error, mode) {
            (Errno::INVAL, FaultMode::Minor) => {
                FaultError::Unsupported { what: "minor faults for this memory (shared memory on Linux 5.14 has them)" }
            }
            (Errno::INVAL, FaultMode::Missing) => FaultError::Unsupported {
                what: "missing faults for this memory: only anonymous memory, tmpfs, memfd and hugetlbfs have them",
            },
            (error, _) => kernel(index, new.pages(), "UFFDIO_REGISTER", error),
        })?;
        self.layout = layout;
        Ok(())
    }

    /// Returns the registered blocks.
    pub fn layout(&self) -> &FaultLayout {
        &self.layout
    }

    /// Creates a hold: it keeps the memory registered when this handler ends, and creates the next one then.
    pub fn registration_guard(&self) -> RegistrationGuard {
        RegistrationGuard { descriptor: Arc::clone(&self.descriptor), layout: self.layout.clone() }
    }

    /// Returns a handle that ends a [`wait`](Self::wait).
    pub fn waker(&self) -> FaultWaker {
        FaultWaker(Arc::clone(&self.wake))
    }

    /// Waits until there is an event, the timeout expires (`None`: never) or a waker is used. Adds the events to
    /// `into`, possibly none.
    ///
    /// # Errors
    /// A thread waits for memory outside the layout, the kernel reports an unknown event, or it refuses.
    pub fn wait(&self, into: &mut Vec<FaultEvent>, timeout: Option<Duration>) -> Result<(), FaultError> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let before = into.len();
        loop {
            into.extend(self.queue.lock().drain(..));
            self.read(into)?;
            if into.len() > before {
                return Ok(());
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.map(|left| Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            });
            let mut fds = [PollFd::new(self.fd(), PollFlags::IN), PollFd::new(&*self.wake, PollFlags::IN)];
            match poll(&mut fds, left.as_ref()) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(descriptor("poll", error)),
            }
            let (faults, woken) = (fds[0].revents(), fds[1].revents());
            if faults.intersects(PollFlags::ERR | PollFlags::NVAL | PollFlags::HUP) {
                return Err(descriptor("poll on the userfaultfd", Errno::BADF));
            }
            if woken.contains(PollFlags::IN) && rustix::io::read(&*self.wake, &mut [0; 8]).is_ok() {
                into.extend(self.queue.lock().drain(..));
                return self.read(into);
            }
        }
    }

    /// Reads the pending events into the queue, for the next call that waits, so that the thread that changes the
    /// memory continues. Returns whether there were any.
    pub(super) fn drain(&self) -> Result<bool, FaultError> {
        let mut events = Vec::new();
        let result = self.read(&mut events);
        let any = !events.is_empty();
        if any {
            self.queue.lock().extend(events);
            self.waker().wake();
        }
        result.map(|()| any)
    }

    fn read(&self, into: &mut Vec<FaultEvent>) -> Result<(), FaultError> {
        let mut messages = Vec::new();
        self.fd().read(&mut messages).map_err(|error| descriptor("reading userfaultfd", error))?;
        let mut result = Ok(());
        for message in messages {
            match message {
                Message::Fault { address, write, minor, thread, .. } => match self.layout.host_page_at(address) {
                    Some((block, pages)) => into.push(FaultEvent::Fault(Fault { block, pages, minor, write, thread })),
                    None => result = Err(FaultError::UnknownAddress { address }),
                },
                Message::Remove(range) => {
                    let pieces = self.layout.pieces(&range);
                    into.extend(pieces.map(|(block, pages)| FaultEvent::Removed { block, pages }));
                }
                Message::Unmap(range) => {
                    let pieces = self.layout.pieces(&range);
                    into.extend(pieces.map(|(block, pages)| FaultEvent::Unmapped { block, pages }));
                }
                Message::Remap { from, to, length } => into.push(FaultEvent::Moved { from, to, length }),
                Message::Fork(child) => into.push(FaultEvent::Forked(child)),
                Message::Unknown(event) => result = Err(FaultError::UnknownEvent { event }),
            }
        }
        result
    }

    /// Ends the handler after all pages have arrived: accesses are no longer reported, and pages that are still missing
    /// read as zeros. Closes the descriptor if no hold is left.
    ///
    /// # Errors
    /// An error of the kernel; the memory stays registered, and the law holds.
    pub fn finish(self) -> Result<(), FaultError> {
        for (index, block) in self.layout.registered() {
            self.fd()
                .unregister(block.addresses())
                .map_err(|error| kernel(index, block.pages(), "UFFDIO_UNREGISTER", error))?;
        }
        // The kernel wakes waiting threads before it unregisters the memory. A thread that begins to wait in between
        // (possible with per-VMA locks) would sleep until the descriptor is closed, and others may hold that.
        for (index, block) in self.layout.registered() {
            self.fd().wake(block.addresses()).map_err(|error| kernel(index, block.pages(), "UFFDIO_WAKE", error))?;
        }
        self.descriptor.needed.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Ends the handler after the guest is gone: as [`finish`](Self::finish), even if pages are missing or the memory
    /// is unmapped. *Threads that still wait read zeros.*
    pub fn abandon(self) {
        for (_, block) in self.layout.registered() {
            // Unmapped memory has no waiting threads.
            let _ = self.fd().unregister(block.addresses());
        }
        self.descriptor.needed.store(false, Ordering::SeqCst);
    }

    pub(super) fn fd(&self) -> &Userfaultfd {
        &self.descriptor.fd
    }

    /// Returns a mapping of at least `length` zeros that is never written.
    pub(super) fn zeros(&self, length: u64) -> Result<&Mapping, FaultError> {
        let largest = self.layout.registered().map(|(_, block)| block.page_size).max().unwrap_or(PAGE_SIZE).max(length);
        if self.zeros.get().is_none() {
            let mapped = to_usize(largest);
            let new = Mapping::new(None, mapped, false, None);
            // If two threads race, one of the mappings is dropped.
            let new = new.map_err(|source| FaultError::Descriptor { operation: "mapping zeros", source })?;
            let _ = self.zeros.set(new);
        }
        self.zeros.get().ok_or(FaultError::Unsupported { what: "zeros" })
    }
}

impl RegistrationGuard {
    /// Creates a handler that continues the last one. All waiting faults are reported again.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn handler(&self) -> Result<FaultHandler, FaultError> {
        FaultHandler::succeeding(Arc::clone(&self.descriptor), self.layout.clone())
    }

    /// Returns the registered blocks, for a pager of another process.
    pub fn layout(&self) -> &FaultLayout {
        &self.layout
    }
}

/// The descriptor, for a pager in another process.
impl AsFd for RegistrationGuard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.fd.as_fd()
    }
}

impl AsFd for FaultHandler {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd().as_fd()
    }
}

pub(super) fn kernel(block: usize, pages: limosa_page::PageRange, operation: &'static str, error: Errno) -> FaultError {
    match error {
        Errno::SRCH => FaultError::Gone,
        Errno::NOMEM => FaultError::NoMemory { block, pages },
        error => FaultError::Kernel { block, pages, operation, source: error.into() },
    }
}

fn descriptor(operation: &'static str, error: Errno) -> FaultError {
    FaultError::Descriptor { operation, source: error.into() }
}

fn not_allowed(source: std::io::Error) -> FaultError {
    match Errno::from_io_error(&source) {
        Some(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => FaultError::NotAllowed { source },
        Some(Errno::INVAL) => FaultError::Unsupported { what: "this kind of faults" },
        _ => FaultError::Descriptor { operation: "opening userfaultfd", source },
    }
}
