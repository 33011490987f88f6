//! Ranges of pages. Law: a range is half-open and always well formed to its methods: one that ends before it starts is
//! empty, never negative.

use std::fmt;
use std::ops::Range;

use crate::number::{PAGE_SIZE, PageNumber};

/// The pages from `start` up to, but not including, `end`, inside one RAM block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageRange {
    /// The first page.
    pub start: PageNumber,
    /// The page after the last one.
    pub end: PageNumber,
}

impl PageRange {
    /// The pages from `start` up to, but not including, `end`; empty if `end` is not after `start`.
    #[must_use]
    pub const fn new(start: PageNumber, end: PageNumber) -> Self {
        Self { start, end }
    }

    /// `pages` pages from `start` on; cut off at the largest page number there is.
    #[must_use]
    pub const fn starting_at(start: PageNumber, pages: u64) -> Self {
        Self { start, end: start.saturating_add(pages) }
    }

    /// The pages of a RAM block of `pages` pages.
    #[must_use]
    pub const fn whole_block(pages: u64) -> Self {
        Self { start: PageNumber(0), end: PageNumber(pages) }
    }

    /// Every page that has at least one of these bytes.
    #[must_use]
    pub const fn covering(bytes: &Range<u64>) -> Self {
        if bytes.end <= bytes.start {
            let start = PageNumber::containing(bytes.start);
            return Self { start, end: start };
        }
        Self { start: PageNumber::containing(bytes.start), end: PageNumber(bytes.end.div_ceil(PAGE_SIZE)) }
    }

    /// Every page all of whose bytes are among these.
    #[must_use]
    pub const fn inside_bytes(bytes: &Range<u64>) -> Self {
        Self { start: PageNumber(bytes.start.div_ceil(PAGE_SIZE)), end: PageNumber::containing(bytes.end) }
    }

    /// The number of pages.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// Whether there is no page in it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.end.0 <= self.start.0
    }

    /// The bytes of these pages, counted from the start of the RAM block.
    #[must_use]
    pub const fn bytes(&self) -> Range<u64> {
        self.start.offset()..self.end.offset()
    }

    /// Whether `page` is one of these pages.
    #[must_use]
    pub const fn contains(&self, page: PageNumber) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }

    /// Returns the pages that are in both ranges; an empty range if they do not overlap.
    #[must_use]
    pub fn intersect(&self, other: Self) -> Self {
        let start = self.start.max(other.start);
        Self { start, end: self.end.min(other.end).max(start) }
    }

    /// The pages before `page`, and those from it on. A `page` outside the range leaves one of the two empty.
    #[must_use]
    pub fn split_at(&self, page: PageNumber) -> (Self, Self) {
        let page = page.min(self.end).max(self.start);
        (Self { start: self.start, end: page }, Self { start: page, end: self.end.max(page) })
    }

    /// The pages, one by one, ascending.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = PageNumber> + Clone + use<> {
        (self.start.0..self.end.0).map(PageNumber)
    }

    /// The same pages in ranges of `pages` pages each, the last one shorter. 0 is taken for 1.
    pub fn chunks(&self, pages: u64) -> impl Iterator<Item = Self> + Clone + use<> {
        let mut rest = *self;
        std::iter::from_fn(move || {
            let (chunk, after) = rest.split_at(rest.start.saturating_add(pages.max(1)));
            rest = after;
            (!chunk.is_empty()).then_some(chunk)
        })
    }
}

/// `pages 3..7`, half-open as in the type.
impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pages {}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::new(PageNumber(start), PageNumber(end))
    }

    #[test]
    fn a_range_that_ends_before_it_starts_is_empty_to_every_method() {
        let backwards = range(9, 3);
        assert!(backwards.is_empty());
        assert_eq!(backwards.len(), 0);
        assert_eq!(backwards.iter().count(), 0);
        assert!((0..12).all(|page| !backwards.contains(PageNumber(page))));
        assert!(backwards.intersect(range(0, 100)).is_empty());
        assert_eq!(backwards.chunks(4).count(), 0);
        let (before, after) = backwards.split_at(PageNumber(5));
        assert!(before.is_empty() && after.is_empty());
    }

    #[test]
    fn bytes_are_rounded_outwards_by_covering_and_inwards_by_within() {
        assert_eq!(PageRange::covering(&(4095..4097)), range(0, 2));
        assert!(PageRange::inside_bytes(&(4095..4097)).is_empty());
        assert_eq!(PageRange::inside_bytes(&(4095..12288)), range(1, 3));
        assert_eq!(PageRange::covering(&(8192..12288)), range(2, 3));
        assert!(PageRange::covering(&(5000..5000)).is_empty());
        assert_eq!(PageRange::covering(&(0..u64::MAX)).len(), 1 << 52);
        assert_eq!(range(2, 3).bytes(), 8192..12288);
    }

    #[test]
    fn chunks_end_even_at_the_largest_page_number_and_with_length_zero() {
        let top = range(u64::MAX - 3, u64::MAX);
        assert_eq!(top.chunks(2).map(|chunk| chunk.len()).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(top.chunks(u64::MAX).count(), 1);
        assert_eq!(top.chunks(0).count(), 3);
    }

    proptest! {
        #[test]
        fn ranges_behave_as_sets_of_pages(a in 0u64..40, b in 0u64..40, c in 0u64..40, d in 0u64..40, at in 0u64..50, step in 1u64..9) {
            let (one, two) = (range(a, b), range(c, d));
            let set: Vec<u64> = one.iter().map(|page| page.0).collect();
            prop_assert_eq!(one.len(), set.len() as u64);
            prop_assert_eq!(one.is_empty(), set.is_empty());
            for page in 0..60 {
                prop_assert_eq!(one.contains(PageNumber(page)), set.contains(&page));
                let both = one.contains(PageNumber(page)) && two.contains(PageNumber(page));
                prop_assert_eq!(one.intersect(two).contains(PageNumber(page)), both);
            }
            let (before, after) = one.split_at(PageNumber(at));
            let joined: Vec<u64> = before.iter().chain(after.iter()).map(|page| page.0).collect();
            prop_assert_eq!(&joined, &set);
            prop_assert!(before.iter().all(|page| page.0 < at));
            prop_assert!(after.iter().all(|page| page.0 >= at));
            let chunked: Vec<u64> = one.chunks(step).flat_map(|chunk| chunk.iter()).map(|page| page.0).collect();
            prop_assert_eq!(&chunked, &set);
            prop_assert!(one.chunks(step).all(|chunk| chunk.len() <= step));
        }
    }
}
