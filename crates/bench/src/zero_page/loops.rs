//! The yardsticks of zero detection: reading memory at the width of its vectors and doing nothing with it, and
//! the loop that the compiler makes.
//!
//! A read is a load of every byte, joined into sums of bits that might be used, so that the compiler can leave no load
//! out; no branch depends on it. What is read belongs to the bench alone, so nothing has to be volatile.
#![allow(unsafe_code, reason = "uses vector instructions")]

use limosa_page::ZeroMethod;

/// Reads the whole steps of `memory` with the vectors of `method`. Returns whether there is such a read and
/// this processor has it.
pub(super) fn read(method: ZeroMethod, memory: &[u8]) -> bool {
    #[cfg(target_arch = "x86_64")]
    if method.is_available() {
        // SAFETY: the processor has the instructions, as was asked.
        unsafe {
            match method {
                ZeroMethod::Avx512 => x86::avx512(memory),
                ZeroMethod::Avx2 => x86::avx2(memory),
                ZeroMethod::Sse2 => x86::sse2(memory),
                ZeroMethod::Plain | ZeroMethod::Portable | ZeroMethod::Neon => return false,
            }
        }
        return true;
    }
    let _ = (method, memory);
    false
}

/// Whether a page is zero, as one writes it down without a thought.
pub(super) fn by_iterator(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_or_si128, _mm_setzero_si128, _mm256_loadu_si256,
        _mm256_or_si256, _mm256_setzero_si256, _mm512_loadu_si512, _mm512_or_si512, _mm512_setzero_si512,
    };
    use std::hint::black_box;

    /// Vectors that are read between two branches, and the sums that they go to in turn: enough for no load to wait for
    /// another.
    const STEP: usize = 16;
    const SUMS: usize = 4;

    macro_rules! read {
        ($name:ident, $feature:literal, $vector:ty, $zero:ident, $load:ident, $or:ident) => {
            #[target_feature(enable = $feature)]
            pub(super) fn $name(memory: &[u8]) {
                let mut sums = [$zero(); SUMS];
                for step in memory.as_chunks::<{ size_of::<$vector>() }>().0.as_chunks::<STEP>().0 {
                    for (index, vector) in step.iter().enumerate() {
                        // SAFETY: the pointer is to as many bytes as a vector has; the load needs no alignment.
                        let vector = unsafe { $load(vector.as_ptr().cast()) };
                        sums[index % SUMS] = $or(sums[index % SUMS], vector);
                    }
                }
                black_box(sums);
            }
        };
    }

    read!(sse2, "sse2", __m128i, _mm_setzero_si128, _mm_loadu_si128, _mm_or_si128);
    read!(avx2, "avx2", __m256i, _mm256_setzero_si256, _mm256_loadu_si256, _mm256_or_si256);
    read!(avx512, "avx512f", __m512i, _mm512_setzero_si512, _mm512_loadu_si512, _mm512_or_si512);
}
