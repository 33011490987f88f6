//! The ledger: a file beside an image that says which epochs of its VM it has.
//!
//! Law: **the ledger says so before the image is changed.** It is replaced as a whole, durably, before a merge begins,
//! and gone before the VM writes to the image itself.

use std::fs::{self, File};
use std::io::ErrorKind::{InvalidFilename, NotADirectory, NotFound};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use limosa_storage::{replace_file, sync_folder};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Separates the image's name from the rest of the ledger's.
const SUFFIX: &str = ".overlays";
/// Most bytes of a ledger.
const LENGTH_MAX: u64 = 4096;
/// The form that this limosa writes, and the newest that it reads.
const VERSION: u32 = 1;

/// The contents of a ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ledger {
    version: u32,
    /// Identifies the overlays.
    pub(super) overlays: Uuid,
    /// The contents of the image.
    pub(super) image: ImageState,
}

/// The epochs that an image has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub(super) enum ImageState {
    /// Those up to this one, while the VM is protected.
    Merged { epoch: u64, stamp: Stamp },
    /// Those before this one, and a part of it.
    Merging { epoch: u64 },
    /// Those before, and a part of those up to this one, to which a failover brings it.
    Bringing { epoch: u64 },
    /// A part of all: the protection is over, and everything that the VM has written is being merged. No checkpoint is
    /// as of it any more.
    Ending,
    /// Those up to this one, to which a failover has brought it.
    Brought { epoch: u64, stamp: Stamp },
}

/// An image as it was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    /// Bytes.
    size: u64,
    /// Modification time, in seconds since 1970 and nanoseconds.
    modified: (i64, i64),
}

impl Stamp {
    /// Looks at an image.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn of(image: &Path) -> io::Result<Self> {
        let found = fs::metadata(image)?;
        Ok(Self { size: found.len(), modified: (found.mtime(), found.mtime_nsec()) })
    }
}

impl Ledger {
    pub(super) const fn new(overlays: Uuid, image: ImageState) -> Self {
        Self { version: VERSION, overlays, image }
    }

    /// Its place.
    pub(super) fn path(image: &Path) -> PathBuf {
        let mut path = image.to_owned();
        path.as_mut_os_string().push(SUFFIX);
        path
    }

    /// Reads the ledger of an image; `None` if it has none.
    ///
    /// # Errors
    /// It cannot be read, or is no ledger.
    pub(super) fn read(image: &Path) -> io::Result<Option<Self>> {
        let path = Self::path(image);
        match path.symlink_metadata() {
            // With its suffix a name may be longer than one can be.
            Err(error) if [NotFound, NotADirectory, InvalidFilename].contains(&error.kind()) => return Ok(None),
            Err(error) => return Err(error),
            // A pipe would be waited for.
            Ok(found) if !found.is_file() => return Err(io::Error::other("it is no regular file")),
            Ok(_) => {}
        }
        let mut text = String::new();
        File::open(&path)?.take(LENGTH_MAX).read_to_string(&mut text)?;
        let ledger: Self = serde_json::from_str(&text)?;
        if ledger.version > VERSION {
            return Err(io::Error::other("a newer limosa wrote it"));
        }
        Ok(Some(ledger))
    }

    /// Replaces the ledger of an image, durably.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn write(&self, image: &Path) -> io::Result<()> {
        replace_file(&Self::path(image), &serde_json::to_vec(self)?)
    }

    /// Removes the ledger of an image, durably, if it is that of these overlays.
    ///
    /// # Errors
    /// The kernel's; another one is there that cannot be read.
    pub(super) fn remove(image: &Path, overlays: Uuid) -> io::Result<()> {
        if Self::read(image)?.is_some_and(|ledger| ledger.overlays == overlays) {
            fs::remove_file(Self::path(image))?;
            sync_folder(image)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_is_read_as_it_was_written_and_removed_by_its_own_protection_alone() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("d");
        fs::write(&image, "contents").unwrap();
        assert_eq!(Ledger::read(&image).unwrap(), None);
        let stamp = Stamp::of(&image).unwrap();
        for state in [
            ImageState::Merged { epoch: 0, stamp },
            ImageState::Merging { epoch: 1 },
            ImageState::Bringing { epoch: 2 },
            ImageState::Ending,
            ImageState::Brought { epoch: 2, stamp },
        ] {
            let ledger = Ledger::new(Uuid::from_u128(3), state);
            ledger.write(&image).unwrap();
            assert_eq!(Ledger::read(&image).unwrap(), Some(ledger));
        }
        Ledger::remove(&image, Uuid::nil()).unwrap();
        assert!(Ledger::path(&image).exists());
        Ledger::remove(&image, Uuid::from_u128(3)).unwrap();
        assert_eq!(Ledger::read(&image).unwrap(), None);
        for text in ["", "{}", r#"{"version": 2, "overlays": 1}"#] {
            fs::write(Ledger::path(&image), text).unwrap();
            assert!(Ledger::read(&image).is_err(), "{text:?}");
        }
    }

    #[test]
    fn an_image_that_was_written_has_another_stamp() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("d");
        fs::write(&image, "contents").unwrap();
        let stamp = Stamp::of(&image).unwrap();
        assert_eq!(Stamp::of(&image).unwrap(), stamp);
        fs::write(&image, "content").unwrap();
        assert_ne!(Stamp::of(&image).unwrap(), stamp);
    }
}
