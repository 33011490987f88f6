//! Files that QEMU wrote itself.

use limosa_migrate::stored::PageSource;
use std::os::unix::fs::FileExt;

use crate::fixture::{CHECKED, LARGE, QUICK, as_qemu, as_qemu_with, leave_stale, names, page, range, tail};
use limosa_page::{PageNumber, PageRange};
use limosa_snapshot::{Manifest, Snapshot, SnapshotError, Transport, publish_qemu_file};

#[test]
fn a_file_of_qemus_gets_its_trailer_and_its_name() {
    let directory = tempfile::tempdir().unwrap();
    for (name, options) in [("plain", QUICK), ("checked", CHECKED)] {
        let target = directory.path().join(name);
        let mut manifest = Manifest::new();
        manifest.transport = Some(Transport::File);
        let published = publish_qemu_file(as_qemu(&target, &[3, 4, 500]), manifest, options).unwrap();
        let snapshot = Snapshot::open(&target).unwrap();
        assert_eq!(snapshot.manifest(), Some(&published.manifest));
        let pages = published.manifest.pages;
        assert_eq!((pages.normal, pages.zero, pages.explicit_zero), (3, LARGE + 16 - 3, 16));
        assert_eq!(pages.hinted, None, "a bit that is clear says nothing of why");
        assert_eq!(published.manifest.run_state.as_deref(), Some("paused"));
        assert_eq!(published.length, target.metadata().unwrap().len());
        assert_eq!(snapshot.has_checksums(), options.checksum);
        assert_eq!(snapshot.device_tail(), tail("paused"));
        let mut buffer = [0; 3 * 4096];
        snapshot.read_pages(0, range(3, 6), &mut buffer).unwrap();
        assert_eq!(buffer[..], [page(3), page(4), [0; 4096]].concat());
        snapshot.verify(0, PageRange::whole_block(LARGE)).unwrap();
    }
}

#[test]
fn zeros_of_small_blocks_have_their_bit_over_a_hole_and_nothing_stale_is_left_there() {
    let directory = tempfile::tempdir().unwrap();
    let stored = [0, 3, 4, LARGE - 2];
    for (name, pages, options) in
        [("plain", LARGE - 1, QUICK), ("checked", LARGE - 1, CHECKED), ("large", LARGE, QUICK)]
    {
        let target = directory.path().join(name);
        let pending = as_qemu_with(&target, pages, &stored);
        leave_stale(&pending, pages, 0, &stored);
        leave_stale(&pending, pages, 1, &[]);
        let published = publish_qemu_file(pending, Manifest::new(), options).unwrap();
        let statistics = published.manifest.pages;
        assert_eq!((statistics.normal, statistics.zero), (4, pages + 16 - 4));
        let snapshot = Snapshot::open(&target).unwrap();
        let file = std::fs::File::open(&target).unwrap();
        // What a loader that goes by the bits reads, in a block with any earlier contents.
        let load = |block: usize, at: u64| {
            let mut found = [0x77; 4096];
            if let Some(place) = snapshot.locate(block, PageNumber(at)) {
                file.read_exact_at(&mut found, place).unwrap();
            }
            found
        };
        for at in 0..16 {
            assert_eq!(load(1, at), [0; 4096], "{name}: page {at} of the firmware");
        }
        if pages == LARGE {
            assert_eq!(statistics.explicit_zero, 16);
            assert_eq!(snapshot.stored_bitmap(0).count(), 4);
            continue;
        }
        assert_eq!(statistics.explicit_zero, pages - 4 + 16);
        for at in 0..pages {
            let wanted = if stored.contains(&at) { page(at) } else { [0; 4096] };
            assert!(load(0, at) == wanted, "{name}: page {at}");
        }
        let room = snapshot.allocated();
        assert!(room < 1 << 20, "the zeros take {room} bytes");
        snapshot.verify(0, PageRange::whole_block(pages)).unwrap();
        assert_eq!(snapshot.warnings(), [] as [&str; 0]);
        assert_eq!(snapshot.device_tail(), tail("paused"));
    }
}

#[test]
fn a_file_of_qemus_opens_without_any_trailer() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    as_qemu(&target, &[3]).publish(limosa_snapshot::Durability::Unsynced).unwrap();
    let snapshot = Snapshot::open(&target).unwrap();
    assert_eq!(snapshot.manifest(), None);
    assert_eq!(snapshot.warnings(), [] as [&str; 0]);
    assert!(snapshot.missing_manifest_reason().unwrap().contains("QEMU wrote it alone"));
    assert_eq!(snapshot.run_state().as_deref(), Some("paused"));
    snapshot.check_restorable().unwrap();
}

#[test]
fn a_file_that_qemu_did_not_finish_is_refused_and_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("vm");
    for missing in [1, 50, 400, 3000, 100_000] {
        let pending = as_qemu(&target, &[3]);
        let length = pending.file().metadata().unwrap().len();
        pending.file().set_len(length - missing).unwrap();
        let refused = publish_qemu_file(pending, Manifest::new(), QUICK);
        assert!(matches!(refused, Err(SnapshotError::Structure { .. })), "{refused:?}");
        assert_eq!(names(directory.path()), [] as [&str; 0]);
    }
}

#[test]
fn a_file_that_goes_on_behind_qemus_stream_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let pending = as_qemu(&directory.path().join("vm"), &[3]);
    let length = pending.file().metadata().unwrap().len();
    pending.file().write_all_at(b"leftover", length).unwrap();
    let error = publish_qemu_file(pending, Manifest::new(), QUICK).unwrap_err().to_string();
    assert!(error.contains("8 bytes behind QEMU's stream"), "{error}");
}

#[test]
fn a_file_whose_bitmaps_were_never_written_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = publish_qemu_file(as_qemu(&directory.path().join("vm"), &[]), Manifest::new(), QUICK).unwrap_err();
    assert!(matches!(error, SnapshotError::Empty { .. }), "{error}");
    assert!(error.to_string().contains("background-snapshot"), "{error}");
}
