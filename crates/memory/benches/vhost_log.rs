//! Cost of importing the log of vhost back ends for a guest of 1 TiB: import, merge and count, on one core. `cargo
//! bench -p limosa-memory --bench vhost_log`.
#![allow(missing_docs, reason = "criterion's macros make items without")]
#![allow(unsafe_code, reason = "sets the bits as a back end does")]

use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use limosa_memory::dirty::{DirtyLog, DirtyPages, VhostLog};
use limosa_memory::{BlockOptions, GuestMemory};

const GUEST: u64 = 1 << 40;
const BITS: u64 = GUEST / 4096;

/// One bit in a hundred: single pages anywhere, or runs of 64 pages.
fn image(run: u64) -> Vec<u8> {
    let mut image = vec![0_u8; usize::try_from(BITS / 8).unwrap()];
    let mut random = 88_172_645_463_325_252_u64;
    for _ in 0..BITS / 100 / run {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let first = random % (BITS - run);
        for bit in first..first + run {
            image[usize::try_from(bit / 8).unwrap()] |= 1 << (bit % 8);
        }
    }
    image
}

fn import(criterion: &mut Criterion) {
    // The guest has no memory that is touched.
    let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("ram", GUEST).map().unwrap()]).unwrap());
    let shared: Arc<Mutex<Option<OwnedFd>>> = Arc::default();
    let for_back_end = Arc::clone(&shared);
    let mut log = VhostLog::new(Arc::clone(&memory), move |base| {
        *for_back_end.lock().unwrap() = base.map(|base| base.fd.try_clone_to_owned()).transpose()?;
        Ok(())
    })
    .unwrap();
    log.start().unwrap();
    let back_end = std::fs::File::from(shared.lock().unwrap().take().unwrap());

    let mut group = criterion.benchmark_group("log of 268 million bits, 1% set");
    group.sample_size(20).measurement_time(Duration::from_secs(5));
    for (name, run) in [("single pages", 1), ("runs of 64 pages", 64)] {
        let image = image(run);
        let bits: u64 = image.iter().map(|byte| u64::from(byte.count_ones())).sum();
        let mut dirty = DirtyPages::new(&memory);
        group.bench_function(format!("{name}: import, merge, count"), |bencher| {
            bencher.iter_custom(|times| {
                let mut spent = Duration::ZERO;
                for _ in 0..times {
                    std::os::unix::fs::FileExt::write_all_at(&back_end, &image, 0).unwrap();
                    let begin = Instant::now();
                    log.fetch(&mut dirty).unwrap();
                    assert_eq!(black_box(dirty.count()), bits);
                    spent += begin.elapsed();
                }
                spent
            });
        });
        group.bench_function(format!("{name}: the same into a new set, merged into another"), |bencher| {
            bencher.iter_custom(|times| {
                let mut spent = Duration::ZERO;
                for _ in 0..times {
                    std::os::unix::fs::FileExt::write_all_at(&back_end, &image, 0).unwrap();
                    let begin = Instant::now();
                    let mut new = DirtyPages::new(&memory);
                    log.fetch(&mut new).unwrap();
                    dirty.union_with(&new);
                    assert_eq!(black_box(dirty.count()), bits);
                    spent += begin.elapsed();
                }
                spent
            });
        });
    }
    group.finish();
}

criterion_group!(benches, import);
criterion_main!(benches);
