//! The files of a copy that can be continued: its part, its journal, and the file that it replaces.
//!
//! Law: the caller did not give the names of the part and the journal, so nothing that is there already is followed or
//! overwritten unless limosa made it. A file that is replaced stays locked until then, and gives the new one its owner,
//! its mode and its extended attributes.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_page::directory_of;
use limosa_storage::{Create, FileIdentity, FileOptions, FileStorage, Io, Operation, StorageError};
use rustix::fs::{CWD, RenameFlags, XattrFlags, getxattr, listxattr, renameat_with, setxattr};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::error::ImageError;
use crate::operations::operation::OperationError;

/// The end of the name of a target that is not complete.
const PART: &str = ".limosa-part";
/// The end of the name of its journal.
const JOURNAL: &str = ".limosa-journal";
/// Who may read a part, until it has the mode of the file that it replaces.
const PRIVATE: u32 = 0o600;

/// The names of a target that is not complete.
#[derive(Debug, Clone)]
pub(in super::super) struct Paths {
    pub(super) target: PathBuf,
    /// The place of the copy until it is complete.
    pub(in super::super) part: PathBuf,
    pub(super) journal: PathBuf,
}

impl Paths {
    /// The files for a target at this path.
    ///
    /// # Errors
    /// [`OperationError::CannotResume`]: it is a symbolic link. The part would be in another folder than the link.
    pub(in super::super) fn of(path: &Path) -> Result<Self, OperationError> {
        let beside = |end: &str| {
            let mut name = OsString::from(path);
            name.push(end);
            PathBuf::from(name)
        };
        let paths = Self { part: beside(PART), journal: beside(JOURNAL), target: path.to_owned() };
        if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink()) {
            return Err(paths.refuse("it is a symbolic link: give the name of the file that it leads to"));
        }
        Ok(paths)
    }

    pub(super) fn refuse(&self, why: &str) -> OperationError {
        OperationError::CannotResume { target: self.target.display().to_string(), why: why.to_owned() }
    }

    /// Refuses to continue what is there.
    pub(super) fn refuse_found(&self, why: &str) -> OperationError {
        let (journal, part) = (self.journal.display(), self.part.display());
        self.refuse(&format!("{why}; remove {journal} and {part} to begin again"))
    }

    pub(super) fn failed(&self, operation: Operation, path: &Path, error: io::Error) -> OperationError {
        let name = Arc::from(path.to_string_lossy());
        ImageError::from(StorageError::for_storage(operation, &name, error)).into()
    }

    /// Makes the names of files durable.
    pub(super) fn sync_folder(&self) -> Result<(), OperationError> {
        let folder = directory_of(&self.target);
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|error| self.failed(Operation::Flush, folder, error))
    }

    /// Opens the journal; also returns whether it is new.
    ///
    /// # Errors
    /// [`OperationError::CannotResume`]: what has its name is a link or another user's; what the kernel says.
    pub(super) fn open_journal(&self) -> Result<(Arc<FileStorage>, bool), OperationError> {
        let options = |create| FileOptions { create, io: Io::CallerThread, ..FileOptions::default() };
        match FileStorage::open(&self.journal, &options(Create::New)) {
            Ok(storage) => return Ok((storage, true)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(ImageError::from(error).into()),
        }
        let is_ours = |found: &Metadata| found.is_file() && found.nlink() == 1 && found.uid() == geteuid().as_raw();
        let refuse = || self.refuse(&format!("{} is not a journal that this user made", self.journal.display()));
        let found = fs::symlink_metadata(&self.journal).ok().filter(is_ours).ok_or_else(refuse)?;
        let storage = FileStorage::open(&self.journal, &options(Create::No)).map_err(ImageError::from)?;
        if storage.identity() == FileIdentity::of(&found) { Ok((storage, false)) } else { Err(refuse()) }
    }

    /// Opens the file that has the target's name, if there is one, so that nothing else uses it until it is replaced.
    ///
    /// # Errors
    /// [`OperationError::CannotResume`]: it is no regular file, or has other names; it is in use.
    pub(super) fn open_replaced(&self) -> Result<Option<Arc<FileStorage>>, OperationError> {
        let Ok(metadata) = fs::symlink_metadata(&self.target) else { return Ok(None) };
        if !metadata.is_file() {
            return Err(self.refuse("it is not a regular file"));
        }
        if metadata.nlink() > 1 {
            return Err(self.refuse("it has other names (hard links), which would keep the old contents"));
        }
        Ok(Some(FileStorage::open(&self.target, &FileOptions::default()).map_err(ImageError::from)?))
    }

    /// Makes the part of a copy that replaces a file, empty, so that other users cannot read it at any time.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn make_private_part(&self) -> Result<(), OperationError> {
        let made = File::options().write(true).create_new(true).mode(PRIVATE).open(&self.part);
        made.map(drop).map_err(|error| self.failed(Operation::Open, &self.part, error))
    }

    /// Gives the complete part the target's name, durably. `replaced`: the file that had it when the copy was begun.
    ///
    /// # Errors
    /// [`OperationError::CannotResume`]: another file has the name now; what the kernel says.
    pub(super) fn give_name(&self, replaced: Option<&FileStorage>) -> Result<(), OperationError> {
        let found = fs::symlink_metadata(&self.target).ok();
        match (replaced, found) {
            (Some(old), Some(found)) if FileIdentity::of(&found) == old.identity() => {
                take_over(&self.target, &found, &self.part);
                fs::rename(&self.part, &self.target)
                    .map_err(|error| self.failed(Operation::Open, &self.target, error))?;
            }
            (None, None) => match renameat_with(CWD, &self.part, CWD, &self.target, RenameFlags::NOREPLACE) {
                Ok(()) => {}
                Err(Errno::EXIST) => return Err(self.refuse_other()),
                // Filesystems that do not have it.
                Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&self.part, &self.target)
                    .map_err(|error| self.failed(Operation::Open, &self.target, error))?,
                Err(error) => return Err(self.failed(Operation::Open, &self.target, error.into())),
            },
            _ => return Err(self.refuse_other()),
        }
        self.sync_folder()
    }

    fn refuse_other(&self) -> OperationError {
        self.refuse(&format!("another file has its name since the copy was begun; the copy is {}", self.part.display()))
    }
}

/// Gives a file the owner, the mode and the extended attributes of the one that it replaces. What this user
/// may not change is named in a warning.
fn take_over(old: &Path, metadata: &Metadata, new: &Path) {
    let warn = |what: &str, error: io::Error| {
        tracing::warn!(%error, "{}: it does not get the old file's {what}", old.display());
    };
    let same = fs::metadata(new).is_ok_and(|new| (new.uid(), new.gid()) == (metadata.uid(), metadata.gid()));
    if !same && let Err(error) = chown(new, Some(metadata.uid()), Some(metadata.gid())) {
        warn("owner", error);
    }
    if let Err(error) = fs::set_permissions(new, metadata.permissions()) {
        warn("mode", error);
    }
    if let Err(error) = copy_attributes(old, new) {
        warn("extended attributes", error.into());
    }
}

/// Copies the extended attributes of a file, access control lists and labels among them.
fn copy_attributes(old: &Path, new: &Path) -> rustix::io::Result<()> {
    let mut names = vec![0; 64 << 10];
    let length = match listxattr(old, &mut names) {
        Err(Errno::OPNOTSUPP) => return Ok(()),
        length => length?,
    };
    let names = names.get(..length).ok_or(Errno::RANGE)?;
    let mut value = vec![0; 64 << 10];
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = OsStr::from_bytes(name);
        let length = getxattr(old, name, &mut value)?;
        setxattr(new, name, value.get(..length).ok_or(Errno::RANGE)?, XattrFlags::empty())?;
    }
    Ok(())
}
