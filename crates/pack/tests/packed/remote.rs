//! Snapshots whose images are objects of a store: here files of a folder, which a client of the tests opens.

use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_image::reference::{ObjectEntry, ObjectStores, OpenObject};
use limosa_pack::{
    Access, PackError, PruneStep, Retention, SnapshotDirectory, SnapshotEntry, SnapshotFolder, open_snapshot,
    plan_prune,
};
use limosa_page::error_with_causes;
use limosa_snapshot::{Snapshot, compare_memory};
use limosa_storage::{
    Alignment, Extent, ExtentKind, FileOptions, FileStorage, IoVector, Operation, Request, Storage, StorageError,
    ZeroOptions,
};

use crate::{access, assert_same, chain_of, encrypted, options, pack_file, passphrase, snapshot, unpack_file};

/// Objects of the bucket `b`, and the bytes that were read of them.
#[derive(Debug)]
struct Folder(PathBuf, Arc<AtomicU64>);

/// An object: it is pinned, as that of a client is.
#[derive(Debug)]
struct Pinned {
    file: Arc<FileStorage>,
    read: Arc<AtomicU64>,
    content_id: Option<String>,
}

impl Storage for Pinned {
    fn name(&self) -> &Arc<str> {
        self.file.name()
    }

    fn length(&self) -> Result<u64, StorageError> {
        self.file.length()
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        self.read.fetch_add(into.len() as u64, Ordering::Relaxed);
        self.file.read(offset, into)
    }

    fn content_id(&self) -> Option<String> {
        self.content_id.clone()
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        self.file.write(offset, from)
    }

    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request {
        self.file.write_zeroes(range, how)
    }

    fn discard(&self, range: Range<u64>) -> Request {
        self.file.discard(range)
    }

    fn flush(&self) -> Request {
        self.file.flush()
    }

    fn set_len(&self, len: u64) -> Request {
        self.file.set_len(len)
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        self.file.allocate(range)
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        Ok(vec![Extent::new(range, ExtentKind::Data)])
    }

    fn clone_range(&self, offset: u64, from: &Arc<dyn Storage>, from_offset: u64, length: u64) -> Request<bool> {
        self.file.clone_range(offset, from, from_offset, length)
    }
}

impl OpenObject for Folder {
    fn open(&self, url: &str) -> Result<Arc<dyn Storage>, StorageError> {
        let failed =
            |kind: io::ErrorKind| StorageError::for_storage(Operation::Open, &url.into(), io::Error::from(kind));
        let name = url.strip_prefix("s3://b/").ok_or_else(|| failed(io::ErrorKind::NotFound))?;
        let path = self.0.join(name);
        let opened = FileStorage::open(&path, &FileOptions::read_only_default());
        let file = opened.map_err(|error| failed(error.kind()))?;
        // A file that replaces another one while that is open is another one. Objects in `weak` have no strong tag.
        let inode = std::fs::metadata(&path).unwrap().ino();
        let content_id = (!name.starts_with("weak")).then(|| inode.to_string());
        Ok(Arc::new(Pinned { file, read: Arc::clone(&self.1), content_id }))
    }

    fn list(&self, folder: &str) -> Result<Vec<ObjectEntry>, StorageError> {
        assert_eq!(folder, "s3://b/");
        let failed = |error| StorageError::for_storage(Operation::List, &folder.into(), error);
        let entry = |entry: io::Result<std::fs::DirEntry>| {
            let entry = entry?;
            let metadata = entry.metadata()?;
            let url = format!("s3://b/{}", entry.file_name().to_str().unwrap());
            Ok(ObjectEntry { url, length: metadata.len(), modified: metadata.modified()?, tag: None })
        };
        std::fs::read_dir(&self.0).and_then(|entries| entries.map(entry).collect()).map_err(failed)
    }

    fn remove(&self, url: &str) -> Result<(), StorageError> {
        let failed = |error| StorageError::for_storage(Operation::Remove, &url.into(), error);
        std::fs::remove_file(self.0.join(url.strip_prefix("s3://b/").unwrap())).map_err(failed)
    }
}

fn stores(folder: &Path) -> ObjectStores {
    counted_stores(folder, &Arc::default())
}

fn counted_stores(folder: &Path, read: &Arc<AtomicU64>) -> ObjectStores {
    ObjectStores::new(Arc::new(Folder(folder.to_path_buf(), Arc::clone(read))))
}

fn open(folder: &Path, name: &str) -> Result<Snapshot, PackError> {
    open_snapshot(Path::new(&format!("s3://b/{name}")), &access(Some(&passphrase())).stores(stores(folder)))
}

/// A chain whose lower images are plain. What is encrypted in the base must be.
fn chain(folder: &Path, depth: u64) {
    chain_of(folder, depth, |number| if number < 2 { options() } else { encrypted() });
}

#[test]
fn objects_read_as_the_files_that_they_are_copies_of() {
    let folder = tempfile::tempdir().unwrap();
    chain(folder.path(), 8);
    for number in 0..8 {
        let plain = Snapshot::open(&folder.path().join(number.to_string())).unwrap();
        let (raw, packed) = (
            open(folder.path(), &number.to_string()).unwrap(),
            open(folder.path(), &format!("{number}.qcow2")).unwrap(),
        );
        assert!(raw.is_remote() && !raw.is_packed() && packed.is_remote() && packed.is_packed());
        assert!(!raw.is_mappable() && !packed.is_mappable());
        assert_same(&plain, &raw);
        assert_same(&plain, &packed);
        assert_eq!(packed.packed_summary().unwrap().bases.len(), number);
        packed.lock_serving().unwrap();
    }
    let back = folder.path().join("back");
    let local = folder.path().join("7.qcow2");
    unpack_file(&local, &back, Some(&passphrase()));
    assert!(std::fs::read(&back).unwrap() == std::fs::read(folder.path().join("7")).unwrap());
}

#[test]
fn what_two_objects_have_from_one_is_compared_without_reading_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let contents =
        |seed: u64| (0..2000).map(|page| (page, if page == 700 { seed } else { page + 1 })).collect::<Vec<_>>();
    let (first, second) =
        (snapshot(&path("first"), 2100, &contents(1)), snapshot(&path("second"), 2100, &contents(7777)));
    let read = Arc::default();
    let open = |name: &str| {
        let access = access(Some(&passphrase())).stores(counted_stores(folder.path(), &read));
        open_snapshot(Path::new(&format!("s3://b/{name}")), &access).unwrap()
    };
    let compared = |one: &Snapshot, other: &Snapshot| {
        let before = read.load(Ordering::Relaxed);
        let found = compare_memory(one, other, true).unwrap();
        assert_eq!(found.differing, Some(1));
        read.load(Ordering::Relaxed) - before
    };
    for (kind, how) in [("", options()), ("secret-", encrypted())] {
        for weak in ["", "weak-"] {
            let [base, increment] = ["base", "increment"].map(|name| format!("{weak}{kind}{name}"));
            pack_file(&first, &path(&base), None, &how);
            pack_file(&second, &path(&increment), Some(&path(&base)), &how);
        }
        let [base, increment] = ["base", "increment"].map(|name| format!("{kind}{name}"));
        let all = compared(&open("first"), &open(&increment));
        let (opened, shared) = (open(&base), compared(&open(&base), &open(&increment)));
        assert!(shared < all / 5, "{shared} of {all} bytes");
        // The base is put again, and might be another one.
        std::fs::copy(path(&base), path("copy")).unwrap();
        std::fs::rename(path("copy"), path(&base)).unwrap();
        assert!(compared(&opened, &open(&increment)) > 5 * shared);
        // The store has no mark of its contents that can be relied on.
        assert!(compared(&open(&format!("weak-{base}")), &open(&format!("weak-{increment}"))) > 5 * shared);
    }
}

#[test]
fn a_base_that_is_missing_or_another_one_is_found_before_anything_is_read() {
    let folder = tempfile::tempdir().unwrap();
    chain(folder.path(), 2);
    let refusal = || {
        let line = error_with_causes(&open(folder.path(), "1.qcow2").unwrap_err());
        assert!(!line.contains('\n') && line.contains("s3://b/"), "{line}");
        line
    };
    let base = folder.path().join("0.qcow2");
    std::fs::rename(&base, folder.path().join("kept")).unwrap();
    assert_eq!(refusal(), "s3://b/1.qcow2: its base 0.qcow2: there is no object s3://b/0.qcow2");
    std::fs::write(&base, "text").unwrap();
    assert!(refusal().contains("not a packed snapshot"));
    std::fs::remove_file(&base).unwrap();
    pack_file(&folder.path().join("1"), &base, None, &options());
    assert!(refusal().contains("holds the snapshot"));
    // An image that stands on itself.
    std::fs::rename(folder.path().join("1.qcow2"), &base).unwrap();
    assert!(error_with_causes(&open(folder.path(), "0.qcow2").unwrap_err()).contains("already part of the chain"));
}

#[test]
fn what_is_no_snapshot_and_a_program_without_a_client_get_one_line() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text"), "Dear Sir or Madam").unwrap();
    std::fs::write(folder.path().join("empty"), "").unwrap();
    for name in ["text", "empty", "none"] {
        let line = error_with_causes(&open(folder.path(), name).unwrap_err());
        assert!(!line.contains('\n') && line.contains(&format!("s3://b/{name}")), "{line}");
    }
    let without = open_snapshot(Path::new("s3://b/text"), &Access::default()).unwrap_err();
    assert!(error_with_causes(&without).contains("no client of object stores"));
}

/// The name of a snapshot, its id, its pages, its base, and whether it is packed, encrypted and looked into.
type Said = (String, Option<uuid::Uuid>, u64, Option<String>, [bool; 3]);

/// Describes a snapshot as a list does, wherever it is.
fn said(entry: &SnapshotEntry) -> Said {
    let name = |name: &OsString| name.to_str().unwrap().to_owned();
    let flags = [entry.is_packed, entry.is_encrypted, entry.is_base_known];
    (name(&entry.name), entry.id, entry.page_bytes, entry.base.as_ref().map(name), flags)
}

#[test]
fn a_folder_of_a_store_is_listed_as_a_directory_and_what_is_needed_stays() {
    let folder = tempfile::tempdir().unwrap();
    chain(folder.path(), 6);
    for number in 0..6 {
        std::fs::remove_file(folder.path().join(number.to_string())).unwrap();
    }
    std::fs::write(folder.path().join("text"), "Dear Sir or Madam").unwrap();
    let access = access(Some(&passphrase())).stores(stores(folder.path()));
    let far = SnapshotFolder::new("s3://b", &access);
    let here = SnapshotDirectory::new(folder.path(), Some(passphrase()));
    let (listed, local) = (far.list().unwrap(), here.list().unwrap());
    assert_eq!(listed.iter().map(said).collect::<Vec<_>>(), local.iter().map(said).collect::<Vec<_>>());
    assert_eq!(listed.len(), 6);
    assert!(listed.iter().all(|entry| entry.fault.is_none() && entry.allocated > 0));
    // What another one stands on stays.
    let refused = far.remove("2.qcow2".as_ref()).unwrap_err();
    assert!(matches!(&refused, PackError::Needed { by, .. } if by == "s3://b/3.qcow2"), "{refused}");
    assert!(matches!(far.remove("text".as_ref()), Err(PackError::Foreign { .. })));
    let absent = far.remove("none".as_ref()).unwrap_err();
    assert_eq!(absent.to_string(), "s3://b/none: there is no such object");
    far.remove("5.qcow2".as_ref()).unwrap();
    // What cannot be looked into may stand on anything.
    let without = SnapshotFolder::new("s3://b", &Access::default().stores(stores(folder.path())));
    assert!(matches!(without.remove("1.qcow2".as_ref()), Err(PackError::Unknown { .. })));
    assert!(without.list().unwrap().iter().any(|entry| !entry.is_base_known && entry.fault.is_some()));
    // A base is what a record names as well, also if the name is gone.
    let renamed = folder.path().join("renamed.qcow2");
    std::fs::rename(folder.path().join("2.qcow2"), &renamed).unwrap();
    assert!(matches!(far.remove("renamed.qcow2".as_ref()), Err(PackError::Needed { .. })));
    std::fs::rename(&renamed, folder.path().join("2.qcow2")).unwrap();
    // Another snapshot has the name of one that was to go, which was open since the list.
    let planned = far.list().unwrap().iter().find(|entry| entry.name == "4.qcow2").unwrap().planned();
    std::fs::copy(folder.path().join("0.qcow2"), &renamed).unwrap();
    std::fs::rename(&renamed, folder.path().join("4.qcow2")).unwrap();
    assert!(far.remove_planned(&planned).unwrap_err().to_string().contains("another snapshot has its name"));
    assert!(
        matches!(SnapshotFolder::of("s3://b/vm/tue", &access), Some((folder, name)) if folder.url() == "s3://b/vm/" && name == "tue")
    );
    assert!(SnapshotFolder::of("s3://b/", &access).is_none() && SnapshotFolder::of("s3://b", &access).is_none());
}

#[test]
fn a_prune_in_a_store_packs_nothing_again() {
    let folder = tempfile::tempdir().unwrap();
    chain(folder.path(), 4);
    let access = access(Some(&passphrase())).stores(stores(folder.path()));
    let far = SnapshotFolder::new("s3://b", &access);
    let mut entries = far.list().unwrap();
    entries.retain(|entry| entry.is_packed);
    // The fixture's VMs have no names and no time.
    for entry in &mut entries {
        (entry.vm, entry.saved) = ("vm".to_owned(), 1_700_000_000);
    }
    let newest = entries.iter_mut().find(|entry| entry.name == "1.qcow2").unwrap();
    (newest.saved, newest.written) = (1_800_000_000, std::time::SystemTime::now());
    let mut retention = Retention::new();
    (retention.last, retention.with_bases) = (std::num::NonZeroUsize::new(1), true);
    let plan = plan_prune(&entries, &retention, 1_900_000_000);
    let removed = plan.steps.iter().map(|step| match step {
        PruneStep::Remove { snapshot } => snapshot,
        PruneStep::Rebase { .. } => panic!("nothing is packed again: {step:?}"),
    });
    let removed: Vec<_> = removed.collect();
    assert_eq!(removed.iter().map(|snapshot| &snapshot.name).collect::<Vec<_>>(), ["3.qcow2", "2.qcow2"]);
    removed.iter().for_each(|snapshot| far.remove_planned(snapshot).unwrap());
    open(folder.path(), "1.qcow2").unwrap().verify_all().unwrap();
}
