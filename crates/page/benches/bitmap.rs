//! Cost of walking the bitmap of an 8 GiB guest: `cargo bench -p limosa-page --bench bitmap`.
#![allow(missing_docs, reason = "criterion's macros make items without")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use limosa_page::{AtomicPageBitmap, PageBitmap, PageNumber, PageRange};

const PAGES: u64 = (8 << 30) / 4096;

fn every(step: u64, run: u64) -> PageBitmap {
    let mut bitmap = PageBitmap::new(PAGES);
    for chunk in PageRange::whole_block(PAGES).chunks(step) {
        bitmap.set_range(PageRange::starting_at(chunk.start, run));
    }
    bitmap
}

fn walk(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("runs of 8 GiB");
    group.throughput(Throughput::Elements(PAGES)).sample_size(20);
    let cases = [
        ("empty", PageBitmap::new(PAGES)),
        ("full", PageBitmap::full(PAGES)),
        ("1 page of 1000", every(1000, 1)),
        ("100 pages of 300", every(300, 100)),
        ("every other page", every(2, 1)),
    ];
    for (name, bitmap) in &cases {
        group.bench_function(*name, |bencher| {
            bencher.iter(|| black_box(bitmap).runs().map(|run| run.len()).sum::<u64>());
        });
    }
    let naive = &cases[3].1;
    group.bench_function("100 pages of 300, bit by bit", |bencher| {
        bencher.iter(|| {
            let mut runs = 0;
            let mut before = false;
            for page in 0..PAGES {
                let bit = black_box(naive).get(PageNumber(page));
                runs += u64::from(bit && !before);
                before = bit;
            }
            runs
        });
    });
    group.finish();
}

fn whole(criterion: &mut Criterion) {
    let bitmap = every(300, 100);
    let bytes = bitmap.to_le_bytes();
    let atomic = AtomicPageBitmap::from(bitmap.clone());
    let mut group = criterion.benchmark_group("whole bitmap of 8 GiB");
    group.throughput(Throughput::Elements(PAGES)).sample_size(20);
    group.bench_function("count", |bencher| bencher.iter(|| black_box(&bitmap).count()));
    group.bench_function("from_le_bytes", |bencher| {
        bencher.iter(|| PageBitmap::from_le_bytes(PAGES, black_box(&bytes)));
    });
    group.bench_function("to_le_bytes", |bencher| bencher.iter(|| black_box(&bitmap).to_le_bytes()));
    group.bench_function("atomic: refill and take", |bencher| {
        bencher.iter(|| {
            atomic.union_with(black_box(&bitmap));
            atomic.take(PageRange::whole_block(PAGES))
        });
    });
    group.bench_function("atomic: refill and take_run", |bencher| {
        bencher.iter(|| {
            atomic.union_with(black_box(&bitmap));
            let mut from = PageNumber(0);
            while let Some(run) = atomic.take_run(PageRange::new(from, PageNumber(PAGES)), 256) {
                from = run.end;
            }
        });
    });
    group.finish();
}

criterion_group!(benches, walk, whole);
criterion_main!(benches);
