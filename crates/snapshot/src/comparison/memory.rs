//! The pages of two snapshots side by side.
//!
//! Only pages that are stored are read, a megabyte at a time; a page that is not stored is zero, and a stored page that
//! holds zeros is the same as one that is not stored.

use limosa_migrate::stored::PageSource as _;
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, PageNumber, PageRange, to_usize};
use serde::Serialize;

use crate::error::SnapshotError;
use crate::reader::Snapshot;

/// Pages that are read at once.
const PIECE: u64 = 256;

/// How the memory of two snapshots differs, in pages of 4 KiB over all RAM blocks that both have; of blocks of unequal
/// length, what both have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct MemoryComparison {
    /// Pages compared.
    pub pages: u64,
    /// Stored in the first file only.
    pub only_first: u64,
    /// Stored in the second file only.
    pub only_second: u64,
    /// Stored in both.
    pub both: u64,
    /// Pages whose contents differ, whichever file stores them; `None` if contents were not read.
    pub differing: Option<u64>,
}

/// Compares the pages; reads them if `contents` is set, else only compares which ones are stored.
///
/// # Errors
/// A page that cannot be read as it was saved.
pub fn compare_memory(first: &Snapshot, second: &Snapshot, contents: bool) -> Result<MemoryComparison, SnapshotError> {
    let mut sum = MemoryComparison { differing: contents.then_some(0), ..MemoryComparison::default() };
    for (a, block) in first.setup().blocks.iter().enumerate() {
        let mut others = second.setup().blocks.iter().enumerate();
        let Some((b, other)) = others.find(|(_, other)| other.name == block.name) else { continue };
        let (stored_a, stored_b) = (first.stored_bitmap(a), second.stored_bitmap(b));
        let pages = block.pages().min(other.pages());
        let whole = PageRange::whole_block(pages);
        let mut both = 0;
        for page in stored_a.runs_in(whole).flat_map(|run| run.iter()) {
            both += u64::from(stored_b.get(page));
        }
        sum.pages += pages;
        sum.both += both;
        sum.only_first += stored_a.count_in(whole) - both;
        sum.only_second += stored_b.count_in(whole) - both;
        if let Some(differing) = &mut sum.differing {
            *differing += differing_pages((first, a, stored_a), (second, b, stored_b), whole)?;
        }
    }
    Ok(sum)
}

type Side<'a> = (&'a Snapshot, usize, &'a PageBitmap);

fn differing_pages(a: Side<'_>, b: Side<'_>, range: PageRange) -> Result<u64, SnapshotError> {
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    let mut differing = 0;
    let mut from = range.start;
    // From one stored page to the next piece that has one: memory that neither stores costs nothing.
    while let Some(start) = next_stored(a.2, b.2, from).filter(|page| *page < range.end) {
        let piece = PageRange::starting_at(start, PIECE.min(range.end.0 - start.0));
        read(a, piece, &mut of_a)?;
        read(b, piece, &mut of_b)?;
        let pairs = of_a.chunks_exact(PAGE_LEN).zip(of_b.chunks_exact(PAGE_LEN));
        differing += pairs.map(|(a, b)| u64::from(a != b)).sum::<u64>();
        from = piece.end;
    }
    Ok(differing)
}

fn next_stored(a: &PageBitmap, b: &PageBitmap, from: PageNumber) -> Option<PageNumber> {
    match (a.next_set(from), b.next_set(from)) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Returns the pages' contents; pages that are not stored are zero and are not read.
fn read((snapshot, block, stored): Side<'_>, pages: PageRange, into: &mut Vec<u8>) -> Result<(), SnapshotError> {
    let length = to_usize(pages.len() * PAGE_SIZE);
    into.clear();
    into.resize(length, 0);
    for run in stored.runs_in(pages) {
        let begin = to_usize((run.start.0 - pages.start.0) * PAGE_SIZE);
        let end = begin + to_usize(run.len() * PAGE_SIZE);
        if let Some(part) = into.get_mut(begin..end) {
            snapshot.read_pages(block, run, part)?;
        }
    }
    Ok(())
}
