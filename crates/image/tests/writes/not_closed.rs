//! Images with refcounts that are written late, and that were not closed: they are repaired when they are opened to be
//! written.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use limosa_image::chain::{Image, OpenOptions, open_image};
use limosa_image::qcow2::{CheckOptions, CreateOptions, Header, Qcow2, Qcow2Options, check};
use limosa_image::reference::Reference;
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::testing::{Failing, Fault};
use limosa_storage::{MemoryStorage, Operation, Storage, block_on};
use limosa_testkit::image::{self, TestImage, filled};
use limosa_testkit::{qemu_img, qemu_io, qemu_skipped, scratch};

const CLUSTER: u64 = 64 << 10;

fn read(disk: &Qcow2, at: u64) -> Vec<u8> {
    image::read(disk, at, 512)
}

fn open_over(file: Arc<dyn Storage>, read_only: bool) -> Result<Arc<Qcow2>, ImageError> {
    TestImage::existing(file).try_open(None, Qcow2Options::default().read_only(read_only))
}

/// An image that was written, flushed, and not closed.
fn abandoned() -> MemoryStorage {
    let storage = MemoryStorage::growing_to(16 << 20);
    let options = CreateOptions::default().size(64 << 20).lazy_refcounts(true);
    let disk = TestImage::create_in(Arc::new(storage.clone()), &options).open();
    assert!(disk.repair_report().is_none());
    block_on(disk.write(GuestOffset(0), filled(1, 3 * CLUSTER).into())).unwrap();
    block_on(disk.write(GuestOffset(32 << 20), filled(2, CLUSTER).into())).unwrap();
    block_on(disk.flush()).unwrap();
    drop(disk);
    let storage = MemoryStorage::with_contents(storage.contents(), 16 << 20);
    assert!(block_on(Header::read(&storage)).unwrap().features.dirty());
    assert!(block_on(check(&storage, CheckOptions::default())).unwrap().corruptions > 0);
    storage
}

fn is_whole(storage: &MemoryStorage) {
    assert!(!block_on(Header::read(storage)).unwrap().features.dirty());
    assert!(block_on(check(storage, CheckOptions::default())).unwrap().is_clean());
    let disk = open_over(Arc::new(storage.clone()), true).unwrap();
    assert_eq!((read(&disk, CLUSTER), read(&disk, 32 << 20)), (vec![1; 512], vec![2; 512]));
}

#[test]
fn an_image_that_was_not_closed_is_repaired_before_it_is_written_and_read_as_it_is() {
    let storage = abandoned();
    let before = storage.contents();
    let disk = open_over(Arc::new(storage.clone()), true).unwrap();
    assert_eq!((read(&disk, CLUSTER), disk.repair_report()), (vec![1; 512], None));
    assert!(storage.contents() == before);

    let disk = open_over(Arc::new(storage.clone()), false).unwrap();
    assert!(disk.repair_report().is_some_and(|report| report.corruptions_fixed > 0 && report.is_clean()));
    is_whole(&MemoryStorage::with_contents(storage.contents(), 16 << 20));
    block_on(disk.write(GuestOffset(16 << 20), filled(3, CLUSTER).into())).unwrap();
    block_on(disk.close()).unwrap();
    is_whole(&storage);
}

#[test]
fn a_repair_that_is_cut_short_is_begun_again() {
    for cut in 0.. {
        let storage = abandoned();
        let failing = Failing::only(&[Operation::Write, Operation::Flush]);
        failing.fail(cut, u64::MAX, Fault::Broken);
        let opened = open_over(failing.wrap(Arc::new(storage.clone())), false);
        let whole = opened.is_ok();
        drop(opened);
        let disk = open_over(Arc::new(storage.clone()), false).unwrap();
        assert!(!whole || disk.repair_report().is_none());
        block_on(disk.close()).unwrap();
        is_whole(&storage);
        if whole {
            assert!(cut > 2, "{cut}");
            return;
        }
    }
}

#[test]
fn an_image_with_more_wrong_than_refcounts_is_left_as_it_is() {
    let storage = abandoned();
    let header = block_on(Header::read(&storage)).unwrap();
    // An entry that points into the middle of a cluster.
    let l1 = usize::try_from(header.l1.0.0).unwrap();
    let mut bytes = storage.contents();
    let l2 = usize::from_be_bytes(bytes[l1..l1 + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    bytes[l2 + 800..l2 + 808].copy_from_slice(&(1_u64 << 63 | 0x5_0200).to_be_bytes());
    let storage = MemoryStorage::with_contents(bytes.clone(), 16 << 20);
    let error = open_over(Arc::new(storage.clone()), false).unwrap_err();
    assert!(error.to_string().contains("it has to be repaired before it is written"), "{error}");
    assert!(storage.contents() == bytes);
    assert_eq!(read(&open_over(Arc::new(storage), true).unwrap(), CLUSTER), [1; 512]);
}

#[test]
fn what_a_killed_qemu_leaves_is_repaired() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let path = folder.path().join("disk.qcow2");
    let image = path.to_str().unwrap();
    qemu_img(["create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", image, "64M"]).unwrap();
    let commands = ["write -P 1 0 300k", "write -P 2 32M 64k", "flush", "sigraise 9"];
    let killed = Command::new("qemu-io")
        .args(commands.iter().flat_map(|command| ["-c", command]))
        .args(["-f", "qcow2", image])
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(killed.signal(), Some(9));

    let open = |read_only| {
        let options = OpenOptions::default().read_only(read_only);
        match block_on(open_image(&Reference::file(&path), &options)).unwrap() {
            Image::Qcow2(disk) => disk,
            Image::Raw(_) | Image::Luks(_) => panic!("it is qcow2"),
        }
    };
    let disk = open(true);
    assert!(disk.header().features.dirty() && disk.repair_report().is_none());
    assert_eq!((read(&disk, CLUSTER), read(&disk, 32 << 20)), (vec![1; 512], vec![2; 512]));
    drop(disk);
    let disk = open(false);
    assert!(disk.repair_report().is_some_and(|report| report.corruptions_fixed > 0 && report.is_clean()));
    block_on(disk.write(GuestOffset(16 << 20), filled(3, CLUSTER).into())).unwrap();
    block_on(disk.close()).unwrap();
    drop(disk);
    qemu_img(["check", "-q", image]).unwrap();
    qemu_io(["-c", "read -P 1 0 300k", "-c", "read -P 2 32M 64k", "-c", "read -P 3 16M 64k", "-f", "qcow2", image])
        .unwrap();
}
