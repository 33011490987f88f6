//! Cost of checking whether a page is zero: `cargo bench -p limosa-page --bench zero`.
//!
//! Times are for one page in cache, where the loop is what counts, and for 256 MiB of them, where memory is.
#![allow(missing_docs, reason = "criterion's macros make items without")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use limosa_page::{GuestPages, PAGE_LEN, Scan, ZeroMethod, is_zero_with};

/// A page aligned as a guest's pages are.
#[repr(align(4096))]
struct Page([u8; PAGE_LEN]);

fn one_page(criterion: &mut Criterion) {
    let mut pages = [("zero", Page([0; PAGE_LEN])), ("content", Page([1; PAGE_LEN])), ("hidden", Page([0; PAGE_LEN]))];
    // The worst a page can do: not where the probes look, and behind everything else.
    pages[2].1.0[PAGE_LEN - 9] = 1;
    for (content, page) in &pages {
        let mut group = criterion.benchmark_group(format!("page/{content}"));
        for method in ZeroMethod::available() {
            group.bench_function(method.name(), |bencher| {
                bencher.iter(|| is_zero_with(black_box(method), black_box(&page.0)));
            });
        }
        group.bench_function("byte by byte", |bencher| {
            bencher.iter(|| black_box(&page.0).iter().all(|byte| *byte == 0));
        });
        group.finish();
    }
}

fn memory(criterion: &mut Criterion) {
    const PAGES: usize = 65536;
    // Mixed: half of the pages, at random, which no processor foresees.
    for (content, rarely) in [("zero", None), ("mixed", Some(2)), ("content", Some(1))] {
        // Memory that was never written is one page of zeros of the kernel's, and would be read from the cache.
        let mut memory = vec![[1; PAGE_LEN]; PAGES];
        memory.as_flattened_mut().fill(0);
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        for page in &mut memory {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if rarely.is_some_and(|rarely| (random >> 32).is_multiple_of(rarely)) {
                page.fill(1);
            }
        }
        let pages = GuestPages::from(memory.as_flattened());
        let mut group = criterion.benchmark_group(format!("256 MiB/{content}"));
        group.throughput(Throughput::Elements(65536)).sample_size(20);
        for method in ZeroMethod::available() {
            group.bench_function(method.name(), |bencher| {
                bencher.iter(|| memory.iter().filter(|page| is_zero_with(method, *page)).count());
            });
            group.bench_function(format!("{method}, in runs"), |bencher| {
                bencher.iter(|| Scan::new(pages, pages.pages(), method).count());
            });
        }
        group.finish();
    }
}

criterion_group!(benches, one_page, memory);
criterion_main!(benches);
