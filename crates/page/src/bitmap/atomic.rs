//! The bitmap that several threads change.
//!
//! Law: of all threads that set (or clear) one bit at the same time exactly one learns that it changed it. This is
//! what lets a thread that answers page requests and a thread that pushes pages in the background share one bitmap
//! and send every page once. Changes release and observations acquire, so what a thread wrote before it set a bit is
//! seen by the thread that found the bit set.

use std::fmt;
#[cfg(not(loom))]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

#[cfg(loom)]
use loom::sync::atomic::AtomicU64;

use super::plain::PageBitmap;
use super::word::{self, Span};
use crate::{PageNumber, PageRange};

/// A set of the pages of one RAM block that several threads change through `&self`.
///
/// Every bit is atomic; a method that covers several words is not atomic as a whole, each of its words is.
pub struct AtomicPageBitmap {
    words: Vec<AtomicU64>,
    pages: u64,
}

impl AtomicPageBitmap {
    /// The empty set of a RAM block of `pages` pages. As for memory, see [`PageBitmap::new`].
    #[must_use]
    pub fn new(pages: u64) -> Self {
        Self::from(PageBitmap::new(pages))
    }

    /// The number of pages that have a bit, set or clear.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.pages
    }

    /// Whether no bit is set. (Not whether [`AtomicPageBitmap::len`] is 0.)
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| word.load(Ordering::Acquire) == 0)
    }

    /// The number of set bits.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Ordering::Acquire).count_ones())).sum()
    }

    /// The bit of `page`.
    #[must_use]
    #[inline]
    pub fn get(&self, page: PageNumber) -> bool {
        word::locate(page, self.pages).is_some_and(|(word, bit)| self.words[word].load(Ordering::Acquire) & bit != 0)
    }

    /// Sets the bit of `page`; returns what it was.
    #[inline]
    pub fn set(&self, page: PageNumber) -> bool {
        let Some((word, bit)) = word::locate(page, self.pages) else { return false };
        self.words[word].fetch_or(bit, Ordering::AcqRel) & bit != 0
    }

    /// Clears the bit of `page`; returns what it was.
    #[inline]
    pub fn clear(&self, page: PageNumber) -> bool {
        let Some((word, bit)) = word::locate(page, self.pages) else { return false };
        self.words[word].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Sets the bits of `range`.
    pub fn set_range(&self, range: PageRange) {
        for (word, mask) in Span::of(range, self.pages).into_iter().flat_map(Span::words) {
            self.words[word].fetch_or(mask, Ordering::AcqRel);
        }
    }

    /// Clears the bits of `range`.
    pub fn clear_range(&self, range: PageRange) {
        for (word, mask) in Span::of(range, self.pages).into_iter().flat_map(Span::words) {
            self.words[word].fetch_and(!mask, Ordering::AcqRel);
        }
    }

    /// Adds the pages of `other`. Those that this bitmap has no bit for are left out.
    pub fn union_with(&self, other: &PageBitmap) {
        let all = Span::of(PageRange::whole_block(self.pages), self.pages);
        for ((word, mask), with) in all.into_iter().flat_map(Span::words).zip(other.words()) {
            if with & mask != 0 {
                self.words[word].fetch_or(with & mask, Ordering::AcqRel);
            }
        }
    }

    /// The first set bit at `from` or behind it. By the time the caller looks, another thread may have changed it.
    #[must_use]
    pub fn next_set(&self, from: PageNumber) -> Option<PageNumber> {
        self.next_set_in(PageRange::new(from, PageNumber(self.pages)))
    }

    /// The first set bit in `range`: no further is looked.
    #[must_use]
    pub fn next_set_in(&self, range: PageRange) -> Option<PageNumber> {
        let span = Span::of(range, self.pages)?;
        span.words().find_map(|(word, mask)| {
            let bits = self.words[word].load(Ordering::Acquire) & mask;
            (bits != 0).then(|| PageNumber(word::first_page(word) + u64::from(bits.trailing_zeros())))
        })
    }

    /// The first clear bit in `range`, as [`next_set_in`](Self::next_set_in) finds a set one.
    #[must_use]
    pub fn next_clear_in(&self, range: PageRange) -> Option<PageNumber> {
        let span = Span::of(range, self.pages)?;
        span.words().find_map(|(word, mask)| {
            let bits = !self.words[word].load(Ordering::Acquire) & mask;
            (bits != 0).then(|| PageNumber(word::first_page(word) + u64::from(bits.trailing_zeros())))
        })
    }

    /// Clears the bits of `range` and returns those that were set, in a bitmap of the same length. A bit that another
    /// thread sets meanwhile is either returned or still set, never lost.
    #[must_use = "the bits that were set are only in the result"]
    pub fn take(&self, range: PageRange) -> PageBitmap {
        let mut taken = vec![0; self.words.len()];
        for (word, mask) in Span::of(range, self.pages).into_iter().flat_map(Span::words) {
            // Most words of a dirty bitmap are clear: a load leaves their cache line shared.
            if self.words[word].load(Ordering::Acquire) & mask != 0 {
                taken[word] = self.words[word].fetch_and(!mask, Ordering::AcqRel) & mask;
            }
        }
        PageBitmap::from_words(taken, self.pages)
    }

    /// Finds the first set bit in `range` and clears it and those directly behind it, at most `limit` bits in all;
    /// returns exactly the pages whose bits this call cleared. `None` if no bit of `range` was found set.
    ///
    /// This is how a thread claims a batch of neighbouring pages while others claim single ones with
    /// [`AtomicPageBitmap::clear`].
    #[must_use = "the bits that were set are only in the result"]
    pub fn take_run(&self, range: PageRange, limit: u64) -> Option<PageRange> {
        if limit == 0 {
            return None;
        }
        let mut run: Option<PageRange> = None;
        for (word, mask) in Span::of(range, self.pages)?.words() {
            let base = word::first_page(word);
            let mut before = self.words[word].load(Ordering::Acquire);
            loop {
                let candidates = before & mask;
                // A run in progress continues at the first bit of this word; a new one begins at the first set bit.
                let first = if run.is_some() { 0 } else { u64::from(candidates.trailing_zeros()) };
                let room = limit - run.map_or(0, |run| run.len());
                if candidates == 0 || candidates >> first & 1 == 0 || room == 0 {
                    break;
                }
                let length = u64::from((candidates >> first).trailing_ones()).min(room);
                let bits = (u64::MAX >> (word::BITS - length)) << first;
                match self.words[word].compare_exchange_weak(
                    before,
                    before & !bits,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
                    Ok(_) => {
                        let start = run.map_or(PageNumber(base + first), |run| run.start);
                        run = Some(PageRange::new(start, PageNumber(base + first + length)));
                        break;
                    }
                    Err(now) => before = now,
                }
            }
            // The run ends unless it reaches into the next word.
            if run.is_some_and(|run| run.end.0 < base + word::BITS || run.len() >= limit) {
                break;
            }
        }
        run
    }

    /// A copy.
    #[must_use]
    pub fn to_bitmap(&self) -> PageBitmap {
        PageBitmap::from_words(self.words.iter().map(|word| word.load(Ordering::Acquire)).collect(), self.pages)
    }
}

impl From<PageBitmap> for AtomicPageBitmap {
    fn from(bitmap: PageBitmap) -> Self {
        let pages = bitmap.len();
        Self { words: bitmap.into_words().into_iter().map(AtomicU64::new).collect(), pages }
    }
}

impl From<AtomicPageBitmap> for PageBitmap {
    fn from(bitmap: AtomicPageBitmap) -> Self {
        let pages = bitmap.pages;
        Self::from_words(bitmap.words.into_iter().map(AtomicU64::into_inner).collect(), pages)
    }
}

impl fmt::Debug for AtomicPageBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AtomicPageBitmap").field(&self.to_bitmap()).finish()
    }
}

/// The bitmap between writers and a reader that takes its bits, in every interleaving of their steps, with memory as
/// weak as the language allows. For the model checker alone; `cargo xtask test` runs it.
#[cfg(all(test, loom))]
#[allow(clippy::cast_possible_truncation, reason = "there are two pages")]
mod models {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    use super::*;

    const PAGES: u64 = 2;

    /// Memory of two pages: plain stores and loads, which order nothing.
    struct Memory([AtomicUsize; 2]);

    impl Memory {
        fn new() -> Self {
            Self([AtomicUsize::new(0), AtomicUsize::new(0)])
        }

        fn write(&self, page: u64, value: usize) {
            self.0[page as usize].store(value, Ordering::Relaxed);
        }

        fn copy(&self, taken: &PageBitmap, shadow: &mut [usize; 2]) {
            for page in taken.runs().flat_map(|run| run.iter()) {
                shadow[page.0 as usize] = self.0[page.0 as usize].load(Ordering::Relaxed);
            }
        }

        fn now(&self) -> [usize; 2] {
            [0, 1].map(|page: usize| self.0[page].load(Ordering::Relaxed))
        }
    }

    #[test]
    fn what_is_written_before_its_bit_is_set_is_copied_after_the_bit_was_taken() {
        loom::model(|| {
            let memory = Arc::new(Memory::new());
            let bits = Arc::new(AtomicPageBitmap::new(PAGES));
            let writers: Vec<_> = (0..2)
                .map(|writer| {
                    let (memory, bits) = (Arc::clone(&memory), Arc::clone(&bits));
                    thread::spawn(move || {
                        // Each has a page of its own, and both bits are in one word. The first one writes again.
                        for value in 1..3 - writer as usize {
                            memory.write(writer, value);
                            bits.set(PageNumber(writer));
                        }
                    })
                })
                .collect();
            let mut shadow = [0; 2];
            memory.copy(&bits.take(PageRange::whole_block(PAGES)), &mut shadow);
            for writer in writers {
                writer.join().unwrap();
            }
            memory.copy(&bits.take(PageRange::whole_block(PAGES)), &mut shadow);
            assert_eq!(shadow, memory.now());
        });
    }

    #[test]
    fn a_bit_that_several_take_goes_to_one_of_them() {
        loom::model(|| {
            let bits = Arc::new(AtomicPageBitmap::from(PageBitmap::full(PAGES)));
            let other = Arc::clone(&bits);
            let thief = thread::spawn(move || u64::from(other.clear(PageNumber(1))));
            let run = bits.take_run(PageRange::whole_block(PAGES), PAGES).map_or(0, |run| run.len());
            let rest = bits.take(PageRange::whole_block(PAGES)).count();
            assert_eq!(run + rest + thief.join().unwrap(), PAGES);
        });
    }
}
