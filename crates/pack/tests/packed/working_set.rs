//! Working sets inside of images.

use std::path::Path;

use limosa_migrate::stored::BlockRange;
use limosa_pack::{Access, open_snapshot};
use limosa_page::{PageNumber, PageRange};
use limosa_snapshot::{RecordedMode, Snapshot, WorkingSet, WorkingSetFile, WorkingSetRecorder};
use limosa_testkit::qemu_img;

use crate::{access, encrypted, options, pack_file, passphrase, snapshot};

/// A snapshot whose guest has touched some pages.
fn touched(folder: &Path, name: &str) -> Snapshot {
    let contents: Vec<_> = (0..2000).map(|page| (page, page + 1)).collect();
    let snapshot = Snapshot::open(&snapshot(&folder.join(name), 2100, &contents)).unwrap();
    let mut recorder = WorkingSetRecorder::new(&snapshot, RecordedMode::Lazy);
    for (start, end) in [(1500, 1501), (3, 5), (700, 900)] {
        recorder.note(BlockRange { block: 0, pages: PageRange::new(PageNumber(start), PageNumber(end)) });
    }
    WorkingSetFile::create(&snapshot).unwrap().publish(&recorder.finish()).unwrap();
    snapshot
}

/// Whether a set has this page of the first block.
fn has(set: &WorkingSet, page: u64) -> bool {
    set.ranges.iter().any(|range| range.block == 0 && (range.pages.start.0..range.pages.end.0).contains(&page))
}

#[test]
fn an_image_keeps_the_working_set_and_stock_tools_see_it() {
    let folder = tempfile::tempdir().unwrap();
    let plain = touched(folder.path(), "vm");
    for (how, name) in [(options(), "vm.qcow2"), (encrypted(), "secret.qcow2")] {
        let path = folder.path().join(name);
        let packed = pack_file(plain.path(), &path, None, &how);
        assert!((201 * 4096..4 << 20).contains(&packed.touched_bytes), "{packed:?}");
        let opened = open_snapshot(&path, &access(Some(&passphrase()))).unwrap();
        let set = WorkingSet::of(&opened).unwrap().unwrap();
        assert_eq!((set.mode, set.snapshot), (RecordedMode::Image, plain.id()));
        for page in [1500, 3, 4, 700, 899] {
            assert!(has(&set, page), "{page}");
        }
        // A cluster has 32 pages.
        assert!(set.pages() < 201 + 8 * 32 && !has(&set, 1000), "{set:?}");
        // It goes along when the image is packed again.
        let again = pack_file(&path, &folder.path().join(format!("again-{name}")), None, &how);
        assert_eq!(again.touched_bytes, packed.touched_bytes);
    }
    // An increment has one of its own.
    let increment = folder.path().join("increment.qcow2");
    let how = options();
    assert!(pack_file(plain.path(), &increment, Some(&folder.path().join("vm.qcow2")), &how).touched_bytes > 0);
    let opened = open_snapshot(&increment, &Access::default()).unwrap();
    assert!(has(&WorkingSet::of(&opened).unwrap().unwrap(), 1500));
    qemu_img(["check", "-q", increment.to_str().unwrap()]).unwrap();
    let info = qemu_img(["info", "--output", "json", folder.path().join("vm.qcow2").to_str().unwrap()]).unwrap();
    assert!(info.contains("limosa-working-set"), "{info}");
    qemu_img(["check", "-q", folder.path().join("vm.qcow2").to_str().unwrap()]).unwrap();
}

#[test]
fn an_image_without_one_has_none_and_one_beside_it_counts_first() {
    let folder = tempfile::tempdir().unwrap();
    let plain = touched(folder.path(), "vm");
    let bare = folder.path().join("bare");
    std::fs::copy(plain.path(), &bare).unwrap();
    let image = folder.path().join("bare.qcow2");
    assert_eq!(pack_file(&bare, &image, None, &options()).touched_bytes, 0);
    let opened = open_snapshot(&image, &Access::default()).unwrap();
    assert_eq!(WorkingSet::of(&opened).unwrap(), None);
    let mut recorder = WorkingSetRecorder::new(&opened, RecordedMode::Lazy);
    recorder.note(BlockRange { block: 0, pages: PageRange::new(PageNumber(7), PageNumber(8)) });
    WorkingSetFile::create(&opened).unwrap().publish(&recorder.finish()).unwrap();
    let set = WorkingSet::of(&opened).unwrap().unwrap();
    assert_eq!((set.mode, set.pages()), (RecordedMode::Lazy, 1));
}
