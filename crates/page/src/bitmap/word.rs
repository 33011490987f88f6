//! Where the bits of a range of pages lie in an array of 64-bit words, for the plain and the atomic bitmap alike.

use crate::{PageNumber, PageRange, to_u64, to_usize};

/// Bits in a word.
pub(super) const BITS: u64 = 64;

/// The number of words for `pages` bits.
pub(super) fn count_for(pages: u64) -> usize {
    index(pages.div_ceil(BITS))
}

/// The word and the bit in it of `page`, if it is one of the `pages` pages of the bitmap.
#[inline]
pub(super) fn locate(page: PageNumber, pages: u64) -> Option<(usize, u64)> {
    (page.0 < pages).then(|| (index(page.0 / BITS), 1 << (page.0 % BITS)))
}

/// Returns a word number as an index.
#[inline]
pub(super) fn index(word: u64) -> usize {
    to_usize(word)
}

/// The number of the first page of a word.
#[inline]
pub(super) fn first_page(word: usize) -> u64 {
    to_u64(word).saturating_mul(BITS)
}

/// The words that the bits of a non-empty range touch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// The first word, and the bits of the range in it.
    pub(super) first: (usize, u64),
    /// The last word and the bits of the range in it. If this is the first word too, both masks are the same.
    pub(super) last: (usize, u64),
}

impl Span {
    /// The span of `range` in a bitmap of `pages` pages, or `None` if nothing of it lies inside.
    pub(super) fn of(range: PageRange, pages: u64) -> Option<Self> {
        let end = range.end.0.min(pages);
        if range.start.0 >= end {
            return None;
        }
        let (first, last) = (index(range.start.0 / BITS), index((end - 1) / BITS));
        let from = u64::MAX << (range.start.0 % BITS);
        let upto = u64::MAX >> (BITS - 1 - (end - 1) % BITS);
        if first == last {
            Some(Self { first: (first, from & upto), last: (first, from & upto) })
        } else {
            Some(Self { first: (first, from), last: (last, upto) })
        }
    }

    /// Every word of the span with the bits of the range in it, ascending.
    pub(super) fn words(self) -> impl Iterator<Item = (usize, u64)> {
        let (first, last) = (self.first.0, self.last.0);
        (first..=last).map(move |word| {
            let mask = match word {
                _ if word == first => self.first.1,
                _ if word == last => self.last.1,
                _ => u64::MAX,
            };
            (word, mask)
        })
    }
}
