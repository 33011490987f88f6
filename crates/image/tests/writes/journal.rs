//! Journals: what was acknowledged and not flushed is in the image when it is opened again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::qcow2::{CheckOptions, CreateOptions, Header, ImageParts, Journal, JournalFolder, Qcow2, check};
use limosa_image::{Disk, GuestOffset, ImageError, Qcow2Options};
use limosa_storage::testing::{Failing, Fault};
use limosa_storage::{Create, FileOptions, FileStorage, Operation, Storage, block_on};
use limosa_testkit::image::{filled, read};
use limosa_testkit::{qemu_io, qemu_skipped, scratch};
use tempfile::TempDir;

const CLUSTER: u64 = 64 << 10;
/// Records of a half of a journal.
const RECORDS: u64 = 1 << 16;

/// An image in a folder, and a folder of journals.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new(options: &CreateOptions) -> Self {
        let place = Self { folder: scratch().unwrap() };
        let new = FileOptions { create: Create::New, ..FileOptions::default() };
        let file = FileStorage::open(place.image(), &new).unwrap();
        block_on(limosa_image::qcow2::create(&*file, None, options)).unwrap();
        place
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    fn journals(&self) -> PathBuf {
        self.folder.path().join("journals")
    }

    fn open_over(&self, over: impl FnOnce(Arc<dyn Storage>) -> Arc<dyn Storage>) -> Result<Arc<Qcow2>, ImageError> {
        let file = FileStorage::open(self.image(), &FileOptions::default())?;
        let header = block_on(Header::read(&*file))?;
        let journals = JournalFolder::open(&self.journals()).unwrap();
        let journal = Journal::open(&journals, &file, &header.geometry())?;
        let parts = ImageParts::new(over(file), header).journal(Some(journal));
        block_on(Qcow2::open(parts, Qcow2Options::default()))
    }

    fn open(&self) -> Arc<Qcow2> {
        self.open_over(|file| file).unwrap()
    }

    /// Leaves the image as a killed process does.
    fn abandoned(write: impl FnOnce(&Qcow2)) -> Self {
        let place = Self::new(&CreateOptions::default().size(64 << 20));
        let disk = place.open();
        write(&disk);
        drop(disk);
        place
    }

    /// The journals that are there.
    fn left(&self) -> Vec<PathBuf> {
        fs::read_dir(self.journals()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    fn is_whole(&self) {
        let file = FileStorage::open(self.image(), &FileOptions::default()).unwrap();
        assert!(!block_on(Header::read(&*file)).unwrap().features.dirty());
        let report = block_on(check(&*file, CheckOptions::default())).unwrap();
        assert!(report.is_clean(), "{report:?}");
    }
}

fn write(disk: &Qcow2, at: u64, value: u8) {
    block_on(disk.write(GuestOffset(at), filled(value, CLUSTER).into())).unwrap();
}

/// Three changes of entries that are not flushed, after a flush.
fn write_some(disk: &Qcow2) {
    write(disk, CLUSTER, 1);
    block_on(disk.flush()).unwrap();
    write(disk, CLUSTER, 2);
    write(disk, 40 << 20, 3);
    block_on(disk.discard(GuestOffset(CLUSTER), CLUSTER)).unwrap();
    write(disk, 2 * CLUSTER, 4);
}

fn has_them(disk: &Qcow2) {
    let expected = [(CLUSTER, 0), (40 << 20, 3), (2 * CLUSTER, 4), (3 * CLUSTER, 0)];
    for (at, value) in expected {
        assert_eq!(read(disk, at, 512), [value; 512], "{at:#x}");
    }
}

#[test]
fn what_was_acknowledged_is_there_and_the_journal_goes_with_the_close() {
    let place = Place::abandoned(write_some);
    let disk = place.open();
    assert_eq!(disk.replayed(), 3);
    has_them(&disk);
    assert_eq!(place.left().len(), 1);
    // It is used on.
    write(&disk, 5 * CLUSTER, 5);
    drop(disk);
    let disk = place.open();
    assert_eq!((disk.replayed(), read(&*disk, 5 * CLUSTER, 512)), (1, vec![5; 512]));
    has_them(&disk);
    block_on(disk.close()).unwrap();
    assert_eq!(place.left(), Vec::<PathBuf>::new());
    drop(disk);
    place.is_whole();
    assert_eq!(place.open().replayed(), 0);
}

#[test]
fn a_flush_takes_its_changes_out_of_the_journal() {
    let place = Place::abandoned(|disk| {
        write_some(disk);
        block_on(disk.flush()).unwrap();
    });
    let disk = place.open();
    assert_eq!(disk.replayed(), 0);
    has_them(&disk);
}

#[test]
fn changes_stay_in_the_journal_as_long_as_flushes_fail() {
    let place = Place::new(&CreateOptions::default().size(64 << 20));
    let failing = Failing::only(&[Operation::Write]);
    let disk = place.open_over(|file| failing.wrap(file)).unwrap();
    write_some(&disk);
    failing.fail(0, u64::MAX, Fault::Broken);
    block_on(disk.flush()).unwrap_err();
    failing.mend();
    write(&disk, 6 * CLUSTER, 6);
    failing.fail(0, u64::MAX, Fault::Broken);
    block_on(disk.flush()).unwrap_err();
    drop(disk);
    let disk = place.open();
    assert_eq!(disk.replayed(), 4);
    has_them(&disk);
    assert_eq!(read(&*disk, 6 * CLUSTER, 512), [6; 512]);
}

#[test]
fn a_replay_that_is_cut_short_is_begun_again() {
    let mut again = 0;
    for cut in 0.. {
        let place = Place::abandoned(write_some);
        let failing = Failing::only(&[Operation::Write, Operation::Flush]);
        failing.fail(cut, u64::MAX, Fault::Broken);
        let opened = place.open_over(|file| failing.wrap(file)).is_ok();
        let disk = place.open();
        // The journal goes when the image has its changes: then it is only repaired.
        again += u64::from(disk.replayed() == 3);
        assert!(disk.replayed() == 3 || disk.replayed() == 0 && again > 0, "{cut}");
        has_them(&disk);
        block_on(disk.close()).unwrap();
        drop(disk);
        place.is_whole();
        if opened {
            assert!(again >= 4 && cut > again, "{again} of {cut}");
            break;
        }
    }
}

#[test]
fn an_image_that_others_have_changed_is_left_alone() {
    if qemu_skipped() {
        return;
    }
    let place = Place::abandoned(write_some);
    let image = place.image();
    qemu_io(["-f", "qcow2", "-c", "write -P 9 10M 64k", image.to_str().unwrap()]).unwrap();
    let before = fs::read(&image).unwrap();
    let error = place.open_over(|file| file).unwrap_err();
    assert!(matches!(&error, ImageError::Journal { changes: 3, .. }), "{error}");
    assert!(fs::read(&image).unwrap() == before);
    // As the error says.
    fs::remove_file(&place.left()[0]).unwrap();
    let disk = place.open();
    assert_eq!((read(&*disk, 10 << 20, 512), read(&*disk, 40 << 20, 512)), (vec![9; 512], vec![0; 512]));
}

/// Changes words of the only journal.
fn change_journal(place: &Place, change: impl FnOnce(&mut [u64])) {
    let path = &place.left()[0];
    let bytes = fs::read(path).unwrap();
    let mut words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    change(&mut words);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_journal_of_another_boot_or_another_file_says_nothing() {
    for word in [2, 3, 4, 5] {
        let place = Place::abandoned(write_some);
        change_journal(&place, |words| words[word] ^= 1);
        let disk = place.open();
        assert_eq!((disk.replayed(), read(&*disk, 40 << 20, 512)), (0, vec![0; 512]), "{word}");
    }
}

#[test]
fn records_that_cannot_be_are_refused_before_anything_is_written() {
    // Words of the first record, which is of the second half: the cluster, the old entry, the new one.
    let begin = 64 + 6;
    let cases: [(usize, u64); 5] = [
        (begin + 1, 1 << 40),
        (begin + 2, 0x0077_0000),
        (begin + 4, 1 << 63 | 0x0001_0000),
        (begin + 4, 1 << 63 | 1 << 50),
        (begin + 4, 1 << 63 | 0x5_0200),
    ];
    for (word, value) in cases {
        // One change, of a cluster that is in the image.
        let place = Place::abandoned(|disk| {
            write(disk, CLUSTER, 1);
            block_on(disk.flush()).unwrap();
            block_on(disk.write_zeroes(GuestOffset(CLUSTER), CLUSTER, true)).unwrap();
        });
        change_journal(&place, |words| {
            assert!(words[begin] != 0 && words[begin + 1] == 1);
            words[word] = value;
        });
        let before = fs::read(place.image()).unwrap();
        let error = place.open_over(|file| file).unwrap_err();
        assert!(matches!(error, ImageError::Journal { .. }), "{word}: {error}");
        assert!(fs::read(place.image()).unwrap() == before, "{word}");
    }
}

#[test]
fn a_full_journal_is_flushed() {
    let place = Place::new(&CreateOptions::default().size(1 << 20).cluster_size(512));
    let disk = place.open();
    let (at, sector) = (GuestOffset(0), filled(7, 512));
    for _ in 0..=RECORDS {
        block_on(async {
            disk.write(at, sector.clone().into()).await?;
            disk.write_zeroes(at, 512, false).await
        })
        .unwrap();
    }
    let flushes = disk.counts().flushes;
    assert!((3..100).contains(&flushes), "{flushes}");
    block_on(disk.write(at, sector.into())).unwrap();
    drop(disk);
    let disk = place.open();
    assert!(disk.replayed() > 0);
    assert_eq!(read(&*disk, 0, 512), [7; 512]);
}

#[test]
fn a_folder_that_others_may_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = scratch().unwrap();
    let open = |path: &Path| JournalFolder::open(path).map(|folder| folder.path().to_path_buf());
    let path = folder.path().join("a/b");
    assert_eq!(open(&path).unwrap(), path);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(open(&path).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
}
