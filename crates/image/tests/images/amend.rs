//! Amended images: the guest sees what it saw, at any moment.

use std::sync::Arc;

use limosa_image::qcow2::{
    CheckOptions, CreateOptions, Header, ImageParts, Qcow2, Qcow2Options, Repair, SnapshotChange, change_refcount_bits,
    change_snapshots, change_version, check, read_snapshots, repair,
};
use limosa_image::{Disk as _, GuestOffset, ImageError};
use limosa_storage::testing::{Loss, PowerCut, SeededRandom};
use limosa_storage::{MemoryStorage, Storage, block_on};
use limosa_testkit::image::{TestImage, contents, memory_file, number, put, raw_filled, read_all, write};

use crate::layers::times;

const MOST: u64 = 64 << 20;

/// The contents of the backing file, in every byte.
const BELOW: u8 = 0xb7;

/// The contents of the disk and of its snapshots.
fn views(bytes: Vec<u8>) -> Vec<Vec<u8>> {
    let file: Arc<dyn Storage> = Arc::new(MemoryStorage::with_contents(bytes, MOST));
    let header = block_on(Header::read(&*file)).unwrap();
    let snapshots = block_on(read_snapshots(&*file, &header)).unwrap();
    let then = snapshots.iter().map(|snapshot| snapshot.l1);
    let seen = [header.l1].into_iter().chain(then).map(|l1| {
        let mut header = header.clone();
        header.l1 = l1;
        let backing = header.backing.is_some().then(|| raw_filled(BELOW, header.size));
        let parts = ImageParts::new(Arc::clone(&file), header).backing(backing);
        read_all(&*block_on(Qcow2::open(parts, Qcow2Options::default().read_only(true))).unwrap())
    });
    seen.collect()
}

/// An image of version 3 with snapshots, contents and zero clusters. Some of these keep their space.
fn image(chance: &mut SeededRandom, has_backing: bool) -> Vec<u8> {
    let size = 512 * (100 + chance.below(300));
    let options = CreateOptions::default().size(size).cluster_size(*chance.choose(&[512, 4096]));
    let options = options.backing_file(has_backing.then(|| "below".into()));
    let image = TestImage::create_in(memory_file("image"), &options.backing_format(has_backing.then(|| "raw".into())));
    for number in 0..4 {
        let backing = has_backing.then(|| raw_filled(BELOW, size));
        let disk = image.open_over(backing, Qcow2Options::default().allocate_ahead(0));
        for _ in 0..6 {
            let at = chance.below(size / 512) * 512;
            let length = (512 * (1 + chance.below(40))).min(size - at);
            if chance.one_in(2) {
                block_on(disk.write_zeroes(GuestOffset(at), length, chance.one_in(2))).unwrap();
            } else {
                write(&*disk, at, &chance.bytes(usize::try_from(length).unwrap()));
            }
        }
        block_on(disk.close()).unwrap();
        if number < 3 {
            let change = SnapshotChange::Create { name: format!("s{number}"), taken: (1, 2) };
            block_on(change_snapshots(&*image.file, &change, CheckOptions::default())).unwrap();
        }
    }
    contents(&*image.file)
}

/// Amends an image, and expects what the guest saw to be there whenever that is cut short.
fn assert_nothing_changes(
    before: &[u8],
    amend: impl Fn(&dyn Storage) -> Result<(), ImageError>,
    chance: &mut SeededRandom,
    what: &str,
) -> Header {
    let seen = views(before.to_vec());
    let power = PowerCut::new();
    let file = power.add_storage("image", before.to_vec(), MOST);
    amend(&*file).unwrap_or_else(|error| panic!("{what}: {error}"));
    let report = block_on(check(&*file, CheckOptions::default())).unwrap();
    assert!(report.is_clean(), "{what}: {:#?}", report.findings);
    assert!(views(contents(&*file)) == seen, "{what}");
    let every = power.moments().div_ceil(60).max(1);
    for moment in (0..=power.moments()).step_by(every) {
        for loss in [Loss::None, Loss::All, Loss::Some(chance.bits())] {
            let what = format!("{what}, cut at {moment} of {}, {loss:?}", power.moments());
            let cut = power.cut(moment, loss).remove(0);
            assert!(views(cut.clone()) == seen, "{what}");
            let again = MemoryStorage::with_contents(cut, MOST);
            let report = block_on(repair(&again, Repair::All, CheckOptions::default())).unwrap();
            assert!(report.is_clean(), "{what}: {report:#?}");
            assert!(views(again.contents()) == seen, "{what}: repaired");
            amend(&again).unwrap_or_else(|error| panic!("{what}: again: {error}"));
        }
    }
    block_on(Header::read(&*file)).unwrap()
}

#[test]
fn refcounts_get_another_width_and_nothing_else_changes() {
    for seed in 0..times(4) {
        let mut chance = SeededRandom::new(seed);
        let has_backing = chance.one_in(2);
        let before = image(&mut chance, has_backing);
        for bits in [4, 8, 32, 64] {
            let amend = |file: &dyn Storage| block_on(change_refcount_bits(file, bits, CheckOptions::default()));
            let after = assert_nothing_changes(&before, amend, &mut chance, &format!("seed {seed}, {bits} bits"));
            assert_eq!(after.geometry().refcount_bits(), bits);
        }
        // With three snapshots some clusters have more references than one bit can say, and nothing changes.
        let file = MemoryStorage::with_contents(before.clone(), MOST);
        let refused = block_on(change_refcount_bits(&file, 1, CheckOptions::default())).unwrap_err();
        assert!(refused.to_string().contains("a refcount of 1 bits cannot say"), "{refused}");
        assert!(file.contents() == before);
        for wrong in [0, 3, 128] {
            assert!(block_on(change_refcount_bits(&file, wrong, CheckOptions::default())).is_err());
        }
    }
}

#[test]
fn zero_clusters_become_contents_for_version_2() {
    let mut zeros = 0;
    for seed in 0..times(4) {
        let mut chance = SeededRandom::new(seed ^ 0x2);
        let has_backing = seed % 2 == 0;
        let before = image(&mut chance, has_backing);
        let amend = |file: &dyn Storage| block_on(change_version(file, 2, CheckOptions::default()));
        let after = assert_nothing_changes(&before, amend, &mut chance, &format!("seed {seed}"));
        assert_eq!(after.version, 2);
        zeros += views(before)[0].iter().filter(|byte| **byte == 0).count();
    }
    assert!(zeros > 10_000, "{zeros}");
}

#[test]
fn a_zero_cluster_that_lies_on_something_else_is_damage_and_nothing_changes() {
    let options = CreateOptions::default().size(1 << 20).backing_file(Some("below".into()));
    let image = TestImage::create_in(memory_file("image"), &options.backing_format(Some("raw".into())));
    let disk = image.open_over(Some(raw_filled(BELOW, 1 << 20)), Qcow2Options::default().allocate_ahead(0));
    write(&*disk, 0, &[7; 1 << 16]);
    block_on(disk.write_zeroes(GuestOffset(1 << 17), 1 << 16, false)).unwrap();
    block_on(disk.close()).unwrap();
    let header = image.header();
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    let l2 = number(&*image.file, header.l1.0.0) & OFFSET;
    let data = number(&*image.file, l2) & OFFSET;
    let sound = contents(&*image.file);
    for host in [data, header.l1.0.0, l2, 1 << 50] {
        let file = MemoryStorage::with_contents(sound.clone(), MOST);
        put(&file, l2 + 2 * 8, &(1 << 63 | host | 1).to_be_bytes());
        let before = file.contents();
        let refused = block_on(change_version(&file, 2, CheckOptions::default())).unwrap_err();
        assert!(matches!(refused, ImageError::NeedsRepair { .. }), "{host:#x}: {refused}");
        assert!(file.contents() == before, "{host:#x}");
    }
}
