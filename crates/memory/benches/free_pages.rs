//! Cost of filtering a list of free pages into a bitmap of pages to send: the list of an idle guest of 8 GiB, 2000
//! ranges of 4 MiB (as Linux reports them), each of them found in the guest's memory, counted and cleared under a lock,
//! as the engine of live migrations does. `cargo bench -p limosa-memory --bench free_pages`.
#![allow(missing_docs, reason = "criterion's macros make items without")]

use std::hint::black_box;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use limosa_memory::{BlockOptions, GuestMemory, GuestRegion};
use limosa_page::{PageBitmap, PageNumber, PageRange};

const GUEST: u64 = 8 << 30;
/// RAM below the hole of a PC, in pages; the rest is seen from 4 GiB on.
const BELOW: u64 = (3 << 30) / 4096;
const RANGE: u64 = 4 << 20;
const RANGES: u64 = 2000;

fn filter(criterion: &mut Criterion) {
    let block = BlockOptions::memfd("pc.ram", GUEST).map().unwrap();
    let (below, all) = (PageRange::whole_block(BELOW), block.pages());
    let above = PageRange::new(PageNumber(BELOW), all.end);
    let regions = [(0, below), (4 << 30, above)];
    let regions = regions.map(|(guest_address, pages)| GuestRegion { guest_address, block: 0, pages });
    let layout = GuestMemory::with_regions(vec![block], regions.into()).unwrap().layout();
    // From the top down, as a buddy allocator gives them out.
    let address = |at: u64| if at < BELOW * 4096 { at } else { at - BELOW * 4096 + (4 << 30) };
    let list: Vec<_> = (1..=RANGES).map(|number| address(GUEST - number * RANGE)).map(|at| at..at + RANGE).collect();
    criterion.bench_function("2000 ranges of 4 MiB", |bencher| {
        bencher.iter_custom(|times| {
            let mut elapsed = Duration::ZERO;
            for _ in 0..times {
                let pages = Mutex::new(vec![PageBitmap::full(all.len())]);
                let begun = Instant::now();
                let mut taken = 0;
                for range in &list {
                    for (block, run) in layout.pages_within(range.clone()) {
                        let bitmap = &mut pages.lock().unwrap()[block];
                        taken += bitmap.count_in(run);
                        bitmap.clear_range(run);
                    }
                }
                elapsed += begun.elapsed();
                assert_eq!(black_box(taken), RANGES * RANGE / 4096);
            }
            elapsed
        });
    });
}

criterion_group!(benches, filter);
criterion_main!(benches);
