//! Rings that stop while the device has a buffer, and lists that are asked for while others are on the queue.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use limosa_balloon::{Balloon, Features, GuestRam, More, Options, OwnRing, Ring, Strategy, Transport};
use limosa_memory::free::{FreePageSink, FreePages as _};
use limosa_memory::rust_vmm::DirtyMarks;
use limosa_memory::{BlockOptions, GuestMemory, rust_vmm};
use virtio_queue::{DescriptorChain, Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use crate::machine::MIB;

type Memory = GuestMemoryMmap<DirtyMarks>;

/// A ring that stops in front of the next buffer that is given back.
struct Stopping<'m> {
    ring: OwnRing<&'m Memory, fn()>,
    stopped: Cell<bool>,
}

impl<'m> Ring for Stopping<'m> {
    type Memory = Memory;
    type Handle = &'m Memory;
    type Error = virtio_queue::Error;

    fn pop(&self) -> Result<Option<DescriptorChain<&'m Memory>>, Self::Error> {
        self.ring.pop()
    }

    fn add_used(&self, head: u16, length: u32) -> Result<(), Self::Error> {
        if self.stopped.get() { Err(virtio_queue::Error::QueueNotReady) } else { self.ring.add_used(head, length) }
    }

    fn notify(&self) -> Result<(), Self::Error> {
        self.ring.notify()
    }
}

struct Bus;

impl Transport for Bus {
    fn config_changed(&self) {}
    fn kick(&self, _queue: usize) {}
}

/// A device whose driver is this test: one queue at the beginning of memory, buffers from 0x4000 on.
struct Bench {
    memory: Arc<GuestMemory>,
    guest: Memory,
    balloon: Balloon,
}

const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const WRITABLE: u16 = 2;

impl Bench {
    fn new() -> Self {
        let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 16 * MIB).map().unwrap()]).unwrap());
        let guest = rust_vmm::export(&memory).unwrap();
        let balloon = Balloon::new(Options::default());
        balloon.memory(Arc::new(GuestRam::new(Arc::clone(&memory), Strategy::Auto)));
        balloon.attached(Arc::new(Bus));
        balloon.accepted(Features::default());
        Self { memory, guest, balloon }
    }

    fn ring(&self) -> Stopping<'_> {
        let mut queue = Queue::new(16).unwrap();
        queue.set_desc_table_address(Some(u32::try_from(DESCRIPTORS).unwrap()), None);
        queue.set_avail_ring_address(Some(u32::try_from(AVAILABLE).unwrap()), None);
        queue.set_used_ring_address(Some(u32::try_from(USED).unwrap()), None);
        queue.set_ready(true);
        Stopping { ring: OwnRing::new(queue, &self.guest, || {}), stopped: Cell::new(false) }
    }

    /// Makes a buffer available, the `number`th.
    fn offer(&self, number: u16, address: u64, length: u32, flags: u16) {
        let at = GuestAddress(DESCRIPTORS + 16 * u64::from(number));
        self.guest.write_obj(address.to_le(), at).unwrap();
        self.guest.write_obj(length.to_le(), GuestAddress(at.0 + 8)).unwrap();
        self.guest.write_obj([flags.to_le(), 0], GuestAddress(at.0 + 12)).unwrap();
        self.guest.write_obj(number.to_le(), GuestAddress(AVAILABLE + 4 + 2 * u64::from(number))).unwrap();
        self.guest.write_obj((number + 1).to_le(), GuestAddress(AVAILABLE + 2)).unwrap();
    }

    fn used(&self) -> u16 {
        u16::from_le(self.guest.read_obj(GuestAddress(USED + 2)).unwrap())
    }

    fn command(&self) -> u32 {
        let mut bytes = [0; 4];
        self.balloon.read_config(8, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}

#[test]
fn a_buffer_whose_ring_was_stopped_comes_back_when_it_goes_on() {
    for queue in [0, 3, 4] {
        let bench = Bench::new();
        let ring = bench.ring();
        let flags = if queue == 4 { WRITABLE } else { 0 };
        bench.guest.write_obj(4095u32.to_le(), GuestAddress(0x4000)).unwrap();
        let (address, length) = if queue == 4 { (8 * MIB, 4096) } else { (0x4000, 4) };
        bench.offer(0, address, length, flags);
        ring.stopped.set(true);
        assert!(bench.balloon.work(queue, &ring).is_err());
        assert_eq!(bench.used(), 0);
        ring.stopped.set(false);
        assert_eq!(bench.balloon.work(queue, &ring).unwrap(), More::No);
        assert_eq!(bench.used(), 1, "queue {queue}: the driver waits for it");
    }
    let bench = Bench::new();
    let ring = bench.ring();
    bench.offer(0, 0x4000, 10, 0);
    bench.balloon.work(2, &ring).unwrap();
    bench.balloon.request_statistics().unwrap();
    ring.stopped.set(true);
    assert!(bench.balloon.work(2, &ring).is_err());
    ring.stopped.set(false);
    bench.balloon.work(2, &ring).unwrap();
    assert_eq!(bench.used(), 1, "and so do statistics");
    assert_eq!(bench.memory.total_pages(), 4096);
}

/// As a VM is stopped for a while: the ring begins anew where the buffers are that were not given back.
#[test]
fn a_queue_that_stops_and_goes_on_has_the_same_driver() {
    let bench = Bench::new();
    let poison = 0xaaaa_aaaa_u32.to_le_bytes();
    bench.balloon.write_config(12, &poison);
    bench.balloon.write_config(4, &77_u32.to_le_bytes());
    bench.offer(0, 0x4000, 10, 0);
    bench.balloon.work(2, &bench.ring()).unwrap();
    let before = bench.balloon.statistics().unwrap().sequence;
    for queue in 0..6 {
        bench.balloon.stopped(queue);
    }
    assert_eq!(bench.balloon.size().actual, 16 * MIB - 77 * 4096, "what is in the balloon stays there");
    let refused = bench.balloon.request(Arc::new(Told::default())).unwrap_err();
    assert!(refused.to_string().contains("page_poison"), "free pages are filled as they were: {refused}");
    // The buffer for statistics is one that the device has not got, so it comes alone.
    bench.balloon.work(2, &bench.ring()).unwrap();
    assert_eq!(bench.balloon.statistics().unwrap().sequence, before + 1);
    assert_eq!((bench.balloon.counters().unexpected_buffers, bench.used()), (0, 0));

    bench.balloon.reset();
    assert_eq!(bench.balloon.size().actual, 16 * MIB);
    bench.balloon.accepted(Features::default().without(Features::PAGE_POISON));
    assert!(bench.balloon.request(Arc::new(Told::default())).is_ok(), "the next driver has no such value");
}

/// QEMU tells a back end what was accepted when the driver is ready, and what the driver has written before at once.
#[test]
fn what_fills_free_pages_may_be_said_before_the_feature_is_accepted() {
    let bench = Bench::new();
    bench.balloon.reset();
    bench.balloon.accepted(Features::FREE_PAGE_HINT);
    bench.balloon.write_config(12, &[0xaa; 4]);
    assert!(bench.balloon.request(Arc::new(Told::default())).is_ok());
    bench.balloon.accepted(Features::default());
    assert!(bench.balloon.request(Arc::new(Told::default())).is_err());
    // Another guest.
    bench.balloon.attached(Arc::new(Bus));
    bench.balloon.accepted(Features::default());
    assert!(bench.balloon.request(Arc::new(Told::default())).is_ok());
}

#[derive(Default)]
struct Told(Mutex<Vec<u64>>);

impl FreePageSink for Told {
    fn free(&self, range: std::ops::Range<u64>) {
        self.0.lock().unwrap().push(range.start);
    }

    fn complete(&self) {}
}

#[test]
fn what_was_on_the_queue_when_a_list_was_asked_for_is_not_of_that_list() {
    let bench = Bench::new();
    let ring = bench.ring();
    let ask = || {
        let told = Arc::new(Told::default());
        bench.balloon.request(told.clone()).unwrap();
        told
    };
    let first = ask();
    bench.balloon.work(3, &ring).unwrap();
    let id = bench.command();
    // Linux has one field for the id, which its buffers point to.
    let field = |id: u32| bench.guest.write_obj(id.to_le(), GuestAddress(0x4000)).unwrap();
    field(id);
    bench.offer(0, 0x4000, 4, 0);
    bench.offer(1, 8 * MIB, 4096, WRITABLE);
    // Nobody has looked at the queue when the list is given up, and another one asked for.
    bench.balloon.stop();
    let second = ask();
    assert!(bench.command() < 0x8000_0000, "the driver cannot know of it yet");
    field(id + 1);
    bench.balloon.work(3, &ring).unwrap();
    assert_eq!(bench.command(), id + 1);
    assert!(first.0.lock().unwrap().is_empty() && second.0.lock().unwrap().is_empty());
    // What comes now was free behind the question.
    bench.offer(2, 0x4000, 4, 0);
    bench.offer(3, 12 * MIB, 4096, WRITABLE);
    bench.balloon.work(3, &ring).unwrap();
    assert_eq!(*second.0.lock().unwrap(), [12 * MIB]);
}
