//! The snapshot that an increment stands on.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::Disk;
use limosa_image::luks::Passphrase;
use limosa_page::directory_of;
use limosa_snapshot::{Snapshot, SnapshotBytes};

use crate::bytes::UnpackedBytes;
use crate::chain::{Chain, Level};
use crate::contents::layout_difference;
use crate::error::PackError;
use crate::head::is_image;
use crate::image::DEPTH_LIMIT;
use crate::open::open_file;
use crate::record::BaseRecord;

/// A packed snapshot that others are compared with.
#[derive(Debug)]
pub struct Base {
    path: PathBuf,
    snapshot: Snapshot,
    bytes: Arc<UnpackedBytes>,
    disk: Arc<dyn Disk>,
    record: BaseRecord,
    depth: usize,
}

impl Base {
    /// Opens a packed snapshot as a base, and takes the lock of a server on it and on all that it stands on, so that
    /// nothing replaces these meanwhile.
    ///
    /// # Errors
    /// As [`open_snapshot`](crate::open_snapshot); it is not packed, by another program, or was written to; its
    /// chain would have more than [`DEPTH_LIMIT`] images.
    pub fn open(path: &Path, passphrase: Option<&Passphrase>) -> Result<Self, PackError> {
        let unsupported = |what: String| PackError::Unsupported { path: path.to_path_buf(), what };
        let file = open_file(path)?;
        if !is_image(&file) {
            return Err(unsupported("a base is a packed snapshot; pack it first".to_owned()));
        }
        let chain = Chain::open(&file, path, passphrase)?;
        let record = chain.top().identity()?;
        let record = record.ok_or_else(|| unsupported("another program made the image; pack it again".to_owned()))?;
        let depth = chain.levels.len();
        if depth >= DEPTH_LIMIT {
            let what = format!("{depth} images are in its chain, which is the most; use another base");
            return Err(unsupported(what));
        }
        let disk = Arc::clone(&chain.disk) as Arc<dyn Disk>;
        let bytes = Arc::new(UnpackedBytes::new(chain));
        let snapshot = Snapshot::from_packed(file, path, Arc::clone(&bytes) as Arc<dyn SnapshotBytes>)?;
        snapshot.check_restorable()?;
        snapshot.lock_serving()?;
        let path = std::fs::canonicalize(path).map_err(PackError::io("find it", path))?;
        Ok(Self { path, snapshot, bytes, disk, record, depth })
    }

    /// Checks that an increment in this place can stand on it: a base is in the directory of its increments.
    ///
    /// # Errors
    /// It is in another directory, or would be replaced.
    pub fn check_beside(&self, target: &Path) -> Result<(), PackError> {
        let refused = |what: &str| PackError::Base {
            path: target.to_path_buf(),
            base: self.path.display().to_string(),
            what: what.to_owned(),
        };
        let directory =
            std::fs::canonicalize(directory_of(target)).map_err(PackError::io("find its directory", target))?;
        if self.path.parent() != Some(&directory) {
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

    /// Its levels, the topmost one first.
    pub(crate) fn levels(&self) -> &[Level] {
        &self.bytes.chain().levels
    }

    /// Whether this file is in its chain.
    pub(crate) fn stands_on(&self, path: &Path) -> bool {
        let levels = self.levels();
        std::fs::metadata(path).is_ok_and(|file| levels.iter().any(|level| level.is_file(&file)))
    }

    /// Whether a part of it is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.levels().iter().any(|level| level.is_encrypted())
    }

    /// Checks that all files of its chain still have their names and contents.
    pub(crate) fn check_still_there(&self) -> Result<(), PackError> {
        self.levels().iter().try_for_each(Level::check_still_there)
    }

    /// The snapshot.
    #[must_use]
    pub const fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Number of images in its chain.
    #[must_use]
    pub const fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.disk)
    }

    pub(crate) const fn record(&self) -> BaseRecord {
        self.record
    }

    /// The name under which an increment has it.
    pub(crate) fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }
}
