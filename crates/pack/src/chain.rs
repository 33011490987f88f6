//! The images of a packed snapshot, from the topmost one down.
//!
//! Law: images are data from outside. A base is a file beside the image that names it, nothing else is opened; no file
//! is in a chain twice; a chain has at most [`DEPTH_LIMIT`] images; and each base is the one that was compared when its
//! increment was made, or says that it has replaced that one with the same contents, or nothing is read.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::luks::Passphrase;
use limosa_image::qcow2::{Encryption, ImageParts, Qcow2, Qcow2Options, table_digest};
use limosa_image::{Disk, ImageError};
use limosa_storage::{FileIdentity, FileOptions, FileStorage, block_on};

use crate::error::PackError;
use crate::head::{Head, is_image};
use crate::record::{BaseRecord, Record};

/// The most images in a chain.
pub const DEPTH_LIMIT: usize = 16;
/// The longest mapped-ram file that is read out of an image: more than the memory that a snapshot may have.
const LENGTH_LIMIT: u64 = 1 << 46;
/// How often a chain is opened again whose files another limosa replaces at that moment.
const TRIES: usize = 5;

/// An image of a chain.
#[derive(Debug)]
pub(crate) struct Level {
    pub(crate) path: PathBuf,
    /// Its file, for what must not change.
    pub(crate) file: File,
    pub(crate) head: Head,
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
                Ok(()) => return Self::of_levels(levels, path),
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
        while let Some(last) = levels.last()
            && let Some(backing) = &last.head.header.backing
        {
            let refused = |what: String| PackError::Base {
                path: last.path.clone(),
                base: backing.name.display().to_string(),
                what,
            };
            let record = last.record().and_then(|record| record.base);
            let record = record.ok_or_else(|| refused("the image does not say which one that is".to_owned()))?;
            if levels.len() == DEPTH_LIMIT {
                return Err(refused(format!("the chain has more than {DEPTH_LIMIT} images")));
            }
            let below = beside(&last.path, &backing.name).map_err(&refused)?;
            let opened = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&below);
            let opened = opened.map_err(|error| refused(format!("cannot be opened: {error}")))?;
            if !seen.insert(identity(&opened, &below)?) {
                return Err(refused("that file is already part of the chain".to_owned()));
            }
            if !is_image(&opened) {
                return Err(refused("it is not a packed snapshot".to_owned()));
            }
            let level = Level::open(opened, &below, passphrase)?;
            let checked = level.check_is(&record).map_err(|error| match error {
                Found::Another(what) => refused(what),
                Found::Unreadable(error) => error.into(),
            });
            levels.push(level);
            checked?;
        }
        Ok(())
    }

    fn of_levels(levels: Vec<Level>, path: &Path) -> Result<Self, PackError> {
        let mut disk: Option<Arc<Qcow2>> = None;
        for level in levels.iter().rev() {
            let below = disk.take().map(|disk| disk as Arc<dyn Disk>);
            let parts = ImageParts::new(Arc::clone(&level.head.contents), level.head.header.clone()).backing(below);
            disk = Some(block_on(Qcow2::open(parts, Qcow2Options::default().read_only(true)))?);
        }
        let disk =
            disk.ok_or_else(|| PackError::Unsupported { path: path.to_path_buf(), what: "no image".to_owned() })?;
        if disk.len() > LENGTH_LIMIT {
            let what = format!("its contents are said to have {} bytes", disk.len());
            return Err(PackError::Unsupported { path: path.to_path_buf(), what });
        }
        Ok(Self { levels, disk })
    }

    /// Returns the largest cluster of the chain: reading less would unpack some twice.
    pub(crate) fn unit(&self) -> u64 {
        self.levels.iter().map(Level::cluster_size).max().unwrap_or(1 << 16)
    }

    /// The topmost image.
    pub(crate) fn top(&self) -> &Level {
        // There is one: a chain is made of it.
        &self.levels[0]
    }
}

/// Why a file is not the base.
enum Found {
    Another(String),
    Unreadable(ImageError),
}

impl Level {
    pub(crate) fn open(file: File, path: &Path, passphrase: Option<&Passphrase>) -> Result<Self, PackError> {
        let unsupported = |what: &str| PackError::Unsupported { path: path.to_path_buf(), what: what.to_owned() };
        // Before the first byte is read.
        let opened = facts(&file.metadata().map_err(PackError::io("look at it", path))?);
        let head = Head::read(&file, path, passphrase, FileOptions::read_only_default())?;
        let head = head.ok_or_else(|| unsupported("what is encrypted is no image"))?;
        let header = &head.header;
        if header.features.data_file() {
            return Err(unsupported("its contents are in a file of their own"));
        }
        if header.encryption != Encryption::None {
            return Err(unsupported("it is encrypted inside of qcow2, and packed snapshots are below it"));
        }
        if head.record.as_ref().is_some_and(|record| record.base.is_some()) && header.backing.is_none() {
            return Err(unsupported("the name of its base was taken away, and without it parts of it are missing"));
        }
        let length = head.contents.length().map_err(PackError::storage)?;
        if let Some(record) = head.record.as_ref().filter(|record| record.length > length) {
            let what = format!("it is cut short: it had {} bytes, and has {length}", record.length);
            return Err(unsupported(&what));
        }
        Ok(Self { path: path.to_path_buf(), file, head, opened })
    }

    pub(crate) fn cluster_size(&self) -> u64 {
        self.head.header.geometry().cluster_size()
    }

    /// The name of the file that it stands on, as it has it.
    pub(crate) fn base_name(&self) -> Option<&OsStr> {
        self.head.base_name()
    }

    pub(crate) const fn is_encrypted(&self) -> bool {
        self.head.is_encrypted
    }

    pub(crate) fn storage(&self) -> &FileStorage {
        &self.head.storage
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
        let what = "it was replaced or written to meanwhile".to_owned();
        Err(PackError::Unsupported { path: self.path.clone(), what })
    }

    pub(crate) const fn record(&self) -> Option<&Record> {
        self.head.record.as_ref()
    }

    pub(crate) fn compression(&self) -> &'static str {
        self.head.header.compression.name()
    }

    /// Returns the identity under which an increment records it as its base; `None`: another program made the image.
    ///
    /// # Errors
    /// It was written to since it was made.
    pub(crate) fn identity(&self) -> Result<Option<BaseRecord>, PackError> {
        let Some(record) = self.record() else { return Ok(None) };
        let tables = block_on(table_digest(&*self.head.contents, &self.head.header))?;
        if tables != record.tables {
            let what = "another program has written to it since it was made".to_owned();
            return Err(PackError::Unsupported { path: self.path.clone(), what });
        }
        Ok(Some(BaseRecord { id: record.id, tables }))
    }

    fn check_is(&self, wanted: &BaseRecord) -> Result<(), Found> {
        let record = match self.record() {
            Some(record) if record.id == wanted.id => record,
            Some(record) => {
                let what = format!("holds the snapshot {}, and not {}, which it stands on", record.id, wanted.id);
                return Err(Found::Another(what));
            }
            None => return Err(Found::Another("does not say which snapshot it holds".to_owned())),
        };
        let tables = block_on(table_digest(&*self.head.contents, &self.head.header)).map_err(Found::Unreadable)?;
        if tables != record.tables || !record.stands_for(wanted) {
            return Err(Found::Another("was changed since this was made on it".to_owned()));
        }
        Ok(())
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
    let plain = Path::new(name);
    if plain.file_name() != Some(name) {
        return Err("a base is in the directory of its image, and is named without one".to_owned());
    }
    let real = std::fs::canonicalize(image).map_err(|error| format!("the image is gone: {error}"))?;
    Ok(real.with_file_name(plain))
}
