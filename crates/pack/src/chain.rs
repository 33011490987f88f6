//! The files of a packed snapshot, from the topmost one down.
//!
//! Law: a base is a file beside the image that names it, and no symbolic link; nothing else is opened. What the images
//! must be, `image.rs` checks.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::ops::Deref;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::luks::Passphrase;
use limosa_image::qcow2::Qcow2;
use limosa_snapshot::SnapshotError;
use limosa_storage::{FileIdentity, FileOptions, FileStorage, Storage};

use crate::error::PackError;
use crate::head::{is_image, storage_of};
use crate::image::{BaseFault, Image, open_bases, open_contents};

/// How often a chain is opened again whose files another limosa replaces at that moment.
const TRIES: usize = 5;

/// An image in a file.
#[derive(Debug)]
pub(crate) struct Level {
    image: Image,
    /// Its file, for what must not change.
    pub(crate) file: File,
    storage: Arc<FileStorage>,
    /// Its file when it was opened: device and inode, length and modification time.
    opened: [u64; 5],
}

/// The images of a packed snapshot, opened for reading.
#[derive(Debug)]
pub(crate) struct Chain {
    /// The topmost one first.
    pub(crate) levels: Vec<Level>,
    pub(crate) disk: Arc<Qcow2>,
}

impl Chain {
    /// Opens an image and its bases.
    pub(crate) fn open(file: &File, path: &Path, passphrase: Option<&Passphrase>) -> Result<Self, PackError> {
        let mut tries = 0;
        loop {
            let mut levels = Vec::new();
            match Self::open_levels(file, path, passphrase, &mut levels) {
                Ok(()) => {
                    let disk = open_contents(levels.iter().map(AsRef::as_ref), path)?;
                    return Ok(Self { levels, disk });
                }
                // Another limosa has replaced a base between its opening and that of what it stood on.
                Err(_) if tries < TRIES && levels.iter().skip(1).any(|level| level.check_still_there().is_err()) => {
                    tries += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn open_levels(
        file: &File,
        path: &Path,
        passphrase: Option<&Passphrase>,
        levels: &mut Vec<Level>,
    ) -> Result<(), PackError> {
        levels.push(Level::open(file.try_clone().map_err(PackError::io("open it again", path))?, path, passphrase)?);
        let mut seen = HashSet::from([identity(file, path)?]);
        open_bases(levels, |above, name| {
            let refused = |what: &str| BaseFault::Refused(what.to_owned());
            let below = beside(above, name).map_err(BaseFault::Refused)?;
            let opened = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&below);
            let opened = opened.map_err(|error| BaseFault::Refused(format!("cannot be opened: {error}")))?;
            if !seen.insert(identity(&opened, &below)?) {
                return Err(refused("that file is already part of the chain"));
            }
            if !is_image(&opened) {
                return Err(refused("it is not a packed snapshot"));
            }
            Ok(Level::open(opened, &below, passphrase)?)
        })
    }

    /// The topmost image.
    pub(crate) fn top(&self) -> &Level {
        // There is one: a chain is made of it.
        &self.levels[0]
    }
}

impl AsRef<Image> for Level {
    fn as_ref(&self) -> &Image {
        &self.image
    }
}

impl Deref for Level {
    type Target = Image;

    fn deref(&self) -> &Image {
        &self.image
    }
}

impl Level {
    pub(crate) fn open(file: File, path: &Path, passphrase: Option<&Passphrase>) -> Result<Self, PackError> {
        // Before the first byte is read.
        let opened = facts(&file.metadata().map_err(PackError::io("look at it", path))?);
        let storage = storage_of(&file, path, FileOptions::read_only_default())?;
        let image = Image::open(Arc::clone(&storage) as Arc<dyn Storage>, path, passphrase)?;
        Ok(Self { image, file, storage, opened })
    }

    pub(crate) fn storage(&self) -> &FileStorage {
        &self.storage
    }

    /// The facts that tell its file from others, and from itself at other times.
    pub(crate) fn origin(&self) -> String {
        format!("file {:?}", self.opened)
    }

    /// Whether its file was written to since it was opened.
    pub(crate) fn has_changed(&self) -> bool {
        self.file.metadata().map_or(true, |metadata| facts(&metadata) != self.opened)
    }

    /// Whether this is its file.
    pub(crate) fn is_file(&self, metadata: &Metadata) -> bool {
        let [device, inode, ..] = self.opened;
        (metadata.dev(), metadata.ino()) == (device, inode)
    }

    /// Checks that its name is still that of its file, and that nobody has written to it.
    pub(crate) fn check_still_there(&self) -> Result<(), PackError> {
        let named = std::fs::metadata(&self.path).map_err(PackError::io("find it again", &self.path))?;
        if self.is_file(&named) && !self.has_changed() {
            return Ok(());
        }
        let what = "it was replaced or written to".to_owned();
        Err(PackError::Snapshot(SnapshotError::Changed { path: self.path.clone(), what }))
    }
}

/// Facts of a file that must not change: device and inode, length and modification time.
pub(crate) fn facts(metadata: &Metadata) -> [u64; 5] {
    let (seconds, nanoseconds) = (metadata.mtime().cast_unsigned(), metadata.mtime_nsec().cast_unsigned());
    [metadata.dev(), metadata.ino(), metadata.len(), seconds, nanoseconds]
}

fn identity(file: &File, path: &Path) -> Result<FileIdentity, PackError> {
    Ok(FileIdentity::of(&file.metadata().map_err(PackError::io("look at it", path))?))
}

/// Returns the path of a base: the file of that name in the directory of the image.
fn beside(image: &Path, name: &OsStr) -> Result<PathBuf, String> {
    let real = std::fs::canonicalize(image).map_err(|error| format!("the image is gone: {error}"))?;
    Ok(real.with_file_name(name))
}
