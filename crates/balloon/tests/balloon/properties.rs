//! Properties of any sequence of actions of guest and host: with the model of the driver, and with rings of arbitrary
//! contents.

use std::ops::Range;
use std::sync::Arc;

use crate::bare::POISON;
use crate::machine::{Guest, MIB, RAM, ReceivedList, Rings, TestDriver, USED, poll_until_idle};
use limosa_balloon::{Balloon, Features, HintState, MoreWork, Options, Reclaim, Transport, VirtioQueueRing};
use limosa_balloon_driver::Pages as _;
use limosa_memory::{FreePageHinting as _, FreePageSink, MemoryError};
use parking_lot::Mutex;
use proptest::prelude::*;
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress};

#[derive(Debug, Clone, Copy)]
enum Step {
    Target(u64),
    Poll,
    PollUntilIdle,
    Request,
    Stop,
    Done,
    Shrink(usize),
    Report(u32),
    Allocate(u32),
    Free(usize),
    Reporting(bool),
    Statistics,
    Reload,
    Vanish,
    Lag(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1u64..RAM / 4096).prop_map(Step::Target),
        Just(Step::Poll),
        Just(Step::Poll),
        Just(Step::PollUntilIdle),
        Just(Step::Request),
        Just(Step::Stop),
        Just(Step::Done),
        (0usize..4).prop_map(Step::Shrink),
        (0u32..11).prop_map(Step::Report),
        (0u32..11).prop_map(Step::Allocate),
        (0u32..11).prop_map(Step::Allocate),
        any::<usize>().prop_map(Step::Free),
        any::<bool>().prop_map(Step::Reporting),
        Just(Step::Statistics),
        Just(Step::Reload),
        Just(Step::Vanish),
        any::<bool>().prop_map(Step::Lag),
    ]
}

/// The queue of lists.
const LISTS: usize = 3;

/// Memory of a program in the guest.
#[derive(Debug)]
struct Block {
    range: Range<u64>,
    /// The value in every page of it.
    byte: u8,
    /// Number of lists that had been requested when it was allocated.
    since: u32,
}

type Owned = Arc<Mutex<Vec<Block>>>;

/// Receives the list with this number, and checks that no page in it was already used by a program when the list was
/// requested. (Pages that the guest has used since do not matter: hints are only hints.)
struct Sink(Owned, u32);

impl FreePageSink for Sink {
    fn add_range(&self, range: Range<u64>) {
        let owned = self.0.lock();
        let meets = |block: &Range<u64>| block.start < range.end && range.start < block.end;
        let taken = owned.iter().find(|block| meets(&block.range) && block.since < self.1);
        assert!(taken.is_none(), "{range:x?} of list {} is {taken:x?}", self.1);
    }

    fn complete(&self) {}
}

struct World {
    guest: Guest,
    driver: Option<TestDriver>,
    owned: Owned,
    next: u8,
    lists: u32,
}

impl World {
    fn new() -> Self {
        let guest = Guest::new();
        let driver = Some(guest.probe());
        Self { guest, driver, owned: Arc::default(), next: 8, lists: 0 }
    }

    fn own(&mut self, block: Range<u64>) {
        self.next = self.next.wrapping_add(1).max(8);
        for page in block.clone().step_by(4096) {
            self.guest.memory.block(0).unwrap().write(page, &[self.next; 4096]).unwrap();
        }
        self.owned.lock().push(Block { range: block, byte: self.next, since: self.lists });
    }

    fn step(&mut self, step: Step) {
        let balloon = Arc::clone(&self.guest.balloon);
        let driver = self.driver.as_mut().unwrap();
        match step {
            Step::Target(pages) => balloon.set_target(pages * 4096).unwrap(),
            Step::Poll => drop(driver.poll().unwrap()),
            Step::PollUntilIdle => poll_until_idle(driver),
            Step::Request => {
                self.lists += 1;
                balloon.request_list(Arc::new(Sink(Arc::clone(&self.owned), self.lists))).unwrap();
            }
            Step::Stop => balloon.stop_list(),
            Step::Done => balloon.return_pages(),
            Step::Shrink(blocks) => {
                for block in driver.shrinker().take_back(blocks) {
                    self.own(block);
                }
            }
            Step::Report(order) => drop(driver.report(4096 << order).unwrap()),
            Step::Allocate(order) => {
                let length = 4096 << order;
                let start = self.guest.free.lock().allocate(length);
                if let Some(start) = start {
                    self.own(start..start + length);
                }
            }
            Step::Free(which) => {
                let mut owned = self.owned.lock();
                if !owned.is_empty() {
                    let which = which % owned.len();
                    let block = owned.swap_remove(which);
                    self.guest.free.lock().free(block.range);
                }
            }
            Step::Reporting(on) => balloon.set_reporting(on),
            Step::Statistics => balloon.request_statistics().unwrap(),
            Step::Reload => {
                self.driver.take().unwrap().unload().unwrap();
                self.driver = Some(self.guest.probe());
            }
            Step::Lag(lags) => self.guest.machine.hold(LISTS, lags),
            Step::Vanish => {
                // The guest is reset: all memory is free again except what its next programs allocate at once.
                self.driver = None;
                let mut free = self.guest.free.lock();
                *free = limosa_balloon_driver::Blocks::new(USED..RAM);
                self.owned.lock().clear();
                drop(free);
                self.driver = Some(self.guest.probe());
            }
        }
    }

    fn check(&self) {
        let mut bytes = vec![0; 1 << 20];
        let owned = self.owned.lock();
        for Block { range: block, byte, .. } in &*owned {
            for start in block.clone().step_by(1 << 20) {
                let length = usize::try_from((block.end - start).min(MIB)).unwrap();
                let piece = &mut bytes[..length];
                self.guest.memory.block(0).unwrap().read(start, piece).unwrap();
                assert!(piece.iter().all(|found| found == byte), "{block:x?} was changed");
            }
        }
        let driver = self.driver.as_ref().unwrap();
        let taken: u64 = owned.iter().map(|block| block.range.end - block.range.start).sum();
        let held = driver.shrinker().held() as u64 * (4 << 20);
        let free = self.guest.free.lock().free_bytes();
        assert_eq!(free + taken + held + driver.balloon_pages() as u64 * 4096, RAM - USED, "pages got lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn what_the_guests_programs_have_is_never_touched_and_no_page_gets_lost(steps in proptest::collection::vec(step(), 1..60)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
            world.check();
        }
        world.step(Step::Lag(false));
        // After any sequence, the next list is complete, and the balloon gets as close to its size as there are free
        // pages.
        world.step(Step::Done);
        world.step(Step::PollUntilIdle);
        let received = Arc::new(ReceivedList::default());
        world.guest.balloon.request_list(received.clone()).unwrap();
        world.step(Step::PollUntilIdle);
        prop_assert!(received.is_complete());
        world.step(Step::Done);
        world.step(Step::PollUntilIdle);
        world.check();
        let size = world.guest.balloon.size();
        let left = world.guest.free.lock().free_bytes();
        prop_assert!(size.actual == size.target || (size.actual > size.target && left == 0), "{:?} {}", size, left);
        prop_assert!(world.guest.is_intact(0..USED));
    }
}

/// Memory that records ranges that are given back, and refuses ranges outside of it.
#[derive(Debug, Default)]
struct RecordingMemory {
    ram: Vec<Range<u64>>,
    given_back: Mutex<u64>,
}

impl Reclaim for RecordingMemory {
    fn ram(&self) -> &[Range<u64>] {
        &self.ram
    }

    fn host_page_size(&self, index: usize) -> u64 {
        // One range is of huge pages.
        if index == 1 { 64 << 10 } else { 4096 }
    }

    fn discard(&self, run: &Range<u64>) -> Result<u64, MemoryError> {
        assert!(run.start < run.end && run.start.is_multiple_of(4096) && run.end.is_multiple_of(4096), "{run:x?}");
        assert!(self.ram.iter().any(|range| range.start <= run.start && run.end <= range.end), "{run:x?}");
        *self.given_back.lock() += 1;
        Ok(run.end - run.start)
    }
}

/// A bus that ignores notifications.
struct SilentBus;

impl Transport for SilentBus {
    fn config_changed(&self) {}

    fn kick(&self, _queue: usize) {}
}

/// A word that is likely to be an address, an index or a flag of these rings.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), 0u64..16, (0u64..64).prop_map(|page| page << 12), Just(0x4000_0000_0000), Just(u64::MAX)]
}

proptest! {
    #[test]
    fn rings_that_no_driver_wrote_do_no_harm(
        words in proptest::collection::vec((0u64..0x400, word()), 0..80),
        counts in proptest::collection::vec(any::<u16>(), 5),
        features in any::<u64>(),
        poison in any::<bool>(),
    ) {
        let memory = Rings::from_ranges(&[(GuestAddress(0), 128 << 10), (GuestAddress(1 << 20), 128 << 10)]).unwrap();
        for (at, word) in &words {
            memory.write_obj(*word, GuestAddress(at * 8)).unwrap();
        }
        let ram = vec![0..128 << 10, 1 << 20..(1 << 20) + (128 << 10)];
        let noted = Arc::new(RecordingMemory { ram, ..RecordingMemory::default() });
        let balloon = Arc::new(Balloon::new(Options::default()));
        balloon.set_memory(noted.clone());
        balloon.attach(Arc::new(SilentBus));
        balloon.ack_features(Features::from_bits(features));
        balloon.write_config(POISON, &[0; 4]);
        let received = Arc::new(ReceivedList::default());
        let asked = balloon.request_list(received.clone()).is_ok();
        balloon.write_config(POISON, &[u8::from(poison); 4]);
        for (number, count) in counts.into_iter().enumerate() {
            // All rings share the written memory; each announces this number of available buffers.
            let available = GuestAddress(0x400 + 0x200 * number as u64);
            memory.write_obj(count % 20, available.0.checked_add(2).map(GuestAddress).unwrap()).unwrap();
            let mut queue = Queue::new(16).unwrap();
            queue.set_size(16);
            queue.try_set_desc_table_address(GuestAddress(0x100 * number as u64)).unwrap();
            queue.try_set_avail_ring_address(available).unwrap();
            queue.try_set_used_ring_address(GuestAddress(0x1_0000 + 0x200 * number as u64)).unwrap();
            queue.set_ready(true);
            let ring = VirtioQueueRing::new(queue, &memory, || {});
            // A ring of 16 gives at most 16 buffers, of at most 128 runs a time: it ends.
            for round in 0.. {
                prop_assert!(round < 10_000);
                let before = *noted.given_back.lock();
                let more = balloon.process_queue(number, &ring);
                prop_assert!(*noted.given_back.lock() - before <= 128);
                let answer = balloon.counters();
                prop_assert_eq!(answer.hinted_blocks, received.ranges.lock().len() as u64);
                prop_assert!(asked || answer.hinted_blocks == 0);
                if !matches!(more, Ok(MoreWork::Yes)) {
                    break;
                }
            }
        }
        balloon.reset();
        let in_ram = |range: &Range<u64>| noted.ram.iter().any(|ram| ram.start <= range.start && range.end <= ram.end);
        prop_assert!(received.ranges.lock().iter().all(in_ram));
        prop_assert_eq!(Arc::strong_count(&received), 1, "the sink was dropped");
        prop_assert_eq!(balloon.hint_list().state, HintState::Done);
    }
}
