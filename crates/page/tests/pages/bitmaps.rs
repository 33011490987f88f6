//! Both bitmaps against a model: a vector with one `bool` per page.

use limosa_page::{AtomicPageBitmap, BitmapError, PageBitmap, PageNumber, PageRange};
use proptest::collection::vec;
use proptest::prelude::*;

/// Lengths around the borders of words.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..70, 120usize..200, 250usize..260, Just(64), Just(128), Just(1000)]
}

/// Bits in runs of any length, and singly.
fn bits() -> impl Strategy<Value = Vec<bool>> {
    let runs = (length(), vec((any::<bool>(), 1usize..150), 0..12)).prop_map(|(length, runs)| {
        let mut bits: Vec<bool> = runs.into_iter().flat_map(|(bit, times)| vec![bit; times]).collect();
        bits.resize(length, false);
        bits
    });
    let single = length().prop_flat_map(|length| vec(any::<bool>(), length));
    prop_oneof![runs, single]
}

fn number(index: usize) -> PageNumber {
    PageNumber(u64::try_from(index).unwrap())
}

fn range(start: usize, end: usize) -> PageRange {
    PageRange::new(number(start), number(end))
}

fn bitmap(bits: &[bool]) -> PageBitmap {
    let mut bitmap = PageBitmap::new(number(bits.len()).0);
    for (index, _) in bits.iter().enumerate().filter(|(_, bit)| **bit) {
        assert!(!bitmap.set(number(index)));
    }
    bitmap
}

/// The bits behind the end have to be clear: what the bytes say is all there is.
fn bools(bitmap: &PageBitmap) -> Vec<bool> {
    let bytes = bitmap.to_le_bytes();
    let bits: Vec<bool> = bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)).collect();
    let (bits, behind) = bits.split_at(usize::try_from(bitmap.len()).unwrap());
    assert!(behind.iter().all(|bit| !bit), "bits behind the last page");
    bits.to_vec()
}

/// The maximal runs of `wanted` in `bits[start..end]`, one page after the other.
fn runs(bits: &[bool], wanted: bool, start: usize, end: usize) -> Vec<PageRange> {
    let mut runs: Vec<PageRange> = Vec::new();
    for index in (start..end.min(bits.len())).filter(|index| bits[*index] == wanted) {
        match runs.last_mut() {
            Some(run) if run.end == number(index) => run.end = number(index + 1),
            _ => runs.push(range(index, index + 1)),
        }
    }
    runs
}

fn count(bits: &[bool]) -> u64 {
    bits.iter().map(|bit| u64::from(*bit)).sum()
}

proptest! {
    #[test]
    fn words_of_another_numbering_are_added_bit_by_bit(bits in bits(), at in 0usize..1100, words in vec(any::<u64>(), 0..6)) {
        let mut expected = bits.clone();
        for (index, word) in words.iter().enumerate() {
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                if let Some(page) = expected.get_mut(at + 64 * index + bit) {
                    *page = true;
                }
            }
        }
        let mut bitmap = bitmap(&bits);
        bitmap.union_words(number(at), &words);
        prop_assert_eq!(bools(&bitmap), expected);
        bitmap.union_words(PageNumber(u64::MAX), &words);
    }

    #[test]
    fn queries_agree_with_the_model(bits in bits(), start in 0usize..300, end in 0usize..300) {
        let bitmap = bitmap(&bits);
        let inside: &[bool] = bits.get(start..end.min(bits.len())).unwrap_or(&[]);
        prop_assert_eq!(bitmap.len(), number(bits.len()).0);
        prop_assert_eq!(bitmap.count(), count(&bits));
        prop_assert_eq!(bitmap.is_empty(), count(&bits) == 0);
        prop_assert_eq!(bitmap.count_in(range(start, end)), count(inside));
        prop_assert_eq!(bools(&bitmap), bits.clone());
        for (index, bit) in bits.iter().enumerate() {
            prop_assert_eq!(bitmap.get(number(index)), *bit);
        }
        prop_assert_eq!(bitmap.runs().collect::<Vec<_>>(), runs(&bits, true, 0, bits.len()));
        prop_assert_eq!(bitmap.gaps().collect::<Vec<_>>(), runs(&bits, false, 0, bits.len()));
        prop_assert_eq!(bitmap.runs_in(range(start, end)).collect::<Vec<_>>(), runs(&bits, true, start, end));
        prop_assert_eq!(bitmap.gaps_in(range(start, end)).collect::<Vec<_>>(), runs(&bits, false, start, end));

        let atomic = AtomicPageBitmap::from(bitmap.clone());
        prop_assert_eq!(atomic.count(), count(&bits));
        prop_assert_eq!(atomic.is_empty(), count(&bits) == 0);
        for from in 0..bits.len() + 2 {
            let next = |wanted: bool| (from..bits.len()).find(|index| bits[*index] == wanted).map(number);
            prop_assert_eq!(bitmap.next_set(number(from)), next(true));
            prop_assert_eq!(bitmap.next_clear(number(from)), next(false));
            prop_assert_eq!(atomic.next_set(number(from)), next(true));
            let end = number(from).saturating_add(7);
            let near = next(true).filter(|page| *page < end);
            prop_assert_eq!(atomic.next_set_in(PageRange::new(number(from), end)), near);
            prop_assert_eq!(atomic.get(number(from)), bits.get(from).copied().unwrap_or(false));
        }
        prop_assert_eq!(&atomic.to_bitmap(), &bitmap);
        prop_assert_eq!(PageBitmap::from(atomic), bitmap);
    }

    #[test]
    fn changes_agree_with_the_model(
        mut bits in bits(),
        changes in vec((0u8..4, 0usize..300, 0usize..300), 0..20),
    ) {
        let mut plain = bitmap(&bits);
        let atomic = AtomicPageBitmap::from(plain.clone());
        for (what, start, end) in changes {
            let before = bits.get(start).copied().unwrap_or(false);
            let (page, pages) = (number(start), range(start, end));
            let affected = match what {
                0 => {
                    prop_assert_eq!((plain.set(page), atomic.set(page)), (before, before));
                    start..start + 1
                }
                1 => {
                    prop_assert_eq!((plain.clear(page), atomic.clear(page)), (before, before));
                    start..start + 1
                }
                2 => {
                    plain.set_range(pages);
                    atomic.set_range(pages);
                    start..end
                }
                _ => {
                    plain.clear_range(pages);
                    atomic.clear_range(pages);
                    start..end
                }
            };
            let pages = bits.len();
            for index in affected.filter(|index| *index < pages) {
                bits[index] = what % 2 == 0;
            }
            prop_assert_eq!(bools(&plain), bits.clone());
            prop_assert_eq!(bools(&atomic.to_bitmap()), bits.clone());
        }
    }

    #[test]
    fn set_algebra_agrees_with_the_model_also_for_unequal_lengths(one in bits(), two in bits()) {
        let combine = |with: fn(bool, bool) -> bool| -> Vec<bool> {
            one.iter().enumerate().map(|(index, bit)| with(*bit, two.get(index).copied().unwrap_or(false))).collect()
        };
        let (left, right) = (bitmap(&one), bitmap(&two));

        let mut union = left.clone();
        union.union_with(&right);
        prop_assert_eq!(bools(&union), combine(|one, two| one || two));
        let atomic = AtomicPageBitmap::from(left.clone());
        atomic.union_with(&right);
        prop_assert_eq!(atomic.to_bitmap(), union);

        let mut intersection = left.clone();
        intersection.intersect_with(&right);
        prop_assert_eq!(bools(&intersection), combine(|one, two| one && two));

        let mut difference = left.clone();
        difference.subtract(&right);
        prop_assert_eq!(bools(&difference), combine(|one, two| one && !two));

        let mut inverse = left.clone();
        inverse.invert();
        prop_assert_eq!(bools(&inverse), combine(|one, _| !one));
        prop_assert_eq!(inverse.count() + left.count(), left.len());
        prop_assert_eq!(left == right, one == two);
    }

    #[test]
    fn any_bytes_of_the_right_length_are_a_bitmap_and_come_back_as_they_were(pages in 0u64..300, bytes in vec(any::<u8>(), 0..48)) {
        let expected = usize::try_from(pages.div_ceil(64) * 8).unwrap();
        match PageBitmap::from_le_bytes(pages, &bytes) {
            Ok(bitmap) => {
                prop_assert_eq!(bytes.len(), expected);
                for page in 0..pages {
                    let byte = bytes[usize::try_from(page / 8).unwrap()];
                    prop_assert_eq!(bitmap.get(PageNumber(page)), byte >> (page % 8) & 1 == 1);
                }
                prop_assert_eq!(PageBitmap::from_le_bytes(pages, &bitmap.to_le_bytes()), Ok(bitmap.clone()));
                bools(&bitmap);
            }
            Err(BitmapError::Length { pages: named, expected: wanted, got }) => {
                prop_assert!(bytes.len() != expected);
                prop_assert_eq!((named, wanted, got), (pages, number(expected).0, number(bytes.len()).0));
            }
        }
    }

    #[test]
    fn take_returns_what_was_set_in_the_range_and_leaves_the_rest(bits in bits(), start in 0usize..300, end in 0usize..300) {
        let atomic = AtomicPageBitmap::from(bitmap(&bits));
        let taken = bools(&atomic.take(range(start, end)));
        let left = bools(&atomic.to_bitmap());
        for (index, bit) in bits.iter().enumerate() {
            let inside = start <= index && index < end;
            prop_assert_eq!((taken[index], left[index]), (*bit && inside, *bit && !inside));
        }
    }

    #[test]
    fn take_run_takes_the_first_run_of_the_range_up_to_the_limit(
        bits in bits(),
        start in 0usize..300,
        end in 0usize..300,
        limit in prop_oneof![0u64..5, 60u64..70, Just(u64::MAX)],
    ) {
        let atomic = AtomicPageBitmap::from(bitmap(&bits));
        let expected = runs(&bits, true, start, end)
            .first()
            .map(|run| PageRange::starting_at(run.start, run.len().min(limit)))
            .filter(|run| !run.is_empty());
        let taken = atomic.take_run(range(start, end), limit);
        prop_assert_eq!(taken, expected);
        let mut left = bitmap(&bits);
        left.clear_range(taken.unwrap_or_default());
        prop_assert_eq!(atomic.to_bitmap(), left);
    }
}

#[test]
fn the_layout_is_that_of_a_file_written_by_qemu() {
    // The start of the bitmap of pc.ram in a mapped-ram file of QEMU 10.0.2, and the pages that it stored.
    let bitmap = PageBitmap::from_le_bytes(40, &[0x41, 0x00, 0x7f, 0x80, 0x01, 0, 0, 0]).unwrap();
    let runs: Vec<_> = bitmap.runs().collect();
    assert_eq!(runs, [range(0, 1), range(6, 7), range(16, 23), range(31, 33)]);
}

#[test]
fn a_full_bitmap_has_every_page_and_none_behind_the_last() {
    for pages in [0, 1, 63, 64, 65, 1000] {
        let full = PageBitmap::full(pages);
        assert_eq!(full.count(), pages);
        assert_eq!(bools(&full).len() as u64, pages);
        let mut inverse = PageBitmap::new(pages);
        inverse.invert();
        assert_eq!(inverse, full);
        assert_eq!(full.runs().map(|run| run.len()).sum::<u64>(), pages);
    }
}

#[test]
fn pages_outside_have_no_bit_however_far_away_they_are() {
    let mut plain = PageBitmap::full(100);
    let atomic = AtomicPageBitmap::from(plain.clone());
    for page in [100, 127, 128, 1 << 40, u64::MAX].map(PageNumber) {
        assert!(!plain.get(page) && !plain.set(page) && !plain.clear(page));
        assert!(!atomic.get(page) && !atomic.set(page) && !atomic.clear(page));
        assert_eq!((plain.next_set(page), plain.next_clear(page), atomic.next_set(page)), (None, None, None));
        let outside = PageRange::new(page, PageNumber(u64::MAX));
        plain.clear_range(outside);
        assert_eq!((plain.count_in(outside), plain.runs_in(outside).count()), (0, 0));
        assert!(atomic.take(outside).is_empty());
        assert_eq!(atomic.take_run(outside, 5), None);
    }
    let everything = PageRange::new(PageNumber(0), PageNumber(u64::MAX));
    assert_eq!(plain.count_in(everything), 100);
    assert_eq!(atomic.take(everything), plain);
}

#[test]
fn a_bitmap_prints_its_size_its_count_and_its_first_runs() {
    let mut bitmap = PageBitmap::new(100);
    bitmap.set_range(range(4, 6));
    bitmap.set(PageNumber(9));
    assert_eq!(format!("{bitmap:?}"), "PageBitmap(3 of 100: 4..6 9..10)");
    let every_other = bitmap_of_every_other_page(100);
    assert!(format!("{every_other:?}").ends_with(" 30..31 ...)"), "{every_other:?}");
}

fn bitmap_of_every_other_page(pages: usize) -> PageBitmap {
    bitmap(&(0..pages).map(|page| page % 2 == 0).collect::<Vec<_>>())
}
