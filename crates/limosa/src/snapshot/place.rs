//! The place of snapshots that are listed and pruned: a directory, or a folder of an object store.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use limosa_image::reference::is_object;
use limosa_migrate::Handle;
use limosa_pack::{PackError, PackOptions, Packed, PruneStep, SnapshotDirectory, SnapshotEntry, SnapshotFolder};

use crate::packed;

/// The place of snapshots.
pub(super) enum Place {
    Directory(SnapshotDirectory),
    Folder(SnapshotFolder),
}

impl Place {
    /// The place of this path or URL.
    pub(super) fn new(name: &Path) -> Self {
        if is_object(name) { Self::Folder(packed::folder(name)) } else { Self::Directory(packed::directory(name)) }
    }

    /// The place of a snapshot, and its name there.
    pub(super) fn of(snapshot: &Path) -> anyhow::Result<(Self, OsString)> {
        Ok(if is_object(snapshot) {
            let (folder, name) = packed::folder_of(snapshot)?;
            (Self::Folder(folder), name)
        } else {
            let (directory, name) = packed::directory_of(snapshot)?;
            (Self::Directory(directory), name)
        })
    }

    /// Leaves files or objects out of everything.
    pub(super) fn ignoring(self, names: &[OsString]) -> Self {
        match self {
            Self::Directory(directory) => Self::Directory(directory.ignoring(names.iter().cloned())),
            Self::Folder(folder) => Self::Folder(folder.ignoring(names.iter().cloned())),
        }
    }

    /// Whether snapshots can be packed again there.
    pub(super) const fn is_rewritable(&self) -> bool {
        matches!(self, Self::Directory(_))
    }

    /// The path or URL of a snapshot.
    pub(super) fn path_of(&self, name: &OsStr) -> PathBuf {
        match self {
            Self::Directory(directory) => directory.path_of(name),
            Self::Folder(folder) => folder.path_of(name),
        }
    }

    pub(super) fn list(&self) -> Result<Vec<SnapshotEntry>, PackError> {
        match self {
            Self::Directory(directory) => directory.list(),
            Self::Folder(folder) => folder.list(),
        }
    }

    pub(super) fn remove(&self, name: &OsStr) -> Result<(), PackError> {
        match self {
            Self::Directory(directory) => directory.remove(name),
            Self::Folder(folder) => folder.remove(name),
        }
    }

    /// Does a step of a plan. Returns what was packed.
    pub(super) fn carry_out(
        &self,
        step: &PruneStep,
        options: &PackOptions,
        handle: &Handle,
    ) -> Result<Option<Packed>, PackError> {
        match (self, step) {
            (Self::Directory(directory), step) => directory.carry_out(step, options, handle),
            (Self::Folder(folder), PruneStep::Remove { snapshot }) => folder.remove_planned(snapshot).map(|()| None),
            // A plan for a folder has none.
            (Self::Folder(folder), PruneStep::Rebase { snapshot, .. }) => {
                let what = "objects are not packed again".to_owned();
                Err(PackError::Refused { path: folder.path_of(&snapshot.name), what })
            }
        }
    }
}
