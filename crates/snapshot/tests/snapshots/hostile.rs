//! Files that were damaged, edited by hand, or change while they are served.

use limosa_migrate::stored::PageSource;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use crate::fixture::{CHECKED, QUICK, page, put, range, small, tail, writer};
use limosa_page::PageNumber;
use limosa_snapshot::{Manifest, Snapshot, SnapshotError, fuzz_open};
use proptest::prelude::*;

/// Both kinds of small file, without and with checksums.
fn files() -> &'static [Vec<u8>; 2] {
    static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    FILES.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        [("plain", QUICK), ("checked", CHECKED)]
            .map(|(name, options)| std::fs::read(small(directory.path(), name, options)).unwrap())
    })
}

/// Every page of every block, as a guest would see it.
fn memory(snapshot: &Snapshot) -> Vec<u8> {
    [600, 16]
        .into_iter()
        .enumerate()
        .flat_map(|(block, pages)| {
            let mut contents = vec![0xff; pages * 4096];
            snapshot.read_pages(block, range(0, pages as u64), &mut contents).unwrap();
            contents
        })
        .collect()
}

/// Offsets where a file has something: everything but holes and pages.
fn frame(file: &[u8]) -> Vec<usize> {
    let snapshot = fuzz_open(file).unwrap();
    let pages: Vec<_> = snapshot.layout().blocks.iter().map(|block| block.pages_range()).collect();
    let outside = |at: &usize| !pages.iter().any(|range| range.contains(&(*at as u64)));
    (0..file.len()).filter(|at| file[*at] != 0).filter(outside).collect()
}

#[test]
fn undamaged_files_open() {
    let [plain, checked] = files();
    assert!(!fuzz_open(plain).unwrap().has_checksums());
    let checked = fuzz_open(checked).unwrap();
    assert!(checked.has_checksums());
    assert_eq!(checked.verified_chunks(), 4, "600 pages are three chunks, the firmware is one");
    assert_eq!(memory(&checked), memory(&fuzz_open(plain).unwrap()));
}

#[test]
fn a_file_cut_anywhere_before_the_end_of_qemus_stream_is_refused() {
    let [plain, _] = files();
    let stream_end = {
        let snapshot = fuzz_open(plain).unwrap();
        usize::try_from(snapshot.layout().tail_offset).unwrap() + snapshot.device_tail().len()
    };
    let tail_offset = stream_end - tail("running").len();
    for cut in (0..300).chain((300..tail_offset).step_by(9973)).chain(tail_offset..stream_end) {
        assert!(fuzz_open(&plain[..cut]).is_err(), "cut to {cut}");
    }
    let error = fuzz_open(&plain[..300]).unwrap_err().to_string();
    assert!(error.contains("the file is cut short: ") && error.contains("but the file ends at 0x12c"), "{error}");
    for cut in stream_end..plain.len() {
        let snapshot = fuzz_open(&plain[..cut]).unwrap();
        assert_eq!(snapshot.manifest(), None);
        assert_eq!(snapshot.warnings().is_empty(), cut == stream_end, "QEMU's own file is nothing to warn about");
        snapshot.check_restorable().unwrap();
    }
}

#[test]
fn what_is_not_such_a_file_at_all_is_refused_with_its_name() {
    for (bytes, why) in [
        (&b""[..], "it is empty"),
        (b"QE", "it does not begin with QEVM"),
        (b"QFI\xfb\0\0\0\x03", "it does not begin with QEVM"),
        (&[0; 5000], "it does not begin with QEVM"),
        (&[0xff; 5000], "it does not begin with QEVM"),
    ] {
        let error = fuzz_open(bytes).unwrap_err();
        assert!(matches!(error, SnapshotError::Unrecognized { .. }), "{error:?}");
        assert!(error.to_string().starts_with("bytes: neither a snapshot nor") && error.to_string().ends_with(why));
    }
    let error = fuzz_open(b"QEVM").unwrap_err().to_string();
    assert!(error.contains("the file is cut short: file header: the input ends inside it"), "{error}");
}

#[test]
fn a_file_whose_page_bitmaps_were_never_written_is_not_restorable() {
    let [plain, _] = files();
    let mut bytes = plain.clone();
    let blocks = fuzz_open(plain).unwrap().layout().blocks.clone();
    for block in &blocks {
        let bitmap = block.bitmap_range();
        bytes[usize::try_from(bitmap.start).unwrap()..usize::try_from(bitmap.end).unwrap()].fill(0);
    }
    let snapshot = fuzz_open(&bytes).unwrap();
    assert_eq!(snapshot.warnings().len(), 1);
    let error = snapshot.check_restorable().unwrap_err();
    assert!(matches!(error, SnapshotError::Empty { .. }), "{error}");
}

#[test]
fn a_damaged_page_is_an_error_that_names_block_and_offset_and_costs_no_other_chunk() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let mut sink = writer(&target, 600, CHECKED);
    put(&mut sink, 0, 10, &[1]);
    put(&mut sink, 0, 300, &[2, 3]);
    sink.finish(&tail("running"), Manifest::new()).unwrap();
    let place = Snapshot::open(&target).unwrap().locate(0, PageNumber(301)).unwrap();
    OpenOptions::new().write(true).open(&target).unwrap().write_all_at(b"damage", place + 77).unwrap();

    let snapshot = Snapshot::open(&target).unwrap();
    let mut buffer = [0; 4096];
    // Not this page, but its chunk: what shares a chunk with damage is not to be trusted.
    let error = snapshot.read_pages(0, range(300, 301), &mut buffer).unwrap_err();
    assert!(matches!(&error, SnapshotError::Checksum { block, offset: 0x10_0000, .. } if block == "pc.ram"), "{error}");
    assert!(snapshot.verify(0, range(299, 302)).is_err());
    let mut chunk = vec![0; 256 * 4096];
    assert!(snapshot.read_pages(0, range(256, 512), &mut chunk).is_err(), "a whole chunk is verified where it lies");
    snapshot.read_pages(0, range(10, 11), &mut buffer).unwrap();
    assert_eq!(buffer, page(1));
    assert_eq!(snapshot.verified_chunks(), 3, "this one, and the two where nothing is stored");
}

/// Clears the bits of these pages in the bitmap of a block.
fn forget(file: &[u8], block: usize, pages: std::ops::Range<u64>) -> Vec<u8> {
    let mut bytes = file.to_vec();
    let bitmap = usize::try_from(fuzz_open(file).unwrap().layout().blocks[block].bitmap_offset).unwrap();
    for page in pages {
        let at = usize::try_from(page).unwrap();
        assert_ne!(bytes[bitmap + at / 8] & (1 << (at % 8)), 0, "page {page} was not stored");
        bytes[bitmap + at / 8] &= !(1 << (at % 8));
    }
    bytes
}

/// The bytes as a file; the directory goes with what is returned.
fn as_file(bytes: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    std::fs::write(&target, bytes).unwrap();
    (directory, target)
}

#[test]
fn a_chunk_that_lost_all_its_bits_is_not_taken_for_zeros() {
    // 300 to 309 are all that is stored of the second chunk, 4 to 7 of the firmware, which has explicit zeros before.
    for (block, pages, name, offset) in [(0, 300..310, "pc.ram", 0x10_0000), (1, 0..8, "pc.bios", 0)] {
        let (_directory, target) = as_file(&forget(&files()[1], block, pages.clone()));
        let snapshot = Snapshot::open(&target).unwrap();
        assert_eq!(snapshot.warnings().len(), 1);
        assert!(snapshot.warnings()[0].contains(name), "{:?}", snapshot.warnings());
        let one = range(pages.start, pages.start + 1);
        let refusals = [
            snapshot.check_restorable(),
            snapshot.verify(block, one),
            snapshot.read_pages(block, one, &mut [0; 4096]),
            snapshot.confirm_zero(block, one).map_err(|error| *error.downcast::<SnapshotError>().unwrap()),
        ];
        for refused in refusals {
            let error = refused.unwrap_err();
            let named =
                matches!(&error, SnapshotError::Checksum { block, offset: at, .. } if block == name && *at == offset);
            assert!(named, "{error}");
        }
        // What is really zero is still served.
        snapshot.confirm_zero(0, range(0, 256)).unwrap();
        snapshot.read_pages(0, range(512, 513), &mut [0; 4096]).unwrap();
    }
}

#[test]
fn a_chunk_that_lost_some_of_its_bits_is_found_before_zeros_are_reported() {
    let (_directory, target) = as_file(&forget(&files()[1], 0, 303..304));
    let snapshot = Snapshot::open(&target).unwrap();
    assert!(!snapshot.stored_bitmap(0).get(PageNumber(303)));
    let error = snapshot.confirm_zero(0, range(303, 304)).unwrap_err().downcast::<SnapshotError>().unwrap();
    assert!(matches!(&*error, SnapshotError::Checksum { offset: 0x10_0000, .. }), "{error}");
    assert!(snapshot.confirm_zero(0, range(0, 600)).is_err(), "a longer claim with that page in it");
}

#[test]
fn that_a_page_is_zero_is_confirmed_with_one_reading_of_its_chunk() {
    let (_directory, target) = as_file(&files()[1]);
    let snapshot = Snapshot::open(&target).unwrap();
    let opened = snapshot.counters().calls_in;
    for page in 0..256 {
        snapshot.confirm_zero(0, range(page, page + 1)).unwrap();
    }
    assert_eq!(snapshot.counters().calls_in, opened, "nothing is stored there");
    snapshot.confirm_zero(0, range(256, 257)).unwrap();
    let once = snapshot.counters().calls_in;
    assert!(once > opened);
    for page in (257..300).chain(310..512) {
        snapshot.confirm_zero(0, range(page, page + 1)).unwrap();
    }
    assert_eq!(snapshot.counters().calls_in, once);
    assert!(snapshot.confirm_zero(0, range(599, 601)).is_err(), "no such page");
}

#[test]
fn a_chunk_that_is_read_again_is_verified_again() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    let mut sink = writer(&target, 40 * 256, CHECKED);
    for chunk in 0..40 {
        put(&mut sink, 0, chunk * 256, &[chunk + 1, 100]);
    }
    sink.finish(&tail("running"), Manifest::new()).unwrap();
    let snapshot = Snapshot::open(&target).unwrap();
    let mut buffer = [0; 4096];
    // More than are kept.
    for chunk in 0..40 {
        snapshot.read_pages(0, range(chunk * 256, chunk * 256 + 1), &mut buffer).unwrap();
        assert_eq!(buffer, page(chunk + 1));
    }
    // A change that nothing but the contents shows.
    let file = OpenOptions::new().write(true).open(&target).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(b"damage", snapshot.locate(0, PageNumber(0)).unwrap()).unwrap();
    file.set_modified(modified).unwrap();
    snapshot.check_unchanged().unwrap();
    let error = snapshot.read_pages(0, range(0, 1), &mut buffer).unwrap_err();
    assert!(matches!(error, SnapshotError::Checksum { offset: 0, .. }), "{error}");
}

#[test]
fn a_verified_chunk_is_not_read_again_for_its_neighbours() {
    let [_, checked] = files();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("vm"), checked).unwrap();
    let snapshot = Snapshot::open(&directory.path().join("vm")).unwrap();
    let mut buffer = [0; 4096];
    snapshot.read_pages(0, range(300, 301), &mut buffer).unwrap();
    let before = snapshot.counters();
    for at in 301..310 {
        snapshot.read_pages(0, range(at, at + 1), &mut buffer).unwrap();
        assert_eq!(buffer, page(at - 299));
    }
    assert_eq!(snapshot.counters().calls_in, before.calls_in);
}

#[test]
fn device_state_that_differs_from_its_checksum_is_shown_but_not_restored() {
    let [plain, checked] = files();
    for (file, enforced) in [(plain, false), (checked, true)] {
        let tail_offset = usize::try_from(fuzz_open(file).unwrap().layout().tail_offset).unwrap();
        let mut bytes = file.clone();
        let body = tail_offset + 1 + 4 + 6 + 8;
        assert_eq!(bytes[body], 7, "the first byte of the first device's state");
        bytes[body] = 8;
        let snapshot = fuzz_open(&bytes).unwrap();
        assert_eq!(snapshot.check_restorable().is_err(), enforced);
        assert_eq!(snapshot.warnings().len(), usize::from(enforced));
    }
}

#[test]
fn a_file_that_is_cut_or_written_while_it_is_served_is_an_error_and_never_zeros() {
    let directory = tempfile::tempdir().unwrap();
    let change = |name: &str, options, change: &dyn Fn(&std::fs::File, u64)| {
        let target = small(directory.path(), name, options);
        let snapshot = Snapshot::open(&target).unwrap();
        snapshot.check_unchanged().unwrap();
        // File times are only as fine as the kernel's clock tick.
        std::thread::sleep(Duration::from_millis(20));
        change(&OpenOptions::new().write(true).open(&target).unwrap(), snapshot.length());
        let mut buffer = vec![0xee; 10 * 4096];
        let read = snapshot.read_pages(0, range(300, 310), &mut buffer);
        assert!(read.is_err(), "{name}");
        let changed = snapshot.check_unchanged().unwrap_err();
        assert!(matches!(changed, SnapshotError::Changed { .. }), "{changed}");
    };
    for options in [QUICK, CHECKED] {
        let name = |what: &str| format!("{what}-{}", options.checksum);
        change(&name("cut"), options, &|file, _| file.set_len(2 << 20).unwrap());
        change(&name("emptied"), options, &|file, _| file.set_len(0).unwrap());
        change(&name("cut and filled with holes"), options, &|file, length| {
            file.set_len(0).unwrap();
            file.set_len(length).unwrap();
        });
        change(&name("written"), options, &|file, _| file.write_all_at(b"x", 0).unwrap());
    }
}

#[test]
fn a_file_that_is_renamed_linked_or_given_another_mode_while_it_is_served_is_still_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", CHECKED);
    let snapshot = Snapshot::open(&target).unwrap();
    let before = target.metadata().unwrap();
    let at = |name: &str| directory.path().join(name);
    // File times are only as fine as the kernel's clock tick.
    std::thread::sleep(Duration::from_millis(20));
    std::fs::rename(&target, at("renamed")).unwrap();
    std::fs::hard_link(at("renamed"), at("linked")).unwrap();
    std::fs::set_permissions(at("linked"), std::fs::Permissions::from_mode(0o400)).unwrap();
    std::fs::remove_file(at("renamed")).unwrap();
    let after = at("linked").metadata().unwrap();
    assert_ne!((before.ctime(), before.ctime_nsec()), (after.ctime(), after.ctime_nsec()));
    snapshot.check_unchanged().unwrap();
    let mut buffer = [0; 4096];
    snapshot.read_pages(0, range(300, 301), &mut buffer).unwrap();
    assert_eq!(buffer, page(1));
}

#[test]
fn a_truncated_file_names_path_offset_and_how_much_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", QUICK);
    let snapshot = Snapshot::open(&target).unwrap();
    let place = snapshot.locate(0, PageNumber(305)).unwrap();
    OpenOptions::new().write(true).open(&target).unwrap().set_len(place + 100).unwrap();
    let mut buffer = vec![0; 10 * 4096];
    let error = snapshot.read_pages(0, range(300, 310), &mut buffer).unwrap_err().to_string();
    assert!(error.starts_with(target.to_str().unwrap()), "{error}");
    assert!(error.contains("truncated") && error.contains(&format!("{:#x}", place + 100)), "{error}");
}

#[test]
fn a_sparse_file_that_claims_more_memory_than_any_machine_is_refused() {
    // One block of 2^54 bytes in a file as long: its bitmap alone would take 512 GiB.
    let mut layout = fuzz_open(&files()[0]).unwrap().layout().clone();
    layout.blocks.truncate(1);
    let length: u64 = 1 << 54;
    let blocks = [limosa_stream::RamBlock::new("pc.ram", length)];
    let layout = limosa_stream::mapped_ram::Layout::plan(&layout.configuration, 2, &blocks).unwrap();
    let directory = Path::new("/dev/shm");
    let Ok(file) = tempfile::NamedTempFile::new_in(directory) else { return };
    for chunk in layout.chunks().unwrap() {
        file.as_file().write_all_at(&chunk.bytes, chunk.offset).unwrap();
    }
    file.as_file().write_all_at(&tail("running"), layout.tail_offset).unwrap();
    let error = Snapshot::open(file.path()).unwrap_err().to_string();
    assert!(error.contains("pages of guest memory"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn damage_to_a_file_with_checksums_never_changes_memory_silently(
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), 1_u8..), 1..4),
        anywhere in any::<bool>(),
    ) {
        static WHERE: OnceLock<Vec<usize>> = OnceLock::new();
        static MEMORY: OnceLock<Vec<u8>> = OnceLock::new();
        let file = &files()[1];
        let undamaged = MEMORY.get_or_init(|| memory(&fuzz_open(file).unwrap()));
        let frame = WHERE.get_or_init(|| frame(file));
        let mut bytes = file.clone();
        for (at, flip) in damage {
            let at = if anywhere { at.index(bytes.len()) } else { frame[at.index(frame.len())] };
            bytes[at] ^= flip;
        }
        if let Ok(snapshot) = fuzz_open(&bytes)
            && snapshot.has_checksums()
        {
            prop_assert!(&memory(&snapshot) == undamaged);
            prop_assert!(snapshot.check_restorable().is_err() || snapshot.device_tail() == tail("running"));
        }
    }

    #[test]
    fn damage_to_a_file_without_checksums_never_panics(
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        static WHERE: OnceLock<Vec<usize>> = OnceLock::new();
        let file = &files()[0];
        let frame = WHERE.get_or_init(|| frame(file));
        let mut bytes = file.clone();
        for (at, byte) in damage {
            bytes[frame[at.index(frame.len())]] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let _ = fuzz_open(&bytes);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        prop_assert!(fuzz_open(&bytes).is_err());
        let mut with_header = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc".to_vec();
        with_header.extend_from_slice(&bytes);
        prop_assert!(fuzz_open(&with_header).is_err());
    }
}
