//! The directory of a pair: its lock, and its two names.
//!
//! Law of this module: `checkpoint.limosa` is the name of a whole file at every instant, from the first base on. Only
//! the holder of the directory's lock gives and exchanges names in it, and only those of its own files.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::SnapshotError;
use crate::lock;
use crate::store::StoreFile;
use crate::unnamed_file::{MODE, names_file};

/// The name of the newest whole checkpoint in its directory.
pub const CHECKPOINT_NAME: &str = "checkpoint.limosa";
/// The name of the file that receives the next one: hidden, because it is not whole.
const SPARE_NAME: &str = ".checkpoint.limosa.spare";
/// The name of a former checkpoint until it is the spare, where names cannot be exchanged.
const FORMER_NAME: &str = ".checkpoint.limosa.former";

/// A directory for continuous checkpoints, held by this process alone.
///
/// Dropping it leaves `checkpoint.limosa`, if there is one, and nothing else.
#[derive(Debug)]
pub struct CheckpointDirectory {
    directory: File,
    path: PathBuf,
}

impl CheckpointDirectory {
    /// Takes a directory, which is made (mode 0700) if it is missing, and removes the spare of a killed process.
    /// `checkpoint.limosa` stays until a base is published over it.
    ///
    /// # Errors
    /// [`SnapshotError::Locked`] while another process has it; it is no directory, or cannot be made or written to.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        match fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(SnapshotError::io("make it", path, None, errno)),
        }
        let directory = open_directory(path)?;
        lock::directory(&directory, path)?;
        let directory = Self { directory, path: path.to_path_buf() };
        for name in [SPARE_NAME, FORMER_NAME] {
            directory.remove(name)?;
        }
        Ok(directory)
    }

    /// Whether a process keeps checkpoints in a directory. Changes nothing in it.
    ///
    /// # Errors
    /// It is no directory, or cannot be opened.
    pub fn is_kept(path: &Path) -> Result<bool, SnapshotError> {
        let directory = open_directory(path)?;
        match lock::shared(&directory, path) {
            Ok(()) => {
                lock::release(&directory);
                Ok(false)
            }
            Err(SnapshotError::Locked { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the newest whole checkpoint, whether there is one or not.
    pub fn checkpoint(&self) -> PathBuf {
        self.path.join(CHECKPOINT_NAME)
    }

    fn spare(&self) -> PathBuf {
        self.path.join(SPARE_NAME)
    }

    /// Makes an empty spare, locked against readers, in the place of what has its name.
    pub(super) fn create_spare(&self) -> Result<StoreFile, SnapshotError> {
        self.remove_spare()?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = self.spare();
        let file = fs::openat(&self.directory, SPARE_NAME, flags, MODE)
            .map_err(|errno| SnapshotError::io("create it", &path, None, errno))?;
        let file = StoreFile::new(File::from(file), &path);
        claim(&file)?;
        Ok(file)
    }

    /// Whether the spare still has its name.
    pub(super) fn has_spare(&self, spare: &StoreFile) -> bool {
        names_file(&self.directory, SPARE_NAME, spare.fd())
    }

    /// Gives the name of the checkpoint to the spare, and that of the spare to the checkpoint; their paths follow.
    ///
    /// # Errors
    /// Nothing has changed then. One of the names is another file's by now, or is gone.
    pub(super) fn flip(&self, current: &mut StoreFile, spare: &mut StoreFile) -> Result<(), SnapshotError> {
        for (name, file) in [(CHECKPOINT_NAME, &*current), (SPARE_NAME, &*spare)] {
            if !names_file(&self.directory, name, file.fd()) {
                let why = "was removed, moved or replaced by another program".to_owned();
                return Err(SnapshotError::Target { path: self.path.join(name), why });
            }
        }
        match self.exchange() {
            // Filesystems without the flag.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => self.replace(),
            exchanged => exchanged,
        }
        .map_err(|errno| SnapshotError::io("give it its name", &self.checkpoint(), None, errno))?;
        current.swap_paths(spare);
        Ok(())
    }

    fn exchange(&self) -> Result<(), Errno> {
        let directory = &self.directory;
        fs::renameat_with(directory, SPARE_NAME, directory, CHECKPOINT_NAME, RenameFlags::EXCHANGE)
    }

    /// As [`exchange`](Self::exchange), with a second name for the former checkpoint.
    fn replace(&self) -> Result<(), Errno> {
        let directory = &self.directory;
        fs::linkat(directory, CHECKPOINT_NAME, directory, FORMER_NAME, AtFlags::empty())?;
        if let Err(errno) = fs::renameat(directory, SPARE_NAME, directory, CHECKPOINT_NAME) {
            let _ = fs::unlinkat(directory, FORMER_NAME, AtFlags::empty());
            return Err(errno);
        }
        // The checkpoint counts already. A spare without its name is replaced by a new one.
        let _ = fs::renameat(directory, FORMER_NAME, directory, SPARE_NAME);
        Ok(())
    }

    /// Makes the names durable.
    pub(super) fn sync(&self) -> Result<(), SnapshotError> {
        let operation = "make its name durable (fsync of the directory); the file itself is whole and in place";
        fs::fsync(&self.directory).map_err(|errno| SnapshotError::io(operation, &self.checkpoint(), None, errno))
    }

    /// Removes the spare of a series that has ended.
    pub(super) fn remove_spare(&self) -> Result<(), SnapshotError> {
        self.remove(SPARE_NAME)
    }

    fn remove(&self, name: &str) -> Result<(), SnapshotError> {
        match fs::unlinkat(&self.directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(SnapshotError::io("remove it", &self.path.join(name), None, errno)),
        }
    }
}

impl Drop for CheckpointDirectory {
    fn drop(&mut self) {
        // Best effort: who opens the directory next removes what stays.
        let _ = self.remove_spare();
        // Said aloud, because a child that was just forked may have a copy of the descriptor.
        lock::release(&self.directory);
    }
}

fn open_directory(path: &Path) -> Result<File, SnapshotError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOTDIR => SnapshotError::Target { path: path.to_path_buf(), why: "is not a directory".to_owned() },
        errno => SnapshotError::io("open it", path, None, errno),
    })?;
    Ok(File::from(directory))
}

/// Locks a file against readers, so that it can be written to.
///
/// # Errors
/// [`SnapshotError::Locked`] if there are any.
pub(super) fn claim(file: &StoreFile) -> Result<(), SnapshotError> {
    lock::exclusive(file.fd(), file.path())?;
    lock::writing(file.fd(), file.path())
}

/// Lets readers in, but nobody who would replace the file.
pub(super) fn admit_readers(file: &StoreFile) -> Result<(), SnapshotError> {
    lock::end_writing(file.fd(), file.path())?;
    lock::shared(file.fd(), file.path())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn inode(path: &Path) -> u64 {
        path.metadata().unwrap().ino()
    }

    /// A directory with a checkpoint and a spare.
    fn pair(path: &Path) -> (CheckpointDirectory, StoreFile, StoreFile) {
        let directory = CheckpointDirectory::open(path).unwrap();
        std::fs::write(directory.checkpoint(), b"checkpoint").unwrap();
        let current = StoreFile::new(File::open(directory.checkpoint()).unwrap(), &directory.checkpoint());
        let spare = directory.create_spare().unwrap();
        (directory, current, spare)
    }

    #[test]
    fn names_change_places_also_where_they_cannot_be_exchanged_at_once() {
        for change in [CheckpointDirectory::exchange, CheckpointDirectory::replace] {
            let folder = tempfile::tempdir().unwrap();
            let (directory, ..) = pair(folder.path());
            let before = (inode(&directory.checkpoint()), inode(&directory.spare()));
            for _ in 0..2 {
                change(&directory).unwrap();
            }
            assert_eq!((inode(&directory.checkpoint()), inode(&directory.spare())), before);
            change(&directory).unwrap();
            assert_eq!((inode(&directory.spare()), inode(&directory.checkpoint())), before);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        }
    }

    #[test]
    fn a_name_that_another_file_has_taken_is_not_exchanged() {
        for stolen in [CHECKPOINT_NAME, SPARE_NAME] {
            let folder = tempfile::tempdir().unwrap();
            let (directory, mut current, mut spare) = pair(folder.path());
            let path = folder.path().join(stolen);
            std::fs::remove_file(&path).unwrap();
            let error = directory.flip(&mut current, &mut spare).unwrap_err();
            assert!(matches!(error, SnapshotError::Target { .. }), "{error}");
            std::fs::write(&path, b"a stranger's").unwrap();
            let error = directory.flip(&mut current, &mut spare).unwrap_err();
            assert!(matches!(&error, SnapshotError::Target { path: named, .. } if *named == path), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), b"a stranger's");
        }
    }

    #[test]
    fn one_process_at_a_time_has_the_directory_and_what_a_killed_one_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made");
        let (directory, current, spare) = pair(&path);
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        assert_eq!(directory.spare().metadata().unwrap().mode() & 0o777, 0o600);
        let error = CheckpointDirectory::open(&path).unwrap_err();
        assert!(matches!(error, SnapshotError::Locked { .. }), "{error}");
        assert!(CheckpointDirectory::is_kept(&path).unwrap());
        // As after a kill: nothing is removed, and the lock goes.
        lock::release(&directory.directory);
        std::mem::forget(directory);
        std::fs::write(path.join(FORMER_NAME), b"").unwrap();
        assert!(!CheckpointDirectory::is_kept(&path).unwrap());
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 3, "it was only asked");
        let directory = CheckpointDirectory::open(&path).unwrap();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
        assert_eq!(std::fs::read(directory.checkpoint()).unwrap(), b"checkpoint");
        drop((current, spare));
    }

    #[test]
    fn what_is_no_directory_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = CheckpointDirectory::open(file.path()).unwrap_err();
        assert!(matches!(error, SnapshotError::Target { .. }), "{error}");
        assert!(CheckpointDirectory::open(&file.path().join("missing/directory")).is_err());
    }
}
