//! Invalid input of a driver: refused or left out, counted, logged once, and its buffer is given back nevertheless.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_balloon::{Counters, MoreWork, Ring};
use limosa_memory::{FreePageHinting as _, FreePageSink, GuestMemory};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes as _, GuestAddress};

use crate::bare::{Bare, BareRing, Memory, WRITABLE};
use crate::machine::{MIB, ReceivedList};

/// Counts warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicU64>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

const INFLATE: usize = 0;
const STATISTICS: usize = 2;
const HINT: usize = 3;
const REPORT: usize = 4;
const NOWHERE: u64 = 1 << 40;

type Count = fn(&Counters) -> u64;
/// Address, length and flags.
type Buffer = (u64, u32, u16);
/// Its name, the queue, the buffer, the counter, and whether it is logged.
type Wrong = (&'static str, usize, Buffer, Count, bool);

const WRONG: [Wrong; 14] = [
    ("an odd array", INFLATE, (0x4000, 5, 0), |c| c.odd_arrays, true),
    ("a long array", INFLATE, (0x4000, (4 << 20) + 4, 0), |c| c.long_arrays, true),
    ("an array outside of memory", INFLATE, (NOWHERE, 4, 0), |c| c.unreadable_buffers, true),
    ("a writable array", INFLATE, (0x4000, 4, WRITABLE), |c| c.unexpected_buffers, true),
    ("a page outside of memory", INFLATE, (0x5000, 4, 0), |c| c.pages_outside, true),
    ("an id of five bytes", HINT, (0x4000, 5, 0), |c| c.unexpected_buffers, true),
    ("an id outside of memory", HINT, (NOWHERE, 4, 0), |c| c.unreadable_buffers, true),
    ("an id of no list", HINT, (0x5000, 4, 0), |c| c.stale_ids, false),
    ("a block outside of memory", HINT, (NOWHERE, 4096, WRITABLE), |c| c.blocks_outside, true),
    ("a block that reaches beyond memory", HINT, (15 * MIB, 4 << 20, WRITABLE), |c| c.blocks_outside, true),
    ("a block of no list", HINT, (8 * MIB, 4096, WRITABLE), |c| c.stale_hints, false),
    ("a readable report", REPORT, (8 * MIB, 4096, 0), |c| c.unexpected_buffers, true),
    ("a report of an incomplete page", REPORT, (8 * MIB + 1, 4096, WRITABLE), |c| c.blocks_outside, true),
    ("statistics outside of memory", STATISTICS, (NOWHERE, 10, 0), |c| c.unreadable_buffers, true),
];

/// A device, the contents of those buffers of [`WRONG`] that are in memory, and a pattern in the rest.
fn bare() -> Bare {
    let bare = Bare::new();
    bare.memory.block(0).unwrap().write(MIB, &vec![7; 15 << 20]).unwrap();
    bare.guest.write_obj(0xffff_fff0_u32.to_le(), GuestAddress(0x5000)).unwrap();
    bare
}

fn is_untouched(bare: &Bare) -> bool {
    let mut bytes = vec![0; 15 << 20];
    bare.memory.block(0).unwrap().read(MIB, &mut bytes).unwrap();
    bytes.iter().all(|byte| *byte == 7)
}

#[test]
fn invalid_input_is_counted_logged_once_and_its_buffer_given_back() {
    for (what, queue, (address, length, flags), counted, said) in WRONG {
        let (bare, warnings) = (bare(), Warnings::default());
        let ring = bare.ring();
        tracing::subscriber::with_default(warnings.clone(), || {
            for number in 0..3 {
                bare.offer(number, address, length, flags);
                while bare.balloon.process_queue(queue, &ring).unwrap() == MoreWork::Yes {}
            }
        });
        assert_eq!(counted(&bare.balloon.counters()), 3, "{what}");
        // The device holds the last buffer of statistics, and has logged that it got more than one.
        let statistics = queue == STATISTICS;
        assert_eq!(bare.used(), if statistics { 2 } else { 3 }, "{what}");
        assert_eq!(warnings.0.load(Ordering::Relaxed), u64::from(said) + u64::from(statistics), "{what}");
        assert_eq!((bare.balloon.counters().discards, is_untouched(&bare)), (0, true), "{what}");
    }
}

#[test]
fn writes_to_read_only_configuration_are_counted_and_logged_once() {
    let (bare, warnings) = (bare(), Warnings::default());
    tracing::subscriber::with_default(warnings.clone(), || {
        for offset in [0, 8, 16, u32::MAX] {
            bare.balloon.write_config(offset, &[1; 4]);
        }
    });
    assert_eq!(bare.balloon.counters().refused_config_writes, 4);
    assert_eq!((warnings.0.load(Ordering::Relaxed), bare.command()), (1, 1));
}

#[test]
fn statistics_of_unknown_kinds_are_counted_and_the_others_kept() {
    let bare = bare();
    let mut bytes = Vec::new();
    for (tag, value) in [(4_u16, 77_u64), (999, 1), (u16::MAX, 1)] {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(value.to_le_bytes());
    }
    bare.guest.write_slice(&bytes, GuestAddress(0x4000)).unwrap();
    bare.offer(0, 0x4000, 30, 0);
    bare.balloon.process_queue(STATISTICS, &bare.ring()).unwrap();
    assert_eq!(bare.balloon.counters().unknown_statistics, 2);
    assert_eq!(bare.balloon.statistics().unwrap().free_memory(), Some(77));
}

/// A ring whose driver is faster than the device: it always has another block, always the same.
struct Flood<'m> {
    ring: BareRing<'m>,
    bare: &'m Bare,
    next: Cell<u16>,
}

impl<'m> Ring for Flood<'m> {
    type Memory = Memory;
    type Handle = &'m Memory;
    type Error = virtio_queue::Error;

    fn pop(&self) -> Result<Option<DescriptorChain<&'m Memory>>, Self::Error> {
        self.bare.offer(self.next.get(), 8 * MIB, 4 << 20, WRITABLE);
        self.next.set(self.next.get() + 1);
        self.ring.pop()
    }

    fn add_used(&self, head: u16, length: u32) -> Result<(), Self::Error> {
        self.ring.add_used(head, length)
    }

    fn notify(&self) -> Result<(), Self::Error> {
        self.ring.notify()
    }
}

/// Begins the list that was just requested; the buffers that follow belong to it.
fn begin_list(bare: &Bare, ring: &BareRing<'_>) {
    bare.balloon.process_queue(HINT, ring).unwrap();
    bare.guest.write_obj(bare.command().to_le(), GuestAddress(0x6000)).unwrap();
    bare.offer(0, 0x6000, 4, 0);
    bare.balloon.process_queue(HINT, ring).unwrap();
}

#[test]
fn a_flood_of_free_blocks_is_taken_a_bounded_number_at_a_time() {
    let bare = bare();
    let received = Arc::new(ReceivedList::default());
    bare.balloon.request_list(received.clone()).unwrap();
    let ring = bare.ring();
    begin_list(&bare, &ring);
    let flood = Flood { ring, bare: &bare, next: Cell::new(1) };
    for look in 1..=5 {
        assert_eq!(bare.balloon.process_queue(HINT, &flood).unwrap(), MoreWork::Yes, "other queues are processed");
        assert_eq!(bare.balloon.counters().hinted_blocks, look * 256);
    }
    assert_eq!(received.ranges.lock().len(), 5 * 256);
    bare.balloon.return_pages();
    assert_eq!(bare.balloon.process_queue(HINT, &flood).unwrap(), MoreWork::Yes);
    assert_eq!((bare.balloon.counters().stale_hints, is_untouched(&bare)), (256, true));
}

/// A host that trusts hints: it discards the pages.
struct TrustingHost(Arc<GuestMemory>);

impl FreePageSink for TrustingHost {
    fn add_range(&self, range: Range<u64>) {
        let zeros = vec![0; usize::try_from(range.end - range.start).unwrap()];
        self.0.block(0).unwrap().write(range.start, &zeros).unwrap();
    }

    fn complete(&self) {}
}

#[test]
fn a_guest_with_wrong_hints_loses_only_its_own_pages() {
    let (liar, honest) = (bare(), bare());
    let listing = |bare: &Bare, blocks: &[(u64, u32)]| {
        bare.balloon.request_list(Arc::new(TrustingHost(Arc::clone(&bare.memory)))).unwrap();
        let ring = bare.ring();
        begin_list(bare, &ring);
        for (number, (address, length)) in (1..).zip(blocks) {
            bare.offer(number, *address, *length, WRITABLE);
        }
        bare.balloon.process_queue(HINT, &ring).unwrap();
    };
    listing(&honest, &[]);
    // All that it uses, more than it has, and memory that is not its own.
    listing(&liar, &[(MIB, 15 << 20), (8 * MIB, 16 << 20), (16 * MIB, 4 << 20), (NOWHERE, 4 << 20)]);
    let mut bytes = vec![1; 15 << 20];
    liar.memory.block(0).unwrap().read(MIB, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "the pages that it hinted are gone");
    let counters = liar.balloon.counters();
    assert_eq!((counters.hinted_blocks, counters.blocks_outside), (1, 3));
    assert_eq!((honest.balloon.counters().hinted_blocks, is_untouched(&honest)), (0, true));
}
