//! Comparisons of two packed snapshots: the bytes that are read, and the pages that are found.

use std::path::{Path, PathBuf};

use limosa_migrate::stored::PageSource as _;
use limosa_page::PageNumber;
use limosa_snapshot::{MemoryComparison, Snapshot, compare_memory};
use limosa_stream::mapped_ram::Layout;
use proptest::prelude::*;

use crate::{access, encrypted, options, pack_file, passphrase, snapshot};

fn open(path: &Path) -> Snapshot {
    limosa_pack::open_snapshot(path, &access(Some(&passphrase()))).unwrap()
}

/// Compares the pages of two snapshots; also returns the bytes of images that were read for it.
fn compared(first: &Snapshot, second: &Snapshot) -> (MemoryComparison, u64) {
    let read = || first.counters().bytes_in + second.counters().bytes_in;
    let before = read();
    let found = compare_memory(first, second, true).unwrap();
    (found, read() - before)
}

/// A snapshot of 2000 pages, one where three of them are another, gone or new, and the images of both: an increment
/// of a base.
fn pair(directory: &Path, kind: &str, how: &limosa_pack::PackOptions) -> [PathBuf; 4] {
    let at = |name: &str| directory.join(format!("{name}{kind}"));
    let mut pages: Vec<_> = (0..2000).map(|page| (page, page + 1)).collect();
    let first = snapshot(&at("first"), 2100, &pages);
    pages[700].1 = 7777;
    pages.remove(1500);
    pages.push((2050, 5));
    let second = snapshot(&at("second"), 2100, &pages);
    let (base, increment) = (at("base.qcow2"), at("increment.qcow2"));
    pack_file(&first, &base, None, how);
    pack_file(&second, &increment, Some(&base), how);
    [first, second, base, increment]
}

#[test]
fn what_an_increment_has_from_its_base_is_not_read() {
    let directory = tempfile::tempdir().unwrap();
    for (kind, how) in [("", options()), ("-secret", encrypted())] {
        let [first, second, base, increment] = pair(directory.path(), kind, &how);
        let (plain, _) = compared(&open(&first), &open(&second));
        assert_eq!((plain.differing, plain.only_first, plain.only_second), (Some(3), 1, 1));
        let (packed, read) = compared(&open(&base), &open(&increment));
        assert_eq!(packed, plain);
        // The same with a base that is another file, so that each page is read.
        let copy = directory.path().join("copy.qcow2");
        std::fs::copy(&base, &copy).unwrap();
        let (copied, all) = compared(&open(&copy), &open(&increment));
        assert_eq!(copied, plain);
        assert!(all > 2 * 1_000_000 && read < all / 5, "{read} of {all} bytes");
        // Twice the same one.
        let (same, read) = compared(&open(&increment), &open(&increment));
        assert_eq!((same.differing, same.both), (Some(0), plain.both + plain.only_second));
        assert!(read < all / 5, "{read} of {all} bytes");
    }
}

#[test]
fn a_base_that_was_replaced_since_it_was_opened_is_another_one() {
    let directory = tempfile::tempdir().unwrap();
    let [.., base, increment] = pair(directory.path(), "", &options());
    let opened = open(&base);
    let (copy, kept) = (directory.path().join("copy"), directory.path().join("kept"));
    std::fs::copy(&base, &copy).unwrap();
    std::fs::rename(&base, &kept).unwrap();
    std::fs::rename(&copy, &base).unwrap();
    let (found, all) = compared(&opened, &open(&increment));
    std::fs::rename(&kept, &base).unwrap();
    let (again, read) = compared(&opened, &open(&increment));
    assert_eq!((found.differing, again), (Some(3), found));
    assert!(all > 2 * 1_000_000 && read < all / 5, "{read} of {all} bytes");
}

#[test]
fn bytes_in_the_place_of_a_page_that_is_not_stored_are_not_compared() {
    let directory = tempfile::tempdir().unwrap();
    let [first, _, base, _] = pair(directory.path(), "", &options());
    let increment = directory.path().join("same.qcow2");
    pack_file(&first, &increment, Some(&base), &options());
    // Pages 0 to 1023, and none of their contents.
    let layout: Layout = open(&first).layout().clone();
    let clear = format!("write -z {} 128", layout.blocks[0].bitmap_offset);
    limosa_testkit::qemu_io(["-f", "qcow2", "-c", &clear, increment.to_str().unwrap()]).unwrap();
    let opened = open(&increment);
    assert!(!opened.stored_bitmap(0).get(PageNumber(0)) && opened.stored_bitmap(0).get(PageNumber(1024)));
    let (found, _) = compared(&open(&base), &opened);
    assert_eq!((found.differing, found.only_first), (Some(1024), 1024));
}

#[test]
fn another_layout_is_compared_page_by_page() {
    let directory = tempfile::tempdir().unwrap();
    let [first, _, base, _] = pair(directory.path(), "", &options());
    // The same pages elsewhere in the file, and as many bytes of other pages in their places.
    let more: Vec<_> = (0..2000).map(|page| (page + 1, page + 1)).collect();
    let other = snapshot(&directory.path().join("other"), 40_000, &more);
    let image = directory.path().join("other.qcow2");
    pack_file(&other, &image, Some(&base), &options());
    let (plain, _) = compared(&open(&first), &open(&other));
    assert_eq!(compared(&open(&base), &open(&image)).0, plain);
    assert!(plain.differing.unwrap() >= 2000, "{plain:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// A base, an increment of it, one of that, and another one of the base: each is compared with each.
    #[test]
    fn packed_snapshots_differ_as_the_plain_ones_do(
        start in prop::collection::btree_map(0_u64..300, 1_u64..40, 0..200),
        changes in prop::array::uniform3(prop::collection::btree_map(0_u64..300, 0_u64..40, 0..60)),
        is_secret: bool,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let how = if is_secret { encrypted() } else { options() };
        let mut made: Vec<(PathBuf, PathBuf, std::collections::BTreeMap<u64, u64>)> = Vec::new();
        for (number, base) in [None, Some(0), Some(1), Some(0)].into_iter().enumerate() {
            let mut pages = base.map_or_else(|| start.clone(), |base: usize| made[base].2.clone());
            // A seed of 0: the page is gone.
            pages.extend(number.checked_sub(1).into_iter().flat_map(|number| changes[number].clone()));
            pages.retain(|_, seed| *seed > 0);
            let contents: Vec<_> = pages.iter().map(|(page, seed)| (*page, *seed)).collect();
            let plain = snapshot(&directory.path().join(number.to_string()), 300, &contents);
            let packed = directory.path().join(format!("{number}.qcow2"));
            pack_file(&plain, &packed, base.map(|base| made[base].1.as_path()), &how);
            made.push((plain, packed, pages));
        }
        let opened: Vec<_> = made.iter().map(|(plain, packed, _)| (open(plain), open(packed))).collect();
        for (plain, packed) in &opened {
            for (other_plain, other_packed) in &opened {
                let expected = compare_memory(plain, other_plain, true).unwrap();
                prop_assert_eq!(compare_memory(packed, other_packed, true).unwrap(), expected);
                // A plain one and a packed one have nothing in common.
                prop_assert_eq!(compare_memory(plain, other_packed, true).unwrap(), expected);
            }
        }
    }
}
