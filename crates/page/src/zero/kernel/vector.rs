//! The unit that a processor compares with zero at once: a word, or a vector of 16, 32 or 64 bytes.
//!
//! Everything here is inlined into functions that are compiled for the instructions it needs; elsewhere it would be
//! calls.
#![allow(unsafe_code, reason = "uses vector instructions")]

/// Bits that can be joined and compared with zero. Any bits are a value; all of its bytes are bits.
pub(super) trait Vector: Copy {
    /// The bits that are set in either.
    ///
    /// # Safety
    ///
    /// The processor has these vectors.
    unsafe fn or(self, other: Self) -> Self;

    /// Whether no bit is set.
    ///
    /// # Safety
    ///
    /// The processor has these vectors.
    unsafe fn is_zero(self) -> bool;
}

impl Vector for u64 {
    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        self | other
    }

    #[inline(always)]
    unsafe fn is_zero(self) -> bool {
        self == 0
    }
}

/// Asks for the cache line of `address`, which may be anywhere: a prefetch reads nothing and never faults.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and it has no effect that a program can see.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    // What it would gain on other processors was not measured.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _mm_cmpeq_epi8, _mm_movemask_epi8, _mm_or_si128, _mm_setzero_si128, _mm256_or_si256,
        _mm256_testz_si256, _mm512_or_si512, _mm512_test_epi64_mask,
    };

    use super::Vector;

    impl Vector for __m128i {
        #[inline(always)]
        unsafe fn or(self, other: Self) -> Self {
            // SAFETY: the processor has SSE2.
            unsafe { _mm_or_si128(self, other) }
        }

        #[inline(always)]
        unsafe fn is_zero(self) -> bool {
            // SAFETY: the processor has SSE2.
            unsafe { _mm_movemask_epi8(_mm_cmpeq_epi8(self, _mm_setzero_si128())) == 0xffff }
        }
    }

    impl Vector for __m256i {
        #[inline(always)]
        unsafe fn or(self, other: Self) -> Self {
            // SAFETY: the processor has AVX2.
            unsafe { _mm256_or_si256(self, other) }
        }

        #[inline(always)]
        unsafe fn is_zero(self) -> bool {
            // SAFETY: the processor has AVX2, and so AVX.
            unsafe { _mm256_testz_si256(self, self) == 1 }
        }
    }

    impl Vector for __m512i {
        #[inline(always)]
        unsafe fn or(self, other: Self) -> Self {
            // SAFETY: the processor has AVX-512F.
            unsafe { _mm512_or_si512(self, other) }
        }

        #[inline(always)]
        unsafe fn is_zero(self) -> bool {
            // SAFETY: the processor has AVX-512F.
            unsafe { _mm512_test_epi64_mask(self, self) == 0 }
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::aarch64::{uint64x2_t, vmaxvq_u32, vorrq_u64, vreinterpretq_u32_u64};

    use super::Vector;

    impl Vector for uint64x2_t {
        #[inline(always)]
        unsafe fn or(self, other: Self) -> Self {
            // SAFETY: the processor has NEON.
            unsafe { vorrq_u64(self, other) }
        }

        #[inline(always)]
        unsafe fn is_zero(self) -> bool {
            // SAFETY: the processor has NEON.
            unsafe { vmaxvq_u32(vreinterpretq_u32_u64(self)) == 0 }
        }
    }
}
