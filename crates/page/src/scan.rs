//! Which pages have content: memory in, runs of pages out.
//!
//! Law: runs come in ascending order, touch each other, cover exactly what was asked for, and no two neighbours are of
//! the same kind. A page is looked at once; a page that is known to be a hole is not looked at at all, because reading
//! a hole of shared memory makes the kernel fill it.

use std::io;
use std::iter::FusedIterator;

use crate::guest::GuestPages;
use crate::zero::Method;
use crate::{PageNumber, PageRange};

/// What a page contains.
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
pub struct Run {
    /// The pages; never empty.
    pub pages: PageRange,
    /// What they contain.
    pub kind: PageKind,
}

/// The runs of zero and non-zero pages of `bytes`, whose first page has the number `first`. A last page that is cut off
/// counts as a page.
pub fn scan(bytes: &[u8], first: PageNumber) -> Scan<'_> {
    let pages = GuestPages::from(bytes).numbered_from(first);
    Scan::new(pages, pages.pages(), Method::best())
}

/// The runs of zero and non-zero pages of guest memory: an iterator that reads on until the kind changes, so that a
/// long range is better asked for in [`PageRange::chunks`].
#[derive(Clone, Debug)]
pub struct Scan<'a> {
    memory: GuestPages<'a>,
    method: Method,
    rest: PageRange,
    /// The kind of the first page of `rest`, if it was looked at already, as the end of the run before it.
    ahead: Option<PageKind>,
}

impl<'a> Scan<'a> {
    /// Scans the pages of `range`, as far as `memory` has them, by `method`. Reads every page: fit for memory that is
    /// populated. See [`ScanData`] for memory with holes.
    #[must_use]
    pub fn new(memory: GuestPages<'a>, range: PageRange, method: Method) -> Self {
        Self { memory, method, rest: range.intersect(memory.pages()), ahead: None }
    }

    fn look(&self, page: PageNumber) -> Option<PageKind> {
        let zero = self.memory.page_is_zero(self.method, page)?;
        Some(if zero { PageKind::Zero } else { PageKind::Data })
    }
}

impl Iterator for Scan<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.rest.is_empty() {
            return None;
        }
        let start = self.rest.start;
        let kind = match self.ahead.take() {
            Some(kind) => kind,
            None => self.look(start)?,
        };
        let mut end = start;
        loop {
            end = end.saturating_add(1);
            if end >= self.rest.end {
                break;
            }
            let next = self.look(end)?;
            if next != kind {
                self.ahead = Some(next);
                break;
            }
        }
        self.rest.start = end;
        Some(Run { pages: PageRange::new(start, end), kind })
    }
}

impl FusedIterator for Scan<'_> {}

/// The runs of guest memory of which it is known what was ever populated: reads only pages that `data` names, all others
/// are [`PageKind::Hole`].
///
/// `data` gives ranges of pages in ascending order that do not touch each other, such as [`crate::holes::data_pages`] of
/// the file that is mapped there. (Ranges that touch cost nothing but the promise that neighbouring runs differ in kind;
/// those out of order are cut off where the scan already is.) It is asked for the next range only when the scan gets there. An error of `data` ends the scan: what was not
/// reached is not reported as a hole.
///
/// Memory that is populated after `data` passed it is reported as a hole: as with everything in a running guest, a
/// dirty log says so later.
#[derive(Debug)]
pub struct ScanData<'a, I> {
    memory: GuestPages<'a>,
    method: Method,
    rest: PageRange,
    data: I,
    inside: Option<Scan<'a>>,
}

impl<'a, I: Iterator<Item = io::Result<PageRange>>> ScanData<'a, I> {
    /// Scans the pages of `range`, as far as `memory` has them, by `method`, reading those of `data` only.
    pub fn new(memory: GuestPages<'a>, range: PageRange, method: Method, data: I) -> Self {
        Self { memory, method, rest: range.intersect(memory.pages()), data, inside: None }
    }
}

impl<I: Iterator<Item = io::Result<PageRange>>> Iterator for ScanData<'_, I> {
    type Item = io::Result<Run>;

    fn next(&mut self) -> Option<io::Result<Run>> {
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
                return Some(Ok(Run { pages: hole, kind: PageKind::Hole }));
            }
        }
    }
}
