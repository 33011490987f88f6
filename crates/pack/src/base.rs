//! The snapshot that an increment stands on.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::Disk;
use limosa_image::reference::is_object;
use limosa_page::directory_of;
use limosa_snapshot::{Snapshot, SnapshotBytes, SnapshotError};

use crate::bytes::UnpackedBytes;
use crate::chain::{Chain, Level};
use crate::contents::layout_difference;
use crate::error::PackError;
use crate::head::is_image;
use crate::image::{DEPTH_LIMIT, Image};
use crate::open::{Access, open_file};
use crate::record::BaseRecord;
use crate::remote::{self, PackedObject};

/// A packed snapshot that others are compared with.
#[derive(Debug)]
pub struct Base {
    /// Its path or URL.
    path: PathBuf,
    snapshot: Snapshot,
    place: Place,
    record: BaseRecord,
}

/// Where the images of its chain are.
#[derive(Debug)]
enum Place {
    Files(Arc<UnpackedBytes>),
    /// How they are opened again.
    Objects(Arc<PackedObject>, Access),
}

impl Place {
    /// The images, the topmost one first.
    fn images(&self) -> Vec<&Image> {
        match self {
            Self::Files(bytes) => bytes.chain().levels.iter().map(AsRef::as_ref).collect(),
            Self::Objects(object, _) => object.images().iter().collect(),
        }
    }
}

impl Base {
    /// Opens a packed snapshot as a base. If it is in files, this takes the lock of a server on it and on all that it
    /// stands on, so that nothing replaces these meanwhile.
    ///
    /// # Errors
    /// As [`open_snapshot`](crate::open_snapshot); it is not packed, by another program, or was written to; its
    /// chain would have more than [`DEPTH_LIMIT`] images.
    pub fn open(path: &Path, access: &Access) -> Result<Self, PackError> {
        let refused = |what: &str| PackError::Refused { path: path.to_path_buf(), what: what.to_owned() };
        let not_packed = || refused("a base is a packed snapshot; pack it first");
        let (place, snapshot) = if is_object(path) {
            let object = Arc::new(remote::open_packed(path, access)?.ok_or_else(not_packed)?);
            let bytes = Arc::clone(&object) as Arc<dyn SnapshotBytes>;
            (Place::Objects(object, access.clone()), Snapshot::from_remote(path, bytes)?)
        } else {
            let file = open_file(path)?;
            if !is_image(&file) {
                return Err(not_packed());
            }
            let files = Arc::new(UnpackedBytes::new(Chain::open(&file, path, access.passphrase.as_ref())?));
            let bytes = Arc::clone(&files) as Arc<dyn SnapshotBytes>;
            (Place::Files(files), Snapshot::from_packed(file, path, bytes)?)
        };
        let images = place.images();
        let record = images.first().map(|top| top.identity()).transpose()?.flatten();
        let record = record.ok_or_else(|| refused("another program made the image; pack it again"))?;
        let depth = images.len();
        if depth >= DEPTH_LIMIT {
            let what = format!("{depth} images are in its chain, which is the most; use another base");
            return Err(refused(&what));
        }
        snapshot.check_restorable()?;
        snapshot.lock_serving()?;
        let path = match place {
            Place::Files(_) => std::fs::canonicalize(path).map_err(PackError::io("find it", path))?,
            Place::Objects(..) => path.to_path_buf(),
        };
        Ok(Self { path, snapshot, place, record })
    }

    /// Checks that an increment in this place can stand on it: a base is in the directory of its increments, or beside
    /// them in their store.
    ///
    /// # Errors
    /// It is in another directory, or would be replaced.
    pub fn check_beside(&self, target: &Path) -> Result<(), PackError> {
        let refused = |what: &str| PackError::Base {
            path: target.to_path_buf(),
            base: self.path.display().to_string(),
            what: what.to_owned(),
        };
        let is_beside = match (&self.place, is_object(target)) {
            (Place::Files(_), false) => {
                let directory =
                    std::fs::canonicalize(directory_of(target)).map_err(PackError::io("find its directory", target))?;
                self.path.parent() == Some(&directory)
            }
            (Place::Objects(..), true) => self.path.parent() == target.parent(),
            _ => false,
        };
        if !is_beside {
            return Err(refused("is in another directory; a snapshot and its base are kept together"));
        }
        if target.file_name() == self.path.file_name() || self.stands_on(target) {
            return Err(refused("is the file that would be replaced, or stands on it"));
        }
        Ok(())
    }

    /// Returns it for an increment of this snapshot; `Err`: why all of the snapshot has to be stored.
    pub(crate) fn admit(&self, snapshot: &Snapshot, target: &Path) -> Result<Result<&Self, String>, PackError> {
        self.check_beside(target)?;
        Ok(layout_difference(snapshot, &self.snapshot).map_or(Ok(self), Err))
    }

    /// The files of its chain, the topmost one first.
    pub(crate) fn levels(&self) -> &[Level] {
        match &self.place {
            Place::Files(bytes) => &bytes.chain().levels,
            Place::Objects(..) => &[],
        }
    }

    /// Whether this file or object is in its chain.
    pub(crate) fn stands_on(&self, path: &Path) -> bool {
        match &self.place {
            Place::Files(bytes) => {
                let levels = &bytes.chain().levels;
                std::fs::metadata(path).is_ok_and(|file| levels.iter().any(|level| level.is_file(&file)))
            }
            Place::Objects(object, _) => object.images().iter().any(|image| image.path == path),
        }
    }

    /// Whether a part of it is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.place.images().iter().any(|image| image.is_encrypted())
    }

    /// Checks that it is still there: of files the whole chain, by names and contents; of objects the topmost one, by
    /// its record. Those below it have no lock, so what is found out about them now may be wrong a moment later.
    pub(crate) fn check_still_there(&self) -> Result<(), PackError> {
        let Place::Objects(_, access) = &self.place else {
            return self.levels().iter().try_for_each(Level::check_still_there);
        };
        let now = remote::record(&self.path, access)?.map(|now| BaseRecord { id: now.id, tables: now.tables });
        if now == Some(self.record) {
            return Ok(());
        }
        let what = "it was replaced".to_owned();
        Err(PackError::Snapshot(SnapshotError::Changed { path: self.path.clone(), what }))
    }

    /// The snapshot.
    #[must_use]
    pub const fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Number of images in its chain.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.place.images().len()
    }

    pub(crate) fn disk(&self) -> Arc<dyn Disk> {
        match &self.place {
            Place::Files(bytes) => Arc::clone(&bytes.chain().disk) as Arc<dyn Disk>,
            Place::Objects(object, _) => Arc::clone(object.contents()) as Arc<dyn Disk>,
        }
    }

    pub(crate) const fn record(&self) -> BaseRecord {
        self.record
    }

    /// The name under which an increment has it.
    pub(crate) fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }
}
