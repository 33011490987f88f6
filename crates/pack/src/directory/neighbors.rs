//! The files of a directory, and which of them stand on one.
//!
//! Law: **what is not known counts as standing on it.** Every file is looked into that is not limosa's own temporary
//! one, hidden or not, snapshot or not; one that cannot be is an error. Headers are read without a lock, because a file
//! that another program writes to stands on its base as well.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use limosa_snapshot::{Snapshot, is_temporary_name};
use limosa_storage::{FileIdentity, FileOptions, LockPolicy};
use uuid::Uuid;

use super::SnapshotDirectory;
use crate::error::PackError;
use crate::head::{Head, is_image, may_name, storage_of};
use crate::image::DEPTH_LIMIT;
use crate::open::open_file;
use crate::record::{Record, TableDigest};

/// A file that was looked into.
#[derive(Debug)]
pub(super) struct KnownFile {
    /// Its length, and the times of its last write and of its last change.
    facts: [i64; 5],
    image: Option<Image>,
}

/// An image of the directory.
#[derive(Debug, Clone)]
pub(super) struct Image {
    pub(super) record: Option<Record>,
    pub(super) base_name: Option<OsString>,
}

/// A file of the directory.
#[derive(Debug)]
pub(super) struct Neighbor {
    name: OsString,
    file: FileIdentity,
    image: Option<Image>,
}

/// A file that others may stand on.
#[derive(Debug, Clone)]
struct Target {
    name: OsString,
    file: FileIdentity,
    /// The snapshot in it, if it is one.
    id: Option<Uuid>,
}

/// The files that stand on a snapshot.
#[derive(Debug, Default)]
pub(super) struct Above {
    /// Those that stand on it directly.
    pub(super) dependents: Vec<OsString>,
    /// Digests of its tables that these have.
    pub(super) tables: Vec<TableDigest>,
    /// Number of images in the longest chain above it.
    pub(super) height: usize,
}

impl SnapshotDirectory {
    /// Returns the names of the files that stand on one.
    ///
    /// # Errors
    /// [`PackError::Unknown`]: a file of the directory cannot be looked into.
    pub fn dependents(&self, name: &OsStr) -> Result<Vec<OsString>, PackError> {
        Ok(self.above(name)?.dependents)
    }

    /// Finds what stands on a file.
    pub(super) fn above(&self, name: &OsStr) -> Result<Above, PackError> {
        let target = self.target(name)?;
        let neighbors = self.neighbors(target.file)?;
        let mut above = Above::default();
        let mut seen = HashSet::from([target.file]);
        let mut front = vec![target];
        // A loop of images ends, too: a file is in the chain of another one once.
        while !front.is_empty() && above.height <= DEPTH_LIMIT {
            let stands = |neighbor: &&Neighbor| {
                !seen.contains(&neighbor.file)
                    && front.iter().any(|target| self.stands_on(neighbor, target, &neighbors))
            };
            let standing: Vec<_> = neighbors.iter().filter(stands).collect();
            if above.height == 0 {
                above.dependents = standing.iter().map(|neighbor| neighbor.name.clone()).collect();
                let records = standing.iter().filter_map(|neighbor| neighbor.image.as_ref()?.record.as_ref()?.base);
                above.tables = records.map(|base| base.tables).collect();
            }
            above.height += usize::from(!standing.is_empty());
            seen.extend(standing.iter().map(|neighbor| neighbor.file));
            front = standing.into_iter().map(Neighbor::as_target).collect();
        }
        Ok(above)
    }

    /// The names of its files, in order: without limosa's temporary ones, and those to be ignored.
    pub(super) fn names(&self) -> Result<Vec<OsString>, PackError> {
        let read = std::fs::read_dir(&self.path).map_err(PackError::io("read it", &self.path))?;
        let mut names = Vec::new();
        for entry in read {
            let name = entry.map_err(PackError::io("read it", &self.path))?.file_name();
            if !is_temporary_name(&name) && !self.ignored.contains(&name) {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Opens a regular file of the directory; `None`: it is no regular file, or is gone.
    pub(super) fn open_regular(&self, name: &OsStr) -> Result<Option<(File, Metadata)>, PackError> {
        let path = self.path_of(name);
        let opened = match std::fs::metadata(&path) {
            // Opening a device may have effects.
            Ok(found) if !found.is_file() => return Ok(None),
            Ok(_) => open_file(&path).and_then(|file| {
                let metadata = file.metadata().map_err(PackError::io("look at it", &path))?;
                Ok(metadata.is_file().then_some((file, metadata)))
            }),
            Err(error) => Err(PackError::io("look at it", &path)(error)),
        };
        match opened {
            Err(PackError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened,
        }
    }

    /// Looks into an image, without a lock; `None`: the file has no image.
    pub(super) fn look_into(&self, file: &File, path: &Path) -> Result<Option<Image>, PackError> {
        let metadata = file.metadata().map_err(PackError::io("look at it", path))?;
        let (identity, facts) = (FileIdentity::of(&metadata), facts(&metadata));
        if let Some(known) = self.known.lock().get(&identity).filter(|known| known.facts == facts) {
            return Ok(known.image.clone());
        }
        let image = if is_image(file) {
            let mut options = FileOptions::read_only_default();
            options.lock = LockPolicy::None;
            let head = Head::read(storage_of(file, path, options)?, path, self.passphrase.as_ref())?;
            head.map(|head| Image { base_name: head.base_name().map(OsStr::to_os_string), record: head.record })
        } else {
            None
        };
        self.known.lock().insert(identity, KnownFile { facts, image: image.clone() });
        Ok(image)
    }

    /// Looks into all files of the directory but one.
    fn neighbors(&self, but: FileIdentity) -> Result<Vec<Neighbor>, PackError> {
        let mut neighbors = Vec::new();
        for name in self.names()? {
            let path = self.path_of(&name);
            let looked = self.open_regular(&name).and_then(|opened| {
                let Some((file, metadata)) = opened else { return Ok(None) };
                if FileIdentity::of(&metadata) == but {
                    return Ok(None);
                }
                let image = self.look_into(&file, &path)?;
                Ok(Some(Neighbor { name, file: FileIdentity::of(&metadata), image }))
            });
            neighbors.extend(looked.map_err(|source| PackError::Unknown { path, source: Box::new(source) })?);
        }
        Ok(neighbors)
    }

    fn target(&self, name: &OsStr) -> Result<Target, PackError> {
        let path = self.path_of(name);
        let file = open_file(&path)?;
        let metadata = file.metadata().map_err(PackError::io("look at it", &path))?;
        let id = match self.look_into(&file, &path) {
            Ok(Some(image)) => image.record.map(|record| record.id),
            Ok(None) => Snapshot::from_file(file, &path).ok().map(|snapshot| snapshot.id()),
            // Its name is enough for what stands on it.
            Err(_) => None,
        };
        Ok(Target { name: name.to_os_string(), file: FileIdentity::of(&metadata), id })
    }

    fn stands_on(&self, neighbor: &Neighbor, target: &Target, neighbors: &[Neighbor]) -> bool {
        let Some(image) = neighbor.image.as_ref().filter(|_| neighbor.file != target.file) else { return false };
        if image.base_name.as_ref().is_some_and(|base| self.leads_to(base, target)) {
            return true;
        }
        // The name of its base may be gone, or be another file's now. Then this is what would repair it.
        let wanted = image.record.as_ref().and_then(|record| record.base).map(|base| base.id);
        let has_another = || {
            neighbors
                .iter()
                .filter(|other| other.id() == wanted)
                .any(|other| image.base_name.as_ref().is_some_and(|base| self.leads_to(base, &other.as_target())))
        };
        wanted.is_some() && wanted == target.id && !has_another()
    }

    /// Whether the name of a backing file is that of a file.
    fn leads_to(&self, backing: &OsStr, target: &Target) -> bool {
        if may_name(backing, &target.name) {
            return true;
        }
        let bytes = backing.as_bytes();
        if bytes.starts_with(b"json:") {
            return false;
        }
        let plain = OsStr::from_bytes(bytes.strip_prefix(b"file:").unwrap_or(bytes));
        match std::fs::metadata(self.path.join(plain)) {
            Ok(found) => FileIdentity::of(&found) == target.file,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            // It cannot be looked at.
            Err(_) => Path::new(plain).file_name() == Some(&target.name),
        }
    }
}

impl Neighbor {
    fn id(&self) -> Option<Uuid> {
        self.image.as_ref()?.record.as_ref().map(|record| record.id)
    }

    fn as_target(&self) -> Target {
        Target { name: self.name.clone(), file: self.file, id: self.id() }
    }
}

fn facts(metadata: &Metadata) -> [i64; 5] {
    let length = metadata.len().cast_signed();
    [length, metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()]
}
