//! Memory that is registered with the rings.
//!
//! **Law: a page is one buffer's, from the take to the drop.** There is one arena in a process. A word of the bitmap
//! covers 64 consecutive pages, one bit each, and a piece lies within one word: it is taken by one atomic exchange, and
//! given back by another. A piece still has the contents of its previous owner; the caller of [`take`] zeroes it. The
//! mapping lives as long as the process, so that its registration with the kernel stays valid. A page that was never
//! taken is not populated.
#![allow(unsafe_code, reason = "memory is mapped, and passed by address")]

use std::cell::Cell;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Size of the arena in bytes: a quarter of the memory that an unprivileged user's processes may pin by default
/// (`RLIMIT_MEMLOCK`, 8 MiB since Linux 5.16; each ring takes some 40 KiB of it). Holds 32 concurrent requests of 64
/// KiB.
pub(crate) const LENGTH: usize = WORDS * WORD_BYTES;
/// Pages are those of the processor's smallest size, or a part of one.
const PAGE: usize = 4096;
/// Bytes that a word of the bitmap covers: the largest piece.
const WORD_BYTES: usize = 64 * PAGE;
const WORDS: usize = 8;

/// The bitmap of 64 pages. Each has a cache line for itself: threads that begin at different words do not share one.
#[repr(align(64))]
struct PageBits(AtomicU64);

struct Arena {
    start: *mut u8,
    /// Pages that are taken.
    words: [PageBits; WORDS],
}

// SAFETY: the memory is only handed out in pieces, which `words` keeps apart.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

/// The arena; none if there is no room for it.
fn arena() -> Option<&'static Arena> {
    static ARENA: OnceLock<Option<Arena>> = OnceLock::new();
    ARENA.get_or_init(Arena::new).as_ref()
}

/// The start of the arena, if there is one.
pub(crate) fn start() -> Option<*mut u8> {
    arena().map(|arena| arena.start)
}

/// Whether all of this memory is in the arena.
pub(crate) fn holds(start: *const u8, len: usize) -> bool {
    let Some(arena) = arena() else { return false };
    let offset = start.addr().wrapping_sub(arena.start.addr());
    offset <= LENGTH && len <= LENGTH - offset
}

/// Takes a piece of at least `len` bytes, if one is free. It begins at a page; its contents are arbitrary.
pub(crate) fn take(len: usize) -> Option<Piece> {
    if len > WORD_BYTES { None } else { arena()?.take(len.max(1).div_ceil(PAGE)) }
}

impl Arena {
    fn new() -> Option<Self> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), LENGTH, protection, flags, -1, 0) };
        (start != libc::MAP_FAILED)
            .then(|| Self { start: start.cast(), words: [const { PageBits(AtomicU64::new(0)) }; WORDS] })
    }

    fn take(&self, pages: usize) -> Option<Piece> {
        let first = preferred();
        (0..WORDS).map(|step| (first + step) % WORDS).find_map(|index| {
            let bits = self.words.get(index)?.take(u32::try_from(pages).ok()?)?;
            let page = index * 64 + bits.trailing_zeros() as usize;
            Some(Piece { start: self.start.wrapping_add(page * PAGE), index, bits })
        })
    }
}

impl PageBits {
    /// Takes `pages` consecutive pages, at least one. Returns their bits.
    fn take(&self, pages: u32) -> Option<u64> {
        let mut taken = self.0.load(Ordering::Relaxed);
        loop {
            let bits = row(!taken, pages)?;
            // Acquire: the previous owner's accesses to the memory happen before.
            match self.0.compare_exchange_weak(taken, taken | bits, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(bits),
                Err(now) => taken = now,
            }
        }
    }

    fn give_back(&self, bits: u64) {
        self.0.fetch_and(!bits, Ordering::Release);
    }
}

/// The first `count` consecutive ones.
fn row(free: u64, count: u32) -> Option<u64> {
    // A bit remains set where a row of `len` ones begins.
    let (mut begins, mut len) = (free, 1);
    while len < count {
        let more = len.min(count - len);
        begins &= begins >> more;
        len += more;
    }
    let ones = u64::MAX.checked_shr(64_u32.checked_sub(count)?)?;
    (begins != 0).then(|| ones << begins.trailing_zeros())
}

/// The word at which this thread begins its search.
fn preferred() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static FIRST: Cell<Option<usize>> = const { Cell::new(None) };
    }
    FIRST.get().unwrap_or_else(|| {
        let first = NEXT.fetch_add(1, Ordering::Relaxed) % WORDS;
        FIRST.set(Some(first));
        first
    })
}

/// Pages that are taken until this is dropped.
pub(crate) struct Piece {
    start: *mut u8,
    index: usize,
    bits: u64,
}

// SAFETY: only names the memory; it does not access it.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Piece {
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(word) = arena().and_then(|arena| arena.words.get(self.index)) {
            word.give_back(self.bits);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn rows_are_found_where_they_fit() {
        assert_eq!(row(u64::MAX, 64), Some(u64::MAX));
        assert_eq!(row(u64::MAX << 1, 64), None);
        assert_eq!(row(0b1101_1101_1110, 4), Some(0b1_1110));
        assert_eq!(row(0b1101_1101_1110, 5), None);
        assert_eq!(row(0b11 << 62, 2), Some(0b11 << 62));
        assert_eq!(row(0b11 << 62, 3), None);
        assert_eq!(row(0, 1), None);
        for count in 1..=64 {
            let ones = u64::MAX >> (64 - count);
            for at in 0..=64 - count {
                assert_eq!(row(ones << at, count), Some(ones << at), "{count} at {at}");
                assert_eq!(row(ones >> 1 << at, count), None, "{count} at {at}");
            }
        }
    }

    #[test]
    fn a_word_is_used_up_and_used_again() {
        let word = PageBits(AtomicU64::new(0));
        let all: Vec<_> = std::iter::from_fn(|| word.take(3)).collect();
        assert_eq!((all.len(), all.iter().fold(0, |sum, bits| sum | bits)), (21, u64::MAX >> 1));
        assert_eq!((word.take(2), word.take(1), word.take(1)), (None, Some(1 << 63), None));
        word.give_back(all[5]);
        assert_eq!((word.take(4), word.take(3)), (None, Some(all[5])));
    }

    #[test]
    fn pieces_of_several_threads_lie_apart() {
        let threads: Vec<_> = (1..=4u8)
            .map(|byte| {
                thread::spawn(move || {
                    for round in 0..2000 {
                        let len = (round * 997 % 40 + 1) * 1024;
                        let Some(piece) = take(len) else { continue };
                        assert!(holds(piece.start(), len) && piece.start().addr().is_multiple_of(PAGE));
                        // SAFETY: a piece is as long, and ours.
                        unsafe { piece.start().write_bytes(byte, len) };
                        thread::yield_now();
                        // SAFETY: as above; just written.
                        let found = unsafe { std::slice::from_raw_parts(piece.start(), len) };
                        assert!(found.iter().all(|found| *found == byte));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn what_lies_around_the_arena_is_not_in_it() {
        let start = start().unwrap();
        assert!(holds(start, LENGTH) && holds(start.wrapping_add(LENGTH), 0));
        assert!(!holds(start, LENGTH + 1) && !holds(start.wrapping_add(1), LENGTH) && !holds(start.wrapping_sub(1), 1));
        assert!(!holds(start.wrapping_add(LENGTH), 1) && !holds(start.wrapping_add(8), usize::MAX));
        assert!(take(WORD_BYTES + 1).is_none());
    }
}
