//! Writes that both userfaultfd logs see, on every kind of memory. Needs a kernel with userfaultfd and 2 MiB pages
//! (root).
#![allow(missing_docs, reason = "a test")]
#![allow(unsafe_code, reason = "writes guest memory, and drops page table entries of it")]

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use limosa_memory::dirty::{DirtyLog, DirtyPages, LogError, UffdWpAsyncLog, UffdWpSyncLog, Writers, best_uffd_log};
use limosa_memory::{BlockOptions, GuestMemory, ReleaseMethod};
use limosa_page::{PAGE_SIZE, PageNumber, PageRange};
use limosa_testkit::HugePages;
use rustix::mm::{Advice, madvise};

const LENGTH: u64 = 16 << 20;

fn memory(options: BlockOptions) -> Arc<GuestMemory> {
    Arc::new(GuestMemory::new(vec![options.map().unwrap()]).unwrap())
}

fn small_pages() -> Vec<Arc<GuestMemory>> {
    vec![
        memory(BlockOptions::anonymous("ram", LENGTH)),
        memory(BlockOptions::memfd("ram", LENGTH)),
        memory(BlockOptions::memfd("ram", LENGTH).private()),
    ]
}

fn logs(memory: &Arc<GuestMemory>) -> Vec<Box<dyn DirtyLog>> {
    vec![
        Box::new(UffdWpAsyncLog::new(Arc::clone(memory)).unwrap()),
        Box::new(UffdWpSyncLog::new(Arc::clone(memory)).unwrap()),
    ]
}

fn fetched(log: &mut dyn DirtyLog, memory: &GuestMemory) -> Vec<PageRange> {
    let mut dirty = DirtyPages::new(memory);
    log.fetch(&mut dirty).unwrap();
    dirty.block(0).unwrap().runs().collect()
}

fn page(number: u64) -> PageRange {
    PageRange::starting_at(PageNumber(number), 1)
}

fn poke(memory: &GuestMemory, page: u64) {
    memory.block(0).unwrap().write(page * PAGE_SIZE + 17, b"x").unwrap();
}

#[test]
fn exactly_the_pages_written_since_the_last_fetch_are_named_populated_or_not() {
    for memory in small_pages() {
        for mut log in logs(&memory) {
            poke(&memory, 3);
            poke(&memory, 4);
            log.start().unwrap();
            assert_eq!(fetched(&mut *log, &memory), [], "{}", log.name());
            for number in [3, 1000, 1001, 4095] {
                poke(&memory, number);
            }
            let expected = [page(3), PageRange::starting_at(PageNumber(1000), 2), page(4095)];
            assert_eq!(fetched(&mut *log, &memory), expected, "{}", log.name());
            assert_eq!(fetched(&mut *log, &memory), []);
            poke(&memory, 3);
            assert_eq!(fetched(&mut *log, &memory), [page(3)]);
            log.stop().unwrap();
            poke(&memory, 5);
            assert!(matches!(log.fetch(&mut DirtyPages::new(&memory)), Err(LogError::NotStarted { .. })));
        }
    }
}

#[test]
fn a_page_that_is_only_read_is_not_named_but_once_if_it_was_never_touched() {
    for memory in small_pages() {
        for mut log in logs(&memory) {
            poke(&memory, 9);
            log.start().unwrap();
            for number in 0..64 {
                memory.block(0).unwrap().read(number * PAGE_SIZE, &mut [0; 8]).unwrap();
            }
            let named = fetched(&mut *log, &memory);
            if memory.block(0).unwrap().file().is_none() && log.name().contains("asynchronous") {
                // Of private memory; what was there before the log is distinguished from it.
                assert_eq!(named, [PageRange::whole_block(9), PageRange::starting_at(PageNumber(10), 54)]);
            } else {
                assert_eq!(named, [], "{}", log.name());
            }
            assert_eq!(fetched(&mut *log, &memory), [], "{}", log.name());
            poke(&memory, 7);
            poke(&memory, 9);
            assert_eq!(fetched(&mut *log, &memory), [page(7), page(9)], "{}", log.name());
        }
    }
}

#[test]
fn what_was_never_written_of_private_memory_is_not_taken_for_populated_while_the_log_is_on() {
    let memory = memory(BlockOptions::anonymous("ram", LENGTH));
    let block = memory.block(0).unwrap();
    block.advise_huge_pages(block.pages(), false).unwrap();
    let populated = || block.populated(block.pages()).unwrap().runs().collect::<Vec<_>>();
    let mut log = UffdWpAsyncLog::new(Arc::clone(&memory)).unwrap();
    poke(&memory, 9);
    log.start().unwrap();
    assert_eq!(populated(), [page(9)]);
    poke(&memory, 600);
    assert_eq!(populated(), [page(9), page(600)]);
    assert_eq!(fetched(&mut log, &memory), [page(600)]);
    assert_eq!(populated(), [page(9), page(600)]);
    assert_eq!(fetched(&mut log, &memory), []);
}

#[test]
fn what_the_kernel_writes_for_this_process_is_seen() {
    for memory in small_pages() {
        for mut log in logs(&memory) {
            log.start().unwrap();
            let place = memory.block(0).unwrap().iovec(PageRange::starting_at(PageNumber(20), 2)).unwrap();
            let source = std::fs::File::open("/dev/zero").unwrap();
            // SAFETY: the memory is there as long as the block is, and no reference to it exists.
            let read = unsafe { libc::read(source.as_raw_fd(), place.iov_base, place.iov_len) };
            assert_eq!(usize::try_from(read).unwrap(), place.iov_len);
            assert_eq!(fetched(&mut *log, &memory), [PageRange::starting_at(PageNumber(20), 2)], "{}", log.name());
        }
    }
}

#[test]
fn a_written_page_of_shared_memory_whose_mapping_was_dropped_is_named() {
    let memory = memory(BlockOptions::memfd("ram", LENGTH));
    for mut log in logs(&memory) {
        log.start().unwrap();
        poke(&memory, 40);
        let place = memory.block(0).unwrap().iovec(PageRange::starting_at(PageNumber(32), 32)).unwrap();
        // As the kernel does when it swaps: the entries of shared memory go, the contents stay in the file.
        // SAFETY: the mapping is shared, so its contents do not change.
        assert_eq!(unsafe { libc::madvise(place.iov_base, place.iov_len, libc::MADV_DONTNEED) }, 0);
        let first = fetched(&mut *log, &memory);
        assert!(first.iter().any(|run| run.contains(PageNumber(40))), "{}: {first:?}", log.name());
        assert_eq!(fetched(&mut *log, &memory), []);
        poke(&memory, 41);
        assert_eq!(fetched(&mut *log, &memory), [page(41)], "{}", log.name());
    }
}

#[test]
fn a_write_to_a_huge_page_names_all_of_it() {
    let _reserved = HugePages::reserve(LENGTH).unwrap();
    let memory = memory(BlockOptions::memfd("ram", LENGTH).huge_pages(2 << 20));
    for mut log in logs(&memory) {
        poke(&memory, 512 * 2);
        log.start().unwrap();
        assert_eq!(fetched(&mut *log, &memory), []);
        poke(&memory, 512 * 2 + 5);
        poke(&memory, 512 * 6 + 511);
        let huge = |number: u64| PageRange::starting_at(PageNumber(512 * number), 512);
        assert_eq!(fetched(&mut *log, &memory), [huge(2), huge(6)], "{}", log.name());
        assert_eq!(fetched(&mut *log, &memory), []);
        poke(&memory, 512 * 2);
        assert_eq!(fetched(&mut *log, &memory), [huge(2)]);
    }
}

#[test]
fn a_written_huge_page_whose_mapping_was_dropped_is_named_once() {
    let _reserved = HugePages::reserve(LENGTH).unwrap();
    let memory = memory(BlockOptions::memfd("ram", LENGTH).huge_pages(2 << 20));
    for mut log in logs(&memory) {
        log.start().unwrap();
        poke(&memory, 512 * 3);
        let place = memory.block(0).unwrap().iovec(memory.block(0).unwrap().pages()).unwrap();
        // SAFETY: the mapping is shared, so its contents do not change.
        assert_eq!(unsafe { libc::madvise(place.iov_base, place.iov_len, libc::MADV_DONTNEED) }, 0);
        let first = fetched(&mut *log, &memory);
        assert!(first.iter().any(|run| run.contains(PageNumber(512 * 3))), "{}: {first:?}", log.name());
        assert_eq!(fetched(&mut *log, &memory), [], "{}", log.name());
        poke(&memory, 512 * 3);
        assert_eq!(fetched(&mut *log, &memory), [PageRange::starting_at(PageNumber(512 * 3), 512)]);
    }
}

#[test]
fn more_dirty_runs_than_one_call_can_tell_are_all_named() {
    for memory in [memory(BlockOptions::anonymous("ram", 160 << 20)), memory(BlockOptions::memfd("ram", 160 << 20))] {
        for mut log in logs(&memory) {
            log.start().unwrap();
            let pages = memory.block(0).unwrap().pages();
            // Over the log with the handler every write is two switches of threads.
            for number in pages.iter().step_by(2) {
                poke(&memory, number.0);
            }
            let mut dirty = DirtyPages::new(&memory);
            log.fetch(&mut dirty).unwrap();
            assert_eq!(dirty.count(), pages.len() / 2);
            assert!(pages.iter().step_by(2).all(|page| dirty.block(0).unwrap().get(page)));
            assert_eq!(fetched(&mut *log, &memory), []);
        }
    }
}

#[test]
fn memory_that_another_log_watches_is_refused_and_stays_as_it_was() {
    let memory = memory(BlockOptions::anonymous("ram", LENGTH));
    let mut first = UffdWpAsyncLog::new(Arc::clone(&memory)).unwrap();
    first.start().unwrap();
    for mut second in logs(&memory) {
        let refused = second.start().unwrap_err();
        assert!(refused.to_string().contains("registered with another userfaultfd"), "{refused}");
    }
    poke(&memory, 1);
    assert_eq!(fetched(&mut first, &memory), [page(1)]);
    drop(first);
    for mut log in logs(&memory) {
        log.start().unwrap();
    }
}

#[test]
fn the_best_log_here_covers_all_writers_of_this_process() {
    let memory = memory(BlockOptions::memfd("ram", LENGTH));
    let mut log = best_uffd_log(&memory).unwrap();
    assert!(log.writers().contains(Writers::VCPUS | Writers::DEVICES));
    assert!(!log.writers().contains(Writers::VHOST));
    log.start().unwrap();
    poke(&memory, 2);
    assert_eq!(fetched(&mut *log, &memory), [page(2)]);
}

#[test]
fn a_page_that_is_given_back_is_written_and_what_is_written_to_it_next_is_seen() {
    for memory in small_pages() {
        for mut log in logs(&memory) {
            let block = memory.block(0).unwrap();
            (0..64).for_each(|page| poke(&memory, page));
            log.start().unwrap();
            let mut expected = vec![page(0)];
            block.discard(page(0)).unwrap();
            for (method, number) in
                [ReleaseMethod::PunchHole, ReleaseMethod::DontNeed, ReleaseMethod::Remove, ReleaseMethod::Free]
                    .into_iter()
                    .zip(1..)
            {
                if block.supports_release(method) {
                    block.release(page(2 * number), method).unwrap();
                    expected.push(page(2 * number));
                }
            }
            for round in 0..3 {
                assert_eq!(fetched(&mut *log, &memory), expected, "{}, fetch {round}", log.name());
                expected.iter().for_each(|page| poke(&memory, page.start.0));
            }
            log.stop().unwrap();
        }
    }
}

#[test]
fn what_was_freed_lazily_before_the_log_began_is_not_written_unseen() {
    let memory = memory(BlockOptions::anonymous("ram", LENGTH));
    let block = memory.block(0).unwrap();
    for mut log in logs(&memory) {
        (0..64).for_each(|page| poke(&memory, page));
        block.release(PageRange::whole_block(64), ReleaseMethod::Free).unwrap();
        log.start().unwrap();
        // The kernel is short of memory, or does as if.
        let place = block.iovec(PageRange::whole_block(64)).unwrap();
        // SAFETY: it takes the contents of no page that was written since it was freed, and the pages are of this
        // mapping.
        unsafe { madvise(place.iov_base, place.iov_len, Advice::LinuxPageOut) }.unwrap();
        (0..64).for_each(|page| poke(&memory, page));
        assert_eq!(fetched(&mut *log, &memory), [PageRange::whole_block(64)], "{}", log.name());
        log.stop().unwrap();
    }
}
