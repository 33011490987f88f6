//! Finds the arriving pages that a file does not have yet.
//!
//! Law of this module: only the file that would be written to is asked. It has the last contents of each page, also of
//! one that came before in the same checkpoint, so leaving an equal page out never changes the outcome.

use std::io::IoSlice;

use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, PageNumber, PageRange, to_usize};

use crate::error::SnapshotError;
use crate::received::BlockPages;
use crate::store::StoreFile;

/// Pages that are read at once: 256 KiB stay in the processor's cache until they are compared.
pub(super) const STRIDE: u64 = 64;

/// A buffer for [`STRIDE`] pages.
pub(super) fn buffer() -> Vec<u8> {
    vec![0; to_usize(STRIDE * PAGE_SIZE)]
}

/// The part of a [`buffer`] for at most [`STRIDE`] pages.
pub(super) fn part<'b>(
    file: &StoreFile,
    buffer: &'b mut [u8],
    pages: PageRange,
) -> Result<&'b mut [u8], SnapshotError> {
    let length = to_usize(pages.len() * PAGE_SIZE);
    buffer.get_mut(..length).ok_or_else(|| file.misuse(format!("{pages} at once, where {STRIDE} can be")))
}

/// Returns the pages among `range` whose contents the file does not have; bit 0 is the first page of the range.
///
/// Pages that are not stored are not read: what has contents is another page than zeros.
pub(super) fn changed_pages(
    file: &StoreFile,
    known: &BlockPages,
    range: PageRange,
    pages: &[IoSlice<'_>],
    buffer: &mut [u8],
) -> Result<PageBitmap, SnapshotError> {
    let mut changed = PageBitmap::full(range.len());
    for run in known.stored.runs_in(range) {
        let stored = part(file, buffer, run)?;
        file.read_pages(&known.place, &known.stored, run, stored)?;
        let at = run.start.0 - range.start.0;
        let arrived = pages.iter().skip(to_usize(at));
        for ((stored, page), number) in stored.chunks_exact(PAGE_LEN).zip(arrived).zip(at..) {
            if **page == *stored {
                changed.clear(PageNumber(number));
            }
        }
    }
    Ok(changed)
}
