//! Finding the pages with content: memory in, runs of pages out.

use std::io;
use std::iter::FusedIterator;

use crate::guest::GuestPages;
use crate::zero::{ZeroMethod, kernel};
use crate::{PageNumber, PageRange};

/// The contents of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageKind {
    /// Something other than zeros.
    Data,
    /// Zeros: the page was read.
    Zero,
    /// Zeros: the page was never populated, and was not read.
    Hole,
}

/// Neighbouring pages of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// The pages; never empty.
    pub pages: PageRange,
    /// Their contents.
    pub kind: PageKind,
}

/// The runs of zero and non-zero pages of `bytes`, whose first page has the number `first`. A last page that is cut off
/// counts as a page.
pub fn scan(bytes: &[u8], first: PageNumber) -> Scan<'_> {
    let pages = GuestPages::from(bytes).numbered_from(first);
    Scan::new(pages, pages.pages(), ZeroMethod::best())
}

/// The runs of zero and non-zero pages of guest memory: an iterator that reads on until the kind changes, and up to 64
/// pages further, so that a long range is better asked for in [`PageRange::chunks`].
///
/// Law: runs come in ascending order, touch each other, cover exactly what was asked for, and no two neighbours are of
/// the same kind. A page is looked at once; a page that is known to be a hole is not looked at at all, because reading
/// a hole of shared memory makes the kernel fill it.
#[derive(Clone, Debug)]
pub struct Scan<'a> {
    memory: GuestPages<'a>,
    method: ZeroMethod,
    rest: PageRange,
    /// Results for the first pages of `rest`.
    seen: Seen,
}

/// Pages that were checked and not reported yet.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// A bit each, set where it is zero, the first in the lowest one.
    zero: u64,
    count: u32,
}

impl Seen {
    /// The kind of the first page, and how many pages from there on are of it; none if there is no page.
    fn first(self) -> Option<(PageKind, u32)> {
        let (kind, same) = match self.zero & 1 {
            0 => (PageKind::Data, self.zero.trailing_zeros()),
            _ => (PageKind::Zero, self.zero.trailing_ones()),
        };
        (self.count > 0).then(|| (kind, same.min(self.count)))
    }

    fn skip(&mut self, count: u32) {
        self.zero = self.zero.unbounded_shr(count);
        self.count -= count;
    }
}

impl<'a> Scan<'a> {
    /// Scans the pages of `range` that are in `memory`, by `method`. Reads every page: suitable for populated memory.
    /// See [`ScanPopulated`] for memory with holes.
    #[must_use]
    pub fn new(memory: GuestPages<'a>, range: PageRange, method: ZeroMethod) -> Self {
        Self { memory, method, rest: range.intersect(memory.pages()), seen: Seen::default() }
    }
}

impl Iterator for Scan<'_> {
    type Item = PageRun;

    fn next(&mut self) -> Option<PageRun> {
        let start = self.rest.start;
        let mut run: Option<PageRun> = None;
        while !self.rest.is_empty() {
            if self.seen.count == 0 {
                let (zero, count) = self.memory.zero_pages(self.method, self.rest);
                self.seen = Seen { zero, count };
            }
            let Some((kind, same)) = self.seen.first().filter(|(kind, _)| run.is_none_or(|run| run.kind == *kind))
            else {
                break;
            };
            self.seen.skip(same);
            self.rest.start = self.rest.start.saturating_add(same.into());
            run = Some(PageRun { pages: PageRange::new(start, self.rest.start), kind });
        }
        run
    }
}

impl FusedIterator for Scan<'_> {}

/// The runs of zero and non-zero pages of ranges, one range after the other; each run is within one of them. For short
/// ranges, such as those of a dirty log: the beginning of the next ones is prefetched while one is scanned.
#[derive(Clone, Debug)]
pub struct ScanRanges<'a, 'r> {
    memory: GuestPages<'a>,
    method: ZeroMethod,
    ranges: &'r [PageRange],
    inside: Option<Scan<'a>>,
}

impl<'a, 'r> ScanRanges<'a, 'r> {
    /// Scans the pages of `ranges` that are in `memory`, by `method`. Reads every page, as [`Scan`] does.
    #[must_use]
    pub fn new(memory: GuestPages<'a>, ranges: &'r [PageRange], method: ZeroMethod) -> Self {
        Self { memory, method, ranges, inside: None }
    }
}

impl Iterator for ScanRanges<'_, '_> {
    type Item = PageRun;

    fn next(&mut self) -> Option<PageRun> {
        loop {
            if let Some(run) = self.inside.as_mut().and_then(Iterator::next) {
                return Some(run);
            }
            let (range, rest) = self.ranges.split_first()?;
            if let Some((page, _)) = rest.get(kernel::AHEAD - 1).and_then(|range| self.memory.locate(range.start)) {
                kernel::fetch(page);
            }
            self.ranges = rest;
            self.inside = Some(Scan::new(self.memory, *range, self.method));
        }
    }
}

impl FusedIterator for ScanRanges<'_, '_> {}

/// The runs of guest memory whose populated parts are known: reads only the pages of `data`; all others are
/// [`PageKind::Hole`].
///
/// `data` gives ranges of pages in ascending order that do not touch each other, such as [`crate::holes::data_pages`]
/// of the file that is mapped there. (Ranges that touch cost nothing but the promise that neighbouring runs differ in
/// kind; those out of order are cut off where the scan already is.) The next range is requested only when the scan
/// reaches it. An error of `data` ends the scan: pages not reached are not reported as holes.
///
/// Memory that is populated after `data` passed it is reported as a hole; in a running guest the dirty log reports it
/// later.
#[derive(Debug)]
pub struct ScanPopulated<'a, I> {
    memory: GuestPages<'a>,
    method: ZeroMethod,
    rest: PageRange,
    data: I,
    inside: Option<Scan<'a>>,
}

impl<'a, I: Iterator<Item = io::Result<PageRange>>> ScanPopulated<'a, I> {
    /// Scans the pages of `range` that are in `memory`, by `method`, and reads those of `data` only.
    pub fn new(memory: GuestPages<'a>, range: PageRange, method: ZeroMethod, data: I) -> Self {
        Self { memory, method, rest: range.intersect(memory.pages()), data, inside: None }
    }
}

impl<I: Iterator<Item = io::Result<PageRange>>> Iterator for ScanPopulated<'_, I> {
    type Item = io::Result<PageRun>;

    fn next(&mut self) -> Option<io::Result<PageRun>> {
        loop {
            if let Some(run) = self.inside.as_mut().and_then(Iterator::next) {
                return Some(Ok(run));
            }
            self.inside = None;
            if self.rest.is_empty() {
                return None;
            }
            let populated = match self.data.next() {
                Some(Ok(data)) => data.intersect(self.rest),
                Some(Err(error)) => {
                    self.rest.start = self.rest.end;
                    return Some(Err(error));
                }
                None => PageRange::new(self.rest.end, self.rest.end),
            };
            if populated.is_empty() && populated.start < self.rest.end {
                continue;
            }
            let (hole, _) = self.rest.split_at(populated.start);
            self.rest.start = populated.end;
            self.inside = Some(Scan::new(self.memory, populated, self.method));
            if !hole.is_empty() {
                return Some(Ok(PageRun { pages: hole, kind: PageKind::Hole }));
            }
        }
    }
}
