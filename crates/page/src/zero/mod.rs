//! Whether memory is all zero.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use thiserror::Error;

pub(crate) mod kernel;

/// How memory is compared with zero.
///
/// Law: every method gives the same answer for the same bytes, of any alignment and number. A page that is not
/// zero costs next to nothing: before any loop runs, its first cache line is looked at, and the words in its middle and
/// at its end; pages with content nearly always differ from zero in the first word. What is left is a page of zeros,
/// and that is read once at the speed of the cache or of memory.
///
/// The methods are the 16 bytes at a time that every x86-64 can do, the 32 of AVX2 and the 64 of AVX-512 where the
/// processor has them, the 16 of NEON, a portable loop, and a [plain](ZeroMethod::Plain) one that the others are
/// measured against. [`is_zero`] takes the fastest there is; [`is_zero_with`] takes the one named, so that tests and
/// benchmarks can compare them.
///
/// Many pages are better asked about at once: see [`scan`](crate::scan()).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ZeroMethod {
    /// Vectors of 16 bytes (words of 8 where there are none), a branch behind each, and nothing looked at beforehand:
    /// on every processor. What the others are measured against.
    Plain,
    /// Words of 8 bytes: on every processor.
    Portable,
    /// Vectors of 16 bytes: on every 64-bit Arm.
    Neon,
    /// Vectors of 16 bytes: on every x86-64.
    Sse2,
    /// Vectors of 32 bytes: on x86-64 since about 2013, found out at run time.
    Avx2,
    /// Vectors of 64 bytes: on some x86-64 since about 2017, found out at run time.
    Avx512,
}

impl ZeroMethod {
    /// All methods, the faster ones last.
    pub const ALL: [Self; 6] = [Self::Plain, Self::Portable, Self::Neon, Self::Sse2, Self::Avx2, Self::Avx512];

    /// The methods that this processor has, the faster ones last. [`ZeroMethod::Portable`] is always among them.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> + Clone {
        Self::ALL.into_iter().filter(|method| method.is_available())
    }

    /// Whether this processor has it.
    #[must_use]
    #[inline]
    pub fn is_available(self) -> bool {
        match self {
            Self::Plain | Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Sse2 => std::arch::is_x86_feature_detected!("sse2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => std::arch::is_x86_feature_detected!("avx512f"),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Sse2 | Self::Avx2 | Self::Avx512 => false,
            #[cfg(not(target_arch = "aarch64"))]
            Self::Neon => false,
        }
    }

    /// The method that finds zero pages fastest where they are: in memory that is in no cache.
    ///
    /// On AMD's processors that is AVX-512 where there is one, on Intel's AVX2. Measured with huge pages: an EPYC (Zen
    /// 5) takes 102 ns for a page by AVX-512 and 114 by AVX2; a Xeon, by an earlier form of the loop with half as long
    /// steps, 274 and 226, as it fetches ahead better for narrower reads. What is in cache is faster by AVX-512 on
    /// both, but a guest has little of it, and some of Intel's processors lower the clock for all that runs beside it.
    #[must_use]
    #[inline]
    pub fn best() -> Self {
        static BEST: OnceLock<ZeroMethod> = OnceLock::new();
        *BEST.get_or_init(|| {
            let wide = if kernel::is_amd() { Self::Avx512 } else { Self::Avx2 };
            let by_preference = [wide, Self::Avx2, Self::Sse2, Self::Neon];
            by_preference.into_iter().find(|method| method.is_available()).unwrap_or(Self::Portable)
        })
    }

    /// The name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Sse2 => "sse2",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

/// [`ZeroMethod::best`].
impl Default for ZeroMethod {
    fn default() -> Self {
        Self::best()
    }
}

impl fmt::Display for ZeroMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no method has.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("zero detection {name:?}: expected plain, portable, neon, sse2, avx2 or avx512")]
pub struct UnknownZeroMethod {
    /// The name.
    pub name: String,
}

impl FromStr for ZeroMethod {
    type Err = UnknownZeroMethod;

    fn from_str(name: &str) -> Result<Self, UnknownZeroMethod> {
        Self::ALL
            .into_iter()
            .find(|method| method.name() == name)
            .ok_or_else(|| UnknownZeroMethod { name: name.to_owned() })
    }
}

/// Whether all of `bytes` are zero; true if there are none. Uses [`ZeroMethod::best`].
///
/// ```
/// use limosa_page::is_zero;
///
/// let mut page = [0; 4096];
/// assert!(is_zero(&page));
/// page[2000] = 1;
/// assert!(!is_zero(&page));
/// ```
#[must_use]
#[inline]
pub fn is_zero(bytes: &[u8]) -> bool {
    is_zero_with(ZeroMethod::best(), bytes)
}

/// Whether all of `bytes` are zero, found out by `method`; by [`ZeroMethod::Portable`] if this processor does not have
/// it (the answer is the same). A caller whose user names the method asks [`ZeroMethod::is_available`] first.
#[must_use]
#[inline]
pub fn is_zero_with(method: ZeroMethod, bytes: &[u8]) -> bool {
    crate::guest::GuestPages::from(bytes).is_zero_with(method)
}
