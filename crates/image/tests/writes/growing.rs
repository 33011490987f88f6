//! Disks that become longer while they are in use.

use std::sync::Arc;
use std::thread;

use futures_util::future::join_all;
use limosa_image::qcow2::{CheckOptions, CreateOptions, Header, Qcow2, Qcow2Options, check};
use limosa_image::{Disk, GuestOffset, HostOffset, Preallocation};
use limosa_storage::testing::{Failing, Fault, Loss, PowerCut, SeededRandom};
use limosa_storage::{MemoryStorage, Storage, block_on};
use limosa_testkit::image::{TestImage, contents, filled, raw_filled, read_all};

const KB: u64 = 1 << 10;

/// Images whose L1 table and refcount table are full soon, and others.
fn kinds() -> Vec<CreateOptions> {
    let usual = CreateOptions::default().size(64 * KB);
    vec![
        usual.clone().cluster_size(512),
        usual.clone().cluster_size(512).refcount_bits(64),
        usual.clone().cluster_size(512).refcount_bits(1).lazy_refcounts(true),
        usual.clone().cluster_size(16 * KB).extended_l2(true),
        usual.clone().cluster_size(4 * KB).version(2),
        usual.cluster_size(512).preallocation(Preallocation::Metadata),
    ]
}

fn open(file: Arc<dyn Storage>, below: Option<Arc<dyn Disk>>) -> Arc<Qcow2> {
    let options = Qcow2Options::default().cache_size(0).allocate_ahead(16 * KB);
    TestImage::existing(file).open_over(below, options)
}

/// The leaks that a check finds.
fn sound(file: &dyn Storage, what: &str) -> u64 {
    let report = block_on(check(file, CheckOptions::default())).unwrap();
    assert_eq!((report.corruptions, report.check_errors), (0, 0), "{what}: {:#?}", report.findings);
    report.leaks
}

#[test]
fn a_power_cut_while_a_disk_grows_leaves_one_size_or_the_other_and_all_that_was_flushed() {
    let mut chance = SeededRandom::new(1);
    for options in kinds() {
        let made = TestImage::new(&options);
        let power = PowerCut::new();
        let storage = power.add_storage("image", contents(&*made.file), 1 << 30);
        let disk = open(Arc::clone(&storage), None);
        block_on(disk.write(GuestOffset(0), filled(1, 64 * KB).into())).unwrap();
        block_on(disk.flush()).unwrap();
        let flushed = power.moments();
        // Writes and a flush are under way while it grows.
        let writes = (0..8).map(|part| disk.write(GuestOffset(part * 8 * KB), filled(2, 8 * KB).into()));
        let requests = writes.chain([disk.grow(1 << 20), disk.flush(), disk.grow(2 << 20)]);
        block_on(join_all(requests)).into_iter().collect::<Result<Vec<_>, _>>().unwrap();
        let grown = power.moments();
        block_on(disk.write(GuestOffset((2 << 20) - 64 * KB), filled(3, 64 * KB).into())).unwrap();
        block_on(disk.flush()).unwrap();
        let last = power.moments();
        block_on(disk.close()).unwrap();
        assert_eq!(sound(&*storage, "closed"), 0);
        for moment in flushed..=power.moments() {
            for loss in [Loss::None, Loss::All, Loss::Some(chance.bits())] {
                let what = format!("{options:?}, cut at {moment} of {}, {loss:?}", power.moments());
                let cut: Arc<dyn Storage> =
                    Arc::new(MemoryStorage::with_contents(power.cut(moment, loss).remove(0), 1 << 30));
                let header = block_on(Header::read(&*cut)).unwrap();
                assert!([64 * KB, 1 << 20, 2 << 20].contains(&header.size), "{what}: {}", header.size);
                if moment >= grown {
                    assert_eq!(header.size, 2 << 20, "{what}");
                }
                if header.features.dirty() {
                    let repaired = limosa_image::qcow2::Repair::All;
                    block_on(limosa_image::qcow2::repair(&*cut, repaired, CheckOptions::default())).unwrap();
                }
                sound(&*cut, &what);
                let found = read_all(&*open(cut, None));
                let (old, new) = found.split_at(64 << 10);
                assert!(old.iter().all(|byte| [1, 2].contains(byte)), "{what}");
                let written = new.len().saturating_sub(64 << 10);
                assert!(new[..written.min(new.len())].iter().all(|byte| *byte == 0), "{what}");
                if moment >= last {
                    assert!(new[written..].iter().all(|byte| *byte == 3), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_disk_grows_again_and_again_while_threads_write_and_flush() {
    for options in kinds() {
        let TestImage { file, .. } = TestImage::new(&options);
        let disk = open(Arc::clone(&file), None);
        thread::scope(|scope| {
            for writer in 0..3_u8 {
                let disk = &disk;
                scope.spawn(move || {
                    let mut chance = SeededRandom::new(u64::from(writer));
                    for round in 0..150_u64 {
                        // Each has every third kilobyte for itself.
                        let at = (chance.below(disk.len() / (3 * KB)) * 3 + u64::from(writer)) * KB;
                        if at + KB <= disk.len() {
                            block_on(disk.write(GuestOffset(at), filled(writer + 1, KB).into())).unwrap();
                        }
                        if round % 16 == 0 {
                            block_on(disk.flush()).unwrap();
                        }
                    }
                });
            }
            for size in 1..=16 {
                block_on(disk.grow(64 * KB + size * 96 * KB)).unwrap();
            }
        });
        let before = read_all(&*disk);
        block_on(disk.close()).unwrap();
        assert_eq!(sound(&*file, &format!("{options:?}")), 0, "{options:?}");
        let after = read_all(&*open(file, None));
        assert!(before == after && after.len() as u64 == 64 * KB + 16 * 96 * KB, "{options:?}");
        let wrong = after
            .chunks(1024)
            .zip((1..=3_u8).cycle())
            .position(|(part, writer)| !part.iter().all(|byte| *byte == 0) && !part.iter().all(|byte| *byte == writer));
        assert_eq!(wrong, None, "{options:?}");
    }
}

#[test]
fn what_the_backing_image_has_behind_the_old_end_is_not_seen_and_what_was_written_is() {
    for options in kinds().into_iter().filter(|options| options.preallocation == Preallocation::Off) {
        let options = options.size(64 * KB + 512).backing_file(Some("below".into()));
        let TestImage { file, .. } = TestImage::new(&options);
        let below = || Some(raw_filled(7, 200 << 10));
        let disk = open(Arc::clone(&file), below());
        block_on(disk.write(GuestOffset(64 * KB), filled(1, 512).into())).unwrap();
        block_on(disk.grow(300 * KB)).unwrap();
        let expected = [vec![7; 64 << 10], vec![1; 512], vec![0; (236 << 10) - 512]].concat();
        assert!(read_all(&*disk) == expected, "{options:?}");
        block_on(disk.close()).unwrap();
        assert!(read_all(&*open(Arc::clone(&file), below())) == expected, "{options:?}");
        assert_eq!(sound(&*file, &format!("{options:?}")), 0);
    }
}

/// Lets requests of a growth fail from this one on; the disk was written up to its end, and grows to two sizes. If the
/// first growth failed: where the file's refcount table is after the next flush.
fn fail_and_grow(
    options: &CreateOptions,
    sizes: [u64; 2],
    (nth, times, fault): (u64, u64, Fault),
) -> Option<(HostOffset, u32)> {
    let what = format!("{options:?}, {fault:?} {times} times after {nth}");
    let bytes = |byte: u8, length: u64| vec![byte; usize::try_from(length).unwrap()];
    let size = options.size;
    let image = TestImage::new(options);
    let failing = Failing::new();
    let disk = open(failing.wrap(Arc::clone(&image.file)), None);
    block_on(disk.write(GuestOffset(0), filled(1, size).into())).unwrap();
    failing.fail(nth, times, fault);
    let failed = block_on(disk.grow(sizes[0])).is_err();
    failing.mend();
    // What was acknowledged before is flushed to the tables that the file's header leads to.
    block_on(disk.flush()).unwrap();
    if !options.lazy_refcounts {
        sound(&*image.file, &what);
    }
    assert!(read_all(&*image.open_read_only()).starts_with(&bytes(1, size)), "{what}");
    let table = image.header().refcount_table;

    assert_eq!(disk.len(), if failed { size } else { sizes[0] }, "{what}");
    block_on(disk.write(GuestOffset(0), filled(2, 32 * KB).into())).unwrap();
    block_on(disk.grow(sizes[1])).unwrap();
    block_on(disk.write(GuestOffset(sizes[0]), filled(3, 32 * KB).into())).unwrap();
    block_on(disk.close()).unwrap();
    sound(&*image.file, &what);
    let parts =
        [(2, 32 * KB), (1, size - 32 * KB), (0, sizes[0] - size), (3, 32 * KB), (0, sizes[1] - sizes[0] - 32 * KB)];
    let expected = parts.map(|(byte, length)| bytes(byte, length));
    assert!(read_all(&*open(image.file, None)) == expected.concat(), "{what}");
    failed.then_some(table)
}

#[test]
fn a_growth_that_fails_leaves_the_disk_as_it_was_and_can_be_tried_again() {
    for options in kinds() {
        for (nth, fault) in (0..30).flat_map(|nth| Fault::ALL.map(|fault| (nth, fault))) {
            fail_and_grow(&options, [1 << 20, 2 << 20], (nth, 1, fault));
        }
    }
}

#[test]
fn a_growth_that_fails_while_the_refcount_table_moves_can_be_tried_again() {
    // The table has entries for 4096 clusters; about 4091 are in use, and the longer L1 table needs 6 and blocks of
    // refcounts.
    let full = CreateOptions::default().cluster_size(512).refcount_bits(64).size(1981 * KB);
    let image = TestImage::new(&full);
    let (disk, old) = (open(Arc::clone(&image.file), None), image.header().refcount_table);
    block_on(disk.write(GuestOffset(0), filled(1, full.size).into())).unwrap();
    assert_eq!(image.header().refcount_table, old);
    block_on(disk.grow(12 << 20)).unwrap();
    assert_ne!(image.header().refcount_table, old);
    block_on(disk.close()).unwrap();

    let sizes = [12 << 20, (12 << 20) + 64 * KB];
    let mut back = 0;
    for nth in 0..40 {
        let [once, ..] = Fault::ALL.map(|fault| fail_and_grow(&full, sizes, (nth, 1, fault)));
        // If what would take the failure back fails, too, the next flush does.
        let twice = fail_and_grow(&full, sizes, (nth, 2, Fault::ALL[0]));
        assert!(once.is_none() || once == twice, "after {nth}: {once:?} or {twice:?}");
        back += u64::from(once == Some(old));
    }
    assert!(back > 10, "{back}");
}

#[test]
fn a_disk_in_use_does_not_become_shorter() {
    let image = TestImage::new(&CreateOptions::default().size(64 * KB));
    let disk = open(image.file, None);
    let said = |size| block_on(disk.grow(size)).unwrap_err().to_string();
    assert_eq!(said(512), "image: it has 65536 bytes; while it is in use it does not become shorter");
    assert_eq!(said(100_000), "image: a size of 100000 bytes, which is no multiple of 512");
    assert_eq!(said(1 << 62), "image: a disk of 4611686018427387904 bytes is too large for clusters of 65536 bytes");
    block_on(disk.grow(64 * KB)).unwrap();
    assert_eq!(disk.len(), 64 * KB);
}
