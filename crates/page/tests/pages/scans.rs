//! Scans against a model: the kind of each page, one by one.

use std::io;

use limosa_page::{
    GuestPages, PAGE_LEN, PageKind, PageNumber, PageRange, PageRun, Scan, ScanPopulated, ScanRanges, ZeroMethod, scan,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// Pages that are zero, or not zero in one byte at some place, and perhaps a part of a page.
fn memory() -> impl Strategy<Value = Vec<u8>> {
    let page = prop_oneof![Just(None), (0..PAGE_LEN).prop_map(Some)];
    (vec((page, 1usize..5), 0..8), 0..PAGE_LEN, any::<bool>()).prop_map(|(pages, cut, whole)| {
        let mut memory = Vec::new();
        for (place, times) in pages {
            for _ in 0..times {
                let start = memory.len();
                memory.resize(start + PAGE_LEN, 0);
                if let Some(place) = place {
                    memory[start + place] = 1;
                }
            }
        }
        memory.truncate(if whole { memory.len() } else { memory.len().saturating_sub(cut) });
        memory
    })
}

fn kinds(memory: &[u8]) -> Vec<PageKind> {
    let zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    memory.chunks(PAGE_LEN).map(|page| if zero(page) { PageKind::Zero } else { PageKind::Data }).collect()
}

/// Checks the law of runs and spells them out page by page.
fn spell_out(runs: &[PageRun]) -> Vec<(u64, PageKind)> {
    for pair in runs.windows(2) {
        assert_eq!(pair[0].pages.end, pair[1].pages.start, "runs touch");
        assert_ne!(pair[0].kind, pair[1].kind, "neighbours differ");
    }
    assert!(runs.iter().all(|run| !run.pages.is_empty()));
    runs.iter().flat_map(|run| run.pages.iter().map(|page| (page.0, run.kind))).collect()
}

proptest! {
    #[test]
    fn a_scan_reports_the_kind_of_every_page(memory in memory(), first in 0u64..1000) {
        let expected: Vec<_> = (first..).zip(kinds(&memory)).collect();
        let runs: Vec<_> = scan(&memory, PageNumber(first)).collect();
        prop_assert_eq!(spell_out(&runs), expected);
    }

    #[test]
    fn a_scan_of_a_range_is_cut_off_at_the_memory_whatever_the_method(memory in memory(), first in 0u64..8, start in 0u64..40, end in 0u64..50) {
        let pages = GuestPages::from(&memory[..]).numbered_from(PageNumber(first));
        let range = PageRange::new(PageNumber(start), PageNumber(end));
        let expected: Vec<_> = (first..).zip(kinds(&memory)).filter(|(page, _)| range.contains(PageNumber(*page))).collect();
        for method in ZeroMethod::ALL {
            let runs: Vec<_> = Scan::new(pages, range, method).collect();
            prop_assert_eq!(spell_out(&runs), expected.clone());
        }
    }

    /// Longer than what is looked at in one call, and at any address: guest memory is aligned, other memory need not
    /// be.
    #[test]
    fn runs_say_of_every_page_what_a_look_at_it_alone_says(
        pages in vec((prop_oneof![Just(None), (0..PAGE_LEN).prop_map(Some)], 1usize..90), 0..6),
        skip in 0usize..100,
        cut in 0usize..PAGE_LEN,
    ) {
        let mut memory = vec![0xff; skip];
        for (place, times) in pages {
            for _ in 0..times {
                let start = memory.len();
                memory.resize(start + PAGE_LEN, 0);
                if let Some(place) = place {
                    memory[start + place] = 0x80;
                }
            }
        }
        memory.truncate(memory.len().saturating_sub(cut).max(skip));
        let pages = GuestPages::from(&memory[skip..]);
        for method in ZeroMethod::ALL {
            let alone: Vec<_> = pages.pages().iter()
                .map(|page| (page.0, match pages.page_is_zero(method, page) {
                    Some(true) => PageKind::Zero,
                    _ => PageKind::Data,
                }))
                .collect();
            prop_assert_eq!(&alone, &(0..).zip(kinds(&memory[skip..])).collect::<Vec<_>>(), "{}", method);
            let runs: Vec<_> = Scan::new(pages, pages.pages(), method).collect();
            prop_assert_eq!(spell_out(&runs), alone, "{}", method);
        }
    }

    #[test]
    fn a_scan_of_ranges_is_their_scans_one_after_the_other(
        memory in memory(),
        first in 0u64..8,
        ranges in vec((0u64..40, 0u64..12), 0..12),
    ) {
        let pages = GuestPages::from(&memory[..]).numbered_from(PageNumber(first));
        let ranges: Vec<_> = ranges.into_iter().map(|(start, len)| PageRange::starting_at(PageNumber(start), len)).collect();
        for method in ZeroMethod::ALL {
            let expected: Vec<_> = ranges.iter().flat_map(|range| Scan::new(pages, *range, method)).collect();
            prop_assert_eq!(ScanRanges::new(pages, &ranges, method).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn pages_that_are_not_named_as_data_are_holes(
        memory in memory(),
        first in 0u64..8,
        lengths in vec((1u64..6, 1u64..6), 0..8),
        start in 0u64..20,
        end in 0u64..60,
    ) {
        let mut at = 0;
        let data: Vec<_> = lengths.into_iter().map(|(skip, len)| {
            let range = PageRange::starting_at(PageNumber(at + skip - 1), len);
            at = range.end.0 + 1;
            range
        }).collect();
        let pages = GuestPages::from(&memory[..]).numbered_from(PageNumber(first));
        let range = PageRange::new(PageNumber(start), PageNumber(end));
        let expected: Vec<_> = (first..).zip(kinds(&memory))
            .filter(|(page, _)| range.contains(PageNumber(*page)))
            .map(|(page, kind)| match data.iter().any(|data| data.contains(PageNumber(page))) {
                true => (page, kind),
                false => (page, PageKind::Hole),
            })
            .collect();
        let runs = ScanPopulated::new(pages, range, ZeroMethod::best(), data.iter().copied().map(Ok));
        let runs: Vec<_> = runs.collect::<io::Result<_>>().unwrap();
        prop_assert_eq!(spell_out(&runs), expected);
    }

    #[test]
    fn ranges_of_data_in_any_order_make_no_page_appear_twice_or_not_at_all(
        memory in memory(),
        data in vec((0u64..40, 0u64..40), 0..8),
    ) {
        let data = data.into_iter().map(|(start, end)| Ok(PageRange::new(PageNumber(start), PageNumber(end))));
        let pages = GuestPages::from(&memory[..]);
        let runs: Vec<_> = ScanPopulated::new(pages, pages.pages(), ZeroMethod::best(), data).collect::<io::Result<_>>().unwrap();
        let seen: Vec<_> = runs.iter().flat_map(|run| run.pages.iter()).collect();
        prop_assert_eq!(seen, pages.pages().iter().collect::<Vec<_>>());
    }
}

#[test]
fn an_error_of_what_names_the_data_ends_the_scan_without_calling_the_rest_a_hole() {
    let memory = vec![1; 10 * PAGE_LEN];
    let pages = GuestPages::from(&memory[..]);
    let data = [Ok(PageRange::new(PageNumber(2), PageNumber(4))), Err(io::Error::other("no answer"))];
    let mut runs = ScanPopulated::new(pages, pages.pages(), ZeroMethod::best(), data.into_iter());
    let hole = runs.next().unwrap().unwrap();
    assert_eq!((hole.pages.len(), hole.kind), (2, PageKind::Hole));
    let data = runs.next().unwrap().unwrap();
    assert_eq!((data.pages.len(), data.kind), (2, PageKind::Data));
    assert_eq!(runs.next().unwrap().unwrap_err().to_string(), "no answer");
    assert!(runs.next().is_none());
}

#[test]
fn pages_are_located_in_their_memory_and_nowhere_else() {
    let memory = vec![0; 2 * PAGE_LEN + 100];
    let pages = GuestPages::from(&memory[..]).numbered_from(PageNumber(10));
    assert_eq!(pages.pages(), PageRange::new(PageNumber(10), PageNumber(13)));
    assert_eq!(pages.locate(PageNumber(11)), Some((memory[PAGE_LEN..].as_ptr(), PAGE_LEN)));
    assert_eq!(pages.locate(PageNumber(12)), Some((memory[2 * PAGE_LEN..].as_ptr(), 100)));
    for outside in [0, 9, 13, 1 << 52, (1 << 52) + 10, u64::MAX].map(PageNumber) {
        assert_eq!(pages.locate(outside), None);
        assert_eq!(pages.page_is_zero(ZeroMethod::best(), outside), None);
    }
}

#[test]
fn empty_ranges_of_data_do_not_split_a_hole() {
    let memory = vec![0; 10 * PAGE_LEN];
    let pages = GuestPages::from(&memory[..]);
    let data = [(3, 3), (5, 2), (7, 7), (20, 30)];
    let data = data.map(|(start, end)| Ok(PageRange::new(PageNumber(start), PageNumber(end))));
    let runs = ScanPopulated::new(pages, pages.pages(), ZeroMethod::best(), data.into_iter());
    let runs: Vec<_> = runs.map(Result::unwrap).collect();
    assert_eq!(runs, [PageRun { pages: PageRange::whole_block(10), kind: PageKind::Hole }]);
}
