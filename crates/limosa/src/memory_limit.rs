//! A limit of this process's memory, and a clean end where it is reached.
//!
//! Law: the kernel enforces the limit (`RLIMIT_DATA`: all private memory that can be written, stacks included), so no
//! way to get memory is forgotten. Rust aborts a process whose allocation fails; with a limit, the allocator of this
//! module ends it as a failed command instead.
#![allow(unsafe_code, reason = "an allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The system's allocator. With a limit, a failed allocation ends the process.
pub(crate) struct LimitedAllocator;

/// Ends the process; called with the number of bytes that could not be allocated, if that is known.
pub(crate) type OnExhausted = fn(Option<usize>) -> !;

static ON_EXHAUSTED: OnceLock<OnExhausted> = OnceLock::new();
/// The thread that ends the process; 0: none yet.
static ENDING: AtomicI32 = AtomicI32::new(0);

/// Limits the memory of this process to `bytes`. `end` runs without the limit, on the thread whose allocation failed,
/// which may hold any lock.
///
/// # Errors
/// The kernel's.
pub(crate) fn set(bytes: u64, end: OnExhausted) -> rustix::io::Result<()> {
    let maximum = getrlimit(Resource::Data).maximum;
    let bytes = maximum.map_or(bytes, |maximum| maximum.min(bytes));
    ON_EXHAUSTED.get_or_init(|| end);
    // Only the soft limit: it is lifted for what has to be done at the end.
    setrlimit(Resource::Data, Rlimit { current: Some(bytes), maximum })
}

/// Ends the process after a failed allocation; returns if there is no limit, and to the thread that is ending it.
#[cold]
pub(crate) fn exhausted(bytes: Option<usize>) {
    let Some(end) = ON_EXHAUSTED.get() else { return };
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    match ENDING.compare_exchange(0, thread, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let maximum = getrlimit(Resource::Data).maximum;
            // If it cannot be lifted, the end itself may run out of memory, and aborts.
            let _ = setrlimit(Resource::Data, Rlimit { current: maximum, maximum });
            end(bytes)
        }
        Err(ending) if ending == thread => {}
        // The process is about to end, and this thread has no memory to continue with.
        Err(_) => loop {
            thread::sleep(Duration::from_secs(1));
        },
    }
}

/// Looks at the result of an allocation of `bytes`.
fn checked(start: *mut u8, bytes: usize) -> *mut u8 {
    if start.is_null() {
        exhausted(Some(bytes));
    }
    start
}

// SAFETY: every call is the system allocator's, with the caller's arguments; its results are returned unchanged.
unsafe impl GlobalAlloc for LimitedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of the system allocator.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        checked(unsafe { System.realloc(start, layout, size) }, size)
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }
}
