//! Packed snapshots: what comes back, what stock tools make of it, what bad input gets.

mod chains;
mod comparison;
mod directory;
mod directory_losses;
mod directory_random;
#[path = "../../../snapshot/tests/snapshots/fixture/mod.rs"]
mod fixture;
mod hostile;
mod remote;
mod round_trip;
mod stock;
mod working_set;

use std::path::{Path, PathBuf};
use std::time::Duration;

use limosa_image::luks::Passphrase;
use limosa_migrate::Handle;
use limosa_pack::{Access, Base, PackEncryption, PackOptions, Packed, open_snapshot, pack, unpack};
use limosa_page::{PageNumber, PageRange};
use limosa_snapshot::{Durability, Manifest, Snapshot, UnnamedFile};

pub(crate) fn options() -> PackOptions {
    let mut options = PackOptions::default();
    options.durability = Durability::Unsynced;
    options
}

pub(crate) fn passphrase() -> Passphrase {
    Passphrase::new(b"a long and secret sentence".to_vec())
}

pub(crate) fn encrypted() -> PackOptions {
    let mut encryption = PackEncryption::new(passphrase());
    encryption.iter_time = Duration::from_millis(1);
    let mut options = options();
    options.encryption = Some(encryption);
    options
}

/// The access with a key.
pub(crate) fn access(key: Option<&Passphrase>) -> Access {
    Access::default().passphrase(key.cloned())
}

/// Packs a snapshot file.
pub(crate) fn pack_file(source: &Path, target: &Path, base: Option<&Path>, options: &PackOptions) -> Packed {
    let key = options.encryption.as_ref().map(|encryption| encryption.passphrase.clone());
    let snapshot = open_snapshot(source, &access(key.as_ref())).unwrap();
    let base = base.map(|base| Base::open(base, &access(key.as_ref())).unwrap());
    let pending = UnnamedFile::create(target, false).unwrap();
    pack(&snapshot, pending, base.as_ref(), options, &Handle::new()).unwrap()
}

pub(crate) fn unpack_file(source: &Path, target: &Path, key: Option<&Passphrase>) {
    let snapshot = open_snapshot(source, &access(key)).unwrap();
    let pending = UnnamedFile::create(target, false).unwrap();
    unpack(&snapshot, pending, Durability::Unsynced, &Handle::new()).unwrap();
}

/// A snapshot with these pages of its first block, which has `pages`: numbers and seeds of contents.
pub(crate) fn snapshot(target: &Path, pages: u64, contents: &[(u64, u64)]) -> PathBuf {
    let mut writer = fixture::writer(target, pages, fixture::QUICK);
    for (page, seed) in contents {
        fixture::put(&mut writer, 0, *page, &[*seed]);
    }
    fixture::put(&mut writer, 1, 4, &[11, 12]);
    let mut manifest = Manifest::new();
    manifest.vm_name = Some("vm".to_owned());
    writer.finish(&fixture::tail("running"), manifest).unwrap();
    target.to_path_buf()
}

/// Snapshots `0` and later ones as files, and packed on each other, each in its way.
pub(crate) fn chain_of(folder: &Path, depth: u64, how: impl Fn(u64) -> PackOptions) {
    let path = |name: String| folder.join(name);
    for number in 0..depth {
        let contents: Vec<_> =
            (0..600).map(|page| (page, if page % 8 <= number { page + number + 1 } else { 7 })).collect();
        let plain = snapshot(&path(number.to_string()), 700, &contents);
        let base = (number > 0).then(|| path(format!("{}.qcow2", number - 1)));
        pack_file(&plain, &path(format!("{number}.qcow2")), base.as_deref(), &how(number));
    }
}

/// Reads every stored page of both, and compares.
pub(crate) fn assert_same(one: &Snapshot, other: &Snapshot) {
    use limosa_migrate::stored::PageSource as _;
    assert_eq!(one.id(), other.id());
    assert_eq!(one.manifest(), other.manifest());
    assert_eq!(one.device_tail(), other.device_tail());
    assert_eq!(one.length(), other.length());
    assert!(one.warnings().is_empty() && other.warnings().is_empty(), "{:?} {:?}", one.warnings(), other.warnings());
    for (block, place) in one.layout().blocks.iter().enumerate() {
        assert_eq!(one.stored_bitmap(block), other.stored_bitmap(block));
        let (mut a, mut b) = (vec![0; 1 << 20], vec![1; 1 << 20]);
        for pages in PageRange::new(PageNumber(0), PageNumber(place.pages)).chunks(256) {
            let length = usize::try_from(pages.len()).unwrap() * 4096;
            one.read_pages(block, pages, &mut a[..length]).unwrap();
            other.read_pages(block, pages, &mut b[..length]).unwrap();
            assert!(a[..length] == b[..length], "{pages} of block {block}");
        }
    }
}
