//! Snapshots that are packed again on another base.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use limosa_migrate::Handle;
use limosa_migrate::control::Phase;
use limosa_snapshot::{HeldSnapshot, Snapshot, SnapshotError, UnnamedFile};
use limosa_storage::FileIdentity;

use super::{PATIENCE, SnapshotDirectory, check_planned};
use crate::base::Base;
use crate::chain::{Chain, facts};
use crate::entry::SnapshotFile;
use crate::equality::check_equal;
use crate::error::PackError;
use crate::head::is_image;
use crate::image::DEPTH_LIMIT;
use crate::open::{open_file, snapshot_of};
use crate::pack::{Inherited, LuksHeader, NewFile, PackOptions, Packed, write};
use crate::record::{REPLACED_MOST, TableDigest};

/// How long readers are waited for when the new file is whole: it may have been hours.
const PATIENCE_WHEN_PACKED: Duration = Duration::from_secs(30);

/// The snapshot that is packed again, and what its new file has from it.
struct Source {
    snapshot: Snapshot,
    inherited: Inherited,
    /// Its cluster size, and whether it has a base.
    cluster_size: u64,
    has_base: bool,
    /// The files of its chain, and the bytes that each takes on the disk.
    files: Vec<(FileIdentity, u64)>,
}

/// A snapshot that is to stand on another base.
struct Change<'a> {
    name: &'a OsStr,
    base: Option<&'a OsStr>,
    /// Both as a plan has them.
    planned: Option<(&'a SnapshotFile, Option<&'a SnapshotFile>)>,
}

impl SnapshotDirectory {
    /// Has a snapshot stand on another base of the directory, or on none, without changing what it holds. What stands
    /// on it stays as it is. The file keeps its owner, mode, attributes and time, and its key slots.
    /// Its clusters are as large as before if it was an increment and stays one, or was none.
    ///
    /// When the new file gets the name, it is durable and was compared with the old one, with any options.
    ///
    /// # Errors
    /// It is served, or one that stands on it is; the base stands on it, or cannot be one; one of the chains above it
    /// would have more than [`DEPTH_LIMIT`] images; it cannot be read or written; there may not be enough room; another
    /// file has its name when the new one is whole.
    pub fn rebase(
        &self,
        name: &OsStr,
        base: Option<&OsStr>,
        options: &PackOptions,
        handle: &Handle,
    ) -> Result<Packed, PackError> {
        let packed = self.pack_again(&Change { name, base, planned: None }, options, handle)?;
        handle.progress.set_phase(Phase::Completed);
        Ok(packed)
    }

    /// As [`rebase`](Self::rebase), if both snapshots are those of the plan.
    pub(super) fn rebase_planned(
        &self,
        planned: &SnapshotFile,
        base: Option<&SnapshotFile>,
        options: &PackOptions,
        handle: &Handle,
    ) -> Result<Packed, PackError> {
        let (name, base_name) = (planned.name.as_os_str(), base.map(|base| base.name.as_os_str()));
        let change = Change { name, base: base_name, planned: Some((planned, base)) };
        self.pack_again(&change, options, handle)
    }

    /// Takes a snapshot out of its chain: what stands on it stands on its base then, or on none, and it is removed.
    /// `on_rebased` learns of each that was packed again, also if a later one fails.
    ///
    /// # Errors
    /// As [`rebase`](Self::rebase); nothing stands on it. What was done before an error stays done, and a repetition
    /// continues there.
    pub fn merge(
        &self,
        name: &OsStr,
        options: &PackOptions,
        handle: &Handle,
        mut on_rebased: impl FnMut(Packed),
    ) -> Result<(), PackError> {
        let path = self.path_of(name);
        let dependents = self.dependents(name)?;
        if dependents.is_empty() {
            let what = "no snapshot stands on it, so there is nothing that it could be merged into".to_owned();
            return Err(PackError::Refused { path, what });
        }
        let base: Option<OsString> = self.look_into(&open_file(&path)?, &path)?.and_then(|image| image.base_name);
        for dependent in &dependents {
            let change = Change { name: dependent, base: base.as_deref(), planned: None };
            on_rebased(self.pack_again(&change, options, handle)?);
        }
        self.remove(name)?;
        handle.progress.set_phase(Phase::Completed);
        Ok(())
    }

    fn pack_again(&self, change: &Change<'_>, options: &PackOptions, handle: &Handle) -> Result<Packed, PackError> {
        let Change { name, base, planned } = *change;
        let path = self.path_of(name);
        let held = HeldSnapshot::open(&path)?;
        // Refused now, and not when it is packed. It may be read meanwhile, by others as well.
        held.exclude_all(PATIENCE)?;
        held.share()?;
        let mut source = self.source(&held)?;
        if let Some((planned, _)) = planned {
            check_planned(planned, &held, Some(source.snapshot.id()))?;
        }
        let base = base.map(|base| Base::open(&self.path_of(base), &self.access())).transpose()?;
        if let Some(base) = &base {
            let refused = |what: &str| {
                let base = base.name().display().to_string();
                Err(PackError::Base { path: path.clone(), base, what: what.to_owned() })
            };
            if base.stands_on(&path) {
                return refused("stands on it already");
            }
            let planned = planned.and_then(|(_, base)| base);
            if planned.is_some_and(|planned| planned.id != Some(base.snapshot().id())) {
                return refused("is another snapshot now than when this was planned");
            }
        }
        let known_tables = self.check_depth(name, base.as_ref())?;
        order_replaced(&mut source.inherited.replaced, &known_tables, &path)?;
        check_room(&source, base.as_ref(), &held)?;
        let mut options = options.clone();
        if options.cluster_size.is_none() && source.has_base == base.is_some() {
            options.cluster_size = Some(source.cluster_size);
        }
        let before = facts(&held.file().metadata().map_err(PackError::io("look at it", &path))?);
        let pending = UnnamedFile::replacing(&held)?;
        let new = NewFile { file: pending.file(), target: &path, inherited: &source.inherited };
        let mut packed = write(&source.snapshot, &new, base.as_ref(), &options, handle)?;
        self.check_packed(&source.snapshot, &pending, handle)?;
        source.snapshot.check_unchanged()?;
        // Its locks, which would be in the way.
        drop(source);
        held.exclude_all(PATIENCE_WHEN_PACKED)?;
        if facts(&held.file().metadata().map_err(PackError::io("look at it", &path))?) != before {
            let what = "it was written to meanwhile".to_owned();
            return Err(PackError::Snapshot(SnapshotError::Changed { path, what }));
        }
        self.check_depth(name, base.as_ref())?;
        packed.path = pending.replace_held(&held)?;
        Ok(packed)
    }

    /// Opens the snapshot in a file that is held.
    fn source(&self, held: &HeldSnapshot) -> Result<Source, PackError> {
        let path = held.path();
        let file = open_file(path)?;
        held.check_named()?;
        if !is_image(&file) {
            let what = "a snapshot that is not packed stands on nothing".to_owned();
            return Err(PackError::Refused { path: path.to_path_buf(), what });
        }
        let chain = Chain::open(&file, path, self.passphrase.as_ref())?;
        let top = chain.top();
        let mut inherited = Inherited::default();
        if let Some(own) = top.identity()? {
            let before = top.record().map(|record| record.replaced.as_slice()).unwrap_or_default();
            inherited.replaced = [&[own.tables], before].concat();
        }
        // What is encrypted anywhere in the chain is not written in the clear.
        if let (Some(level), Some(passphrase)) =
            (chain.levels.iter().find(|level| level.is_encrypted()), &self.passphrase)
        {
            inherited.luks = Some(LuksHeader::of(level, passphrase)?);
        }
        let mut files = Vec::new();
        for level in &chain.levels {
            let metadata = level.file.metadata().map_err(PackError::io("look at it", &level.path))?;
            files.push((FileIdentity::of(&metadata), metadata.blocks().saturating_mul(512)));
        }
        let (cluster_size, has_base) = (top.cluster_size(), top.base_name().is_some());
        let snapshot = snapshot_of(chain, file, path)?;
        snapshot.lock_serving()?;
        Ok(Source { snapshot, inherited, cluster_size, has_base, files })
    }

    /// Checks that no chain above a file becomes too long. Returns the tables that those which stand on it record.
    fn check_depth(&self, name: &OsStr, base: Option<&Base>) -> Result<Vec<TableDigest>, PackError> {
        let above = self.above(name)?;
        let images = base.map_or(0, Base::depth) + 1 + above.height;
        match base.filter(|_| images > DEPTH_LIMIT) {
            Some(base) => {
                let what = format!("{images} images would be in the longest chain above it, and {DEPTH_LIMIT} may be");
                Err(PackError::Base { path: self.path_of(name), base: base.name().display().to_string(), what })
            }
            None => Ok(above.tables),
        }
    }

    /// Opens the new file with all that it stands on, and compares what it holds.
    fn check_packed(&self, source: &Snapshot, pending: &UnnamedFile, handle: &Handle) -> Result<(), PackError> {
        let path = pending.target();
        let file = pending.file().try_clone().map_err(PackError::io("open it again", path))?;
        let chain = Chain::open(&file, path, self.passphrase.as_ref())?;
        check_equal(source, &snapshot_of(chain, file, path)?, handle)
    }
}

/// Cuts the list of replaced files to what has room in a header: the one that is there first, then those that others
/// know, then the newest ones.
fn order_replaced(replaced: &mut Vec<TableDigest>, known: &[TableDigest], path: &Path) -> Result<(), PackError> {
    if let Some((_, before)) = replaced.split_first_mut() {
        before.sort_by_key(|tables| !known.contains(tables));
    }
    if replaced.iter().skip(REPLACED_MOST).any(|tables| known.contains(tables)) {
        let what = format!("snapshots stand on more than {REPLACED_MOST} of the files that it has replaced");
        return Err(PackError::Refused { path: path.to_path_buf(), what });
    }
    replaced.truncate(REPLACED_MOST);
    Ok(())
}

/// Checks that there is room for what the new file takes at most: all that its chain has, without the new base's.
fn check_room(source: &Source, base: Option<&Base>, held: &HeldSnapshot) -> Result<(), PackError> {
    let mut shared = Vec::new();
    for level in base.map(Base::levels).unwrap_or_default() {
        let metadata = level.file.metadata().map_err(PackError::io("look at it", &level.path))?;
        shared.push(FileIdentity::of(&metadata));
    }
    let own = source.files.iter().filter(|(file, _)| !shared.contains(file));
    let needed = own.map(|(_, allocated)| *allocated).fold(0, u64::saturating_add);
    let path: PathBuf = held.path().to_path_buf();
    let found = rustix::fs::fstatvfs(held.file());
    let found = found.map_err(|errno| PackError::io("find how much room there is", &path)(errno.into()))?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free < needed { Err(PackError::NoRoom { path, needed, free }) } else { Ok(()) }
}
