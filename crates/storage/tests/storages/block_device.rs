//! Block devices, where this user may have one.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use limosa_storage::{Buffer, CacheMode, ExtentKind, FileOptions, FileStorage, Io, Storage, ZeroOptions, block_on};
use tempfile::NamedTempFile;

const SIZE: u64 = 4 << 20;

/// A device over a file. It is taken down when this is dropped.
struct Loop {
    path: String,
    file: NamedTempFile,
}

impl Loop {
    /// Creates a device with this sector size; `None`, with a note, if this process lacks the privileges.
    fn new(sector: u32) -> Option<Self> {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(SIZE).unwrap();
        let made = Command::new("losetup")
            .args(["-f", "--show", "--sector-size", &sector.to_string()])
            .arg(file.path())
            .output();
        match made {
            Ok(made) if made.status.success() => {
                let path = String::from_utf8(made.stdout).unwrap().trim().into();
                Some(Self { path, file })
            }
            _ => {
                limosa_testkit::note_skip("no loop device for this user");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        _ = Command::new("losetup").args(["-d", &self.path]).status();
    }
}

#[test]
fn a_block_device_keeps_its_length_and_the_contract_within_it() {
    keeps_the_contract(512);
}

#[test]
fn a_block_device_of_large_sectors_keeps_the_contract_too() {
    keeps_the_contract(4096);
}

fn keeps_the_contract(sector: u32) {
    let Some(device) = Loop::new(sector) else { return };
    for (cache, io) in [CacheMode::Writeback, CacheMode::None].into_iter().zip([Io::Threads, Io::Uring]) {
        let storage = FileStorage::open(&device.path, &FileOptions { cache, io, ..FileOptions::default() }).unwrap();
        assert!(storage.is_block_device());
        assert_eq!(storage.alignment().offset, if cache.is_direct() { sector } else { 1 });
        assert_eq!(storage.length().unwrap(), SIZE);
        let mut model: Vec<u8> = (0..SIZE).map(|at| u8::try_from(at % 250).unwrap() + 1).collect();
        block_on(storage.write(0, Buffer::from_slice(&model).into())).unwrap();
        block_on(storage.write(1001, Buffer::from_slice(&[77; 3000]).into())).unwrap();
        model[1001..4001].fill(77);
        for (unmap, start, end) in
            [(false, 8192, 16384), (true, 65536, 131_072), (true, 200_001, 210_100), (false, 511, 513)]
        {
            block_on(storage.write_zeroes(start..end, ZeroOptions { unmap, only_fast: false })).unwrap();
            model[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()].fill(0);
        }
        block_on(storage.flush()).unwrap();
        let found = Buffer::zeroed(model.len());
        block_on(storage.read(0, found.clone().into())).unwrap();
        assert!(found.to_vec() == model, "{cache}");
        // What is given back is zeros or as it was.
        block_on(storage.discard((1 << 20)..SIZE)).unwrap();
        block_on(storage.read(0, found.clone().into())).unwrap();
        let is_kept = |(at, (found, was)): (usize, (u8, &u8))| found == *was || at >= 1 << 20 && found == 0;
        assert!(found.to_vec().into_iter().zip(&model).enumerate().all(is_kept));
        // Nothing is known without reading, but what is behind the end.
        let extents = storage.extents(0..SIZE + 4096).unwrap();
        let kinds: Vec<_> = extents.into_iter().map(|extent| (extent.range, extent.kind)).collect();
        assert_eq!(kinds, [(0..SIZE, ExtentKind::Data), (SIZE..SIZE + 4096, ExtentKind::Hole)]);
        let tail = Buffer::from_slice(&[1; 2048]);
        block_on(storage.read(SIZE - 1024, tail.clone().into())).unwrap();
        assert!(tail.slice(1024..2048).is_zero());
        for refused in [
            storage.write(SIZE - 512, Buffer::zeroed(1024).into()),
            storage.write(SIZE, Buffer::zeroed(512).into()),
            storage.write_zeroes(SIZE - 512..SIZE + 512, ZeroOptions::default()),
            storage.allocate(0..SIZE + 1),
        ] {
            let error = block_on(refused).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
        }
        assert!(block_on(storage.set_len(SIZE + 512)).is_err() && block_on(storage.set_len(SIZE)).is_ok());
        block_on(storage.allocate(0..SIZE)).unwrap();
    }
}

#[test]
fn zeros_on_a_device_give_space_back_only_if_they_may() {
    let Some(device) = Loop::new(512) else { return };
    let storage = FileStorage::open(&device.path, &FileOptions::default()).unwrap();
    let contents = Buffer::from_slice(&vec![5; usize::try_from(SIZE).unwrap()]);
    block_on(storage.write(0, contents.clone().into())).unwrap();
    block_on(storage.flush()).unwrap();
    let space = || device.file.as_file().metadata().unwrap().blocks() * 512;
    let full = space();
    let zero = |unmap, only_fast| block_on(storage.write_zeroes(0..1 << 20, ZeroOptions { unmap, only_fast }));
    zero(false, false).unwrap();
    block_on(storage.read(0, contents.clone().into())).unwrap();
    assert!(contents.slice(0..1 << 20).is_zero() && !contents.is_zero());
    assert!(space() >= full, "{} of {full}", space());
    // Whether the device writes for that cannot be known.
    assert_eq!(zero(false, true).unwrap_err().kind(), io::ErrorKind::Unsupported);
    zero(true, true).unwrap();
    assert!(space() < full, "{} of {full}", space());
}
