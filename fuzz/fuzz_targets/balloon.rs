//! The queues of a balloon: for any rings and any configuration that a guest writes, the device gives back pages of the
//! guest's memory alone, a bounded number at a time, and comes to an end.

#![no_main]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libfuzzer_sys::fuzz_target;
use limosa_balloon::{Balloon, Features, MoreWork, QueueNumbering, Options, VirtioQueueRing, Reclaim, Transport};
use limosa_memory::{FreePageSink, FreePageHinting as _, MemoryError};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

/// Bytes of each of two pieces of memory.
const PIECE: u64 = 64 << 10;
/// Where the second one begins; its host has pages of 16 KiB.
const SECOND: u64 = 1 << 20;

#[derive(Debug)]
struct Ram {
    ram: [Range<u64>; 2],
    given_back: AtomicU64,
}

impl Reclaim for Ram {
    fn ram(&self) -> &[Range<u64>] {
        &self.ram
    }

    fn host_page_size(&self, index: usize) -> u64 {
        [4096, 16 << 10][index]
    }

    fn discard(&self, run: &Range<u64>) -> Result<u64, MemoryError> {
        assert_inside(&self.ram, run);
        self.given_back.fetch_add(1, Ordering::Relaxed);
        Ok(run.end - run.start)
    }
}

struct Sink([Range<u64>; 2]);

impl FreePageSink for Sink {
    fn add_range(&self, range: Range<u64>) {
        assert_inside(&self.0, &range);
    }

    fn complete(&self) {}
}

struct Bus;

impl Transport for Bus {
    fn config_changed(&self) {}

    fn kick(&self, _queue: usize) {}
}

fn assert_inside(ram: &[Range<u64>], run: &Range<u64>) {
    assert!(run.start < run.end && run.start % 4096 == 0 && run.end % 4096 == 0, "{run:x?}");
    assert!(ram.iter().any(|range| range.start <= run.start && run.end <= range.end), "{run:x?}");
}

fuzz_target!(|data: &[u8]| {
    let ram = [0..PIECE, SECOND..SECOND + PIECE];
    let memory = GuestMemoryMmap::<()>::from_ranges(&[
        (GuestAddress(0), PIECE as usize),
        (GuestAddress(SECOND), PIECE as usize),
    ])
    .expect("memory");
    let numbering = if data.first().is_some_and(|byte| byte & 1 != 0) { QueueNumbering::Fixed } else { QueueNumbering::Compact };
    let balloon = Arc::new(Balloon::new(Options { numbering, ..Options::default() }));
    let reclaim = Arc::new(Ram { ram: ram.clone(), given_back: AtomicU64::new(0) });
    balloon.set_memory(reclaim.clone());
    balloon.attach(Arc::new(Bus));
    balloon.ack_features(Features::ALL);
    // Its free pages are filled with zeros, so it may be asked for them.
    balloon.write_config(12, &[0; 4]);
    let rings: Vec<_> = (0..5)
        .map(|number| {
            let mut queue = Queue::new(16).expect("a power of two");
            queue.set_size(16);
            queue.set_desc_table_address(Some(0x400 * number), None);
            queue.set_avail_ring_address(Some(0x400 * number + 0x200), None);
            queue.set_used_ring_address(Some(0x400 * number + 0x300), None);
            queue.set_ready(true);
            VirtioQueueRing::new(queue, &memory, || {})
        })
        .collect();
    // Each step: what to do, three bytes more, and for some of them bytes of the guest's.
    let mut rest = data.get(1..).unwrap_or_default();
    while let Some(([what, a, b, c], behind)) = rest.split_first_chunk().map(|(head, behind)| (*head, behind)) {
        rest = behind;
        let place = u64::from(u16::from_le_bytes([a, b])) % 0x1800;
        let bytes = rest.get(..usize::from(c)).unwrap_or(rest);
        match what % 12 {
            0..4 => {
                rest = &rest[bytes.len()..];
                let _ = memory.write_slice(bytes, GuestAddress(place));
            }
            4..7 => {
                let number = usize::from(a % 5);
                // A ring of 16 buffers holds few enough runs.
                for round in 0.. {
                    assert!(round < 100_000);
                    let before = reclaim.given_back.load(Ordering::Relaxed);
                    let more = balloon.process_queue(number, &rings[number]);
                    assert!(reclaim.given_back.load(Ordering::Relaxed) - before <= 128);
                    if !matches!(more, Ok(MoreWork::Yes)) {
                        break;
                    }
                }
            }
            7 => {
                rest = &rest[bytes.len()..];
                balloon.write_config(u32::from(a), bytes);
                let mut config = [0; 32];
                balloon.read_config(u32::from(b), &mut config);
            }
            8 => balloon.ack_features(Features::from_bits(a.into())),
            9 => balloon.reset(),
            10 => drop(balloon.set_target(place * 4096)),
            _ => match a % 5 {
                0 => drop(balloon.request_list(Arc::new(Sink(ram.clone())))),
                1 => balloon.stop_list(),
                2 => balloon.return_pages(),
                3 => balloon.set_reporting(b & 1 != 0),
                _ => drop(balloon.request_statistics()),
            },
        }
    }
});
