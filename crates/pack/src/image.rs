//! An image of a packed snapshot, and the images that it stands on, in files or in a store.
//!
//! Law: images are data from outside. A base has a name without a directory, no base is in a chain twice, a chain has
//! at most [`DEPTH_LIMIT`] images; and each base is the one that was compared when its increment was made, or says that
//! it has replaced that one with the same contents, or nothing is read.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::luks::Passphrase;
use limosa_image::qcow2::{Encryption, ImageParts, Qcow2, Qcow2Options, table_digest};
use limosa_image::{Disk, ImageError};
use limosa_storage::{Storage, block_on};

use crate::error::PackError;
use crate::head::Head;
use crate::record::{BaseRecord, Record};

/// The most images in a chain.
pub const DEPTH_LIMIT: usize = 16;
/// The longest mapped-ram file that is read out of an image: more than the memory that a snapshot may have.
const LENGTH_LIMIT: u64 = 1 << 46;

/// An image of a chain.
#[derive(Debug)]
pub(crate) struct Image {
    /// Its path or URL.
    pub(crate) path: PathBuf,
    pub(crate) head: Head,
}

impl AsRef<Self> for Image {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// Why an image is not the base.
enum Found {
    Another(String),
    Unreadable(ImageError),
}

impl Image {
    /// Opens the image in a storage.
    pub(crate) fn open(
        storage: Arc<dyn Storage>,
        path: &Path,
        passphrase: Option<&Passphrase>,
    ) -> Result<Self, PackError> {
        let unsupported = |what: &str| PackError::Unsupported { path: path.to_path_buf(), what: what.to_owned() };
        let head = Head::read(storage, path, passphrase)?;
        let head = head.ok_or_else(|| unsupported("what is encrypted is no image"))?;
        let header = &head.header;
        if header.features.data_file() {
            return Err(unsupported("its contents are in a file of their own"));
        }
        if header.encryption != Encryption::None {
            return Err(unsupported("it is encrypted inside of qcow2, and packed snapshots are below it"));
        }
        if head.record.as_ref().is_some_and(|record| record.base.is_some()) && header.backing.is_none() {
            let what = "the name of its base was taken away, and without it parts of it are missing".to_owned();
            return Err(PackError::Refused { path: path.to_path_buf(), what });
        }
        let length = head.contents.length().map_err(PackError::storage)?;
        if let Some(record) = head.record.as_ref().filter(|record| record.length > length) {
            let what = format!("is cut short: it had {} bytes, and has {length}", record.length);
            return Err(PackError::Refused { path: path.to_path_buf(), what });
        }
        Ok(Self { path: path.to_path_buf(), head })
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
            return Err(PackError::Refused { path: self.path.clone(), what });
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

/// Why a base cannot be opened.
pub(crate) enum BaseFault {
    /// It is not what it should be, for this reason.
    Refused(String),
    Failed(PackError),
}

impl From<PackError> for BaseFault {
    fn from(error: PackError) -> Self {
        Self::Failed(error)
    }
}

/// Opens all that the last of these images stands on. `open` opens the base of this name of the image with this path,
/// and refuses one that is in the chain already.
pub(crate) fn open_bases<L: AsRef<Image>>(
    levels: &mut Vec<L>,
    mut open: impl FnMut(&Path, &OsStr) -> Result<L, BaseFault>,
) -> Result<(), PackError> {
    while let Some(last) = levels.last().map(AsRef::as_ref)
        && let Some(name) = last.base_name()
    {
        let refused =
            |what: String| PackError::Base { path: last.path.clone(), base: name.display().to_string(), what };
        let record = last.record().and_then(|record| record.base);
        let record = record.ok_or_else(|| refused("the image does not say which one that is".to_owned()))?;
        if levels.len() == DEPTH_LIMIT {
            return Err(refused(format!("the chain has more than {DEPTH_LIMIT} images")));
        }
        if Path::new(name).file_name() != Some(name) {
            let what = "a base is in the directory of its image, and is named without one";
            return Err(refused(what.to_owned()));
        }
        let level = open(&last.path, name).map_err(|fault| match fault {
            BaseFault::Refused(what) => refused(what),
            BaseFault::Failed(error) => error,
        })?;
        let checked = level.as_ref().check_is(&record).map_err(|error| match error {
            Found::Another(what) => refused(what),
            Found::Unreadable(error) => error.into(),
        });
        levels.push(level);
        checked?;
    }
    Ok(())
}

/// Opens the contents of images that stand on each other, the topmost one first.
pub(crate) fn open_contents<'a>(
    images: impl DoubleEndedIterator<Item = &'a Image>,
    path: &Path,
) -> Result<Arc<Qcow2>, PackError> {
    let mut disk: Option<Arc<Qcow2>> = None;
    for Image { head, .. } in images.rev() {
        let below = disk.take().map(|disk| disk as Arc<dyn Disk>);
        let parts = ImageParts::new(Arc::clone(&head.contents), head.header.clone()).backing(below);
        disk = Some(block_on(Qcow2::open(parts, Qcow2Options::default().read_only(true)))?);
    }
    let disk = disk.ok_or_else(|| PackError::Unsupported { path: path.to_path_buf(), what: "no image".to_owned() })?;
    if disk.len() > LENGTH_LIMIT {
        let what = format!("its contents are said to have {} bytes", disk.len());
        return Err(PackError::Unsupported { path: path.to_path_buf(), what });
    }
    Ok(disk)
}
