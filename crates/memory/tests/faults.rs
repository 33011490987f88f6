//! The fault handler under threads that really wait: every kind of memory, every way to place a page, and killed
//! pagers.
#![allow(unsafe_code, reason = "gives pages back under the handler, and privileges")]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use limosa_memory::{
    BlockOptions, Fault, FaultBlock, FaultError, FaultEvent, FaultHandler, FaultLayout, FaultMode, FaultOptions,
    FaultOrigin, GuestMemory, MemoryBlock, PlacedPages,
};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange};
use limosa_testkit::{HugePages, note_skip};
use rustix::mm::{Advice, madvise};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

const HUGE: u64 = 2 << 20;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::starting_at(PageNumber(start), pages)
}

/// Contents of page `page` of every block: never zero, and different in every page.
fn contents(pages: PageRange) -> Vec<u8> {
    pages.iter().flat_map(|page| (page.0 + 1).to_ne_bytes().repeat(PAGE_LEN / 8)).collect()
}

/// Reads all of a page, and says which page it holds; 0: zeros; anything else makes it fail.
fn number_in(block: &MemoryBlock, page: PageNumber) -> u64 {
    let mut bytes = vec![0; PAGE_LEN];
    block.read(page.offset(), &mut bytes).unwrap();
    let first = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes.chunks(8).all(|word| word == first.to_ne_bytes()), "page {page} is of two pieces");
    first
}

fn memory(block: BlockOptions) -> GuestMemory {
    GuestMemory::new(vec![block.map().unwrap()]).unwrap()
}

fn handler(memory: &GuestMemory, mode: FaultMode) -> FaultHandler {
    let mut handler = FaultHandler::open(FaultOptions::default()).unwrap();
    handler.register(memory, 0, mode).unwrap();
    handler
}

fn faults(handler: &FaultHandler) -> Vec<Fault> {
    let mut events = Vec::new();
    handler.wait(&mut events, None).unwrap();
    events
        .into_iter()
        .filter_map(|event| if let FaultEvent::Fault(fault) = event { Some(fault) } else { None })
        .collect()
}

/// Four threads read all pages, each in an order of its own, while `answer` places what they wait for.
fn read_everything(memory: &GuestMemory, handler: &FaultHandler, answer: impl Fn(Fault) -> PlacedPages + Sync) {
    let block = memory.block(0).unwrap();
    let pages = block.pages().len();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                for fault in faults(handler) {
                    assert_eq!(fault.pages.bytes().end - fault.pages.bytes().start, block.page_size());
                    let placement = answer(fault);
                    // Two threads may wait for one page.
                    assert!(placement.present.is_none_or(|present| present == fault.pages), "{placement:?}");
                }
            }
        });
        let readers: Vec<_> = [1, 7, 11, 13]
            .map(|step| {
                scope.spawn(move || {
                    for turn in 0..pages {
                        let page = PageNumber((turn * step + step) % pages);
                        assert_eq!(number_in(block, page), page.0 + 1);
                    }
                })
            })
            .into_iter()
            .collect();
        let results: Vec<_> = readers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::SeqCst);
        handler.waker().wake();
        for result in results {
            result.unwrap();
        }
    });
}

fn missing_pages_are_copied_in(block: BlockOptions) {
    let memory = memory(block);
    let handler = handler(&memory, FaultMode::Missing);
    read_everything(&memory, &handler, |fault| {
        assert!(!fault.minor);
        handler.copy(0, fault.pages.start, &contents(fault.pages)).unwrap()
    });
    handler.finish().unwrap();
}

fn written_pages_are_let_in(block: BlockOptions) {
    let memory = memory(block);
    let handler = handler(&memory, FaultMode::Minor);
    let block = memory.block(0).unwrap();
    let (file, offset) = block.file().unwrap();
    let file = file.try_clone_to_owned().unwrap();
    let door = BlockOptions::file("door", block.len(), file, offset).map().unwrap();
    // Half of the pages are there before they are requested, the others come when they are asked for.
    let half = PageRange::new(PageNumber(0), PageNumber(block.pages().end.0 / 2));
    door.write(0, &contents(half)).unwrap();
    read_everything(&memory, &handler, |fault| {
        assert_eq!(fault.minor, half.contains(fault.pages.start));
        if !fault.minor {
            door.write(fault.pages.bytes().start, &contents(fault.pages)).unwrap();
        }
        handler.map_present(0, fault.pages).unwrap()
    });
    handler.finish().unwrap();
}

#[test]
fn missing_pages_of_anonymous_memory_are_copied_in() {
    missing_pages_are_copied_in(BlockOptions::anonymous("ram", 601 * PAGE_SIZE));
}

#[test]
fn missing_pages_of_a_memfd_are_copied_in() {
    missing_pages_are_copied_in(BlockOptions::memfd("ram", 601 * PAGE_SIZE));
}

#[test]
fn missing_huge_pages_of_anonymous_memory_are_copied_in() {
    let _pages = HugePages::reserve(8 * HUGE).unwrap();
    missing_pages_are_copied_in(BlockOptions::anonymous("ram", 7 * HUGE).huge_pages(HUGE));
}

#[test]
fn missing_huge_pages_of_a_memfd_are_copied_in() {
    let _pages = HugePages::reserve(8 * HUGE).unwrap();
    missing_pages_are_copied_in(BlockOptions::memfd("ram", 7 * HUGE).huge_pages(HUGE));
}

#[test]
fn pages_of_a_memfd_that_are_there_are_let_in() {
    written_pages_are_let_in(BlockOptions::memfd("ram", 601 * PAGE_SIZE));
}

#[test]
fn huge_pages_of_a_memfd_that_are_there_are_let_in() {
    let _pages = HugePages::reserve(9 * HUGE).unwrap();
    written_pages_are_let_in(BlockOptions::memfd("ram", 8 * HUGE).huge_pages(HUGE));
}

#[test]
fn pages_are_filled_with_zeros_in_runs() {
    let _pages = HugePages::reserve(16 * HUGE).unwrap();
    for block in [
        BlockOptions::anonymous("ram", 6 * HUGE),
        BlockOptions::memfd("ram", 6 * HUGE),
        BlockOptions::anonymous("ram", 6 * HUGE).huge_pages(HUGE),
        BlockOptions::memfd("ram", 6 * HUGE).huge_pages(HUGE),
    ] {
        let memory = memory(block);
        let handler = handler(&memory, FaultMode::Missing);
        let run = range(512, 2048);
        assert_eq!(handler.zero(0, run).unwrap(), PlacedPages { placed: run, present: None });
        for page in run.iter() {
            assert_eq!(number_in(memory.block(0).unwrap(), page), 0);
        }
        handler.abandon();
    }
}

#[test]
fn a_page_that_is_there_ends_a_run_and_is_not_overwritten() {
    let memory = memory(BlockOptions::anonymous("ram", 64 * PAGE_SIZE));
    let block = memory.block(0).unwrap();
    block.write(10 * PAGE_SIZE, &7777u64.to_ne_bytes().repeat(PAGE_LEN / 8)).unwrap();
    let handler = handler(&memory, FaultMode::Missing);

    let first = handler.copy(0, PageNumber(4), &contents(range(4, 20))).unwrap();
    assert_eq!(first, PlacedPages { placed: range(4, 6), present: Some(range(10, 1)) });
    let again = handler.zero(0, range(9, 8)).unwrap();
    assert_eq!(again, PlacedPages { placed: range(9, 0), present: Some(range(9, 1)) });
    let behind = handler.copy(0, PageNumber(11), &contents(range(11, 13))).unwrap();
    assert_eq!(behind, PlacedPages { placed: range(11, 13), present: None });

    assert_eq!(number_in(block, PageNumber(10)), 7777);
    for page in range(4, 20).iter().filter(|page| page.0 != 10) {
        assert_eq!(number_in(block, page), page.0 + 1);
    }
    handler.finish().unwrap();
    assert_eq!(number_in(block, PageNumber(50)), 0, "behind `finish` what never came is zero");
}

#[test]
fn what_cannot_be_placed_is_refused_before_the_kernel_is_asked() {
    let _pages = HugePages::reserve(2 * HUGE).unwrap();
    let memory = memory(BlockOptions::memfd("ram", 2 * HUGE).huge_pages(HUGE));
    let handler = handler(&memory, FaultMode::Missing);
    let refused = |result: Result<PlacedPages, FaultError>| matches!(result, Err(FaultError::Pages { .. }));
    assert!(refused(handler.copy(0, PageNumber(0), &vec![1; PAGE_LEN])), "a part of a huge page");
    assert!(refused(handler.copy(0, PageNumber(0), &vec![1; 1000])), "a part of a page");
    assert!(refused(handler.copy(0, PageNumber(1024), &vec![1; 2 << 20])), "behind the end");
    assert!(refused(handler.copy(1, PageNumber(0), &vec![1; 2 << 20])), "no such block");
    assert!(refused(handler.zero(0, range(u64::MAX - 1, 512))), "far behind the end");
    assert!(refused(handler.map_present(0, range(0, 0))), "nothing");
    handler.abandon();
}

/// Gives pages of private memory back.
fn give_back(block: &MemoryBlock, pages: PageRange) {
    let place = block.iovec(pages).unwrap();
    // SAFETY: there is no reference to the memory.
    unsafe { madvise(place.iov_base, place.iov_len, Advice::LinuxDontNeed) }.unwrap();
}

#[test]
fn pages_are_placed_while_others_are_given_back_and_every_removal_is_reported() {
    let memory = memory(BlockOptions::anonymous("ram", 4096 * PAGE_SIZE));
    let block = memory.block(0).unwrap();
    let handler = handler(&memory, FaultMode::Missing);
    let (guest, balloon) = (range(0, 4000), range(4050, 8));
    let placed = AtomicBool::new(false);
    let mut report = Vec::new();
    let rounds = std::thread::scope(|scope| {
        let giver = scope.spawn(|| {
            let mut rounds = 0;
            while !placed.load(Ordering::SeqCst) {
                give_back(block, balloon);
                rounds += 1;
                // On one CPU with the thread that places pages, the kernel would let it run only amid a change.
                std::thread::yield_now();
            }
            rounds
        });
        // No thread waits for events meanwhile: the one that places pages has to read what the giver waits for.
        for run in guest.chunks(50) {
            assert_eq!(handler.copy(0, run.start, &contents(run)).unwrap(), PlacedPages { placed: run, present: None });
        }
        placed.store(true, Ordering::SeqCst);
        while !giver.is_finished() {
            handler.wait(&mut report, Some(Duration::from_millis(1))).unwrap();
        }
        giver.join().unwrap()
    });
    handler.wait(&mut report, Some(Duration::ZERO)).unwrap();
    assert_eq!(report.len(), rounds);
    assert!(report.iter().all(|event| matches!(event, FaultEvent::Removed { block: 0, pages } if *pages == balloon)));
    for page in guest.iter() {
        assert_eq!(number_in(block, page), page.0 + 1);
    }
    handler.abandon();
}

#[test]
fn pages_that_the_guest_gave_back_are_missing_again() {
    let memory = memory(BlockOptions::anonymous("ram", 16 * PAGE_SIZE));
    let block = memory.block(0).unwrap();
    let handler = handler(&memory, FaultMode::Missing);
    handler.copy(0, PageNumber(0), &contents(range(0, 16))).unwrap();
    let mut report = Vec::new();
    std::thread::scope(|scope| {
        let giver = scope.spawn(|| give_back(block, range(3, 2)));
        handler.wait(&mut report, None).unwrap();
        giver.join().unwrap();
    });
    assert!(matches!(report[..], [FaultEvent::Removed { block: 0, pages }] if pages == range(3, 2)));
    assert_eq!(handler.zero(0, range(3, 2)).unwrap().present, None);
    assert_eq!(number_in(block, PageNumber(4)), 0);
    assert_eq!(number_in(block, PageNumber(5)), 6);
    handler.abandon();
}

/// Threads of this process that wait for a page.
fn waiting_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let place = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("wchan")).unwrap_or_default();
    tasks.map(place).filter(|place| place == "handle_userfault").count()
}

#[test]
fn a_waiting_thread_survives_a_killed_pager_and_reads_what_the_next_one_places() {
    let memory = memory(BlockOptions::anonymous("ram", 64 * PAGE_SIZE));
    let block = memory.block(0).unwrap();
    let first = handler(&memory, FaultMode::Missing);
    let held = first.registration_guard();
    std::thread::scope(|scope| {
        let readers = [5, 6, 7].map(|page| scope.spawn(move || number_in(block, PageNumber(page))));
        // The first pager receives at least one, answers nothing, and ends.
        assert!(!faults(&first).is_empty());
        drop(first);
        // All of them wait in the kernel, and no handler answers.
        while waiting_threads() < readers.len() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!readers.iter().any(std::thread::ScopedJoinHandle::is_finished));
        let second = held.handler().unwrap();
        while !readers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            let mut events = Vec::new();
            second.wait(&mut events, Some(Duration::from_millis(1))).unwrap();
            for event in events {
                let FaultEvent::Fault(fault) = event else { panic!("{event:?}") };
                second.copy(0, fault.pages.start, &contents(fault.pages)).unwrap();
            }
        }
        assert_eq!(readers.map(|reader| reader.join().unwrap()), [6, 7, 8]);
        second.finish().unwrap();
    });
}

fn is_open(descriptor: &str) -> bool {
    std::fs::read_link(descriptor).is_ok_and(|target| target.to_string_lossy().contains("userfaultfd"))
}

#[test]
fn the_descriptor_stays_open_without_any_pager_until_finish_is_called() {
    let memory = memory(BlockOptions::memfd("ram", 4 * PAGE_SIZE));
    let new = || {
        let handler = handler(&memory, FaultMode::Missing);
        let descriptor = format!("/proc/self/fd/{}", handler.as_fd().as_raw_fd());
        assert!(is_open(&descriptor));
        (handler, descriptor)
    };
    let (finished, descriptor) = new();
    let held = finished.registration_guard();
    finished.finish().unwrap();
    assert!(is_open(&descriptor), "a hold keeps it open");
    drop(held);
    assert!(!is_open(&descriptor));

    let (abandoned, descriptor) = new();
    abandoned.abandon();
    assert!(!is_open(&descriptor));

    let (dropped, descriptor) = new();
    drop(dropped.registration_guard());
    drop(dropped);
    assert!(is_open(&descriptor), "closing it would let the guest read zeros");
}

#[test]
fn a_wait_ends_by_time_by_a_waker_and_with_what_is_there() {
    let memory = memory(BlockOptions::anonymous("ram", 4 * PAGE_SIZE));
    let handler = handler(&memory, FaultMode::Missing);
    let mut events = Vec::new();
    handler.wait(&mut events, Some(Duration::ZERO)).unwrap();
    handler.waker().wake();
    handler.wait(&mut events, None).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| handler.waker().wake());
        handler.wait(&mut events, None).unwrap();
    });
    assert!(events.is_empty());
    handler.abandon();
}

#[test]
fn memory_that_has_no_faults_to_handle_is_refused_with_the_reason() {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(PAGE_SIZE).unwrap();
    let memory = memory(BlockOptions::file("rom", PAGE_SIZE, file.into(), 0));
    let mut handler = FaultHandler::open(FaultOptions::default()).unwrap();
    let error = handler.register(&memory, 0, FaultMode::Missing).unwrap_err();
    assert!(error.to_string().contains("only anonymous memory, tmpfs, memfd and hugetlbfs"), "{error}");
    let anonymous = self::memory(BlockOptions::anonymous("ram", PAGE_SIZE));
    let error = handler.register(&anonymous, 0, FaultMode::Minor).unwrap_err();
    assert!(error.to_string().contains("minor faults"), "{error}");
    handler.abandon();
    let socket = UnixStream::pair().unwrap().0;
    let layout = FaultBlock { address: 4096, length: 4096, page_size: 4096, mode: FaultMode::Missing };
    let layout = FaultLayout::new(vec![Some(layout)]).unwrap();
    assert!(matches!(FaultHandler::from_fd(socket.into(), layout), Err(FaultError::Kernel { .. })), "no userfaultfd");
}

#[test]
fn memory_of_an_abandoned_guest_is_given_back_without_a_reader() {
    let memory = memory(BlockOptions::anonymous("ram", 8 * PAGE_SIZE));
    let handler = handler(&memory, FaultMode::Missing);
    let held = handler.registration_guard();
    handler.copy(0, PageNumber(0), &contents(range(0, 4))).unwrap();
    handler.abandon();
    // With the event still on, this would wait for ever.
    give_back(memory.block(0).unwrap(), range(0, 4));
    drop(held);
    // Memory that has gone first is no obstacle.
    let short = self::memory(BlockOptions::anonymous("ram", 8 * PAGE_SIZE));
    let handler = self::handler(&short, FaultMode::Missing);
    drop(short);
    handler.abandon();
}

#[test]
fn faults_of_threads_alone_can_be_had() {
    let memory = memory(BlockOptions::memfd("ram", 16 * PAGE_SIZE));
    let options = FaultOptions { origin: FaultOrigin::UserOnly, ..FaultOptions::default() };
    let mut handler = FaultHandler::open(options).unwrap();
    handler.register(&memory, 0, FaultMode::Missing).unwrap();
    read_everything(&memory, &handler, |fault| handler.copy(0, fault.pages.start, &contents(fault.pages)).unwrap());
    handler.finish().unwrap();
}

const UNPRIVILEGED: &str = "LIMOSA_TEST_UNPRIVILEGED";

/// The other process of the test below: a user who may do nothing.
#[test]
fn unprivileged_process() {
    if std::env::var_os(UNPRIVILEGED).is_none() {
        return;
    }
    // SAFETY: plain system calls; this process is one that may lose its privileges.
    unsafe {
        libc::setresgid(65534, 65534, 65534);
        libc::setresuid(65534, 65534, 65534);
    }
    let error = FaultHandler::open(FaultOptions::default()).unwrap_err();
    assert!(matches!(error, FaultError::NotAllowed { .. }), "{error:?}");
    for said in ["/dev/userfaultfd", "vm.unprivileged_userfaultfd", "CAP_SYS_PTRACE"] {
        assert!(error.to_string().contains(said), "{error}");
    }
    let options = FaultOptions { origin: FaultOrigin::UserOnly, ..FaultOptions::default() };
    FaultHandler::open(options).unwrap().abandon();
}

#[test]
fn a_user_without_permission_gets_an_error_that_names_it() {
    if std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|value| value.trim() == "1") {
        return note_skip("every user may use userfaultfd here");
    }
    let mut command = limosa_testkit::own_test!(unprivileged_process);
    command.env(UNPRIVILEGED, "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

const PAGER: &str = "LIMOSA_TEST_PAGER";

/// Sends a descriptor with eight bytes.
fn pass(socket: &UnixStream, descriptor: &impl AsFd, bytes: [u8; 8]) {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    assert_eq!(sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap(), 8);
}

fn passed(socket: impl AsFd) -> (OwnedFd, [u8; 8]) {
    let mut bytes = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let message = control.drain().next();
    let Some(RecvAncillaryMessage::ScmRights(mut descriptors)) = message else { panic!("no descriptor came") };
    (descriptors.next().unwrap(), bytes)
}

/// The other process of the test below: serves 64 pages at the address it was given.
#[test]
fn pager_process() {
    if std::env::var_os(PAGER).is_none() {
        return;
    }
    let (descriptor, address) = passed(std::io::stdin());
    let length = 64 * PAGE_SIZE;
    let block =
        FaultBlock { address: u64::from_ne_bytes(address), length, page_size: PAGE_SIZE, mode: FaultMode::Missing };
    let handler = FaultHandler::from_fd(descriptor, FaultLayout::new(vec![Some(block)]).unwrap()).unwrap();
    for _ in 0..64 {
        for fault in faults(&handler) {
            handler.copy(0, fault.pages.start, &contents(fault.pages)).unwrap();
        }
    }
}

#[test]
fn a_pager_in_another_process_goes_on_with_a_passed_descriptor() {
    let memory = memory(BlockOptions::anonymous("ram", 64 * PAGE_SIZE));
    let block = memory.block(0).unwrap();
    let own = handler(&memory, FaultMode::Missing);
    let held = own.registration_guard();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| block.pages().iter().all(|page| number_in(block, page) == page.0 + 1));
        // One fault is known to this pager alone when it hands over.
        assert_eq!(faults(&own).len(), 1);
        drop(own);
        let (here, there) = UnixStream::pair().unwrap();
        let mut command = limosa_testkit::own_test!(pager_process);
        command.env(PAGER, "1").stdin(OwnedFd::from(there));
        let mut pager = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(command);
        let address = held.layout().block(0).unwrap().address;
        pass(&here, &held, address.to_ne_bytes());
        assert!(reader.join().unwrap());
        let status = pager.wait().unwrap();
        assert!(status.success(), "{status}");
    });
    held.handler().unwrap().finish().unwrap();
}

#[test]
fn what_another_mapping_touches_does_not_wait_and_is_there_when_its_contents_come() {
    let memory = memory(BlockOptions::memfd("ram", 16 * PAGE_SIZE));
    let file = memory.block(0).unwrap().file().unwrap().0.try_clone_to_owned().unwrap();
    let other = BlockOptions::file("ram", 16 * PAGE_SIZE, file, 0).map().unwrap();
    let handler = handler(&memory, FaultMode::Missing);
    assert_eq!(number_in(&other, PageNumber(3)), 0);
    let placement = handler.copy(0, PageNumber(2), &contents(range(2, 2))).unwrap();
    assert_eq!(placement, PlacedPages { placed: range(2, 1), present: Some(range(3, 1)) });
    handler.finish().unwrap();
}
