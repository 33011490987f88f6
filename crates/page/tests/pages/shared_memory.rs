//! Scans of real shared memory with holes, and of memory that is being written meanwhile.
#![allow(unsafe_code, reason = "maps files and looks at them through raw pointers, as a user of guest memory does")]

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;

use limosa_page::holes::{data_pages, data_ranges};
use limosa_page::{
    GuestPages, PAGE_LEN, PAGE_SIZE, PageKind, PageNumber, PageRange, PageRun, Scan, ScanPopulated, ZeroMethod,
};
use proptest::collection::vec;
use proptest::prelude::*;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

fn memfd(len: u64) -> File {
    let file = File::from(memfd_create("limosa-page-test", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

/// A shared mapping of a file, taken away at the end.
struct Mapping {
    start: *mut u8,
    len: usize,
}

impl Mapping {
    fn of(file: &File, len: u64, offset: u64) -> Self {
        let len = usize::try_from(len).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, file, offset).unwrap() };
        Self { start: start.cast(), len }
    }

    fn pages(&self) -> GuestPages<'_> {
        // SAFETY: mapped and readable as long as `self` lives; no test truncates a file that is mapped.
        unsafe { GuestPages::new(self.start, self.len, PageNumber(0)) }
    }

    /// A byte that several threads may write and read.
    fn byte(&self, offset: usize) -> &AtomicU8 {
        assert!(offset < self.len);
        // SAFETY: inside the mapping, which is writable; a byte is always aligned, and all access is atomic or
        // volatile.
        unsafe { AtomicU8::from_ptr(self.start.add(offset)) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `of`, which nothing borrows any more.
        unsafe { munmap(self.start.cast(), self.len).unwrap() };
    }
}

#[test]
fn a_scan_of_an_empty_memfd_of_8_gib_allocates_nothing() {
    let len = 8 << 30;
    let file = memfd(len);
    let mapping = Mapping::of(&file, len, 0);
    let pages = mapping.pages();
    let data = data_pages(file.as_fd(), 0, pages.pages()).unwrap();
    let runs: Vec<_> = ScanPopulated::new(pages, pages.pages(), ZeroMethod::best(), data).map(Result::unwrap).collect();
    assert_eq!(runs, [PageRun { pages: PageRange::whole_block(len / PAGE_SIZE), kind: PageKind::Hole }]);
    assert_eq!(file.metadata().unwrap().blocks(), 0);
}

/// Why the test above means something: without asking for the holes first it would fail.
#[test]
fn a_scan_that_reads_holes_of_shared_memory_allocates_all_of_it() {
    let len = 1 << 20;
    let file = memfd(len);
    let mapping = Mapping::of(&file, len, 0);
    let runs: Vec<_> = Scan::new(mapping.pages(), mapping.pages().pages(), ZeroMethod::best()).collect();
    assert_eq!(runs, [PageRun { pages: PageRange::whole_block(256), kind: PageKind::Zero }]);
    assert!(file.metadata().unwrap().blocks() * 512 >= len);
}

#[test]
fn a_sparse_memfd_of_8_gib_is_scanned_where_it_has_data_only() {
    let len = 8 << 30;
    let file = memfd(len);
    file.write_all_at(b"boot", 0).unwrap();
    file.write_all_at(b"far away", (5 << 30) + 4090).unwrap();
    file.write_all_at(&[0], len - 1).unwrap();
    let before = file.metadata().unwrap().blocks();
    let mapping = Mapping::of(&file, len, 0);
    let pages = mapping.pages();
    let data = data_pages(file.as_fd(), 0, pages.pages()).unwrap();
    let runs: Vec<_> = ScanPopulated::new(pages, pages.pages(), ZeroMethod::best(), data).map(Result::unwrap).collect();
    let found: Vec<_> = runs.iter().map(|run| (run.kind, run.pages.start.0, run.pages.len())).collect();
    let (far, last) = ((5 << 30) / PAGE_SIZE, len / PAGE_SIZE - 1);
    assert_eq!(
        found,
        [
            (PageKind::Data, 0, 1),
            (PageKind::Hole, 1, far - 1),
            (PageKind::Data, far, 2),
            (PageKind::Hole, far + 2, last - far - 2),
            (PageKind::Zero, last, 1),
        ]
    );
    assert_eq!(file.metadata().unwrap().blocks(), before, "the scan allocated something");
}

#[test]
fn pages_are_counted_from_where_the_mapping_begins_in_the_file() {
    let file = memfd(64 * PAGE_SIZE);
    file.write_all_at(&[7], 20 * PAGE_SIZE).unwrap();
    let mapping = Mapping::of(&file, 48 * PAGE_SIZE, 16 * PAGE_SIZE);
    let pages = mapping.pages();
    let data = data_pages(file.as_fd(), 16 * PAGE_SIZE, pages.pages()).unwrap();
    let runs = ScanPopulated::new(pages, pages.pages(), ZeroMethod::best(), data).map(Result::unwrap);
    let stored: Vec<_> = runs.filter(|run| run.kind == PageKind::Data).map(|run| run.pages).collect();
    assert_eq!(stored, [PageRange::starting_at(PageNumber(4), 1)]);
}

#[test]
fn the_end_of_the_file_is_no_data_and_neither_is_what_lies_behind() {
    let file = memfd(0);
    file.write_all_at(&[1; 5000], 0).unwrap();
    let ranges = |start, end| -> Vec<_> {
        let ranges = data_ranges(file.as_fd(), start..end).unwrap().map(Result::unwrap);
        ranges.map(|range| (range.start, range.end)).collect()
    };
    assert_eq!(ranges(0, u64::MAX), [(0, 5000)]);
    assert_eq!(ranges(100, 200), [(100, 200)]);
    assert_eq!(ranges(5000, 9000), []);
    assert_eq!(ranges(u64::MAX - 1, u64::MAX), []);
    assert_eq!(ranges(200, 100), []);
}

#[test]
fn a_file_without_a_hole_is_one_range_and_has_holes_again_once_one_is_punched() {
    let file = memfd(0);
    for page in 0..40 {
        file.write_all_at(&[1; 4096], page * PAGE_SIZE).unwrap();
    }
    file.write_all_at(&[1], 40 * PAGE_SIZE).unwrap();
    let ranges = |start, end| -> Vec<_> {
        let ranges = data_ranges(file.as_fd(), start..end).unwrap().map(Result::unwrap);
        ranges.map(|range| (range.start, range.end)).collect()
    };
    assert_eq!(ranges(0, u64::MAX), [(0, 40 * PAGE_SIZE + 1)]);
    assert_eq!(ranges(3, 7), [(3, 7)]);
    assert_eq!(ranges(40 * PAGE_SIZE + 1, u64::MAX), []);
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 8 * PAGE_SIZE, PAGE_SIZE).unwrap();
    assert_eq!(ranges(0, 20 * PAGE_SIZE), [(0, 8 * PAGE_SIZE), (9 * PAGE_SIZE, 20 * PAGE_SIZE)]);
    file.write_all_at(&[0], 8 * PAGE_SIZE).unwrap();
    assert_eq!(ranges(0, 20 * PAGE_SIZE), [(0, 20 * PAGE_SIZE)]);
}

#[test]
fn data_taken_away_while_it_is_listed_ends_the_list_early_and_not_in_a_loop() {
    let file = memfd(100 * PAGE_SIZE);
    for page in (0..100).step_by(2) {
        file.write_all_at(&[1], page * PAGE_SIZE).unwrap();
    }
    let mut ranges = data_ranges(file.as_fd(), 0..100 * PAGE_SIZE).unwrap();
    assert_eq!(ranges.next().unwrap().unwrap(), 0..PAGE_SIZE);
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 90 * PAGE_SIZE).unwrap();
    assert_eq!(ranges.next().unwrap().unwrap(), 90 * PAGE_SIZE..91 * PAGE_SIZE);
    file.set_len(0).unwrap();
    assert!(ranges.next().is_none());
    assert!(ranges.next().is_none());
}

#[test]
fn what_cannot_have_holes_is_an_error_at_once() {
    let (reader, _writer) = io::pipe().unwrap();
    let error = data_ranges(reader.as_fd(), 0..4096).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotSeekable);
}

#[test]
fn pages_that_are_written_during_a_scan_do_not_disturb_the_others() {
    const PAGES: usize = 64;
    let len = u64::try_from(PAGES * PAGE_LEN).unwrap();
    let file = memfd(len);
    let mapping = Mapping::of(&file, len, 0);
    for page in (0..PAGES).step_by(4) {
        mapping.byte(page * PAGE_LEN + 2000).store(1, Ordering::Relaxed);
    }
    // Another mapping of the same memory, as a guest has it: page 2 of every 4 flickers, 1 and 3 stay zero.
    let (other, done) = (Mapping::of(&file, len, 0), AtomicBool::new(false));
    let flickering: Vec<_> = (2..PAGES).step_by(4).map(|page| other.byte(page * PAGE_LEN + 3000)).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for byte in &flickering {
                    byte.fetch_xor(1, Ordering::Relaxed);
                }
            }
        });
        for method in ZeroMethod::available().cycle().take(600) {
            let runs: Vec<_> = Scan::new(mapping.pages(), mapping.pages().pages(), method).collect();
            let kinds: Vec<_> = runs.iter().flat_map(|run| run.pages.iter().map(|_| run.kind)).collect();
            assert_eq!(kinds.len(), PAGES);
            for (page, kind) in kinds.into_iter().enumerate() {
                match page % 4 {
                    0 => assert_eq!(kind, PageKind::Data, "{method}: page {page}"),
                    2 => assert_ne!(kind, PageKind::Hole, "{method}: page {page}"),
                    _ => assert_eq!(kind, PageKind::Zero, "{method}: page {page}"),
                }
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}

proptest! {
    /// tmpfs knows its holes to the page, unless the system is set to use huge pages for shared memory.
    #[test]
    fn ranges_of_data_are_those_written_whatever_was_written(
        written in vec(0u64..64, 0..24),
        file_offset in 0u64..3 * PAGE_SIZE,
        range in (0u64..70 * PAGE_SIZE, 0u64..70 * PAGE_SIZE),
    ) {
        let file = memfd(64 * PAGE_SIZE);
        for page in &written {
            file.write_all_at(&[0], page * PAGE_SIZE + 5).unwrap();
        }
        let has_data = |byte: u64| written.contains(&(byte / PAGE_SIZE));

        let ranges: Vec<_> = data_ranges(file.as_fd(), range.0..range.1).unwrap().collect::<io::Result<_>>().unwrap();
        prop_assert!(ranges.iter().all(|range| range.start < range.end));
        prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        // Whether a byte is data changes at page borders and at the ends of the range only.
        for byte in (0..64).map(|page| page * PAGE_SIZE).chain([range.0, range.1.saturating_sub(1)]) {
            let expected = has_data(byte) && range.0 <= byte && byte < range.1;
            prop_assert_eq!(ranges.iter().any(|range| range.contains(&byte)), expected, "byte {}", byte);
        }

        let pages = PageRange::covering(&(range.0..range.1));
        let found: Vec<_> = data_pages(file.as_fd(), file_offset, pages).unwrap().collect::<io::Result<_>>().unwrap();
        prop_assert!(found.iter().all(|pages| !pages.is_empty()));
        prop_assert!(found.windows(2).all(|pair| pair[0].end < pair[1].start));
        for page in (0..72).map(PageNumber) {
            let last = file_offset + page.offset() + PAGE_SIZE - 1;
            let expected = pages.contains(page) && (has_data(last) || has_data(file_offset + page.offset()));
            prop_assert_eq!(found.iter().any(|pages| pages.contains(page)), expected, "page {}", page);
        }
    }
}
