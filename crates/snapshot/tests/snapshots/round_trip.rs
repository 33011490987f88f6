//! Tests that a reader returns the pages that a writer was given.

use limosa_migrate::stored::{PageSink, PageSource};
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::PermissionsExt;

use crate::fixture::{CHECKED, QUICK, names, page, put, range, small, start, tail, writer};
use limosa_page::{PAGE_LEN, PageNumber};
use limosa_snapshot::{Disk, Manifest, Snapshot, SnapshotError, SnapshotWriter, Transport, UnnamedFile, WriteOptions};
use proptest::prelude::*;

fn read(snapshot: &Snapshot, block: usize, start: u64, end: u64) -> Vec<u8> {
    let mut pages = vec![0xff; usize::try_from(end - start).unwrap() * PAGE_LEN];
    snapshot.read(block, range(start, end), &mut pages).unwrap();
    pages
}

#[test]
fn pages_devices_and_manifest_come_back_as_they_were_given() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let mut manifest = Manifest::new();
    manifest.qemu_version = Some("10.0.2".to_owned());
    manifest.transport = Some(Transport::Socket);
    let disk = directory.path().join("disk");
    std::fs::write(&disk, b"contents").unwrap();
    manifest.disks.push(Disk::from_file("drive0", None, disk, "raw").unwrap());
    let mut writer = writer(&target, 600, WriteOptions::default());
    put(&mut writer, 0, 300, &[1, 2, 3]);
    put(&mut writer, 0, 301, &[9]);
    put(&mut writer, 1, 5, &[4]);
    writer.put_zero(1, range(0, 5)).unwrap();
    let published = writer.finish(&tail("paused"), manifest.clone()).unwrap();
    assert_eq!(published.path, target);

    let snapshot = Snapshot::open(&target).unwrap();
    assert_eq!(snapshot.setup(), &start(600));
    assert_eq!(snapshot.warnings(), [] as [&str; 0]);
    assert_eq!(snapshot.manifest(), Some(&published.manifest));
    let found = &published.manifest;
    assert_eq!((found.id, &found.qemu_version, &found.disks), (manifest.id, &manifest.qemu_version, &manifest.disks));
    assert_eq!(found.machine.as_deref(), Some("pc-q35-10.0"));
    assert_eq!(found.run_state.as_deref(), Some("paused"));
    assert_eq!(found.ram_bytes, 616 * 4096);
    let pages = &found.pages;
    assert_eq!((pages.normal, pages.zero, pages.explicit_zero, pages.resent, pages.punched), (4, 5, 5, 1, 0));
    assert_eq!(pages.hinted, Some(600 - 3 + 16 - 6), "nothing was said of them");
    assert_eq!(published.length, target.metadata().unwrap().len());

    assert_eq!(snapshot.device_tail(), tail("paused"));
    assert_eq!(snapshot.device_sections()[0], 4);
    assert_eq!(snapshot.description()[0], b'{');
    assert_eq!(snapshot.devices().sections[1].name, "globalstate");
    let wanted = [page(1), page(9), page(3)].concat();
    assert_eq!(read(&snapshot, 0, 300, 303), wanted);
    assert_eq!(read(&snapshot, 0, 299, 301), [[0; 4096], page(1)].concat());
    assert_eq!(read(&snapshot, 1, 5, 6), page(4));
    snapshot.check_restorable().unwrap();
}

#[test]
fn what_a_stream_never_mentions_was_hinted_unless_it_may_not_be_plugged() {
    let directory = tempfile::tempdir().unwrap();
    for virtio_mem in [false, true] {
        let mut writer = writer(&directory.path().join(virtio_mem.to_string()), 600, QUICK);
        if virtio_mem {
            writer.put_early_sections(b"which of its memory is plugged").unwrap();
        }
        put(&mut writer, 0, 3, &[1, 2]);
        writer.put_zero(0, range(4, 10)).unwrap();
        let pages = writer.statistics();
        let (zero, hinted) = if virtio_mem { (615, None) } else { (6, Some(609)) };
        assert_eq!((pages.normal, pages.zero, pages.hinted, pages.resent), (1, zero, hinted, 1));
    }
}

#[test]
fn a_published_file_is_the_owners_alone_and_sparse() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", QUICK);
    let metadata = target.metadata().unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert!(metadata.len() > 600 * 4096);
    assert!(metadata.blocks() * 512 < 300 << 10, "{} blocks", metadata.blocks());
    assert_eq!(names(directory.path()), ["vm"]);
}

#[test]
fn zeros_that_arrive_in_a_small_block_have_their_bit_over_a_hole() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", QUICK);
    let snapshot = Snapshot::open(&target).unwrap();
    let bios = snapshot.stored_bitmap(1);
    assert!((0..8).all(|page| bios.get(PageNumber(page))));
    assert!(!bios.get(PageNumber(8)), "this one was never mentioned");
    assert_eq!(read(&snapshot, 1, 0, 2), [0; 8192]);
    assert_eq!(snapshot.manifest().unwrap().pages.explicit_zero, 4);
}

#[test]
fn zeros_that_arrive_in_a_large_block_are_not_stored_and_old_contents_are_gone() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let mut writer = writer(&target, (64 << 20) / 4096, QUICK);
    put(&mut writer, 0, 100, &[1, 2, 3]);
    put(&mut writer, 0, 4000, &[4]);
    writer.put_zero(0, range(100, 102)).unwrap();
    writer.put_zero(0, range(7000, 8000)).unwrap();
    let published = writer.finish(&tail("running"), Manifest::new()).unwrap();
    assert_eq!(published.manifest.pages.punched, 2);
    let snapshot = Snapshot::open(&target).unwrap();
    assert_eq!(snapshot.stored_bitmap(0).count(), 2);
    assert_eq!(snapshot.locate(0, PageNumber(101)), None);
    let place = snapshot.locate(0, PageNumber(102)).unwrap();
    let file = std::fs::read(&target).unwrap();
    let place = usize::try_from(place).unwrap();
    assert_eq!(file[place..place + 4096], page(3));
    assert!(file[place - 8192..place].iter().all(|byte| *byte == 0), "the old contents are still in the file");
}

#[test]
fn a_writer_reads_back_what_the_stream_has_said_last_of_a_page() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = writer(&directory.path().join("vm"), 600, QUICK);
    let held = |writer: &mut SnapshotWriter, block, number| {
        let mut contents = [0xff; PAGE_LEN];
        writer.read_back(block, PageNumber(number), &mut contents).unwrap();
        contents
    };
    const ZERO: [u8; PAGE_LEN] = [0; PAGE_LEN];
    assert_eq!(held(&mut writer, 0, 300), ZERO, "nothing was said of it");
    put(&mut writer, 0, 299, &[1, 2, 3]);
    put(&mut writer, 1, 15, &[4]);
    assert_eq!([299, 300, 301, 302].map(|number| held(&mut writer, 0, number)), [page(1), page(2), page(3), ZERO]);
    assert_eq!((held(&mut writer, 1, 15), held(&mut writer, 1, 14)), (page(4), ZERO));
    put(&mut writer, 0, 300, &[5]);
    assert_eq!(held(&mut writer, 0, 300), page(5), "the newer contents");
    writer.put_zero(0, range(300, 302)).unwrap();
    assert_eq!(
        [300, 301].map(|number| held(&mut writer, 0, number)),
        [ZERO; 2],
        "the file still holds the old contents"
    );
    put(&mut writer, 0, 301, &[6]);
    assert_eq!([299, 300, 301].map(|number| held(&mut writer, 0, number)), [page(1), ZERO, page(6)]);
    // On top of that the next delta goes, and what comes of it is what is published.
    let mut changed = held(&mut writer, 0, 301);
    changed[7] ^= 1;
    writer.put_pages(0, PageNumber(301), &[std::io::IoSlice::new(&changed)]).unwrap();
    let path = writer.finish(&tail("running"), Manifest::new()).unwrap().path;
    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!(read(&snapshot, 0, 299, 303), [page(1), ZERO, changed, ZERO].concat());
}

#[test]
fn what_is_no_page_of_the_stream_is_not_read_back() {
    let directory = tempfile::tempdir().unwrap();
    let pending = |name: &str| UnnamedFile::create(&directory.path().join(name), false).unwrap();
    let mut contents = [0xff; PAGE_LEN];
    let mut unbegun = SnapshotWriter::new(pending("unbegun"), QUICK).unwrap();
    assert!(unbegun.read_back(0, PageNumber(0), &mut contents).is_err());
    let mut writer = writer(&directory.path().join("vm"), 600, QUICK);
    for (block, page) in [(0, 600), (1, 16), (2, 0), (0, u64::MAX / 4096), (usize::MAX, 0)] {
        assert!(writer.read_back(block, PageNumber(page), &mut contents).is_err(), "page {page} of block {block}");
    }
    assert_eq!(contents, [0xff; PAGE_LEN]);
    assert!(writer.read_back(0, PageNumber(599), &mut contents).is_ok() && contents == [0; PAGE_LEN]);
}

#[test]
fn the_summary_tells_what_is_in_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", CHECKED);
    let summary = Snapshot::open(&target).unwrap().summary();
    assert_eq!(summary.machine, "pc-q35-10.0");
    assert_eq!(summary.capabilities, ["mapped-ram"]);
    assert_eq!(summary.run_state.as_deref(), Some("running"));
    assert_eq!((summary.blocks[0].stored, summary.blocks[0].zero), (10, 590));
    assert_eq!((summary.devices[0].name.as_str(), summary.devices[0].size), ("timer", 24));
    assert!(summary.checksums);
    let json = serde_json::to_value(&summary).unwrap();
    assert_eq!(json["manifest"]["pages"]["normal"], 14);
}

#[test]
fn a_stream_without_any_page_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let refused = writer(&target, 600, QUICK).finish(&tail("running"), Manifest::new());
    assert!(matches!(refused, Err(SnapshotError::Empty { .. })), "{refused:?}");
    assert_eq!(names(directory.path()), [] as [&str; 0]);
}

#[test]
fn a_vm_of_zeros_is_stored_and_restorable() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let mut start = start(64 << 10);
    start.blocks.truncate(1);
    let mut writer = SnapshotWriter::new(UnnamedFile::create(&target, false).unwrap(), QUICK).unwrap();
    writer.begin(&start).unwrap();
    writer.put_zero(0, range(0, 64 << 10)).unwrap();
    writer.finish(&tail("running"), Manifest::new()).unwrap();
    let snapshot = Snapshot::open(&target).unwrap();
    assert_eq!(snapshot.stored_pages(), 0);
    assert_eq!(snapshot.warnings().len(), 1);
    snapshot.check_restorable().unwrap();
}

#[test]
fn a_cut_device_tail_is_refused_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let whole = tail("running");
    for cut in [0, 1, 40, whole.len() - 1] {
        let mut writer = writer(&target, 600, QUICK);
        put(&mut writer, 0, 1, &[1]);
        let refused = writer.finish(&whole[..cut], Manifest::new());
        assert!(matches!(refused, Err(SnapshotError::Structure { .. })), "{refused:?}");
        assert_eq!(names(directory.path()), [] as [&str; 0]);
    }
}

#[test]
fn shared_memory_left_out_of_the_stream_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let pending = UnnamedFile::create(&directory.path().join("vm"), false).unwrap();
    let mut writer = SnapshotWriter::new(pending, QUICK).unwrap();
    let mut start = start(600);
    start.configuration.capabilities.push("x-ignore-shared".to_owned());
    let error = writer.begin(&start).unwrap_err().to_string();
    assert!(error.contains("x-ignore-shared"), "{error}");
}

#[test]
fn pages_outside_a_block_are_an_error_and_not_a_write() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let mut sink = writer(&target, 600, QUICK);
    let page = page(1);
    let slices = [std::io::IoSlice::new(&page), std::io::IoSlice::new(&page)];
    assert!(sink.put_pages(0, PageNumber(599), &slices).is_err());
    assert!(sink.put_pages(0, PageNumber(u64::MAX), &slices).is_err());
    assert!(sink.put_pages(2, PageNumber(0), &slices).is_err());
    assert!(sink.put_zero(0, range(0, 601)).is_err());
    let odd = [std::io::IoSlice::new(&page[..4000])];
    assert!(sink.put_pages(0, PageNumber(0), &odd).is_err());
    assert_eq!(sink.statistics().normal, 0);
}

#[test]
fn reads_that_do_not_fit_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    let snapshot = Snapshot::open(&small(directory.path(), "vm", QUICK)).unwrap();
    let mut buffer = vec![0; 8192];
    assert!(snapshot.read(0, range(0, 1), &mut buffer).is_err());
    assert!(snapshot.read(0, range(599, 601), &mut buffer).is_err());
    assert!(snapshot.read(2, range(0, 2), &mut buffer).is_err());
    assert!(snapshot.read(0, range(598, 600), &mut buffer).is_ok());
}

/// One thing that a stream says.
#[derive(Debug, Clone)]
enum Said {
    Pages { block: usize, first: u64, seeds: Vec<u64> },
    Zero { block: usize, first: u64, end: u64 },
}

fn said() -> impl Strategy<Value = Said> {
    let pages = (0_usize..2, 0_u64..600, proptest::collection::vec(1_u64..1000, 1..40));
    prop_oneof![
        pages.prop_map(|(block, first, seeds)| Said::Pages { block, first, seeds }),
        (0_usize..2, 0_u64..600, 1_u64..200).prop_map(|(block, first, n)| Said::Zero { block, first, end: first + n }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_last_word_about_each_page_wins(
        stream in proptest::collection::vec(said(), 1..40),
        reads in proptest::collection::vec((0_usize..2, 0_u64..600, 1_u64..400), 1..20),
        checksum in any::<bool>(),
        large in any::<bool>(),
    ) {
        let lengths = [if large { 16500_u64 } else { 600 }, 16];
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("vm");
        let options = if checksum { CHECKED } else { QUICK };
        let mut sink = writer(&target, lengths[0], options);
        let mut model: Vec<Vec<Option<u64>>> = lengths.iter().map(|n| vec![None; usize::try_from(*n).unwrap()]).collect();
        let mut mentioned = 0;
        for said in &stream {
            match said {
                Said::Pages { block, first, seeds } => {
                    let first = first % lengths[*block];
                    let room = usize::try_from(lengths[*block] - first).unwrap();
                    let seeds = &seeds[..seeds.len().min(room)];
                    put(&mut sink, *block, first, seeds);
                    for (at, seed) in seeds.iter().enumerate() {
                        model[*block][usize::try_from(first).unwrap() + at] = Some(*seed);
                    }
                    mentioned += seeds.len() as u64;
                }
                Said::Zero { block, first, end } => {
                    let (first, end) = ((*first).min(lengths[*block]), (*end).min(lengths[*block]));
                    sink.put_zero(*block, range(first, end)).unwrap();
                    model[*block][usize::try_from(first).unwrap()..usize::try_from(end).unwrap()].fill(None);
                    mentioned += end - first;
                }
            }
        }
        prop_assume!(mentioned > 0);
        let published = sink.finish(&tail("running"), Manifest::new()).unwrap();
        let stored = model.iter().flatten().filter(|page| page.is_some()).count() as u64;
        prop_assert_eq!(published.manifest.pages.normal, stored);

        let snapshot = Snapshot::open(&target).unwrap();
        for (block, first, count) in reads {
            let first = first % lengths[block];
            let end = (first + count).min(lengths[block]);
            let wanted: Vec<u8> = model[block][usize::try_from(first).unwrap()..usize::try_from(end).unwrap()]
                .iter()
                .flat_map(|seed| seed.map_or([0; PAGE_LEN], page))
                .collect();
            prop_assert!(read(&snapshot, block, first, end) == wanted, "block {} pages {}..{}", block, first, end);
        }
        for (block, pages) in model.iter().enumerate() {
            for (at, seed) in pages.iter().enumerate() {
                let bit = snapshot.stored_bitmap(block).get(PageNumber(at as u64));
                prop_assert!(bit || seed.is_none(), "page {} of block {} is lost", at, block);
                let small = lengths[block] < 16384;
                prop_assert!(small || bit == seed.is_some());
            }
        }
    }
}
