//! Threads that claim pages from one atomic bitmap: every page goes to exactly one of them.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use limosa_page::{AtomicPageBitmap, PageBitmap, PageNumber, PageRange};

const PAGES: u64 = 10_000;
const ROUNDS: usize = 20;

/// Puts together what the threads say they got; a page that two of them got ends the test.
fn gather(claims: impl IntoIterator<Item = Vec<PageRange>>) -> PageBitmap {
    let mut all = PageBitmap::new(PAGES);
    for page in claims.into_iter().flatten().flat_map(|range| range.iter()) {
        assert!(!all.set(page), "page {page} was claimed twice");
    }
    all
}

/// Single pages, in an order that crosses that of the others.
fn claim_singly(bitmap: &AtomicPageBitmap, step: u64) -> Vec<PageRange> {
    let order = (0..PAGES).map(|index| PageNumber(index * step % PAGES));
    order.filter(|page| bitmap.clear(*page)).map(|page| PageRange::starting_at(page, 1)).collect()
}

/// Batches of neighbours, as a background push takes them.
fn claim_runs(bitmap: &AtomicPageBitmap, limit: u64) -> Vec<PageRange> {
    std::iter::from_fn(|| bitmap.take_run(PageRange::whole_block(PAGES), limit)).collect()
}

/// Whole stretches.
fn claim_stretches(bitmap: &AtomicPageBitmap) -> Vec<PageRange> {
    PageRange::whole_block(PAGES).chunks(100).flat_map(|chunk| bitmap.take(chunk).runs().collect::<Vec<_>>()).collect()
}

#[test]
fn every_page_goes_to_exactly_one_of_the_threads_that_claim_it() {
    for _ in 0..ROUNDS {
        let bitmap = AtomicPageBitmap::from(PageBitmap::full(PAGES));
        let start = Barrier::new(4);
        let claims = thread::scope(|scope| {
            let threads = [
                scope.spawn(|| (start.wait(), claim_singly(&bitmap, 7919)).1),
                scope.spawn(|| (start.wait(), claim_runs(&bitmap, 97)).1),
                scope.spawn(|| (start.wait(), claim_runs(&bitmap, 3)).1),
                scope.spawn(|| (start.wait(), claim_stretches(&bitmap)).1),
            ];
            threads.map(|thread| thread.join().expect("a claiming thread ends"))
        });
        assert_eq!(gather(claims).count(), PAGES, "every page was claimed");
        assert!(bitmap.is_empty());
    }
}

#[test]
fn of_the_threads_that_set_one_bit_exactly_one_sees_that_it_was_clear() {
    for _ in 0..ROUNDS {
        let bitmap = AtomicPageBitmap::new(PAGES);
        let start = Barrier::new(3);
        let claims = thread::scope(|scope| {
            let set = |step: u64| {
                start.wait();
                let order = (0..PAGES).map(|index| PageNumber(index * step % PAGES));
                order.filter(|page| !bitmap.set(*page)).map(|page| PageRange::starting_at(page, 1)).collect()
            };
            let threads = [1, 7919, 1201].map(|step| scope.spawn(move || set(step)));
            threads.map(|thread| thread.join().expect("a setting thread ends"))
        });
        assert_eq!(gather(claims).count(), PAGES);
        assert_eq!(bitmap.count(), PAGES);
    }
}

#[test]
fn a_page_dirtied_while_others_are_taken_is_taken_or_still_there() {
    for _ in 0..ROUNDS {
        let bitmap = AtomicPageBitmap::new(PAGES);
        let done = AtomicBool::new(false);
        let mut taken = thread::scope(|scope| {
            scope.spawn(|| {
                for page in PageRange::whole_block(PAGES).iter() {
                    bitmap.set(page);
                }
                done.store(true, Ordering::Release);
            });
            let mut taken = PageBitmap::new(PAGES);
            while !done.load(Ordering::Acquire) {
                taken.union_with(&bitmap.take(PageRange::whole_block(PAGES)));
                if let Some(run) = bitmap.take_run(PageRange::whole_block(PAGES), 10) {
                    taken.set_range(run);
                }
            }
            taken
        });
        taken.union_with(&bitmap.to_bitmap());
        assert_eq!(taken.count(), PAGES, "no page was lost");
    }
}

/// All in one word, where the threads meet at every step: what was set is what was claimed, and what is left.
#[test]
fn claims_in_one_word_balance_with_the_bits_that_were_set() {
    const STEPS: u64 = 1_000_000;
    let bitmap = AtomicPageBitmap::new(64);
    let (word, start) = (PageRange::whole_block(64), Barrier::new(3));
    let (set, claimed) = thread::scope(|scope| {
        let setter = scope.spawn(|| {
            start.wait();
            let pages = (0..STEPS).map(|step| PageNumber(step * 7 % 64));
            pages.filter(|page| !bitmap.set(*page)).count()
        });
        let runs = scope.spawn(|| {
            start.wait();
            let runs = (0..STEPS).filter_map(|step| bitmap.take_run(word, step % 9));
            runs.map(|run| run.iter().count()).sum::<usize>()
        });
        start.wait();
        let single = (0..STEPS).filter(|step| bitmap.clear(PageNumber(step * 11 % 64))).count();
        (setter.join().expect("the setter ends"), single + runs.join().expect("the claimer ends"))
    });
    assert_eq!(set, claimed + bitmap.to_bitmap().runs().map(|run| run.iter().count()).sum::<usize>());
}
