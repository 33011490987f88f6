//! The loops that read memory to compare it with zero.
//!
//! Law: memory is read through raw pointers, with volatile reads of integers and vectors only. Somebody else may be
//! writing it: no reference to it is ever made, the compiler can assume nothing between two reads, and whatever bits a
//! read gives are a valid value. Each read stays inside the memory that the caller named.
#![allow(unsafe_code, reason = "reads memory that a guest may be writing, and uses vector instructions")]

use super::Method;

/// Bytes in the words that the portable loop reads and that everything else is aligned to first.
const WORD: usize = size_of::<u64>();

/// Whether the `len` bytes at `start` are zero. `method` falls back to [`Method::Portable`] if it is not available.
///
/// # Safety
///
/// The `len` bytes at `start` are readable for the duration of the call. They may be written meanwhile, also by other
/// processes and devices; the answer then mixes bytes from before and after.
#[inline]
pub(crate) unsafe fn is_zero(method: Method, start: *const u8, len: usize) -> bool {
    let head = (start.addr().wrapping_neg() % WORD).min(len);
    let words = (len - head) / WORD;
    let tail = (len - head) % WORD;
    // SAFETY: head <= len.
    let body = unsafe { start.add(head) }.cast::<u64>();

    // One after the other, not all three: where the first word decides, the cache lines of the others stay untouched.
    if words > 0 {
        for probe in [0, words / 2, words - 1] {
            // SAFETY: `body` is aligned to a word if there is a word at all, and the probe is one of the `words` words.
            if unsafe { body.add(probe).read_volatile() } != 0 {
                return false;
            }
        }
    }
    // SAFETY: the bytes before and after the words are inside the caller's memory; `body` is aligned and has `words`
    // words; a vector method is called only if the processor has it.
    unsafe {
        bytes_are_zero(start, head)
            && bytes_are_zero(body.add(words).cast(), tail)
            && match method {
                #[cfg(target_arch = "x86_64")]
                Method::Avx2 if method.is_available() => x86::avx2(body, words),
                #[cfg(target_arch = "x86_64")]
                Method::Sse2 if method.is_available() => x86::sse2(body, words),
                _ => words_are_zero(body, words),
            }
    }
}

/// # Safety
///
/// The `len` bytes at `start` are readable.
#[inline]
unsafe fn bytes_are_zero(start: *const u8, len: usize) -> bool {
    // SAFETY: index < len.
    (0..len).all(|index| unsafe { start.add(index).read_volatile() } == 0)
}

/// The portable loop, eight words between two branches.
///
/// # Safety
///
/// `start` is aligned to 8 bytes and `count` words are readable there.
unsafe fn words_are_zero(start: *const u64, count: usize) -> bool {
    const STEP: usize = 8;
    let mut at = 0;
    while at + STEP <= count {
        let mut bits = 0;
        for index in at..at + STEP {
            // SAFETY: index < at + STEP <= count.
            bits |= unsafe { start.add(index).read_volatile() };
        }
        if bits != 0 {
            return false;
        }
        at += STEP;
    }
    // SAFETY: index < count.
    (at..count).all(|index| unsafe { start.add(index).read_volatile() } == 0)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_cmpeq_epi8, _mm_movemask_epi8, _mm_or_si128, _mm_setzero_si128, _mm256_or_si256,
        _mm256_setzero_si256, _mm256_testz_si256,
    };

    use super::{WORD, words_are_zero};

    /// Vectors read between two branches.
    const STEP: usize = 8;

    /// # Safety
    ///
    /// `start` is aligned to 8 bytes, `count` words are readable there, and the processor has SSE2.
    #[target_feature(enable = "sse2")]
    pub(super) unsafe fn sse2(start: *const u64, count: usize) -> bool {
        let zero = |vector: __m128i| _mm_movemask_epi8(_mm_cmpeq_epi8(vector, _mm_setzero_si128())) == 0xffff;
        let (head, vectors, tail) = split(start, count, size_of::<__m128i>());
        // SAFETY: head words lie before the vectors, tail words behind them, all among the caller's.
        let body = unsafe { start.add(head) }.cast::<__m128i>();
        // SAFETY: as above.
        if unsafe { !words_are_zero(start, head) || !words_are_zero(body.add(vectors).cast(), tail) } {
            return false;
        }
        let mut at = 0;
        while at + STEP <= vectors {
            let mut bits = _mm_setzero_si128();
            for index in at..at + STEP {
                // SAFETY: index < vectors, and `split` has aligned `body`.
                bits = _mm_or_si128(bits, unsafe { body.add(index).read_volatile() });
            }
            if !zero(bits) {
                return false;
            }
            at += STEP;
        }
        let mut bits = _mm_setzero_si128();
        for index in at..vectors {
            // SAFETY: index < vectors, and `split` has aligned `body`.
            bits = _mm_or_si128(bits, unsafe { body.add(index).read_volatile() });
        }
        zero(bits)
    }

    /// # Safety
    ///
    /// `start` is aligned to 8 bytes, `count` words are readable there, and the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(start: *const u64, count: usize) -> bool {
        let zero = |vector: __m256i| _mm256_testz_si256(vector, vector) == 1;
        let (head, vectors, tail) = split(start, count, size_of::<__m256i>());
        // SAFETY: head words lie before the vectors, tail words behind them, all among the caller's.
        let body = unsafe { start.add(head) }.cast::<__m256i>();
        // SAFETY: as above.
        if unsafe { !words_are_zero(start, head) || !words_are_zero(body.add(vectors).cast(), tail) } {
            return false;
        }
        let mut at = 0;
        while at + STEP <= vectors {
            let mut bits = _mm256_setzero_si256();
            for index in at..at + STEP {
                // SAFETY: index < vectors, and `split` has aligned `body`.
                bits = _mm256_or_si256(bits, unsafe { body.add(index).read_volatile() });
            }
            if !zero(bits) {
                return false;
            }
            at += STEP;
        }
        let mut bits = _mm256_setzero_si256();
        for index in at..vectors {
            // SAFETY: index < vectors, and `split` has aligned `body`.
            bits = _mm256_or_si256(bits, unsafe { body.add(index).read_volatile() });
        }
        zero(bits)
    }

    /// Splits `count` words at the aligned `start` into words up to the first aligned vector of `size` bytes, vectors,
    /// and words that are left.
    fn split(start: *const u64, count: usize, size: usize) -> (usize, usize, usize) {
        let head = (start.addr().wrapping_neg() % size / WORD).min(count);
        let words_per_vector = size / WORD;
        (head, (count - head) / words_per_vector, (count - head) % words_per_vector)
    }
}
