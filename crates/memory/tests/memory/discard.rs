//! Discarding: what was discarded reads as zero and costs no memory, what lies beside it is untouched, for every kind
//! of memory.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use limosa_memory::{BlockOptions, Discarded, MemoryBlock, MemoryError};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, PageNumber, PageRange};
use limosa_testkit::HugePages;
use proptest::prelude::*;

const HUGE: u64 = 2 << 20;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::starting_at(PageNumber(start), pages)
}

fn fill(block: &MemoryBlock) {
    for page in block.pages().iter() {
        block.write(page.offset(), &[page.0.to_ne_bytes()[0] | 1; PAGE_LEN]).unwrap();
    }
}

/// The first and the last byte of each page.
fn is_zero(block: &MemoryBlock, page: PageNumber) -> bool {
    let mut bytes = vec![0; PAGE_LEN];
    block.read(page.offset(), &mut bytes).unwrap();
    let zero = bytes.iter().all(|byte| *byte == 0);
    assert!(zero || bytes.iter().all(|byte| *byte == page.0.to_ne_bytes()[0] | 1), "page {page} is in pieces");
    zero
}

/// Bytes that the memory of a file has.
fn allocated(block: &MemoryBlock) -> u64 {
    let (file, _) = block.file().unwrap();
    File::from(file.try_clone_to_owned().unwrap()).metadata().unwrap().blocks() * 512
}

fn disk_file(bytes: &[u8]) -> File {
    use std::io::Write as _;
    let mut file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn check(block: &MemoryBlock, discards: &[PageRange]) {
    let before = block.file().map(|_| allocated(block));
    let mut zero = PageBitmap::new(block.pages().len());
    for pages in discards {
        let done = block.discard(*pages).unwrap();
        assert_eq!(done, Discarded { given_back: pages.len(), overwritten: 0 });
        zero.set_range(*pages);
    }
    // Looked at before anything is read: reading a hole of shared memory gives it a page.
    if let Some(before) = before {
        assert_eq!(before - allocated(block), zero.count() * PAGE_SIZE);
    }
    let populated = block.populated(block.pages()).unwrap();
    for page in block.pages().iter() {
        assert_eq!(populated.get(page), !zero.get(page), "page {page}");
        assert_eq!(is_zero(block, page), zero.get(page), "page {page}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn exactly_what_was_discarded_is_zero_and_given_back(
        discards in prop::collection::vec((0u64..300, 0u64..120), 0..8),
        kind in 0..3,
    ) {
        let length = 300 * PAGE_SIZE;
        let block = match kind {
            0 => BlockOptions::anonymous("ram", length).map(),
            1 => BlockOptions::memfd("ram", length).map(),
            // In the middle of a file that has more.
            _ => {
                let file = BlockOptions::memfd("file", 400 * PAGE_SIZE).map().unwrap();
                fill(&file);
                let file = file.file().unwrap().0.try_clone_to_owned().unwrap();
                BlockOptions::file("ram", length, file, 50 * PAGE_SIZE).map()
            }
        }.unwrap();
        fill(&block);
        let discards: Vec<_> = discards.into_iter().map(|(start, pages)| range(start, pages.min(300 - start))).collect();
        check(&block, &discards);
    }
}

#[test]
fn what_lies_outside_the_block_is_refused_and_nothing_is_changed() {
    let block = BlockOptions::memfd("ram", 8 * PAGE_SIZE).map().unwrap();
    fill(&block);
    for pages in [range(7, 2), range(u64::MAX - 1, 1), PageRange::new(PageNumber(0), PageNumber(u64::MAX))] {
        assert!(matches!(block.discard(pages), Err(MemoryError::Outside { .. })), "{pages}");
    }
    assert_eq!(block.discard(PageRange::new(PageNumber(5), PageNumber(2))).unwrap(), Discarded::default());
    assert!(block.pages().iter().all(|page| !is_zero(&block, page)));
}

#[test]
fn huge_pages_go_back_to_their_pool_and_parts_of_them_are_written() {
    let _pages = HugePages::reserve(8 * HUGE).unwrap();
    for options in [BlockOptions::memfd("ram", 4 * HUGE), BlockOptions::anonymous("ram", 4 * HUGE)] {
        let block = options.huge_pages(HUGE).map().unwrap();
        fill(&block);
        let done = block.discard(range(500, 1100)).unwrap();
        assert_eq!(done, Discarded { given_back: 1024, overwritten: 12 + 64 });
        for page in block.pages().iter() {
            assert_eq!(is_zero(&block, page), range(500, 1100).contains(page), "page {page}");
        }
    }
}

#[test]
fn huge_pages_without_memory_are_not_populated_to_make_a_part_of_them_zero() {
    let block = BlockOptions::anonymous("ram", 4 * HUGE).huge_pages(HUGE).map().unwrap();
    // The pool may be empty: then touching one is a signal.
    assert_eq!(block.discard(range(1, 100)).unwrap(), Discarded::default());
}

#[test]
fn a_private_copy_of_a_file_reads_as_zero_too() {
    let mut contents = vec![0; 16 * PAGE_LEN];
    contents[4 * PAGE_LEN..8 * PAGE_LEN].fill(7);
    let file = disk_file(&contents);
    // A hole behind what was written.
    file.set_len(32 * PAGE_SIZE).unwrap();
    let block = BlockOptions::file("rom", 32 * PAGE_SIZE, file.into(), 0).private().map().unwrap();
    fill(&block);
    let done = block.discard(range(2, 26)).unwrap();
    assert_eq!(done.given_back + done.overwritten, 26);
    assert!(done.given_back >= 12, "{done:?}: the hole can be given back");
    for page in block.pages().iter() {
        assert_eq!(is_zero(&block, page), range(2, 26).contains(page), "page {page}");
    }
}

#[test]
fn what_a_private_copy_shows_of_its_file_counts_as_populated() {
    let file = disk_file(&[7; 4 * PAGE_LEN]);
    file.set_len(16 * PAGE_SIZE).unwrap();
    let block = BlockOptions::file("rom", 16 * PAGE_SIZE, file.into(), 0).private().map().unwrap();
    block.write(9 * PAGE_SIZE, &[1]).unwrap();
    let found = block.populated(block.pages()).unwrap();
    assert!(range(0, 4).iter().chain(range(9, 1).iter()).all(|page| found.get(page)));
    assert_eq!(found.count(), 5);
    assert_eq!(block.populated(range(2, 7)).unwrap().runs().collect::<Vec<_>>(), [range(2, 2)]);
}

#[test]
fn a_mapping_of_another_process_sees_that_shared_memory_is_gone() {
    let block = BlockOptions::memfd("ram", 8 * PAGE_SIZE).map().unwrap();
    fill(&block);
    let file = block.file().unwrap().0.try_clone_to_owned().unwrap();
    let other = BlockOptions::file("other", 8 * PAGE_SIZE, file, 0).map().unwrap();
    assert!(!is_zero(&other, PageNumber(3)));
    block.discard(range(3, 1)).unwrap();
    assert!(is_zero(&other, PageNumber(3)));
    assert!(!is_zero(&other, PageNumber(4)));
}
