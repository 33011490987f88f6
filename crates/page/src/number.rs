//! The number of a page. Law: a page number and a byte offset are different types, so that neither is ever added to
//! the other.

use std::fmt;

/// Bits of a byte offset that lie inside a page.
pub const PAGE_BITS: u32 = 12;

/// Bytes in a page, as the unit of offsets inside a RAM block or a file.
///
/// RAM records and the bitmaps of QEMU's migration stream count target pages, which are 4 KiB on every machine that
/// limosa serves; huge pages of the host are several of these.
pub const PAGE_SIZE: u64 = 1 << PAGE_BITS;

/// Bytes in a page, as the length of a buffer. The same as [`PAGE_SIZE`].
pub const PAGE_LEN: usize = 1 << PAGE_BITS;

/// The index of a 4 KiB page inside its RAM block, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNumber(pub u64);

impl PageNumber {
    /// The page that contains the byte at `offset` (in bytes from the start of the RAM block).
    ///
    /// ```
    /// # use limosa_page::PageNumber;
    /// assert_eq!(PageNumber::containing(4095), PageNumber(0));
    /// assert_eq!(PageNumber::containing(4096), PageNumber(1));
    /// ```
    #[must_use]
    pub const fn containing(offset: u64) -> Self {
        Self(offset >> PAGE_BITS)
    }

    /// Where the page begins, in bytes from the start of the RAM block. A page number whose offset no `u64` can hold
    /// (2^52 and above, which no [`PageNumber::containing`] returns) gives `u64::MAX`, an offset that is past the end
    /// of every block.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0.saturating_mul(PAGE_SIZE)
    }

    /// The page `pages` further on; the largest number there is instead of an overflow.
    #[must_use]
    pub const fn saturating_add(self, pages: u64) -> Self {
        Self(self.0.saturating_add(pages))
    }

    /// The page `pages` further on, or `None` where the number would overflow.
    #[must_use]
    pub const fn checked_add(self, pages: u64) -> Option<Self> {
        match self.0.checked_add(pages) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }
}

/// The bare number, as it appears in messages: `page 17`.
impl fmt::Display for PageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_the_containing_page_is_the_offset_rounded_down() {
        for offset in [0, 1, 4095, 4096, 4097, 1 << 40, u64::MAX] {
            assert_eq!(PageNumber::containing(offset).offset(), offset & !0xfff);
        }
    }

    #[test]
    fn an_offset_that_does_not_fit_is_past_the_end_of_everything() {
        assert_eq!(PageNumber(1 << 52).offset(), u64::MAX);
        assert_eq!(PageNumber((1 << 52) - 1).offset(), u64::MAX - 0xfff);
    }

    #[test]
    fn additions_saturate_or_say_that_they_overflow() {
        assert_eq!(PageNumber(5).saturating_add(2), PageNumber(7));
        assert_eq!(PageNumber(u64::MAX).saturating_add(2), PageNumber(u64::MAX));
        assert_eq!(PageNumber(5).checked_add(2), Some(PageNumber(7)));
        assert_eq!(PageNumber(u64::MAX).checked_add(1), None);
    }
}
