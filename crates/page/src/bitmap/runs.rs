//! The iterator over ranges of equal bits.
//!
//! Law: a word is loaded once, and a word of 64 equal bits is passed in one step; inside a word a run costs a few
//! instructions, so that neither an empty bitmap of a big guest nor a ragged one is slow to walk.

use std::iter::FusedIterator;

use super::word::{self, Span};
use crate::{PageNumber, PageRange};

/// Maximal ranges of set (or clear) bits of a [`PageBitmap`](super::PageBitmap), ascending.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    /// The words up to the last one of the range.
    words: &'a [u64],
    /// All ones if clear bits are wanted.
    flip: u64,
    /// The bits of the range in the last word.
    last: u64,
    /// The word that we are in, and its wanted bits that were not given out.
    at: usize,
    bits: u64,
}

impl<'a> Runs<'a> {
    /// The runs inside `span`; none if there is no span.
    pub(super) fn new(words: &'a [u64], flip: u64, span: Option<Span>) -> Self {
        let Some(Span { first, last }) = span else { return Self { words: &[], flip, last: 0, at: 0, bits: 0 } };
        let mut runs = Self { words: &words[..=last.0], flip, last: last.1, at: first.0, bits: 0 };
        runs.bits = runs.word(first.0) & first.1;
        runs
    }

    /// The wanted bits of a word, if it is not behind the last one.
    #[inline]
    fn load(&self, at: usize) -> Option<u64> {
        (at < self.words.len()).then(|| self.word(at))
    }

    /// The wanted bits of a word up to the last one.
    #[inline]
    fn word(&self, at: usize) -> u64 {
        let bits = self.words[at] ^ self.flip;
        if at + 1 == self.words.len() { bits & self.last } else { bits }
    }
}

impl Iterator for Runs<'_> {
    type Item = PageRange;

    #[inline]
    fn next(&mut self) -> Option<PageRange> {
        while self.bits == 0 {
            self.bits = self.load(self.at + 1)?;
            self.at += 1;
        }
        let base = word::first_page(self.at);
        let first = self.bits.trailing_zeros();
        let start = base + u64::from(first);
        // Adding the lowest bit of a run carries through to the first clear bit behind it.
        let (carried, beyond) = self.bits.overflowing_add(1 << first);
        self.bits &= carried;
        if !beyond {
            let end = base + u64::from(carried.trailing_zeros());
            return Some(PageRange::new(PageNumber(start), PageNumber(end)));
        }
        // The run reaches the end of the word: it continues through full words into the low bits of another one.
        loop {
            self.at += 1;
            let Some(bits) = self.load(self.at) else {
                self.bits = 0;
                return Some(PageRange::new(PageNumber(start), PageNumber(word::first_page(self.at))));
            };
            if bits != u64::MAX {
                self.bits = bits & (bits + 1);
                let end = word::first_page(self.at) + u64::from(bits.trailing_ones());
                return Some(PageRange::new(PageNumber(start), PageNumber(end)));
            }
        }
    }
}

impl FusedIterator for Runs<'_> {}
