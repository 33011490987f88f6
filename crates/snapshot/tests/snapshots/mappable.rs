//! Files whose RAM blocks can be mapped as memory: what is not stored reads as zero at its place.

use limosa_migrate::stored::{PageSink, PageSource};
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use limosa_page::PageNumber;
use limosa_snapshot::{Durability, Manifest, Snapshot, SnapshotError, publish_qemu_file, seal_snapshot};
use proptest::prelude::*;

use crate::fixture::{CHECKED, LARGE, QUICK, as_qemu_with, leave_stale, names, page, put, range, small, tail, writer};

/// Returns the bytes that a process sees that maps a block: the file's, regardless of its bitmap.
fn mapped(path: &Path, block: usize) -> Vec<u8> {
    let snapshot = Snapshot::open(path).unwrap();
    let place = &snapshot.layout().blocks[block];
    let mut bytes = vec![0xff; usize::try_from(place.pages * 4096).unwrap()];
    File::open(path).unwrap().read_exact_at(&mut bytes, place.pages_offset).unwrap();
    bytes
}

/// Returns the page that a restore brings.
fn restored(path: &Path, block: usize) -> Vec<u8> {
    let snapshot = Snapshot::open(path).unwrap();
    let pages = snapshot.layout().blocks[block].pages;
    let mut bytes = vec![0xff; usize::try_from(pages * 4096).unwrap()];
    snapshot.read_pages(block, range(0, pages), &mut bytes).unwrap();
    bytes
}

#[track_caller]
fn assert_mappable(path: &Path) {
    assert!(Snapshot::open(path).unwrap().is_mappable());
    for block in 0..2 {
        assert!(mapped(path, block) == restored(path, block), "block {block} of {}", path.display());
    }
}

/// A file of QEMU's with old contents wherever no page is stored.
fn stale_file(directory: &Path, name: &str, pages: u64, stored: &[u64]) -> std::path::PathBuf {
    let target = directory.join(name);
    let pending = as_qemu_with(&target, pages, stored);
    leave_stale(&pending, pages, 0, stored);
    leave_stale(&pending, pages, 1, &[]);
    pending.publish(Durability::Unsynced).unwrap()
}

#[test]
fn a_file_that_qemu_wrote_is_mappable_once_it_is_adopted() {
    let directory = tempfile::tempdir().unwrap();
    let stored = [0, 3, 4, LARGE - 2];
    for (name, pages, options) in [("small", 700, QUICK), ("large", LARGE, QUICK), ("checked", LARGE, CHECKED)] {
        let stored: Vec<_> = stored.iter().map(|at| at % pages).collect();
        let target = directory.path().join(name);
        let pending = as_qemu_with(&target, pages, &stored);
        leave_stale(&pending, pages, 0, &stored);
        leave_stale(&pending, pages, 1, &[]);
        let published = publish_qemu_file(pending, Manifest::new(), options).unwrap();
        assert!(published.manifest.mappable);
        assert_eq!(published.manifest.pages.punched, pages + 16 - 4);
        assert_mappable(&target);
    }
}

#[test]
fn an_older_or_foreign_file_is_sealed_in_place_and_keeps_what_it_recorded() {
    let directory = tempfile::tempdir().unwrap();
    let target = stale_file(directory.path(), "vm", LARGE, &[3, 500]);
    assert!(!Snapshot::open(&target).unwrap().is_mappable());
    assert!(mapped(&target, 0) != restored(&target, 0), "nothing to seal");
    let inode = target.metadata().unwrap().ino();
    let before = restored(&target, 0);
    let sealed = seal_snapshot(&target).unwrap();
    assert_eq!((sealed.was_mappable, sealed.cleared, sealed.explicit_zero), (false, LARGE - 2 + 16, 16));
    assert_mappable(&target);
    assert!(restored(&target, 0) == before);
    let snapshot = Snapshot::open(&target).unwrap();
    assert_eq!(snapshot.warnings(), [] as [&str; 0]);
    assert_eq!(snapshot.device_tail(), tail("paused"));
    let pages = &snapshot.manifest().unwrap().pages;
    assert_eq!((pages.normal, pages.zero, pages.explicit_zero), (2, LARGE - 2 + 16, 16));
    let metadata = target.metadata().unwrap();
    assert_eq!((metadata.ino(), metadata.permissions().mode() & 0o777), (inode, 0o400));
    assert_eq!(names(directory.path()), ["vm"]);
    // Once more changes nothing.
    let length = metadata.len();
    assert!(seal_snapshot(&target).unwrap().was_mappable);
    assert_eq!(target.metadata().unwrap().len(), length);
}

/// As an older version wrote it: without the key.
fn forget_mappable(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let key = br#","mappable":true"#;
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    // Another key of the same length, which is kept as one that is not known.
    bytes[at + 2..at + 10].copy_from_slice(b"oldstyle");
    // The manifest lies between the stream's end and the checksums; both checksums over it are in the footer.
    let footer = bytes.len() - 64;
    let field = |at: usize| {
        usize::try_from(u64::from_le_bytes(bytes[footer + at..footer + at + 8].try_into().unwrap())).unwrap()
    };
    let (start, length) = (field(16), field(24));
    let crc = crc32c::crc32c(&bytes[start..start + length]);
    bytes[footer + 44..footer + 48].copy_from_slice(&crc.to_le_bytes());
    sign_footer(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Makes the checksum of a changed footer right.
fn sign_footer(bytes: &mut [u8]) {
    let footer = bytes.len() - 64;
    let crc = crc32c::crc32c(&bytes[footer..footer + 60]);
    bytes[footer + 60..].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn a_trailer_of_a_later_version_is_not_hidden_behind_another() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", QUICK);
    let mut bytes = std::fs::read(&target).unwrap();
    let footer = bytes.len() - 64;
    bytes[footer + 8..footer + 12].copy_from_slice(&2_u32.to_le_bytes());
    sign_footer(&mut bytes);
    std::fs::write(&target, &bytes).unwrap();
    let refused = seal_snapshot(&target);
    assert!(matches!(&refused, Err(SnapshotError::Structure { what, .. }) if what.contains("version")), "{refused:?}");
    assert!(std::fs::read(&target).unwrap() == bytes);
}

#[test]
fn sealing_keeps_the_record_and_the_checksums() {
    let directory = tempfile::tempdir().unwrap();
    let target = small(directory.path(), "vm", CHECKED);
    forget_mappable(&target);
    let before = Snapshot::open(&target).unwrap();
    assert!(!before.is_mappable() && before.has_checksums() && before.warnings().is_empty());
    let (id, length) = (before.manifest().unwrap().id, before.length());
    seal_snapshot(&target).unwrap();
    let after = Snapshot::open(&target).unwrap();
    assert!(after.is_mappable() && after.has_checksums());
    assert_eq!(after.manifest().unwrap().id, id);
    assert!(after.manifest().unwrap().unknown_keys.contains_key("oldstyle"));
    for (block, pages) in [(0, 600), (1, 16)] {
        after.verify(block, range(0, pages)).unwrap();
    }
    // Power fails while the new trailer is written: the old one counts.
    let whole = std::fs::read(&target).unwrap();
    std::fs::set_permissions(&target, Permissions::from_mode(0o600)).unwrap();
    for cut in [length, length + 1, length + 100, whole.len() as u64 - 1] {
        std::fs::write(&target, &whole[..usize::try_from(cut).unwrap()]).unwrap();
        let cut = Snapshot::open(&target).unwrap();
        assert_eq!(cut.manifest().unwrap().id, id);
        assert!(cut.has_checksums() && !cut.is_mappable());
    }
    // It can be sealed again from there.
    seal_snapshot(&target).unwrap();
    let again = Snapshot::open(&target).unwrap();
    assert!(again.is_mappable() && again.warnings().is_empty() && again.manifest().unwrap().id == id);
}

#[test]
fn a_file_that_is_served_or_damaged_is_not_sealed() {
    let directory = tempfile::tempdir().unwrap();
    let target = stale_file(directory.path(), "vm", 700, &[3]);
    let served = Snapshot::open(&target).unwrap();
    served.lock_serving().unwrap();
    let refused = seal_snapshot(&target);
    assert!(matches!(refused, Err(SnapshotError::Locked { .. })), "{refused:?}");
    drop(served);
    let whole = std::fs::read(&target).unwrap();
    std::fs::write(&target, &whole[..whole.len() - 50]).unwrap();
    let refused = seal_snapshot(&target);
    assert!(matches!(refused, Err(SnapshotError::Structure { .. })), "{refused:?}");
    assert_eq!(std::fs::read(&target).unwrap(), whole[..whole.len() - 50]);
    assert!(seal_snapshot(&directory.path().join("missing")).is_err());
}

#[test]
fn a_link_to_a_file_seals_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let target = stale_file(directory.path(), "vm", 700, &[3]);
    let link = directory.path().join("link");
    std::os::unix::fs::symlink("vm", &link).unwrap();
    seal_snapshot(&link).unwrap();
    assert_mappable(&target);
    assert!(link.is_symlink());
}

/// The pages of a stream.
#[derive(Debug, Clone)]
enum Said {
    Contents { first: u64, seeds: Vec<u64> },
    Zero { first: u64, length: u64 },
}

fn said(pages: u64) -> impl Strategy<Value = Said> {
    let contents = (0..pages - 8, proptest::collection::vec(any::<u64>(), 1..8));
    let zero = (0..pages - 40, 1_u64..40);
    prop_oneof![
        contents.prop_map(|(first, seeds)| Said::Contents { first, seeds }),
        zero.prop_map(|(first, length)| Said::Zero { first, length }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn whatever_a_stream_says_the_file_is_mappable(stream in proptest::collection::vec(said(LARGE), 1..40)) {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("vm");
        let mut writer = writer(&target, LARGE, QUICK);
        for said in &stream {
            match said {
                Said::Contents { first, seeds } => put(&mut writer, 0, *first, seeds),
                Said::Zero { first, length } => writer.put_zero(0, range(*first, first + length)).unwrap(),
            }
        }
        writer.finish(&tail("running"), Manifest::new()).unwrap();
        assert_mappable(&target);
        // What is stored is there, too.
        let snapshot = Snapshot::open(&target).unwrap();
        for (at, bytes) in mapped(&target, 0).chunks(4096).enumerate() {
            prop_assert_eq!(snapshot.stored_bitmap(0).get(PageNumber(at as u64)), bytes.iter().any(|byte| *byte != 0));
        }
    }

    #[test]
    fn whatever_qemu_left_behind_a_sealed_file_is_mappable(
        pages in prop_oneof![100_u64..900, Just(LARGE)],
        stored in proptest::collection::btree_set(0_u64..100, 1..30),
        stale in proptest::collection::btree_set(0_u64..100, 0..60),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("vm");
        let stored: Vec<_> = stored.into_iter().collect();
        let pending = as_qemu_with(&target, pages, &stored);
        // What is not in `stale` stays a hole.
        let keep: Vec<_> = (0..pages).filter(|at| stored.contains(at) || !stale.contains(at)).collect();
        leave_stale(&pending, pages, 0, &keep);
        pending.publish(Durability::Unsynced).unwrap();
        let sealed = seal_snapshot(&target).unwrap();
        prop_assert_eq!(sealed.cleared, stale.iter().filter(|at| !stored.contains(at)).count() as u64);
        assert_mappable(&target);
        let memory = mapped(&target, 0);
        for at in stored {
            let start = usize::try_from(at * 4096).unwrap();
            prop_assert!(memory[start..start + 4096] == page(at));
        }
    }
}
