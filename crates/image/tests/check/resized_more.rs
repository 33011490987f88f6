//! Resizing disks with snapshots, bitmaps, a data file, a guest.

use std::path::Path;
use std::sync::Arc;

use limosa_image::Preallocation;
use limosa_image::qcow2::{Bitmap, Header, Repair, read_bitmaps, repair};
use limosa_storage::testing::{Failing, Fault};
use limosa_storage::{MemoryStorage, Operation, Storage, block_on};
use limosa_testkit::{qemu_img, qemu_io};

use crate::cuts::contents;
use crate::resizing::{clean, resized, shrink};
use crate::zoo;

fn memory(path: &Path) -> MemoryStorage {
    MemoryStorage::with_contents(std::fs::read(path).unwrap(), 1 << 30)
}

fn alone(file: &MemoryStorage, size: u64) -> Result<(), String> {
    resized(Arc::new(file.clone()), None, None, size, shrink()).map_err(|error| error.to_string())
}

#[test]
fn what_was_cut_off_does_not_come_back_and_snapshots_keep_it() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    for (options, write) in [
        ("cluster_size=64k", "write -P 7 0 1M"),
        ("cluster_size=64k,extended_l2=on", "write -P 7 0 1M"),
        ("cluster_size=64k", "write -c -P 7 0 1M"),
        ("cluster_size=64k,compat=0.10", "write -c -P 7 0 1M"),
        ("cluster_size=4k,refcount_bits=2", "write -P 7 0 1M"),
    ] {
        for snapshot in [true, false] {
            let path = folder.path().join("cut.qcow2");
            let image = path.to_str().unwrap();
            qemu_img(["create", "-q", "-f", "qcow2", "-o", options, image, "1M"]).unwrap();
            qemu_io(["-f", "qcow2", "-c", write, image]).unwrap();
            // Version 2 does not say how large a snapshot is.
            let snapshot = snapshot && !options.contains("compat");
            if snapshot {
                qemu_img(["snapshot", "-c", "before", image]).unwrap();
            }
            let what = format!("{options}, {write}, {snapshot}");
            let storage = memory(&path);
            let end = 3 * 65536 + 1536;
            alone(&storage, end).unwrap();
            std::fs::write(&path, storage.contents()).unwrap();
            clean(&path, &what);
            alone(&storage, 1 << 20).unwrap();
            std::fs::write(&path, storage.contents()).unwrap();
            clean(&path, &what);
            let commands = [format!("read -P 7 0 {end}"), format!("read -P 0 {end} {}", (1 << 20) - end)];
            let read = commands.iter().flat_map(|command| ["-c", command]).chain(["-f", "qcow2", image]);
            let said = qemu_io(read).unwrap();
            assert!(!said.contains("verification failed"), "{what}: {said}");
            if snapshot {
                qemu_img(["snapshot", "-a", "before", image]).unwrap();
                let said = qemu_io(["-f", "qcow2", "-c", "read -P 7 0 1M", image]).unwrap();
                assert!(!said.contains("verification failed"), "{what}: {said}");
            }
        }
    }
}

/// The bitmaps of an image: their names, and their bits.
fn bitmaps(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let storage = MemoryStorage::with_contents(bytes.to_vec(), 1 << 30);
    let header = block_on(Header::read(&storage)).unwrap();
    let found = block_on(read_bitmaps(&storage, &header)).unwrap();
    let cluster = usize::try_from(header.geometry().cluster_size()).unwrap();
    let bits = |bitmap: &Bitmap| {
        assert!(!bitmap.in_use, "{bitmap:?}");
        let needed = header.size.div_ceil(1 << bitmap.granularity_bits).div_ceil(8);
        assert_eq!(u64::from(bitmap.table.1), header.geometry().clusters(needed), "{bitmap:?}");
        let mut bits = Vec::new();
        for entry in 0..bitmap.table.1 as usize {
            let at = usize::try_from(bitmap.table.0.0).unwrap() + entry * 8;
            let entry = u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
            let place = usize::try_from(entry & !1).unwrap();
            match entry {
                0 => bits.extend(vec![0; cluster]),
                1 => bits.extend(vec![0xff; cluster]),
                _ => bits.extend(&bytes[place..place + cluster]),
            }
        }
        bits
    };
    found.iter().map(|bitmap| (bitmap.name.clone(), bits(bitmap))).collect()
}

#[test]
fn bitmaps_follow_the_size_as_they_do_with_the_stock_tool() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let path = zoo::one(folder.path(), "bitmaps").path;
    let (mine, theirs) = (folder.path().join("mine.qcow2"), folder.path().join("theirs.qcow2"));
    for sizes in [&[512 << 20][..], &[16 << 30], &[3 << 20], &[(6 << 20) + 512, 8 << 20], &[512, 1 << 30, 64 << 10]] {
        let storage = memory(&path);
        std::fs::copy(&path, &theirs).unwrap();
        for size in sizes {
            alone(&storage, *size).unwrap();
            let image = theirs.to_str().unwrap();
            qemu_img(["resize", "-q", "-f", "qcow2", "--shrink", image, &size.to_string()]).unwrap();
        }
        std::fs::write(&mine, storage.contents()).unwrap();
        clean(&mine, &format!("{sizes:?}"));
        let (mine_bits, theirs_bits) = (bitmaps(&storage.contents()), bitmaps(&std::fs::read(&theirs).unwrap()));
        assert!(mine_bits.len() == 2 && mine_bits == theirs_bits, "{sizes:?}");
        // It loads all of them to change one.
        qemu_img(["bitmap", "--disable", mine.to_str().unwrap(), "one"]).unwrap();
    }
}

/// Of a storage that gets full on the way, and of one that refuses a single request.
#[test]
fn a_growth_that_finds_no_space_gives_back_what_it_took_and_keeps_bitmaps() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    for name in ["usual", "tiny", "subclusters", "bitmaps"] {
        let path = zoo::one(folder.path(), name).path;
        let whole = std::fs::read(&path).unwrap();
        let (before, marked) = (contents(&whole).unwrap(), bitmaps(&whole));
        let unchanged = |storage: &MemoryStorage, what: &str| {
            std::fs::write(&path, storage.contents()).unwrap();
            clean(&path, what);
            assert!(contents(&storage.contents()).unwrap() == before, "{what}");
            assert_eq!(bitmaps(&storage.contents()), marked, "{what}");
        };
        for preallocation in [Preallocation::Off, Preallocation::Metadata, Preallocation::Full] {
            let options = shrink().preallocation(preallocation);
            let size = if preallocation == Preallocation::Full { 64 << 20 } else { 3 << 40 };
            for room in [0, 4096, 100_000, 3 << 20] {
                let what = format!("{name}, {preallocation:?}, room for {room}");
                let storage = MemoryStorage::with_contents(whole.clone(), whole.len() as u64 + room);
                if resized(Arc::new(storage.clone()), None, None, size, options).is_err() {
                    unchanged(&storage, &what);
                    let length = storage.contents().len();
                    // Longer tables of L2 tables and of refcounts stay; here they have room where they are.
                    let in_place = name == "usual" && preallocation == Preallocation::Full;
                    assert!(!in_place || length <= whole.len() + (64 << 10), "{what}: {length} of {}", whole.len());
                }
            }
            if name == "tiny" {
                continue;
            }
            for after in (0..9).chain((9..).step_by(8)) {
                let storage = MemoryStorage::with_contents(whole.clone(), 1 << 30);
                let failing = Failing::only(&[Operation::Write, Operation::WriteZeroes]);
                failing.fail(after, 1, Fault::NoSpace);
                let size = 40 << 20;
                if resized(failing.wrap(Arc::new(storage.clone())), None, None, size, options).is_err() {
                    let header = block_on(Header::read(&storage)).unwrap();
                    let what = format!("{name}, {preallocation:?}, request {after}");
                    if header.size == size {
                        std::fs::write(&path, storage.contents()).unwrap();
                        clean(&path, &what);
                    } else {
                        unchanged(&storage, &what);
                    }
                } else {
                    assert!(after > 0, "{name}");
                    break;
                }
            }
        }
    }
}

#[test]
fn data_files_follow_the_size_as_they_do_with_the_stock_tool() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    for raw in ["off", "on"] {
        for (preallocation, how) in [
            (Preallocation::Off, "off"),
            (Preallocation::Metadata, "metadata"),
            (Preallocation::Falloc, "falloc"),
            (Preallocation::Full, "full"),
        ] {
            let path = folder.path().join("image.qcow2");
            let data = folder.path().join("data");
            let image = path.to_str().unwrap();
            let options = format!("data_file={},data_file_raw={raw}", data.to_str().unwrap());
            qemu_img(["create", "-q", "-f", "qcow2", "-o", &options, image, "4M"]).unwrap();
            qemu_io(["-f", "qcow2", "-c", "write -P 7 0 4M", image]).unwrap();
            let what = format!("raw {raw}, {how}");
            let (file, contents) = (memory(&path), memory(&data));
            for (size, preallocation) in [(1 << 20, Preallocation::Off), (6 << 20, preallocation)] {
                let options = shrink().preallocation(preallocation);
                let data_file: Arc<dyn Storage> = Arc::new(contents.clone());
                resized(Arc::new(file.clone()), None, Some(data_file), size, options).unwrap();
                assert_eq!(contents.contents().len() as u64, size, "{what}");
            }
            let stock = ["resize", "-q", "-f", "qcow2"];
            qemu_img(stock.into_iter().chain(["--shrink", image, "1M"])).unwrap();
            qemu_img(stock.into_iter().chain([&*format!("--preallocation={how}"), image, "6M"])).unwrap();
            assert!(std::fs::read(&data).unwrap() == contents.contents(), "{what}");
            let map = || qemu_img(["map", "--output", "json", "-f", "qcow2", image]).unwrap();
            let theirs = map();
            std::fs::write(&path, file.contents()).unwrap();
            clean(&path, &what);
            assert_eq!(map(), theirs, "{what}");
        }
    }
}

#[test]
fn what_cannot_be_resized_says_why() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let of = |name| memory(&zoo::one(folder.path(), name).path);
    let old = of("old");
    let said = "memory: it has snapshots and is of version 2, which does not say how large they are";
    assert_eq!(alone(&old, 16 << 20).unwrap_err(), said);
    let usual = of("usual");
    assert!(alone(&usual, 1000).unwrap_err().contains("no multiple of 512"));
    assert!(alone(&usual, 1 << 62).unwrap_err().contains("too large for clusters of 65536 bytes"));
    let kept = resized(Arc::new(usual.clone()), None, None, 512, shrink().shrink(false));
    assert!(kept.unwrap_err().to_string().contains("shrinking has to be asked for"));

    // Bit 1 of the incompatible features says corrupt, bit 0 dirty: what was not closed is repaired.
    let mut bytes = usual.contents();
    bytes[79] = 2;
    let corrupt = MemoryStorage::with_contents(bytes.clone(), 1 << 30);
    assert!(alone(&corrupt, 16 << 20).unwrap_err().contains("check and repair it"));
    assert!(corrupt.contents() == bytes);
    bytes[79] = 1;
    let dirty = MemoryStorage::with_contents(bytes, 1 << 30);
    alone(&dirty, 16 << 20).unwrap();
    assert_eq!(contents(&dirty.contents()).unwrap().len(), 16 << 8);

    let bitmaps = of("bitmaps");
    let header = block_on(Header::read(&bitmaps)).unwrap();
    let flags = usize::try_from(header.bitmaps().unwrap().directory.0 + 15).unwrap();
    let mut bytes = bitmaps.contents();
    bytes[flags] |= 1;
    let in_use = MemoryStorage::with_contents(bytes.clone(), 1 << 30);
    assert!(alone(&in_use, 16 << 20).unwrap_err().contains("its bitmap \"one\" was not put away"));
    assert!(in_use.contents() == bytes);
    assert!(block_on(repair(&in_use, Repair::All, shrink().check)).unwrap().is_clean());
}

#[test]
fn space_for_what_is_new_of_a_disk_whose_tables_a_snapshot_shares_loses_none() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let path = folder.path().join("image.qcow2");
    let image = path.to_str().unwrap();
    for options in ["cluster_size=64k", "cluster_size=512", "cluster_size=16k,extended_l2=on"] {
        qemu_img(["create", "-q", "-f", "qcow2", "-o", options, image, "4M"]).unwrap();
        qemu_io(["-f", "qcow2", "-c", "write -P 1 0 1M", image]).unwrap();
        qemu_img(["snapshot", "-c", "one", image]).unwrap();
        for preallocation in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
            let file = memory(&path);
            let options = shrink().preallocation(preallocation);
            resized(Arc::new(file.clone()), None, None, 20 << 20, options).unwrap();
            let grown = folder.path().join("grown.qcow2");
            std::fs::write(&grown, file.contents()).unwrap();
            clean(&grown, &format!("{options:?}"));
        }
    }
}
