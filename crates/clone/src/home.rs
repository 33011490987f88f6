//! The directory of one clone: claimed, filled under a hidden name, published, removed.
//!
//! Laws:
//! - **A directory that is seen has a record.** It is filled under a hidden name and gets its own by a rename. What a
//!   kill leaves under a hidden name is removed by the next limosa that meets it.
//! - **One limosa at a time makes or removes a clone.** It holds a lock (flock(2)) on the directory, which the kernel
//!   releases at its end, however it ends.
//! - **What belongs to the clone goes with it, and nothing else**: its record, monitor, log and overlays, and what its
//!   command line puts there.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use crate::directory::{DiskInUse, RemoveReport};
use crate::error::CloneError;
use crate::record::{LOG, MONITOR, OverlayRecord, RECORD, Record, UNFINISHED_RECORD};
use crate::saved_disks::image_above;

/// A clone's directory that no other limosa works on, while this is held.
#[derive(Debug)]
pub(crate) struct Home {
    path: PathBuf,
    /// The directory, open: it has the lock, also under another name.
    _lock: File,
}

impl Home {
    /// Makes the directory of a new clone under its hidden name.
    ///
    /// # Errors
    /// [`CloneError::Exists`] if the name is taken, or another limosa is making a clone of this name.
    pub(crate) fn new(clones: &Path, name: &str) -> Result<Self, CloneError> {
        let exists = || CloneError::Exists { path: clones.join(name) };
        if clones.join(name).exists() {
            return Err(exists());
        }
        let path = clones.join(hidden(name));
        match DirBuilder::new().mode(0o700).create(&path) {
            // What a limosa that was killed has left, or another one's that is at work.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && clear(&path) => {
                DirBuilder::new().mode(0o700).create(&path).map_err(|_| exists())?;
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(exists()),
            made => made.map_err(CloneError::path("make", &path))?,
        }
        Self::lock(&path)?.ok_or_else(exists)
    }

    /// Locks the directory of a clone; `None` if another limosa works on it, or it has gone.
    pub(crate) fn lock(path: &Path) -> Result<Option<Self>, CloneError> {
        let lock = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(CloneError::path("open", path))?,
        };
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            locked => locked.map_err(|error| CloneError::path("lock", path)(error.into()))?,
        }
        // It may have been removed, or renamed, between the two.
        let identity = |found: fs::Metadata| (found.dev(), found.ino());
        let is_there =
            fs::metadata(path).is_ok_and(|found| lock.metadata().is_ok_and(|own| identity(own) == identity(found)));
        Ok(is_there.then(|| Self { path: path.to_path_buf(), _lock: lock }))
    }

    /// Locks the directory of a clone as [`lock`](Self::lock) does. A list that looks whether the lock is held holds it
    /// for a moment itself, which is waited out.
    pub(crate) fn lock_soon(path: &Path) -> Result<Option<Self>, CloneError> {
        for _ in 0..100 {
            match Self::lock(path)? {
                None if path.exists() => thread::sleep(Duration::from_millis(5)),
                found => return Ok(found),
            }
        }
        Ok(None)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the directory its own name. The record must be in it.
    pub(crate) fn publish(&mut self, name: &str) -> Result<(), CloneError> {
        let path = self.path.with_file_name(name);
        // Fails if a clone of that name is there: it has a record, so its directory is not empty (rename(2)).
        match fs::rename(&self.path, &path) {
            Err(error) if matches!(error.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists) => {
                Err(CloneError::Exists { path })
            }
            renamed => {
                renamed.map_err(CloneError::path("rename", &self.path))?;
                self.path = path;
                Ok(())
            }
        }
    }

    /// Removes everything that belongs to the clone, except for disks that something else stands on, and the directory
    /// if nothing else is in it. Returns what stays.
    ///
    /// The record goes last: until then the rest can be found again.
    pub(crate) fn remove(self, record: &Record) -> Result<RemoveReport, CloneError> {
        let needed = self.needed_disks(record);
        let is_needed = |name: &Path| needed.iter().any(|needed| needed.disk == self.path.join(name));
        let overlays = record.overlays.iter().map(|overlay| overlay.name.as_path());
        let outputs = record.outputs.iter().map(PathBuf::as_path);
        let own = [MONITOR, LOG, UNFINISHED_RECORD].map(Path::new);
        // The command line names the overlays too.
        for name in own.into_iter().chain(overlays).chain(outputs).filter(|name| !is_needed(name)) {
            remove_inside(&self.path, name)?;
        }
        let mut kept = self.entries();
        kept.retain(|path| !path.ends_with(RECORD));
        // An empty directory is not seen as a clone, and its number is free again: it is hidden before it is emptied.
        let name = self.path.file_name().map(|name| hidden(&name.to_string_lossy()));
        let hidden =
            name.filter(|_| kept.is_empty() && !is_hidden(&self.path)).map(|name| self.path.with_file_name(name));
        // Where the hidden name is taken, a kill in the next instant leaves an empty directory.
        let hidden = hidden.filter(|path| fs::rename(&self.path, path).is_ok());
        let last = hidden.unwrap_or_else(|| self.path.clone());
        remove_inside(&last, Path::new(RECORD))?;
        if kept.is_empty() {
            fs::remove_dir(&last).map_err(CloneError::path("remove", &last))?;
        }
        kept.retain(|path| needed.iter().all(|needed| needed.disk != *path));
        Ok(RemoveReport { kept, needed })
    }

    fn entries(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.path).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }

    /// The disks of the clone that a snapshot was saved with, or that another image in the directory stands on.
    fn needed_disks(&self, record: &Record) -> Vec<DiskInUse> {
        let own = |path: &PathBuf| record.overlays.iter().any(|overlay| path.ends_with(&overlay.name));
        let mut others = self.entries();
        others.retain(|path| !own(path));
        let needed = |overlay: &OverlayRecord| {
            let disk = self.path.join(&overlay.name);
            let by = || image_above(&disk, &others).into_iter().collect();
            let by: Vec<_> = if overlay.snapshots.is_empty() { by() } else { overlay.snapshots.clone() };
            (!by.is_empty() && disk.exists()).then_some(DiskInUse { disk, needed_by: by })
        };
        record.overlays.iter().filter_map(needed).collect()
    }
}

/// Removes what limosas that were killed have left under hidden names. What another limosa works on stays.
pub(crate) fn clear_left_over(clones: &Path) {
    let entries = fs::read_dir(clones).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| is_hidden(path)) {
        clear(&path);
    }
}

/// Removes a directory with a hidden name that no limosa works on. Returns whether it is gone.
fn clear(path: &Path) -> bool {
    let Ok(Some(home)) = Home::lock(path) else { return !path.exists() };
    match Record::read(path) {
        // A limosa that was killed had written nothing else before its record.
        Ok(None) => remove_inside(path, Path::new(UNFINISHED_RECORD)).is_ok() && fs::remove_dir(path).is_ok(),
        Ok(Some(record)) => home.remove(&record).is_ok_and(|removed| removed.into_paths().is_empty()),
        Err(_) => false,
    }
}

/// The name of a clone's directory until the clone has a record.
fn hidden(name: &str) -> OsString {
    format!(".{name}").into()
}

/// Whether a directory has the hidden name of a clone, which is a number.
fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix('.'));
    name.is_some_and(|name| name.parse::<u64>().is_ok())
}

/// Removes a file of a clone's directory, and the directories in between that are empty then. A name that leads out of
/// the directory, also by a symbolic link, is left alone, and so is a directory.
fn remove_inside(folder: &Path, name: &Path) -> Result<(), CloneError> {
    if !name.components().all(|part| matches!(part, Component::Normal(_))) {
        return Ok(());
    }
    let file = folder.join(name);
    let real = |path: &Path| fs::canonicalize(path).ok();
    let (Some(parent), Some(root)) = (file.parent().and_then(real), real(folder)) else { return Ok(()) };
    if !parent.starts_with(&root) || fs::symlink_metadata(&file).is_ok_and(|found| found.is_dir()) {
        return Ok(());
    }
    match fs::remove_file(&file) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(CloneError::path("remove", file)(error)),
        _ => {}
    }
    for between in name.ancestors().skip(1).filter(|between| !between.as_os_str().is_empty()) {
        // One with something else in it stays.
        if fs::remove_dir(folder.join(between)).is_err() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::record::tests::record;

    #[test]
    fn a_clone_is_seen_when_it_has_its_record_and_its_name_is_taken_from_the_beginning() {
        let clones = tempfile::tempdir().unwrap();
        let mut home = Home::new(clones.path(), "001").unwrap();
        assert!(matches!(Home::new(clones.path(), "001"), Err(CloneError::Exists { .. })), "another one is at work");
        record().write(home.path()).unwrap();
        home.publish("001").unwrap();
        assert_eq!(home.path(), clones.path().join("001"));
        assert!(Home::lock(home.path()).unwrap().is_none(), "the lock goes with the directory");
        assert!(matches!(Home::new(clones.path(), "001"), Err(CloneError::Exists { .. })));
        drop(home);
        let home = Home::lock(&clones.path().join("001")).unwrap().unwrap();
        assert_eq!(home.remove(&record()).unwrap(), RemoveReport::default());
        assert_eq!(fs::read_dir(clones.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_kill_leaves_is_removed_by_the_next_one() {
        let clones = tempfile::tempdir().unwrap();
        for written in 0..3 {
            let home = Home::new(clones.path(), "007").unwrap();
            if written > 0 {
                record().write(home.path()).unwrap();
            }
            if written > 1 {
                fs::write(home.path().join("disk0.qcow2"), "overlay").unwrap();
            }
            drop(home);
            let again = Home::new(clones.path(), "007").unwrap();
            assert_eq!(fs::read_dir(again.path()).unwrap().count(), 0);
            drop(again);
            clear_left_over(clones.path());
            assert_eq!(fs::read_dir(clones.path()).unwrap().count(), 0);
        }
        fs::create_dir(clones.path().join(".008")).unwrap();
        fs::write(clones.path().join(".008/letter"), "mine").unwrap();
        clear_left_over(clones.path());
        assert!(clones.path().join(".008/letter").exists());
        assert!(matches!(Home::new(clones.path(), "008"), Err(CloneError::Exists { .. })));
    }

    #[test]
    fn what_belongs_to_a_clone_goes_with_it_and_nothing_else() {
        let clones = tempfile::tempdir().unwrap();
        let outside = clones.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "mine").unwrap();
        let mut home = Home::new(clones.path(), "001").unwrap();
        let mut record = record();
        record.outputs =
            ["serial", "sub/pid", "../outside/file", "link/file", "/etc/hostname"].map(Into::into).to_vec();
        record.write(home.path()).unwrap();
        home.publish("001").unwrap();
        let folder = home.path().to_path_buf();
        fs::create_dir(folder.join("sub")).unwrap();
        symlink(&outside, folder.join("link")).unwrap();
        for name in ["serial", "sub/pid", "disk0.qcow2", "log", "letter"] {
            fs::write(folder.join(name), name).unwrap();
        }
        let mut kept = home.remove(&record).unwrap().kept;
        kept.sort();
        assert_eq!(kept, [folder.join("letter"), folder.join("link")]);
        assert!(outside.join("file").exists());
        assert!(!folder.join(RECORD).exists());
    }
}
