//! Disks of clones that something else stands on: a snapshot that was saved of the clone, an image above it.
//!
//! The law: **removing a clone takes no disk from under anything.** A snapshot of a clone is its memory, and the
//! clone's disks are the other half of it. So a save writes down in the clone's record that it needs them, before it
//! begins.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use limosa_image::chain;
use limosa_image::reference::{Reference, is_object};
use limosa_image::{Format, Guess, guess};
use limosa_storage::block_on;

use crate::error::CloneError;
use crate::home::Home;
use crate::overlay::read_beside_others;
use crate::record::Record;

/// Disks of clones that are written down as needed by a snapshot.
#[derive(Debug)]
#[must_use = "a save that fails must forget them"]
pub struct SavedDisks {
    snapshot: PathBuf,
    /// The directories of clones in whose records this snapshot is new.
    clones: Vec<PathBuf>,
}

impl SavedDisks {
    /// Writes down that `snapshot` is being saved with these images: in the record of each clone that one of them was
    /// made for. Images that belong to no clone are left alone.
    ///
    /// # Errors
    /// The record of a clone cannot be read or written, or another limosa works on the clone.
    pub fn mark_needed(images: &[PathBuf], snapshot: &Path) -> Result<Self, CloneError> {
        // The name of an object is the same in every directory.
        let snapshot = if is_object(snapshot) { Ok(snapshot.to_path_buf()) } else { std::path::absolute(snapshot) }
            .map_err(CloneError::path("find", snapshot))?;
        let mut by_clone: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
        for image in images.iter().filter_map(|image| fs::canonicalize(image).ok()) {
            if let (Some(folder), Some(name)) = (image.parent(), image.file_name()) {
                by_clone.entry(folder.to_path_buf()).or_default().push(name.into());
            }
        }
        let mut saved = Self { snapshot, clones: Vec::new() };
        for (folder, names) in by_clone {
            match saved.remember_in(&folder, &names) {
                Ok(()) => {}
                Err(error) => {
                    saved.unmark_needed();
                    return Err(error);
                }
            }
        }
        Ok(saved)
    }

    fn remember_in(&mut self, folder: &Path, names: &[PathBuf]) -> Result<(), CloneError> {
        if Record::read(folder)?.is_none() {
            return Ok(());
        }
        let busy = || CloneError::Busy { path: folder.to_path_buf() };
        let home = Home::lock_soon(folder)?.ok_or_else(busy)?;
        let Some(mut record) = Record::read(home.path())? else { return Ok(()) };
        let own = record.overlays.iter_mut().filter(|overlay| names.contains(&overlay.name));
        let new: Vec<_> = own.filter(|overlay| !overlay.snapshots.contains(&self.snapshot)).collect();
        if new.is_empty() {
            return Ok(());
        }
        for overlay in new {
            overlay.snapshots.push(self.snapshot.clone());
        }
        record.write_durably(home.path())?;
        self.clones.push(home.path().to_path_buf());
        Ok(())
    }

    /// Takes it back: there is no such snapshot. Where that fails, the disks stay when their clone is removed.
    pub fn unmark_needed(self) {
        for folder in &self.clones {
            let Ok(Some(home)) = Home::lock_soon(folder) else { continue };
            let Ok(Some(mut record)) = Record::read(home.path()) else { continue };
            for overlay in &mut record.overlays {
                overlay.snapshots.retain(|snapshot| *snapshot != self.snapshot);
            }
            let _ = record.write(home.path());
        }
    }
}

/// Returns the first of these files that is an image above `disk`. An image that cannot be read may be one.
pub(crate) fn image_above(disk: &Path, files: &[PathBuf]) -> Option<PathBuf> {
    let disk = fs::canonicalize(disk).ok()?;
    files.iter().find(|file| **file != disk && is_above(file, &disk)).cloned()
}

fn is_above(file: &Path, disk: &Path) -> bool {
    let mut magic = [0; 4];
    let is_image = fs::metadata(file).is_ok_and(|found| found.is_file())
        && fs::File::open(file).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
        && guess(&magic) == Guess::Known(Format::Qcow2);
    if !is_image {
        return false;
    }
    let options = read_beside_others(Format::Qcow2);
    let Ok(reference) = Reference::from_name(file) else { return true };
    let Ok(chain) = block_on(chain::files(&reference, &options)) else { return true };
    let is_disk = |path: &Path| fs::canonicalize(path).is_ok_and(|path| path == disk);
    chain.iter().any(|image| image.reference.path().is_some_and(is_disk))
}

#[cfg(test)]
mod tests {
    use limosa_image::qcow2::{CreateOptions, create};
    use limosa_storage::{Create, FileOptions, FileStorage};

    use super::*;
    use crate::record::tests::record;

    fn image(path: &Path, backing: Option<&Path>) {
        let storage = FileStorage::open(path, &FileOptions { create: Create::New, ..FileOptions::default() }).unwrap();
        let format = backing.map(|_| "qcow2".to_owned());
        let options = CreateOptions::default().size(1 << 20).backing_format(format);
        let options = options.backing_file(backing.map(|path| path.as_os_str().to_owned()));
        block_on(create(&*storage, None, &options)).unwrap();
    }

    #[test]
    fn a_disk_stays_when_a_snapshot_was_saved_with_it_and_goes_when_that_save_failed() {
        let clones = tempfile::tempdir().unwrap();
        let folder = clones.path().join("001");
        let make = || {
            fs::create_dir(&folder).unwrap();
            let mut record = record();
            record.outputs.push("disk0.qcow2".into());
            record.write(&folder).unwrap();
            image(&folder.join("disk0.qcow2"), None);
        };
        let remove = || Home::lock(&folder).unwrap().unwrap().remove(&Record::read(&folder).unwrap().unwrap()).unwrap();
        let disk = folder.join("disk0.qcow2");
        let snapshot = clones.path().join("branch");
        make();
        let images = [disk.clone(), clones.path().join("no-clones-disk")];
        SavedDisks::mark_needed(&images, &snapshot).unwrap().unmark_needed();
        assert_eq!(remove().needed, []);
        assert!(!folder.exists());
        make();
        let first = SavedDisks::mark_needed(&images, &snapshot).unwrap();
        // A later save under the same name fails: the first one needs the disk all the same.
        SavedDisks::mark_needed(&images, &snapshot).unwrap().unmark_needed();
        let removed = remove();
        assert_eq!((removed.needed.len(), removed.kept.len()), (1, 0));
        assert_eq!((&removed.needed[0].disk, &removed.needed[0].needed_by), (&disk, &vec![snapshot]));
        assert!(disk.exists());
        assert!(!folder.join("clone.json").exists());
        drop(first);
    }

    #[test]
    fn a_disk_below_another_image_of_the_directory_stays_with_it() {
        let clones = tempfile::tempdir().unwrap();
        let folder = clones.path().join("001");
        fs::create_dir(&folder).unwrap();
        record().write(&folder).unwrap();
        let (disk, middle, top) = (folder.join("disk0.qcow2"), folder.join("middle"), folder.join("top"));
        image(&disk, None);
        image(&middle, Some(&disk));
        image(&top, Some(&middle));
        fs::write(folder.join("note"), "QFI is no image").unwrap();
        fs::write(folder.join("log"), "QFI").unwrap();
        let removed = Home::lock(&folder).unwrap().unwrap().remove(&record()).unwrap();
        assert_eq!(removed.needed.len(), 1);
        assert_eq!(removed.needed[0].disk, disk);
        assert!([&disk, &middle, &top].iter().all(|path| path.exists()));
        assert_eq!(removed.kept.len(), 3, "{removed:?}");
    }
}
