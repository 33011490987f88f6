//! A few pages of a block are asked for, and the answer is the one about all of it.

use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use limosa_memory::{BlockOptions, MemoryBlock, ReleaseMethod};
use limosa_page::{PAGE_SIZE, PageBitmap, PageNumber, PageRange, holes};
use proptest::prelude::*;

const PAGES: u64 = 3000;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::starting_at(PageNumber(start), pages)
}

fn among(block: &MemoryBlock, wanted: &PageBitmap) -> PageBitmap {
    let mut found = PageBitmap::new(block.pages().len());
    block.for_each_populated(wanted.runs(), |run| found.set_range(run)).unwrap();
    found
}

fn runs() -> impl Strategy<Value = Vec<(u64, u64)>> {
    // Single pages, short runs and long ones.
    let length = prop_oneof![Just(1), 1..8_u64, 1..600_u64];
    prop::collection::vec((0..PAGES, length), 0..40)
}

fn bitmap(runs: &[(u64, u64)]) -> PageBitmap {
    let mut bitmap = PageBitmap::new(PAGES);
    runs.iter().for_each(|(start, pages)| bitmap.set_range(range(*start, (*pages).min(PAGES - start))));
    bitmap
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn few_pages_are_said_of_what_is_said_of_all(
        written in runs(),
        given_back in runs(),
        wanted in runs(),
        kind in 0..4,
    ) {
        let options = match kind {
            0 => BlockOptions::memfd("ram", PAGES * PAGE_SIZE),
            1 => BlockOptions::anonymous("ram", PAGES * PAGE_SIZE),
            2 => {
                // Elsewhere in its file, with data before and behind it.
                let memfd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                rustix::fs::ftruncate(&memfd, (PAGES + 14) * PAGE_SIZE).unwrap();
                rustix::io::pwrite(&memfd, b"before", 0).unwrap();
                rustix::io::pwrite(&memfd, b"behind", (PAGES + 7) * PAGE_SIZE).unwrap();
                BlockOptions::file("ram", PAGES * PAGE_SIZE, memfd, 7 * PAGE_SIZE)
            }
            _ => {
                let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
                file.set_len(PAGES * PAGE_SIZE).unwrap();
                BlockOptions::file("ram", PAGES * PAGE_SIZE, file.into(), 0)
            }
        };
        let block = options.map().unwrap();
        for page in bitmap(&written).runs().flat_map(|run| run.iter().collect::<Vec<_>>()) {
            block.write(page.0 * PAGE_SIZE, b"contents").unwrap();
        }
        for run in bitmap(&given_back).runs() {
            let method = if block.is_shared() { ReleaseMethod::PunchHole } else { ReleaseMethod::DontNeed };
            block.release(run, method).unwrap();
        }
        let wanted = bitmap(&wanted);
        let mut expected = block.populated(block.pages()).unwrap();
        expected.intersect_with(&wanted);
        prop_assert!(among(&block, &wanted) == expected);
    }
}

#[test]
fn a_file_elsewhere_is_asked_as_a_whole() {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(PAGES * PAGE_SIZE).unwrap();
    let is_tmpfs = holes::is_tmpfs(file.as_fd());
    let there = BlockOptions::file("ram", PAGES * PAGE_SIZE, file.into(), 0).map().unwrap();
    assert!(is_tmpfs || !there.can_query_ranges());
    assert!(BlockOptions::anonymous("ram", PAGES * PAGE_SIZE).map().unwrap().can_query_ranges());
}

#[test]
fn what_is_full_is_all_of_it() {
    let block = BlockOptions::memfd("ram", PAGES * PAGE_SIZE).map().unwrap();
    for page in 0..PAGES {
        block.write(page * PAGE_SIZE, b"contents").unwrap();
    }
    let wanted = bitmap(&[(5, 1), (100, 2000), (PAGES - 1, 1)]);
    assert!(among(&block, &wanted) == wanted);
}

/// Pages that are populated while it is looked are counted in place of others: none of the others is taken for a hole.
#[test]
fn what_was_there_before_is_found_whatever_is_populated_and_given_back_meanwhile() {
    let block = BlockOptions::memfd("ram", PAGES * PAGE_SIZE).map().unwrap();
    // Every other page of the second half stays.
    let stays: Vec<_> = (PAGES / 2..PAGES).step_by(2).collect();
    stays.iter().for_each(|page| block.write(page * PAGE_SIZE, b"contents").unwrap());
    let (all, over) = (bitmap(&[(0, PAGES)]), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for page in (0..PAGES / 2).step_by(3) {
                    block.write(page * PAGE_SIZE, b"passing").unwrap();
                }
                block.release(range(0, PAGES / 2), ReleaseMethod::PunchHole).unwrap();
            }
        });
        for _ in 0..200 {
            let found = among(&block, &all);
            if let Some(lost) = stays.iter().find(|page| !found.get(PageNumber(**page))) {
                over.store(true, Ordering::Relaxed);
                panic!("page {lost} passes for a hole");
            }
        }
        over.store(true, Ordering::Relaxed);
    });
}
