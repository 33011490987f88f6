//! Whether memory is all zero.
//!
//! Law: every method gives the same answer for the same bytes, whatever their alignment and number. A page that is not
//! zero costs next to nothing: before any loop runs, the first, the middle and the last word are looked at, and pages
//! with content nearly always differ from zero in one of them. What is left is a page of zeros, and that is read once
//! at the speed of the cache.
//!
//! The methods are the 16 bytes at a time that every x86-64 can do, the 32 bytes of AVX2 where the processor has it, and
//! a portable twin. [`is_zero`] takes the fastest there is; [`is_zero_with`] takes the one named, so that tests and
//! benchmarks can compare them.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

pub(crate) mod kernel;

pub use crate::guest::is_zero_at;

/// How memory is compared with zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Words of 8 bytes: on every processor.
    Portable,
    /// Vectors of 16 bytes: on every x86-64.
    Sse2,
    /// Vectors of 32 bytes: on x86-64 since about 2013, found out at run time.
    Avx2,
}

impl Method {
    /// All methods, the fastest last.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Sse2, Self::Avx2];

    /// The methods that this processor has, the fastest last. [`Method::Portable`] is always among them.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> + Clone {
        Self::ALL.into_iter().filter(|method| method.is_available())
    }

    /// Whether this processor has it.
    #[must_use]
    #[inline]
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Sse2 => std::arch::is_x86_feature_detected!("sse2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Sse2 | Self::Avx2 => false,
        }
    }

    /// The fastest method that this processor has.
    #[must_use]
    #[inline]
    pub fn best() -> Self {
        if Self::Avx2.is_available() {
            Self::Avx2
        } else if Self::Sse2.is_available() {
            Self::Sse2
        } else {
            Self::Portable
        }
    }

    /// The name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Sse2 => "sse2",
            Self::Avx2 => "avx2",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no method has.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("zero detection {name:?}: expected portable, sse2 or avx2")]
pub struct UnknownMethod {
    /// The name.
    pub name: String,
}

impl FromStr for Method {
    type Err = UnknownMethod;

    fn from_str(name: &str) -> Result<Self, UnknownMethod> {
        Self::ALL
            .into_iter()
            .find(|method| method.name() == name)
            .ok_or_else(|| UnknownMethod { name: name.to_owned() })
    }
}

/// Whether all of `bytes` are zero; true if there are none. Uses [`Method::best`].
///
/// ```
/// use limosa_page::zero::is_zero;
///
/// let mut page = [0; 4096];
/// assert!(is_zero(&page));
/// page[2000] = 1;
/// assert!(!is_zero(&page));
/// ```
#[must_use]
#[inline]
pub fn is_zero(bytes: &[u8]) -> bool {
    is_zero_with(Method::best(), bytes)
}

/// Whether all of `bytes` are zero, found out by `method`; by [`Method::Portable`] if this processor does not have it
/// (the answer is the same). Whoever lets a user name the method asks [`Method::is_available`] first.
#[must_use]
#[inline]
pub fn is_zero_with(method: Method, bytes: &[u8]) -> bool {
    crate::guest::GuestPages::from(bytes).is_zero_with(method)
}
