//! Memory in huge pages of the host: the pages that are given back, by driver, and those that no longer are.

use std::ops::Range;
use std::sync::Arc;

use limosa_balloon::{Features, GuestRam, MoreWork, Reclaim, Strategy};
use limosa_memory::{BlockOptions, GuestMemory, MemoryError, ReleaseMethod};
use limosa_testkit::{HugePages, skipped};
use parking_lot::Mutex;
use rustix::fs::fstat;
use vm_memory::{Bytes as _, GuestAddress};

use crate::bare::{Bare, BareRing};
use crate::machine::MIB;

/// Ordinary memory up to 8 MiB, and huge pages of 64 KiB after it; it records ranges that are given back.
#[derive(Debug)]
struct RecordingMemory {
    ram: Vec<Range<u64>>,
    given_back: Mutex<Vec<Range<u64>>>,
}

impl RecordingMemory {
    fn of(ram: &[Range<u64>]) -> Arc<Self> {
        Arc::new(Self { ram: ram.to_vec(), given_back: Mutex::default() })
    }

    fn take(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.given_back.lock())
    }
}

impl Reclaim for RecordingMemory {
    fn ram(&self) -> &[Range<u64>] {
        &self.ram
    }

    fn host_page_size(&self, index: usize) -> u64 {
        if self.ram[index].start == 8 * MIB { 64 << 10 } else { 4096 }
    }

    fn discard(&self, run: &Range<u64>) -> Result<u64, MemoryError> {
        assert!(self.ram.iter().any(|range| range.start <= run.start && run.end <= range.end), "{run:x?}");
        self.given_back.lock().push(run.clone());
        Ok(run.end - run.start)
    }
}

/// The first page of the huge ones.
const HUGE: u32 = 2048;

fn bytes(pages: Range<u32>) -> Range<u64> {
    u64::from(pages.start) << 12..u64::from(pages.end) << 12
}

fn both() -> [Range<u64>; 2] {
    [0..8 * MIB, 8 * MIB..16 * MIB]
}

/// Sends an array over a queue with a new ring, and processes it once.
fn send(bare: &Bare, queue: usize, pages: impl IntoIterator<Item = u32>) -> MoreWork {
    send_over(bare, &bare.ring(), queue, pages)
}

fn send_over(bare: &Bare, ring: &BareRing<'_>, queue: usize, pages: impl IntoIterator<Item = u32>) -> MoreWork {
    let pages: Vec<u32> = pages.into_iter().collect();
    for (page, at) in pages.iter().zip((0x4000..).step_by(4)) {
        bare.guest.write_obj(page.to_le(), GuestAddress(at)).unwrap();
    }
    bare.offer(0, 0x4000, u32::try_from(4 * pages.len()).unwrap(), 0);
    bare.balloon.process_queue(queue, ring).unwrap()
}

#[test]
fn pages_of_a_driver_that_does_not_notify_are_given_back_only_as_complete_huge_pages() {
    for tells in [true, false] {
        let noted = RecordingMemory::of(&both());
        let bare = Bare::with(|_| noted.clone());
        let features = Features::ALL;
        assert!(features.has(Features::MUST_TELL_HOST), "the required feature is offered");
        bare.balloon.ack_features(if tells { features } else { features.without(Features::MUST_TELL_HOST) });
        send(&bare, 0, HUGE..HUGE + 8);
        // A driver that has not promised to notify may use the first of them now.
        send(&bare, 0, HUGE + 8..HUGE + 16);
        assert_eq!(noted.take(), if tells { vec![bytes(HUGE..HUGE + 16)] } else { vec![] });
        send(&bare, 0, HUGE + 30..HUGE + 50);
        assert_eq!(noted.take(), [bytes(HUGE + 32..HUGE + 48)]);
    }
}

#[test]
fn pages_taken_out_of_the_balloon_are_no_longer_given_back() {
    let noted = RecordingMemory::of(&both());
    let bare = Bare::with(|_| noted.clone());
    // More runs than one call gives back; the last is a huge page.
    let apart = (1024..).step_by(2).take(128);
    let ring = bare.ring();
    assert_eq!(send_over(&bare, &ring, 0, apart.chain(HUGE..HUGE + 16)), MoreWork::Yes);
    assert_eq!(noted.take().len(), 128);
    // Its other queue may be anywhere: here at the same address, which the device has read.
    assert_eq!(send(&bare, 1, [HUGE + 3]), MoreWork::No);
    assert_eq!(bare.balloon.process_queue(0, &ring).unwrap(), MoreWork::No);
    assert_eq!(
        noted.take(),
        [bytes(HUGE..HUGE + 3), bytes(HUGE + 4..HUGE + 16)],
        "but never the page that was deflated"
    );
    send(&bare, 0, HUGE..HUGE + 3);
    assert_eq!(noted.take(), []);
}

#[test]
fn no_bits_are_kept_of_memory_that_was_removed() {
    let (ordinary, noted) = (RecordingMemory::of(&both()[..1]), RecordingMemory::of(&both()));
    let bare = Bare::with(|_| noted.clone());
    send(&bare, 0, HUGE..HUGE + 8);
    bare.balloon.set_memory(ordinary.clone());
    bare.balloon.set_memory(noted.clone());
    send(&bare, 0, HUGE + 8..HUGE + 16);
    assert_eq!(noted.take(), [], "pages that were in the balloon then are not in it now");
    send(&bare, 0, HUGE..HUGE + 8);
    assert_eq!(noted.take(), [bytes(HUGE..HUGE + 16)]);
    // Its bits are kept when other memory is added and removed.
    send(&bare, 0, HUGE + 16..HUGE + 24);
    bare.balloon.set_memory(RecordingMemory::of(&both()[1..]));
    bare.balloon.set_memory(noted.clone());
    send(&bare, 0, HUGE + 24..HUGE + 32);
    assert_eq!(noted.take(), [bytes(HUGE + 16..HUGE + 32)]);
    bare.balloon.reset();
    send(&bare, 0, HUGE + 24..HUGE + 32);
    assert_eq!(noted.take(), [], "nor of another driver's balloon");

    // In the middle of an array.
    let apart = (1024..).step_by(2).take(128);
    let ring = bare.ring();
    assert_eq!(send_over(&bare, &ring, 0, apart.chain(HUGE..HUGE + 16)), MoreWork::Yes);
    bare.balloon.set_memory(ordinary.clone());
    assert_eq!(bare.balloon.process_queue(0, &ring).unwrap(), MoreWork::No);
    assert_eq!(ordinary.take(), []);
}

#[test]
fn real_huge_pages_of_the_host_are_given_back_completely() {
    if skipped("LIMOSA_SKIP_HUGETLB") {
        return;
    }
    let _pages = HugePages::reserve(16 * MIB)
        .unwrap_or_else(|error| panic!("no huge pages: {error:#}; LIMOSA_SKIP_HUGETLB=1 skips this test"));
    for strategy in
        [Strategy::Auto, Strategy::Method(ReleaseMethod::PunchHole), Strategy::Method(ReleaseMethod::Remove)]
    {
        let block = BlockOptions::memfd("pc.ram", 16 * MIB).huge_pages(2 * MIB).map().unwrap();
        block.write(0, &vec![7; 16 << 20]).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![block]).unwrap());
        // The rings are in separate memory, at the guest's addresses.
        let bare = Bare::with(|_| Arc::new(GuestRam::new(Arc::clone(&memory), strategy)));
        let block = memory.block(0).unwrap();
        let resident = || fstat(block.file().unwrap().0).unwrap().st_blocks * 512 / (2 << 20);
        // Linux sends 256 pages at a time; the sixth huge page begins at page 2560.
        send(&bare, 0, 2560..2816);
        send(&bare, 0, 2816..3071);
        assert_eq!(
            (resident(), bare.balloon.counters().discards),
            (8, 0),
            "{strategy:?}: the guest uses one page of it"
        );
        send(&bare, 0, [3071]);
        assert_eq!((resident(), bare.balloon.counters().discarded_bytes), (7, 2 * MIB), "{strategy:?}");
        let mut bytes = vec![1; 16 << 20];
        block.read(0, &mut bytes).unwrap();
        let gone = (10 << 20)..(12 << 20);
        assert!((0..).zip(&bytes).all(|(at, byte)| *byte == if gone.contains(&at) { 0 } else { 7 }), "{strategy:?}");
    }
}
