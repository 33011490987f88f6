//! The snapshots of a directory: which of them stand on which, and how one is taken out.
//!
//! Law: **an increment is readable at every moment**, also after a kill or a power cut. A snapshot that others stand on
//! is replaced by one of the same contents, whole and durable, with one rename, and nothing else is written to: the new
//! file says itself which ones it has replaced ([`Record`](crate::record::Record)). A snapshot is removed only if it is
//! known of every file of the directory that it does not stand on it; a file that cannot be looked into may.
//!
//! Who replaces or removes a snapshot holds its exclusive lock, and looks for those that stand on it only then: a new
//! one would have to take the lock of a server first ([`Base::open`](crate::Base::open)).

mod list;
mod neighbors;
mod rebase;

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use limosa_image::luks::Passphrase;
use limosa_migrate::Handle;
use limosa_page::directory_of;
use limosa_snapshot::{HeldSnapshot, Snapshot, SnapshotError};
use limosa_storage::FileIdentity;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::entry::SnapshotFile;
use crate::error::PackError;
use crate::head::is_image;
use crate::open::{Access, open_snapshot};
use crate::pack::{PackOptions, Packed};
use crate::retention::PruneStep;
use neighbors::KnownFile;

/// How long readers are waited for that are soon done.
const PATIENCE: Duration = Duration::from_secs(2);

/// A directory with snapshots.
#[derive(Debug)]
pub struct SnapshotDirectory {
    path: PathBuf,
    passphrase: Option<Passphrase>,
    ignored: BTreeSet<OsString>,
    /// Files that were looked into, so that the key of an encrypted one is derived once.
    known: Mutex<HashMap<FileIdentity, KnownFile>>,
}

impl SnapshotDirectory {
    /// A directory whose encrypted snapshots are opened with this passphrase.
    #[must_use]
    pub fn new(path: &Path, passphrase: Option<Passphrase>) -> Self {
        Self { path: path.to_path_buf(), passphrase, ignored: BTreeSet::new(), known: Mutex::default() }
    }

    /// The directory of a snapshot.
    ///
    /// # Errors
    /// It has no name, or is a symbolic link.
    pub fn of(snapshot: &Path, passphrase: Option<Passphrase>) -> Result<(Self, OsString), PackError> {
        let refused = |why: &str| {
            PackError::Snapshot(SnapshotError::Target { path: snapshot.to_path_buf(), why: why.to_owned() })
        };
        let name = snapshot.file_name().ok_or_else(|| refused("is not the name of a file"))?;
        if snapshot.is_symlink() {
            return Err(refused("is a symbolic link; name the file that it leads to"));
        }
        Ok((Self::new(directory_of(snapshot), passphrase), name.to_os_string()))
    }

    /// Leaves files out of everything: they are said to stand on no snapshot. For files that cannot be looked into.
    #[must_use]
    pub fn ignoring(mut self, names: impl IntoIterator<Item = OsString>) -> Self {
        self.ignored.extend(names);
        self
    }

    /// The path of one of its files.
    #[must_use]
    pub fn path_of(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }

    /// Removes a snapshot that no other file stands on.
    ///
    /// # Errors
    /// One does, or cannot be looked into; it is not a snapshot; it is served, or open in another program.
    pub fn remove(&self, name: &OsStr) -> Result<(), PackError> {
        self.remove_if(name, None)
    }

    /// Does a step of a plan, if the snapshots are still those that it was made for. Returns what was packed.
    ///
    /// # Errors
    /// As [`rebase`](Self::rebase) and [`remove`](Self::remove); another file has the name of a snapshot now.
    pub fn carry_out(
        &self,
        step: &PruneStep,
        options: &PackOptions,
        handle: &Handle,
    ) -> Result<Option<Packed>, PackError> {
        match step {
            PruneStep::Rebase { snapshot, base } => {
                self.rebase_planned(snapshot, base.as_ref(), options, handle).map(Some)
            }
            PruneStep::Remove { snapshot } => self.remove_if(&snapshot.name, Some(snapshot)).map(|()| None),
        }
    }

    fn remove_if(&self, name: &OsStr, planned: Option<&SnapshotFile>) -> Result<(), PackError> {
        let path = self.path_of(name);
        let held = HeldSnapshot::open(&path)?;
        held.exclude(PATIENCE)?;
        let id = self.id_of(&held)?;
        if let Some(planned) = planned {
            check_planned(planned, &held, Some(id))?;
        }
        let dependents = self.dependents(name)?;
        if let Some(first) = dependents.first() {
            let more = match dependents.len() {
                1 => String::new(),
                count => format!(" and {} more", count - 1),
            };
            return Err(PackError::Needed { path, by: format!("{}{more}", first.display()) });
        }
        held.exclude_all(PATIENCE)?;
        Ok(held.remove()?)
    }

    fn access(&self) -> Access {
        Access::default().passphrase(self.passphrase.clone())
    }

    /// Returns the id of the snapshot in a file.
    ///
    /// # Errors
    /// [`PackError::Foreign`]: it is not a snapshot.
    fn id_of(&self, held: &HeldSnapshot) -> Result<Uuid, PackError> {
        let path = held.path();
        let foreign = || PackError::Foreign { path: path.to_path_buf() };
        if is_image(held.file()) {
            let image = self.look_into(held.file(), path)?.ok_or_else(foreign)?;
            return match image.record {
                Some(record) => Ok(record.id),
                // Another program has made the image; what is in it shows whether it is a snapshot.
                None => Ok(open_snapshot(path, &self.access()).map_err(|_| foreign())?.id()),
            };
        }
        let file = held.file().try_clone().map_err(PackError::io("open it again", path))?;
        Ok(Snapshot::from_file(file, path).map_err(|_| foreign())?.id())
    }
}

/// Checks that a file is the one that a plan was made for.
fn check_planned(planned: &SnapshotFile, held: &HeldSnapshot, id: Option<Uuid>) -> Result<(), PackError> {
    let metadata = held.file().metadata().map_err(PackError::io("look at it", held.path()))?;
    if planned.file == Some(FileIdentity::of(&metadata)) && planned.id == id {
        return Ok(());
    }
    let what = "another snapshot has its name now than when this was planned".to_owned();
    Err(PackError::Snapshot(SnapshotError::Changed { path: held.path().to_path_buf(), what }))
}
