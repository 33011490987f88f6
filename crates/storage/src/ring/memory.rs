//! Memory that rings know beforehand: the [`arena`].
//!
//! **Law: without it everything is the same, and slower.** A request of such memory spares the kernel finding and pinning its pages. All of the
//! arena is pinned once for all rings, which take it over from each other; the kernel has it until the last of them ends. It may refuse
//! (`RLIMIT_MEMLOCK`, of all processes of a user together): then rings go on by addresses, and do not ask again.
//!
//! A process that is forked off has the arena's contents, but other pages: its rings, if it makes some, begin anew.
#![allow(unsafe_code, reason = "the kernel is told about memory")]

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::arena;
use crate::ring::handle::Handle;

/// What the arena is known by in each ring.
pub(crate) const INDEX: u16 = 0;
/// Requests of a ring after which it takes the arena over from another ring: 2 us.
const WORTH_TAKING: u32 = 16;
/// Requests of a ring after which it has the kernel pin the arena, which has to find most of its pages first: 1 ms.
const WORTH_PINNING: u32 = 4096;

/// Rings that know the arena.
static RINGS: Mutex<Vec<Weak<Handle>>> = Mutex::new(Vec::new());

/// What one ring knows of it.
#[derive(Default)]
pub(crate) struct Known {
    is_known: AtomicBool,
    /// Requests that were made without. Only the ring's thread counts.
    without: AtomicU32,
}

/// Whether this memory may be named to the ring as part of the arena. Only on the ring's thread.
pub(crate) fn knows(ring: &Arc<Handle>, start: *const u8, len: usize) -> bool {
    if !arena::holds(start, len) {
        return false;
    }
    let known = &ring.memory;
    if known.is_known.load(Ordering::Relaxed) {
        return true;
    }
    let without = known.without.load(Ordering::Relaxed).saturating_add(1);
    known.without.store(without, Ordering::Relaxed);
    let is_known = match without {
        WORTH_TAKING => learn(ring, false),
        WORTH_PINNING => learn(ring, true),
        _ => false,
    };
    known.is_known.store(is_known, Ordering::Relaxed);
    is_known
}

/// Tells the ring of the arena, if another one knows it or it may be pinned for this one. Whether it knows it now.
fn learn(ring: &Arc<Handle>, pins: bool) -> bool {
    // Rings without a table of files are those of kernels before 5.19, of which some wait here for everything that is under way.
    if !ring.has_table() {
        return false;
    }
    let mut rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner);
    // A ring of another process has pages of that one.
    let others: Vec<_> = rings.iter().filter_map(Weak::upgrade).filter(|other| other.is_ours()).collect();
    // Linux 6.12.
    let takes = |other: &Arc<Handle>| ring.uring.submitter().register_buffers_clone(other.uring.as_raw_fd()).is_ok();
    let is_known = others.iter().any(takes) || (pins && pin(ring));
    let knowing = others.iter().chain(is_known.then_some(ring));
    *rings = knowing.map(Arc::downgrade).collect();
    is_known
}

/// Has the kernel pin the arena for this ring.
fn pin(ring: &Handle) -> bool {
    let Some(start) = arena::start() else { return false };
    let all = libc::iovec { iov_base: start.cast(), iov_len: arena::LENGTH };
    // SAFETY: the arena's memory stays as long as the process.
    unsafe { ring.uring.submitter().register_buffers(&[all]) }.is_ok()
}
