//! Contents and order of a guest's writes: pure arithmetic, which a guest under KVM does too.
//!
//! A page is 1024 words of 32 bits. A writer goes round the pages of its share in strides that hit each once a lap; so
//! its counter alone says how often each of its pages was written: its *generation*. Page number and generation make
//! the contents. In one of sixteen generations, another one for neighbouring pages, a page becomes zero.

use limosa_page::PAGE_LEN;

/// Words of 32 bits in a page.
pub(super) const WORDS: usize = PAGE_LEN / 4;

const PAGE_FACTOR: u32 = 0x9E37_79B1;
const GENERATION_FACTOR: u32 = 0x85EB_CA6B;
const WORD_FACTOR: u32 = 0xC2B2_AE35;

/// The contents of a page: word `i` is `base + i * WORD_FACTOR` for every `spacing`-th word, and 0 for the others; or
/// all zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Contents {
    base: Option<u32>,
    spacing: usize,
}

impl Contents {
    /// All zero.
    pub(super) const ZERO: Self = Self { base: None, spacing: 1 };

    /// Of `page` in its `generation`.
    #[allow(clippy::cast_possible_truncation, reason = "the contents depend on the low bits alone")]
    pub(super) fn of(seed: u32, page: u64, generation: u64, spacing: usize) -> Self {
        if page.wrapping_add(generation).is_multiple_of(16) {
            return Self::ZERO;
        }
        let of_page = (page as u32).wrapping_mul(PAGE_FACTOR);
        let of_generation = (generation as u32).wrapping_mul(GENERATION_FACTOR);
        Self { base: Some(seed.wrapping_add(of_page).wrapping_add(of_generation)), spacing }
    }

    pub(super) fn is_zero(self) -> bool {
        self.base.is_none()
    }

    #[allow(clippy::cast_possible_truncation, reason = "there are 1024 words")]
    pub(super) fn word(self, index: usize) -> u32 {
        match self.base {
            Some(base) if index.is_multiple_of(self.spacing) => {
                base.wrapping_add((index as u32).wrapping_mul(WORD_FACTOR))
            }
            _ => 0,
        }
    }
}

/// The pages of one writer, and its way through them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    /// Its first page.
    pub(super) first: u64,
    /// How many, at least 1.
    pub(super) pages: u64,
    /// From each page to the next, modulo `pages`; they have no common divisor.
    pub(super) stride: u64,
    /// The number by which the way is found back: `stride * inverse` is 1 modulo `pages`.
    inverse: u64,
}

impl Share {
    fn new(first: u64, pages: u64) -> Self {
        // The golden section: strides of it come near no page twice in a row.
        let wanted = (u128::from(pages) * 618 / 1000).max(1);
        let mut stride = u64::try_from(wanted).unwrap_or(1);
        loop {
            if let Some(inverse) = inverse_of(stride, pages) {
                return Self { first, pages, stride, inverse };
            }
            // Ends at `pages + 1`, which has no common divisor with `pages`.
            stride += 1;
        }
    }

    /// The page of a write, counted from 0, and the generation it then has.
    pub(super) fn write(&self, number: u64) -> (u64, u64) {
        (self.first + product(number % self.pages, self.stride, self.pages), number / self.pages + 1)
    }

    /// How often `page` has been written after `writes` writes; `None` if it is not one of these.
    pub(super) fn generation(&self, page: u64, writes: u64) -> Option<u64> {
        let within = page.checked_sub(self.first).filter(|within| *within < self.pages)?;
        let turn = product(within, self.inverse, self.pages);
        Some(writes / self.pages + u64::from(turn < writes % self.pages))
    }
}

#[allow(clippy::cast_possible_truncation, reason = "less than the modulus")]
fn product(a: u64, b: u64, modulus: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(modulus)) as u64
}

/// The inverse of `number` modulo `modulus`, if they have no common divisor (Euclid).
fn inverse_of(number: u64, modulus: u64) -> Option<u64> {
    let m = i128::from(modulus);
    let (mut before, mut rest) = (m, i128::from(number) % m);
    let (mut factor_before, mut factor) = (0_i128, 1_i128);
    while rest != 0 {
        let quotient = before / rest;
        (before, rest) = (rest, before - quotient * rest);
        (factor_before, factor) = (factor, factor_before - quotient * factor);
    }
    (before == 1).then(|| u64::try_from(factor_before.rem_euclid(m)).ok())?
}

/// The parts of a guest's memory, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Pages in front that are the guest's own (its code).
    pub(super) reserved: u64,
    /// Pages that have contents from the beginning, behind those.
    pub(super) filled: u64,
    /// Pages that are written, from the same page on as the filled ones.
    pub(super) working: u64,
}

/// The writes of all of a guest's writers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) seed: u32,
    pub(super) layout: Layout,
    /// Of how many words of a page one is written.
    pub(super) spacing: usize,
    pub(super) shares: Vec<Share>,
}

impl Plan {
    /// `writers` is at least 1 and at most `working`.
    pub(super) fn new(seed: u32, layout: Layout, spacing: usize, writers: u16) -> Self {
        let writers = u64::from(writers.max(1));
        let border = |index: u64| layout.reserved + index.saturating_mul(layout.working) / writers;
        let shares = (0..writers).map(|index| Share::new(border(index), (border(index + 1) - border(index)).max(1)));
        Self { seed, layout, spacing, shares: shares.collect() }
    }

    /// Returns the contents of a page in its `generation`; not of reserved pages.
    pub(super) fn contents(&self, page: u64, generation: u64) -> Contents {
        if generation == 0 && page >= self.layout.reserved.saturating_add(self.layout.filled) {
            return Contents::ZERO;
        }
        Contents::of(self.seed, page, generation, self.spacing)
    }

    /// How often a page has been written, after these writes of each writer.
    pub(super) fn generation(&self, page: u64, writes: &[u64]) -> u64 {
        let behind = self.shares.partition_point(|share| share.first <= page);
        let of = behind.checked_sub(1).and_then(|index| self.shares.get(index).zip(writes.get(index)));
        of.and_then(|(share, writes)| share.generation(page, *writes)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_counter_tells_how_often_each_page_was_written() {
        for pages in [1_u64, 2, 3, 7, 16, 30, 97, 120] {
            let share = Share::new(5, pages);
            let mut written = BTreeMap::new();
            for number in 0..3 * pages + 2 {
                for page in 5..5 + pages {
                    let expected = written.get(&page).copied().unwrap_or(0);
                    assert_eq!(share.generation(page, number), Some(expected), "{share:?} after {number}");
                }
                let (page, generation) = share.write(number);
                *written.entry(page).or_insert(0) += 1;
                assert_eq!(written[&page], generation);
            }
            assert_eq!(share.generation(4, 1), None);
            assert_eq!(share.generation(5 + pages, 1), None);
        }
    }

    #[test]
    fn the_shares_of_all_writers_are_the_working_set() {
        for (working, writers) in [(1, 1), (7, 3), (64, 64), (1000, 7)] {
            let plan = Plan::new(1, Layout { reserved: 3, filled: 0, working }, 1, writers);
            let mut next = 3;
            for share in &plan.shares {
                assert_eq!(share.first, next);
                next += share.pages;
            }
            assert_eq!(next, 3 + working);
        }
    }

    #[test]
    fn pages_differ_from_their_neighbours_and_from_their_own_past() {
        let word = |page, generation| Contents::of(1, page, generation, 1).word(0);
        for page in 0..100 {
            for generation in 0..40 {
                assert_ne!(word(page, generation), word(page, generation + 1));
                assert_ne!(word(page, generation), word(page + 1, generation));
            }
        }
    }

    #[test]
    fn what_was_neither_filled_nor_written_is_zero() {
        let plan = Plan::new(1, Layout { reserved: 0, filled: 10, working: 20 }, 1, 2);
        assert!(!plan.contents(9, 0).is_zero());
        assert!(plan.contents(10, 0).is_zero());
        assert!(!plan.contents(10, 1).is_zero());
        assert!(plan.contents(10, 6).is_zero(), "10 + 6 is a multiple of 16");
        assert_eq!(plan.generation(25, &[5, 5]), 0);
    }
}
