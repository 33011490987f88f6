//! Registration of the [`arena`] with rings.
//!
//! **Law: registration changes speed only.** For a request in registered memory the kernel need not look up and pin its
//! pages. The arena is pinned once, as a whole, for all rings: a ring clones the registration of another. It stays
//! pinned until the last of them is destroyed. The kernel may refuse (`RLIMIT_MEMLOCK`, which counts all processes of a
//! user): then rings use plain addresses, and do not try again.
//!
//! A forked process has the arena's contents, but other pages: its rings register the arena again.
#![allow(unsafe_code, reason = "memory is registered with the kernel")]

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::arena;
use crate::ring::handle::Handle;

/// Buffer index of the arena in each ring.
pub(crate) const INDEX: u16 = 0;
/// Requests of a ring after which it clones the registration of another ring, which takes 2 us.
const CLONE_AFTER: u32 = 16;
/// Requests of a ring after which it has the kernel pin the arena. That populates most of its pages and takes 1 ms.
const PIN_AFTER: u32 = 4096;

/// Rings that have the arena registered.
static RINGS: Mutex<Vec<Weak<Handle>>> = Mutex::new(Vec::new());

/// State of the arena's registration with one ring.
#[derive(Default)]
pub(crate) struct ArenaRegistration {
    is_registered: AtomicBool,
    /// Requests before the registration. Only the ring's thread counts.
    requests: AtomicU32,
}

/// Whether this memory is registered with the ring. Registers the arena if it is due. Only on the ring's thread.
pub(crate) fn is_registered(ring: &Arc<Handle>, start: *const u8, len: usize) -> bool {
    if !arena::holds(start, len) {
        return false;
    }
    let state = &ring.memory;
    if state.is_registered.load(Ordering::Relaxed) {
        return true;
    }
    let requests = state.requests.load(Ordering::Relaxed).saturating_add(1);
    state.requests.store(requests, Ordering::Relaxed);
    let is_registered = match requests {
        CLONE_AFTER => register(ring, false),
        PIN_AFTER => register(ring, true),
        _ => false,
    };
    state.is_registered.store(is_registered, Ordering::Relaxed);
    is_registered
}

/// Registers the arena with the ring, by cloning another ring's registration or, if `pins`, by pinning it. Returns
/// whether that succeeded.
fn register(ring: &Arc<Handle>, pins: bool) -> bool {
    // No file table means a kernel before 5.19; some of these wait here for all requests in flight.
    if !ring.has_table() {
        return false;
    }
    let mut rings = RINGS.lock();
    // A ring of the parent process has the parent's pages registered.
    let others: Vec<_> = rings.iter().filter_map(Weak::upgrade).filter(|other| other.is_ours()).collect();
    // Linux 6.12.
    let clones = |other: &Arc<Handle>| ring.uring.submitter().register_buffers_clone(other.uring.as_raw_fd()).is_ok();
    let is_registered = others.iter().any(clones) || (pins && pin(ring));
    let registered = others.iter().chain(is_registered.then_some(ring));
    *rings = registered.map(Arc::downgrade).collect();
    is_registered
}

/// Has the kernel pin the arena and register it with this ring.
fn pin(ring: &Handle) -> bool {
    let Some(start) = arena::start() else { return false };
    let all = libc::iovec { iov_base: start.cast(), iov_len: arena::LENGTH };
    // SAFETY: the arena stays mapped as long as the process.
    unsafe { ring.uring.submitter().register_buffers(&[all]) }.is_ok()
}
