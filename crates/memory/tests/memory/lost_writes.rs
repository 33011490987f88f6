//! Thousands of fetches while threads write: a copy of the memory that is kept by fetched pages alone is equal to it,
//! byte for byte, whenever the writers pause. Every ninth write is a page that is given back. (KVM's logs are tested so
//! with the guest of limosa-demo.)
#![allow(missing_docs, reason = "a test")]
#![allow(unsafe_code, reason = "sets the bits of a log as a back end does")]

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use limosa_memory::dirty::{DirtyLog, DirtyPages, SoftwareDirtyLog, UffdWpAsyncLog, UffdWpSyncLog, VhostLog, Writers};
use limosa_memory::{BlockOptions, GuestMemory, MemoryBlock};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange};
use limosa_testkit::HugePages;

/// Few pages, so that writers and fetches meet on them.
const LENGTH: u64 = 48 << 12;
const WRITERS: u64 = 3;
const FETCHES: u64 = 3000;
/// For writers that never get to write.
const PATIENCE: Duration = Duration::from_secs(120);

/// Writes these bytes at an offset, and does what else the log wants of a writer.
type Write = Box<dyn Fn(u64, &[u8]) + Send + Sync>;

fn memory(options: BlockOptions) -> Arc<GuestMemory> {
    Arc::new(GuestMemory::new(vec![options.map().unwrap()]).unwrap())
}

fn plain(memory: &Arc<GuestMemory>) -> Write {
    let memory = Arc::clone(memory);
    Box::new(move |offset, bytes| memory.block(0).unwrap().write(offset, bytes).unwrap())
}

fn fetch(log: &mut dyn DirtyLog, block: &MemoryBlock, memory: &GuestMemory, shadow: &mut [u8]) {
    let mut dirty = DirtyPages::new(memory);
    log.fetch(&mut dirty).unwrap();
    for page in dirty.block(0).unwrap().runs().flat_map(|run| run.iter()) {
        let at = usize::try_from(page.offset()).unwrap();
        block.read(page.offset(), &mut shadow[at..at + PAGE_LEN]).unwrap();
    }
}

fn no_write_is_lost(memory: &GuestMemory, log: &mut dyn DirtyLog, write: &Write) {
    no_write_is_lost_in(FETCHES, memory, log, write);
}

fn no_write_is_lost_in(fetches: u64, memory: &GuestMemory, log: &mut dyn DirtyLog, write: &Write) {
    let block = memory.block(0).unwrap();
    let (over, pause, writes) = (AtomicBool::new(false), RwLock::new(()), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (over, pause, writes) = (&over, &pause, &writes);
            scope.spawn(move || {
                let mut random = 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(writer + 1);
                while !over.load(Ordering::Relaxed) {
                    let _running = pause.read().unwrap();
                    for _ in 0..8 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let offset = random % (block.len() / 8) * 8;
                        match (random >> 40) % 9 {
                            0 => {
                                block.discard(PageRange::starting_at(PageNumber::containing(offset), 1)).unwrap();
                            }
                            _ => write(offset, &random.to_ne_bytes()),
                        }
                        writes.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        log.start().unwrap();
        let mut shadow = vec![0; usize::try_from(block.len()).unwrap()];
        block.read(0, &mut shadow).unwrap();
        let mut now = shadow.clone();
        let begun = Instant::now();
        // On a busy machine the fetches may be through before the writers have had a turn.
        let enough = |round| round >= fetches && writes.load(Ordering::Relaxed) > fetches;
        for round in (0..).take_while(|round| !enough(*round) && begun.elapsed() < PATIENCE) {
            if round % 3 != 2 {
                fetch(log, block, memory, &mut shadow);
                continue;
            }
            let _paused = pause.write().unwrap();
            fetch(log, block, memory, &mut shadow);
            block.read(0, &mut now).unwrap();
            let wrong = now.iter().zip(&shadow).position(|(now, shadow)| now != shadow);
            if let Some(at) = wrong {
                over.store(true, Ordering::Relaxed);
                panic!("{}: fetch {round}: a write to page {} was not named", log.name(), at / PAGE_LEN);
            }
        }
        over.store(true, Ordering::Relaxed);
        log.stop().unwrap();
    });
    assert!(writes.load(Ordering::Relaxed) > fetches, "{}: hardly anything was written", log.name());
}

#[test]
fn asynchronous_write_protection_loses_no_write() {
    for options in [BlockOptions::anonymous("ram", LENGTH), BlockOptions::memfd("ram", LENGTH)] {
        let memory = memory(options);
        let mut log = UffdWpAsyncLog::new(Arc::clone(&memory)).unwrap();
        no_write_is_lost(&memory, &mut log, &plain(&memory));
    }
}

#[test]
fn write_protection_with_a_fault_handler_loses_no_write() {
    for options in [BlockOptions::anonymous("ram", LENGTH), BlockOptions::memfd("ram", LENGTH)] {
        let memory = memory(options);
        let mut log = UffdWpSyncLog::new(Arc::clone(&memory)).unwrap();
        no_write_is_lost(&memory, &mut log, &plain(&memory));
    }
}

#[test]
fn write_protection_of_huge_pages_loses_no_write() {
    let _reserved = HugePages::reserve(4 << 20).unwrap();
    let huge = || memory(BlockOptions::memfd("ram", 4 << 20).huge_pages(2 << 20));
    let one = huge();
    no_write_is_lost_in(300, &one, &mut UffdWpAsyncLog::new(Arc::clone(&one)).unwrap(), &plain(&one));
    drop(one);
    let other = huge();
    no_write_is_lost_in(300, &other, &mut UffdWpSyncLog::new(Arc::clone(&other)).unwrap(), &plain(&other));
}

#[test]
fn the_explicit_log_loses_no_write() {
    let memory = memory(BlockOptions::anonymous("ram", LENGTH));
    let mut log = SoftwareDirtyLog::new(&memory, Writers::DEVICES);
    let (marker, plain) = (log.bitmap(), plain(&memory));
    let write: Write = Box::new(move |offset, bytes| {
        plain(offset, bytes);
        marker.mark(0, PageRange::starting_at(PageNumber::containing(offset), 1));
    });
    no_write_is_lost(&memory, &mut log, &write);
}

#[test]
fn the_log_of_back_ends_loses_no_write() {
    // Seen from an address that is no multiple of 64 pages.
    let block = BlockOptions::memfd("ram", LENGTH).map().unwrap();
    let fd = block.file().unwrap().0.try_clone_to_owned().unwrap();
    let region = limosa_memory::GuestRegion { guest_address: 37 * PAGE_SIZE, block: 0, pages: block.pages() };
    let memory = Arc::new(GuestMemory::with_regions(vec![block], vec![region]).unwrap());
    // A back end has mappings of its own, of the memory and of the log.
    let its_memory = BlockOptions::file("ram", LENGTH, fd, 0).map().unwrap();
    let its_log: Arc<Mutex<Option<MemoryBlock>>> = Arc::default();
    let given = Arc::clone(&its_log);
    let mut log = VhostLog::new(Arc::clone(&memory), move |base| {
        let map = |base: limosa_memory::dirty::LogBase<'_>| {
            let fd = base.fd.try_clone_to_owned()?;
            BlockOptions::file("log", base.length, fd, 0).map().map_err(std::io::Error::other)
        };
        let mapped = base.map(map).transpose()?;
        if mapped.is_some() {
            *given.lock().unwrap() = mapped;
        }
        Ok(())
    })
    .unwrap();
    log.start().unwrap();
    let its_log = its_log.lock().unwrap().take().unwrap();
    let write: Write = Box::new(move |offset, bytes| {
        its_memory.write(offset, bytes).unwrap();
        let page = 37 + offset / PAGE_SIZE;
        let byte = its_log.host_address().wrapping_add(usize::try_from(page / 8).unwrap());
        // SAFETY: a byte of the log, which is mapped as long as `its_log`, and which all change by atomic operations.
        unsafe { AtomicU8::from_ptr(byte) }.fetch_or(1 << (page % 8), Ordering::AcqRel);
    });
    no_write_is_lost(&memory, &mut log, &write);
}
