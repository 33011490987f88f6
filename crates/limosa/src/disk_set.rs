//! The disks of a VM beside the one that has its state: all have the internal snapshot, of one moment.
//!
//! Law: a set that is not consistent is refused before anything is read or written. What goes into a set goes into the
//! disk with the state last: QEMU loads a name that all disks have, so an interrupted export is not loaded.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use limosa_image::Format;
use limosa_image::chain::{ImageFile, OpenOptions};
use limosa_image::qcow2::{
    CheckOptions, Header, Snapshot, SnapshotChange, SnapshotChoice, change_snapshots, read_snapshots,
};
use limosa_image::reference::Reference;
use limosa_storage::block_on;

use crate::img::open::no_journal;
use crate::serve::beside::refuse_incomplete;

/// The snapshots of an image.
fn snapshots(image: &Path, file: &ImageFile) -> anyhow::Result<Vec<Snapshot>> {
    ensure!(file.format == Format::Qcow2, "{}: format {} has no internal snapshots", image.display(), file.format);
    Ok(block_on(async { read_snapshots(&*file.storage, &Header::read_for_reading(&*file.storage).await?).await })?)
}

/// Checks that all disks have the snapshot that `image` has, of the same moment, and that no other one has a state.
/// QEMU gives the snapshots of a VM's disks one name and one time; their ids may differ.
///
/// Returns the images, which other processes cannot change while they are open.
///
/// # Errors
/// One of them has no such snapshot, or one of another moment; an image cannot be opened.
pub(crate) fn check(
    image: &Path,
    tag: &SnapshotChoice,
    others: &[PathBuf],
    options: &OpenOptions,
) -> anyhow::Result<Vec<ImageFile>> {
    if others.is_empty() {
        return Ok(Vec::new());
    }
    let options = options.clone().read_only(true);
    let open = |path: &Path| anyhow::Ok(block_on(ImageFile::open(&Reference::from_name(path)?, &options))?);
    let file = open(image)?;
    let all = snapshots(image, &file)?;
    let mut files = vec![file];
    let Some(with_state) = tag.find(&all) else { bail!("{}: it has no snapshot with {tag}", image.display()) };
    let name = SnapshotChoice::IdAndName { id: None, name: Some(with_state.name.clone()) };
    for other in others {
        let file = open(other)?;
        let all = snapshots(other, &file)?;
        files.push(file);
        let Some(found) = name.find(&all) else {
            bail!("{}: it has no snapshot with {name}, which {} has", other.display(), image.display());
        };
        let is_same = (found.taken, found.vm_clock) == (with_state.taken, with_state.vm_clock);
        ensure!(
            is_same,
            "{}: its snapshot with {name} is not of the moment of that of {}",
            other.display(),
            image.display()
        );
        ensure!(found.vm_state_size == 0, "{}: its snapshot with {name} has a state of a VM, too", other.display());
    }
    Ok(files)
}

/// Disks that get a snapshot together with the one that gets the VM's state. They are open, so nothing else uses them.
pub(crate) struct NewSnapshots<'a> {
    disks: Vec<(&'a Path, ImageFile)>,
    change: SnapshotChange,
    name: &'a str,
    /// How many have it.
    done: usize,
}

impl<'a> NewSnapshots<'a> {
    /// Opens the disks.
    ///
    /// # Errors
    /// One of them cannot be opened, is not qcow2, or has a snapshot of this name.
    pub(crate) fn begin(disks: &'a [PathBuf], name: &'a str, taken: (u32, u32)) -> anyhow::Result<Self> {
        let open = |path: &'a PathBuf| {
            let reference = Reference::from_name(path)?;
            refuse_incomplete(&reference)?;
            let file = block_on(ImageFile::open(&reference, &no_journal(OpenOptions::default())))?;
            refuse_taken(path, &file, name)?;
            anyhow::Ok((path.as_path(), file))
        };
        let disks = disks.iter().map(open).collect::<anyhow::Result<_>>()?;
        Ok(Self { disks, change: SnapshotChange::Create { name: name.to_owned(), taken }, name, done: 0 })
    }

    /// Takes the snapshots, durably. Those that were taken stay after a failure: [`undo`](Self::undo).
    ///
    /// # Errors
    /// That of the first disk that cannot have one.
    pub(crate) fn take(&mut self) -> anyhow::Result<()> {
        for (path, file) in &self.disks {
            let taken = block_on(change_snapshots(&*file.storage, &self.change, CheckOptions::default()));
            taken.with_context(|| format!("{}: no snapshot", path.display()))?;
            self.done += 1;
        }
        Ok(())
    }

    /// Removes the snapshots again. One that cannot be removed is named in a warning.
    pub(crate) fn undo(&self) {
        let choice = SnapshotChoice::IdAndName { id: None, name: Some(self.name.to_owned()) };
        let delete = SnapshotChange::Delete(choice);
        for (path, file) in self.disks.iter().take(self.done) {
            if let Err(error) = block_on(change_snapshots(&*file.storage, &delete, CheckOptions::default())) {
                tracing::warn!(%error, "{}: the snapshot {:?} was not removed again", path.display(), self.name);
            }
        }
    }
}

/// Refuses an image that has a snapshot of this name.
///
/// # Errors
/// It has one; its snapshots cannot be read.
pub(crate) fn refuse_taken(path: &Path, file: &ImageFile, name: &str) -> anyhow::Result<()> {
    let is_taken = snapshots(path, file)?.iter().any(|snapshot| snapshot.name == name);
    ensure!(!is_taken, "{}: it has a snapshot with the name {name:?} already", path.display());
    Ok(())
}
