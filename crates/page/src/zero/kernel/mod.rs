//! The loops that read memory to compare it with zero.
//!
//! Law: memory is read through raw pointers, with volatile reads of integers and vectors only. The guest may be
//! writing it: no reference to it is ever made, the compiler can assume nothing between two reads, and any bits that a
//! read gives are a valid value. Each read stays inside the memory that the caller named.
//!
//! There is one loop, over any [`Vector`]; each method is that loop, compiled for the instructions that its vectors
//! need. [`ZeroMethod::Plain`] is the same with one vector between two branches.
#![allow(unsafe_code, reason = "reads memory that a guest may be writing, and uses vector instructions")]

mod vector;

use self::vector::Vector;
use super::ZeroMethod;
use crate::PAGE_LEN;

/// Bytes in the words that everything else is aligned to first.
const WORD: usize = size_of::<u64>();

/// Vectors read between two branches. Measured on an AMD EPYC (Zen 5), vectors of AVX2 that no cache holds: with 16,
/// joined in four rows, a page takes as long as reading it; with 8 in one row a sixth longer.
const STEP: usize = 16;

/// Bytes that are fetched together.
const CACHE_LINE: usize = 64;

/// Pages that [`zero_pages`] looks at in one call at most: the bits of its answer.
pub(crate) const PAGES_A_CALL: usize = 64;

/// How many pages ahead memory is fetched. Measured: where half of the pages are zero, at random, and none is in cache,
/// a page takes 19% less time with it; with 2 pages 14%, with 8 17%, with 16 10%.
pub(crate) const AHEAD: usize = 4;

/// Pages ahead are prefetched as long as one of the last 8 pages, a bit each, was decided by its first line. If pages
/// are read further, the processor prefetches by itself, and better: prefetching too made AVX2 slower by 5% to 20%.
const LATELY: u64 = 0xff;

/// Whether the `len` bytes at `start` are zero. `method` falls back to [`ZeroMethod::Portable`] if it is not available.
///
/// # Safety
///
/// The `len` bytes at `start` are readable for the duration of the call. They may be written meanwhile, also by other
/// processes and devices; the answer then mixes bytes from before and after.
#[inline]
pub(crate) unsafe fn is_zero(method: ZeroMethod, start: *const u8, len: usize) -> bool {
    let head = (start.addr().wrapping_neg() % WORD).min(len);
    let words = (len - head) / WORD;
    let tail = (len - head) % WORD;
    // SAFETY: head <= len.
    let body = unsafe { start.add(head) }.cast::<u64>();
    // SAFETY: `body` is aligned if there is a word at all, and the first of `words` words.
    if method != ZeroMethod::Plain && words > 0 && unsafe { body.read_volatile() } != 0 {
        return false;
    }
    // SAFETY: the bytes before and after the words are inside the caller's memory; the words are as above.
    unsafe {
        bytes_are_zero(start, head)
            && bytes_are_zero(body.add(words).cast(), tail)
            && words_are_zero_with(method, body, words)
    }
}

/// Checks `count` pages at `start` for zeros: returns a bit for each, set if it is zero, the first page in the lowest
/// bit. `beyond` more pages will be checked after them; `method` as in [`is_zero`].
///
/// # Safety
///
/// As for [`is_zero`], for the `count` pages, which are at most [`PAGES_A_CALL`]. Those beyond need not be readable.
#[inline]
pub(crate) unsafe fn zero_pages(method: ZeroMethod, start: *const u8, count: usize, beyond: usize) -> u64 {
    debug_assert!(count <= PAGES_A_CALL, "{count} pages at once");
    if method == ZeroMethod::Plain || !start.addr().is_multiple_of(WORD) {
        let mut zero = 0;
        for page in 0..count {
            // SAFETY: one of the caller's pages.
            zero |= u64::from(unsafe { is_zero(method, start.add(page * PAGE_LEN), PAGE_LEN) }) << page;
        }
        return zero;
    }
    // SAFETY: `start` is aligned to a word, and the rest is the caller's promise; the processor has what the method
    // needs.
    unsafe {
        match method {
            #[cfg(target_arch = "x86_64")]
            ZeroMethod::Avx512 if method.is_available() => avx512::zero_pages(start, count, beyond),
            #[cfg(target_arch = "x86_64")]
            ZeroMethod::Avx2 if method.is_available() => avx2::zero_pages(start, count, beyond),
            #[cfg(target_arch = "x86_64")]
            ZeroMethod::Sse2 if method.is_available() => sse2::zero_pages(start, count, beyond),
            #[cfg(target_arch = "aarch64")]
            ZeroMethod::Neon if method.is_available() => neon::zero_pages(start, count, beyond),
            _ => find_zero_pages::<u64>(start, count, beyond),
        }
    }
}

/// Whether the processor is one of AMD's.
pub(crate) fn is_amd() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        #[allow(unused_unsafe, reason = "later versions of Rust know that it is safe")]
        // SAFETY: every x86-64 has the instruction and its first leaf.
        let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
        let words = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        words.as_flattened() == b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Asks for the beginning of a page, so that it is there when it is looked at. Reads nothing: `page` may be anywhere.
#[inline]
pub(crate) fn fetch(page: *const u8) {
    vector::prefetch(page);
}

/// # Safety
///
/// As for [`look`], without its last condition.
#[inline]
unsafe fn words_are_zero_with(method: ZeroMethod, start: *const u64, count: usize) -> bool {
    // SAFETY: the caller's promise; the processor has what the method needs.
    unsafe {
        match method {
            #[cfg(target_arch = "x86_64")]
            ZeroMethod::Avx512 if method.is_available() => avx512::words_are_zero(start, count),
            #[cfg(target_arch = "x86_64")]
            ZeroMethod::Avx2 if method.is_available() => avx2::words_are_zero(start, count),
            #[cfg(target_arch = "x86_64")]
            ZeroMethod::Sse2 if method.is_available() => sse2::words_are_zero(start, count),
            #[cfg(target_arch = "x86_64")]
            ZeroMethod::Plain if ZeroMethod::Sse2.is_available() => plain(start, count),
            #[cfg(target_arch = "aarch64")]
            ZeroMethod::Neon if method.is_available() => neon::words_are_zero(start, count),
            ZeroMethod::Plain => words_are_zero::<u64, 1>(start, count),
            _ => words_are_zero::<u64, STEP>(start, count),
        }
    }
}

/// Vectors of 16 bytes, one after the other.
///
/// # Safety
///
/// As for [`look`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
unsafe fn plain(start: *const u64, count: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { words_are_zero::<std::arch::x86_64::__m128i, 1>(start, count) }
}

/// The loops for vectors that need certain instructions. A function compiled for them is called from one that is not,
/// so what is generic over vectors is inlined here and nowhere else.
macro_rules! compiled_for {
    ($name:ident, $feature:literal, $vector:ty) => {
        mod $name {
            /// # Safety
            ///
            /// As for [`super::look`].
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn words_are_zero(start: *const u64, count: usize) -> bool {
                // SAFETY: the caller's promise.
                unsafe { super::words_are_zero::<$vector, { super::STEP }>(start, count) }
            }

            /// # Safety
            ///
            /// As for [`super::find_zero_pages`].
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn zero_pages(start: *const u8, count: usize, beyond: usize) -> u64 {
                // SAFETY: the caller's promise.
                unsafe { super::find_zero_pages::<$vector>(start, count, beyond) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
compiled_for!(sse2, "sse2", std::arch::x86_64::__m128i);
#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, "avx2", std::arch::x86_64::__m256i);
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, "avx512f", std::arch::x86_64::__m512i);
#[cfg(target_arch = "aarch64")]
compiled_for!(neon, "neon", std::arch::aarch64::uint64x2_t);

/// # Safety
///
/// The `len` bytes at `start` are readable.
#[inline]
unsafe fn bytes_are_zero(start: *const u8, len: usize) -> bool {
    // SAFETY: index < len.
    (0..len).all(|index| unsafe { start.add(index).read_volatile() } == 0)
}

/// Result of checking words.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Zero,
    /// Contents in the first cache line.
    Early,
    /// Contents behind it.
    Late,
}

/// Whether words are zero.
///
/// # Safety
///
/// As for [`look`].
#[inline(always)]
unsafe fn words_are_zero<V: Vector, const STEP: usize>(start: *const u64, count: usize) -> bool {
    // SAFETY: the caller's promise.
    let found = unsafe { look::<V, STEP, false>(start, count) };
    matches!(found, Found::Zero)
}

/// The loop: `STEP` vectors between two branches, and words up to the first aligned vector and behind the last one.
///
/// With more than one vector a step, memory with contents is distinguished from zeros as early as possible: by its
/// first cache line, then by the words in the middle and at the end. One after the other, so that where the first line
/// decides no other one is fetched.
///
/// # Safety
///
/// `start` is aligned to 8 bytes, and to a vector if `ALIGNED` says so, `count` words are readable there, and the
/// processor has the vectors.
#[inline(always)]
unsafe fn look<V: Vector, const STEP: usize, const ALIGNED: bool>(start: *const u64, count: usize) -> Found {
    // Pages are aligned, and a loop whose length the compiler knows is a sixth faster.
    let head = if ALIGNED { 0 } else { (start.addr().wrapping_neg() % size_of::<V>() / WORD).min(count) };
    let words_a_vector = size_of::<V>() / WORD;
    let (vectors, tail) = ((count - head) / words_a_vector, (count - head) % words_a_vector);
    // SAFETY: head <= count.
    let body = unsafe { start.add(head) }.cast::<V>();
    // SAFETY: head words lie before the vectors, all among the caller's.
    if unsafe { !single_words_are_zero(start, head) } {
        return Found::Early;
    }
    let line = CACHE_LINE / size_of::<V>();
    if STEP > 1 && vectors >= line {
        // SAFETY: `body` is aligned to a vector, there are as many, and the processor has them.
        if unsafe { !joined(body, line).is_zero() } {
            return Found::Early;
        }
        for word in [count / 2, count - 1] {
            // SAFETY: one of the `count` words; there is at least one, because there is a vector.
            if unsafe { start.add(word).read_volatile() } != 0 {
                return Found::Late;
            }
        }
    }
    // SAFETY: tail words lie behind the vectors, all among the caller's.
    if unsafe { !single_words_are_zero(body.add(vectors).cast(), tail) } {
        return Found::Late;
    }
    // Loops and no closures: those would not be compiled for the vectors' instructions.
    let mut at = 0;
    while at + STEP <= vectors {
        // SAFETY: at + STEP <= vectors, `body` is aligned to a vector, and the processor has them.
        if unsafe { !joined(body.add(at), STEP).is_zero() } {
            return Found::Late;
        }
        at += STEP;
    }
    while at < vectors {
        // SAFETY: at < vectors, and the processor has the vectors.
        if unsafe { !body.add(at).read_volatile().is_zero() } {
            return Found::Late;
        }
        at += 1;
    }
    Found::Zero
}

/// The bits that are set in any of `count` vectors: of many, joined in four rows, so that none waits for the one before
/// it.
///
/// # Safety
///
/// `start` is aligned to a vector, `count` of them are readable there and at least one, and the processor has them.
#[inline(always)]
unsafe fn joined<V: Vector>(start: *const V, count: usize) -> V {
    const ROWS: usize = 4;
    // SAFETY: the first one.
    let mut first = unsafe { start.read_volatile() };
    let mut at = 1;
    if count >= 2 * ROWS {
        // SAFETY: there are twice as many.
        let [mut second, mut third, mut fourth] =
            unsafe { [start.add(1).read_volatile(), start.add(2).read_volatile(), start.add(3).read_volatile()] };
        at = ROWS;
        while at + ROWS <= count {
            // SAFETY: at + ROWS <= count, and the processor has the vectors.
            unsafe {
                first = first.or(start.add(at).read_volatile());
                second = second.or(start.add(at + 1).read_volatile());
                third = third.or(start.add(at + 2).read_volatile());
                fourth = fourth.or(start.add(at + 3).read_volatile());
            }
            at += ROWS;
        }
        // SAFETY: the processor has the vectors.
        first = unsafe { first.or(second).or(third.or(fourth)) };
    }
    while at < count {
        // SAFETY: at < count, and the processor has the vectors.
        first = unsafe { first.or(start.add(at).read_volatile()) };
        at += 1;
    }
    first
}

/// # Safety
///
/// `start` is aligned to 8 bytes and `count` words are readable there.
#[inline(always)]
unsafe fn single_words_are_zero(start: *const u64, count: usize) -> bool {
    for index in 0..count {
        // SAFETY: index < count.
        if unsafe { start.add(index).read_volatile() } != 0 {
            return false;
        }
    }
    true
}

/// [`zero_pages`] with vectors.
///
/// # Safety
///
/// `start` is aligned to 8 bytes, `count` pages are readable there, at most [`PAGES_A_CALL`], and the processor has the
/// vectors.
#[inline(always)]
unsafe fn find_zero_pages<V: Vector>(start: *const u8, count: usize, beyond: usize) -> u64 {
    // SAFETY: the caller's promise, and what was asked.
    unsafe {
        if start.addr().is_multiple_of(size_of::<V>()) {
            look_at_pages::<V, true>(start, count, beyond)
        } else {
            look_at_pages::<V, false>(start, count, beyond)
        }
    }
}

/// # Safety
///
/// As for [`find_zero_pages`]; `start` is aligned to a vector if `ALIGNED` says so.
#[inline(always)]
unsafe fn look_at_pages<V: Vector, const ALIGNED: bool>(start: *const u8, count: usize, beyond: usize) -> u64 {
    const WORDS: usize = PAGE_LEN / WORD;
    let mut zero = 0;
    // As if the page before had been decided by its first line: what comes first is the least likely to be fetched by
    // itself.
    let mut early = 1;
    for page in 0..count {
        if early & LATELY != 0 && page + AHEAD < count + beyond {
            fetch(start.wrapping_add((page + AHEAD) * PAGE_LEN));
        }
        // SAFETY: page < count.
        let words = unsafe { start.add(page * PAGE_LEN) }.cast::<u64>();
        // SAFETY: the words of a page, which is aligned as `start` is; the processor has the vectors.
        let found =
            unsafe { if words.read_volatile() == 0 { look::<V, STEP, ALIGNED>(words, WORDS) } else { Found::Early } };
        zero |= u64::from(matches!(found, Found::Zero)) << page;
        early = early << 1 | u64::from(matches!(found, Found::Early));
    }
    zero
}
