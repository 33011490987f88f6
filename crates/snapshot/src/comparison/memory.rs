//! The pages of two snapshots side by side.
//!
//! Only pages that are stored are read, a megabyte at a time; a page that is not stored is zero, and a stored page that
//! holds zeros is the same as one that is not stored. What both read from one image at the same offset is not read: it
//! is the same, and whether it is damaged is not found out.

use limosa_migrate::stored::PageSource as _;
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, PageNumber, PageRange, to_u64, to_usize};
use serde::Serialize;

use crate::bytes::Origin;
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
        let left = PageRange::starting_at(start, PIECE.min(range.end.0 - start.0));
        let Piece { pages, is_shared } = first_piece(a, b, left);
        from = pages.end;
        if is_shared {
            continue;
        }
        read(a, pages, &mut of_a)?;
        read(b, pages, &mut of_b)?;
        let pairs = of_a.chunks_exact(PAGE_LEN).zip(of_b.chunks_exact(PAGE_LEN));
        differing += pairs.map(|(a, b)| u64::from(a != b)).sum::<u64>();
    }
    Ok(differing)
}

/// Neighbouring pages: both snapshots have all of them from one place, so that they are equal, or none.
struct Piece {
    pages: PageRange,
    is_shared: bool,
}

/// Returns the first of these pages, up to where that changes. Runs that have to be read are read together.
fn first_piece(a: Side<'_>, b: Side<'_>, pages: PageRange) -> Piece {
    let mut end = pages.start;
    while end < pages.end {
        let run = first_run(a, b, PageRange::new(end, pages.end));
        if run.is_shared && end > pages.start {
            break;
        }
        end = run.pages.end;
        if run.is_shared {
            return Piece { pages: PageRange::new(pages.start, end), is_shared: true };
        }
    }
    Piece { pages: PageRange::new(pages.start, end), is_shared: false }
}

/// Returns the first of these pages, at least one, up to where one of the snapshots has another place.
fn first_run((a, block_a, stored_a): Side<'_>, (b, block_b, stored_b): Side<'_>, pages: PageRange) -> Piece {
    let first = |count: u64| PageRange::starting_at(pages.start, count.clamp(1, pages.len()));
    let of_both = a.origin(block_a, pages).zip(b.origin(block_b, pages));
    let Some(((_, (of_a, len_a)), (_, (of_b, len_b)))) = of_both.filter(|(a, b)| a.0 == b.0) else {
        return Piece { pages, is_shared: false };
    };
    let length = len_a.min(len_b);
    if of_a != of_b {
        return Piece { pages: first(length.div_ceil(PAGE_SIZE)), is_shared: false };
    }
    // A page that is not stored is zero, also if the image has other bytes in its place.
    let is_equal = |page: &PageNumber| of_a == Origin::ZEROS || stored_a.get(*page) == stored_b.get(*page);
    let equal = to_u64(pages.iter().take(to_usize(length / PAGE_SIZE)).take_while(is_equal).count());
    Piece { pages: first(equal), is_shared: equal > 0 }
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
