//! Bitmaps that cannot be read or stored, while the image is in use.

use std::sync::Arc;

use limosa_image::qcow2::{CheckOptions, CreateOptions, Repair, change_bitmap, check, create, read_bitmaps, repair};
use limosa_image::{BitmapAction, Disk, GuestOffset};
use limosa_storage::block_on;
use limosa_storage::testing::RequestRecorder;
use limosa_testkit::image::{TestImage, filled, memory_file, number, put};

use super::dirty_bitmaps::{KB, add, change, open, with_bitmaps};

/// Bytes of the directory's entries of bitmaps with names of one to eight bytes.
const ENTRY: u64 = 32;

/// An image with these bitmaps, each with a set bit.
fn with_bits(options: &CreateOptions, names: &[&str]) -> TestImage {
    let bitmaps: Vec<_> = names.iter().map(|name| (*name, 512)).collect();
    let file = with_bitmaps(options, &bitmaps);
    let disk = open(Arc::clone(&file), None);
    block_on(disk.write(GuestOffset(0), filled(1, 512).into())).unwrap();
    block_on(disk.close()).unwrap();
    TestImage::existing(file)
}

/// The offset of a bitmap's entry in the directory.
fn entry(image: &TestImage, number: u64) -> u64 {
    image.header().extensions.bitmaps.unwrap().directory.0 + number * ENTRY
}

/// Has the first entry of a bitmap's table lead nowhere.
fn damage(image: &TestImage, bitmap: u64) {
    let table = number(&*image.file, entry(image, bitmap));
    put(&*image.file, table, &3_u64.to_be_bytes());
}

fn small() -> CreateOptions {
    CreateOptions::default().size(256 * KB).cluster_size(512)
}

/// Names and bits that are set, of what is stored.
fn stored(image: &TestImage) -> Vec<(String, Option<u64>)> {
    let disk = image.open_read_only();
    block_on(disk.bitmaps()).unwrap().into_iter().map(|bitmap| (bitmap.name, bitmap.set)).collect()
}

#[test]
fn bitmaps_that_share_their_clusters_are_not_read_again_and_again() {
    let names: Vec<String> = (0..64).map(|number| format!("b{number}")).collect();
    let options = CreateOptions::default().size(64 << 20).cluster_size(512);
    let made = TestImage::new(&options);
    let disk = made.open();
    for name in &names {
        change(&*disk, name, &[add(512)]).unwrap();
    }
    // A cluster of bits is about 2 MiB.
    for at in (0..64 << 20).step_by(2 << 20) {
        block_on(disk.write(GuestOffset(at), filled(1, 512).into())).unwrap();
    }
    block_on(disk.close()).unwrap();
    let table = number(&*made.file, entry(&made, 0));
    (1..64).for_each(|bitmap| put(&*made.file, entry(&made, bitmap), &table.to_be_bytes()));
    let seen = RequestRecorder::new();
    let disk = open(seen.wrap(Arc::clone(&made.file)), None);
    let bitmaps = block_on(disk.bitmaps()).unwrap();
    assert_eq!(bitmaps.iter().filter(|bitmap| bitmap.set.is_some()).count(), 1);
    // That is all of their bits.
    let read: u64 = seen.counts().values().map(|counts| counts.bytes).sum();
    assert!(read < 64 * 16 * KB, "{read}");
}

#[test]
fn a_damaged_bitmap_is_removed_although_its_clusters_are_unknown() {
    for live in [false, true] {
        let image = with_bits(&small(), &["a", "b"]);
        damage(&image, 0);
        if live {
            let disk = open(Arc::clone(&image.file), None);
            assert_eq!(block_on(disk.bitmaps()).unwrap()[0].set, None);
            block_on(disk.write(GuestOffset(4 * KB), filled(2, 512).into())).unwrap();
            change(&*disk, "a", &[BitmapAction::Remove]).unwrap();
            block_on(disk.close()).unwrap();
        } else {
            block_on(change_bitmap(&*image.file, "a", &[BitmapAction::Remove], None, CheckOptions::default())).unwrap();
        }
        let bits = if live { 2 } else { 1 };
        assert_eq!(stored(&image), [("b".to_owned(), Some(bits))], "{live}");
        let report = block_on(check(&*image.file, CheckOptions::default())).unwrap();
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{live}: {:#?}", report.findings);
        assert!(report.leaks > 0, "{live}");
        let report = block_on(repair(&*image.file, Repair::Leaks, CheckOptions::default())).unwrap();
        assert!(report.is_clean(), "{live}: {:#?}", report.findings);
        assert_eq!(stored(&image), [("b".to_owned(), Some(bits))], "{live}");
    }
}

#[test]
fn a_bitmap_that_cannot_be_stored_costs_no_other_one() {
    let image = with_bits(&small(), &["a", "b"]);
    let disk = open(Arc::clone(&image.file), None);
    block_on(disk.write(GuestOffset(4 * KB), filled(2, 512).into())).unwrap();
    damage(&image, 0);
    let error = block_on(disk.close()).unwrap_err();
    assert!(error.to_string().contains("bitmap"), "{error}");
    let bitmaps = block_on(read_bitmaps(&*image.file, &image.header())).unwrap();
    assert_eq!(bitmaps.iter().map(|bitmap| bitmap.in_use).collect::<Vec<_>>(), [true, false]);
    assert_eq!(stored(&image), [("a".to_owned(), None), ("b".to_owned(), Some(2))]);
}

#[test]
fn a_bitmap_that_the_header_has_no_room_for_is_refused_when_it_is_added() {
    let with_name =
        |length: usize| small().backing_file(Some("b".repeat(length).into())).backing_format(Some("raw".into()));
    let offline =
        |image: &TestImage| block_on(change_bitmap(&*image.file, "a", &[add(512)], None, CheckOptions::default()));
    let (mut accepted, mut refused) = (0, 0);
    for length in (200..400).step_by(8) {
        let made = TestImage::existing(memory_file("image"));
        if block_on(create(&*made.file, None, &with_name(length))).is_err() {
            break;
        }
        let disk = open(Arc::clone(&made.file), None);
        let added = change(&*disk, "a", &[add(512)]);
        block_on(disk.write(GuestOffset(0), filled(2, 512).into())).unwrap();
        block_on(disk.close()).unwrap();
        drop(disk);
        let said = offline(&TestImage::new(&with_name(length))).map_err(|error| error.to_string());
        match added {
            Ok(()) => {
                accepted += 1;
                assert_eq!((said, stored(&made)), (Ok(()), vec![("a".to_owned(), Some(1))]), "{length}");
            }
            Err(error) => {
                refused += 1;
                assert_eq!(said, Err(error.to_string()), "{length}");
            }
        }
    }
    assert!(accepted > 0 && refused > 0, "{accepted} {refused}");
}
