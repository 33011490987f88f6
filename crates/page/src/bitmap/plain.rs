//! The bitmap with one owner.

use std::fmt;

use thiserror::Error;

use super::count;
use super::runs::Runs;
use super::word::{self, Span};
use crate::{PageNumber, PageRange, to_u64};

/// Bytes that are not the bitmap of the given number of pages.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BitmapError {
    /// The length is not that of QEMU's layout.
    #[error("bitmap of {pages} pages: expected {expected} bytes (whole 64-bit words), got {got}")]
    Length {
        /// Pages that the bitmap should be of.
        pages: u64,
        /// Bytes that it should have: [`PageBitmap::byte_len`].
        expected: u64,
        /// Bytes that there were.
        got: u64,
    },
}

/// A set of the pages of one RAM block, one bit per page.
#[derive(Clone, PartialEq, Eq)]
pub struct PageBitmap {
    words: Vec<u64>,
    pages: u64,
}

impl PageBitmap {
    /// The empty set of a RAM block of `pages` pages.
    ///
    /// Takes `pages / 8` bytes of memory, which the system fills in as they are touched. A number of pages from outside
    /// has to be checked first: like every `Vec` this ends the process if the memory is not available.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        Self { words: vec![0; word::count_for(pages)], pages }
    }

    /// The set of all `pages` pages of a RAM block. As for memory, see [`PageBitmap::new`].
    #[must_use]
    pub fn full(pages: u64) -> Self {
        let mut bitmap = Self { words: vec![u64::MAX; word::count_for(pages)], pages };
        bitmap.trim();
        bitmap
    }

    /// The bytes of QEMU's layout for `pages` pages: whole 64-bit words.
    #[must_use]
    pub const fn byte_len(pages: u64) -> u64 {
        // At most 2^61: no overflow.
        pages.div_ceil(word::BITS) * 8
    }

    /// Reads QEMU's layout. Bits behind the last page mean nothing and are dropped, as QEMU does.
    ///
    /// # Errors
    ///
    /// [`BitmapError::Length`] if `bytes` are not exactly [`PageBitmap::byte_len`] bytes; checked before any memory is
    /// taken.
    pub fn from_le_bytes(pages: u64, bytes: &[u8]) -> Result<Self, BitmapError> {
        let (expected, got) = (Self::byte_len(pages), to_u64(bytes.len()));
        if expected != got {
            return Err(BitmapError::Length { pages, expected, got });
        }
        let (words, _) = bytes.as_chunks::<8>();
        let mut bitmap = Self { words: words.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect(), pages };
        bitmap.trim();
        Ok(bitmap)
    }

    /// Writes QEMU's layout: [`PageBitmap::byte_len`] bytes.
    #[must_use]
    pub fn to_le_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.words.len() * 8];
        let (chunks, _) = bytes.as_chunks_mut::<8>();
        for (chunk, word) in chunks.iter_mut().zip(&self.words) {
            *chunk = word.to_le_bytes();
        }
        bytes
    }

    pub(super) fn from_words(words: Vec<u64>, pages: u64) -> Self {
        let mut bitmap = Self { words, pages };
        bitmap.trim();
        bitmap
    }

    pub(super) fn into_words(self) -> Vec<u64> {
        self.words
    }

    pub(super) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Clears the bits behind the last page.
    fn trim(&mut self) {
        let used = self.pages % word::BITS;
        if let Some(last) = self.words.last_mut()
            && used != 0
        {
            *last &= (1 << used) - 1;
        }
    }

    /// The number of pages that have a bit, set or clear.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.pages
    }

    /// Whether no bit is set. (Not whether [`PageBitmap::len`] is 0.)
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The number of set bits.
    #[must_use]
    pub fn count(&self) -> u64 {
        count::ones(&self.words)
    }

    /// The number of set bits among `range`.
    #[must_use]
    pub fn count_in(&self, range: PageRange) -> u64 {
        let Some(Span { first, last }) = Span::of(range, self.pages) else { return 0 };
        let ones = |(word, mask): (usize, u64)| u64::from((self.words[word] & mask).count_ones());
        if first.0 == last.0 {
            return ones(first);
        }
        ones(first) + count::ones(&self.words[first.0 + 1..last.0]) + ones(last)
    }

    /// The bit of `page`.
    #[must_use]
    #[inline]
    pub fn get(&self, page: PageNumber) -> bool {
        word::locate(page, self.pages).is_some_and(|(word, bit)| self.words[word] & bit != 0)
    }

    /// Sets the bit of `page`; returns what it was.
    #[inline]
    pub fn set(&mut self, page: PageNumber) -> bool {
        let Some((word, bit)) = word::locate(page, self.pages) else { return false };
        let before = self.words[word];
        self.words[word] = before | bit;
        before & bit != 0
    }

    /// Clears the bit of `page`; returns what it was.
    #[inline]
    pub fn clear(&mut self, page: PageNumber) -> bool {
        let Some((word, bit)) = word::locate(page, self.pages) else { return false };
        let before = self.words[word];
        self.words[word] = before & !bit;
        before & bit != 0
    }

    /// Sets the bits of `range`.
    pub fn set_range(&mut self, range: PageRange) {
        let Some(Span { first, last }) = Span::of(range, self.pages) else { return };
        self.words[first.0] |= first.1;
        if first.0 != last.0 {
            self.words[first.0 + 1..last.0].fill(u64::MAX);
            self.words[last.0] |= last.1;
        }
    }

    /// Adds the pages from `at` on whose bits are set in `words`: 64 a word, the first of them in the least significant
    /// bit; `at` is any page. Those that there are no bits for are left out. How bitmaps of another numbering are taken
    /// over.
    pub fn union_words(&mut self, at: PageNumber, words: &[u64]) {
        let (first, shift) = (word::index(at.0 / word::BITS), at.0 % word::BITS);
        let Some(mine) = self.words.get_mut(first..) else { return };
        if shift == 0 {
            for (mine, word) in mine.iter_mut().zip(words) {
                *mine |= word;
            }
        } else {
            // The high bits of each word go into the low ones of the place behind it.
            let mut carried = 0;
            for (mine, word) in mine.iter_mut().zip(words.iter().chain(&[0])) {
                *mine |= word << shift | carried;
                carried = word >> (word::BITS - shift);
            }
        }
        self.trim();
    }

    /// Clears the bits of `range`.
    pub fn clear_range(&mut self, range: PageRange) {
        let Some(Span { first, last }) = Span::of(range, self.pages) else { return };
        self.words[first.0] &= !first.1;
        if first.0 != last.0 {
            self.words[first.0 + 1..last.0].fill(0);
            self.words[last.0] &= !last.1;
        }
    }

    /// The first set bit at `from` or behind it.
    #[must_use]
    pub fn next_set(&self, from: PageNumber) -> Option<PageNumber> {
        find(&self.words, 0, from.0, self.pages).map(PageNumber)
    }

    /// The first clear bit at `from` or behind it, among the pages of the block.
    #[must_use]
    pub fn next_clear(&self, from: PageNumber) -> Option<PageNumber> {
        find(&self.words, u64::MAX, from.0, self.pages).map(PageNumber)
    }

    /// The maximal ranges of set bits, ascending.
    #[must_use]
    pub fn runs(&self) -> Runs<'_> {
        self.runs_in(PageRange::whole_block(self.pages))
    }

    /// The maximal ranges of set bits inside `range`, ascending.
    #[must_use]
    pub fn runs_in(&self, range: PageRange) -> Runs<'_> {
        Runs::new(&self.words, 0, Span::of(range, self.pages))
    }

    /// The maximal ranges of clear bits, ascending.
    #[must_use]
    pub fn gaps(&self) -> Runs<'_> {
        self.gaps_in(PageRange::whole_block(self.pages))
    }

    /// The maximal ranges of clear bits inside `range`, ascending.
    #[must_use]
    pub fn gaps_in(&self, range: PageRange) -> Runs<'_> {
        Runs::new(&self.words, u64::MAX, Span::of(range, self.pages))
    }

    /// Adds the pages of `other`. Those that this bitmap has no bit for are left out.
    pub fn union_with(&mut self, other: &Self) {
        for (word, with) in self.words.iter_mut().zip(&other.words) {
            *word |= with;
        }
        self.trim();
    }

    /// Keeps only pages that are in `other` too; those that `other` has no bit for go.
    pub fn intersect_with(&mut self, other: &Self) {
        let common = self.words.len().min(other.words.len());
        for (word, with) in self.words.iter_mut().zip(&other.words) {
            *word &= with;
        }
        self.words[common..].fill(0);
    }

    /// Removes the pages of `other`.
    pub fn subtract(&mut self, other: &Self) {
        for (word, with) in self.words.iter_mut().zip(&other.words) {
            *word &= !with;
        }
    }

    /// Turns the set into that of all other pages of the block.
    pub fn invert(&mut self) {
        for word in &mut self.words {
            *word = !*word;
        }
        self.trim();
    }
}

/// `PageBitmap(3 of 100: 4..6 9..10)`; the runs after the sixteenth are left out.
impl fmt::Debug for PageBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        write!(f, "PageBitmap({} of {}:", self.count(), self.pages)?;
        for (index, run) in self.runs().enumerate() {
            if index == SHOWN {
                f.write_str(" ...")?;
                break;
            }
            write!(f, " {}..{}", run.start, run.end)?;
        }
        f.write_str(")")
    }
}

/// The first page in `from..end` whose bit, flipped by `flip` (0 or all ones), is set.
#[inline]
fn find(words: &[u64], flip: u64, from: u64, end: u64) -> Option<u64> {
    if from >= end {
        return None;
    }
    let first = word::index(from / word::BITS);
    let bits = (words.get(first)? ^ flip) & (u64::MAX << (from % word::BITS));
    let (at, bits) = if bits != 0 {
        (first, bits)
    } else {
        let last = word::index((end - 1) / word::BITS);
        let behind = words.get(first + 1..=last)?;
        let skipped = behind.iter().position(|word| word ^ flip != 0)?;
        (first + 1 + skipped, behind[skipped] ^ flip)
    };
    let page = word::first_page(at) + u64::from(bits.trailing_zeros());
    (page < end).then_some(page)
}
