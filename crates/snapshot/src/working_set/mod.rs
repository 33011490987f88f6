//! The working set of a snapshot: the pages that a guest touched after its start, in a file beside the snapshot.
//!
//! It is a file of its own (`SNAPSHOT.working-set`), because VMs may map the snapshot when it is recorded, and a mapped
//! file is never written to. It names the snapshot that it is of.
//!
//! Law of this module: **a working set is a hint.** It cannot make a page wrong: it decides the order in which pages
//! are read, and nothing else. One that is missing, damaged or of another snapshot costs that order alone. What
//! it asks for is bounded: each page at most once.

mod format;
mod inside;
mod plan;
mod read_ahead;
mod recorder;

use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use limosa_migrate::stored::BlockRange;
use limosa_page::{PageBitmap, PageRange};
use strum::IntoStaticStr;
use uuid::Uuid;

use crate::error::{InvalidWorkingSet, SnapshotError};
use crate::reader::Snapshot;
use crate::sidecar;
use crate::unnamed_file::{Durability, UnnamedFile};

pub use read_ahead::{ReadAhead, ReadAheadReport};
pub use recorder::WorkingSetRecorder;

/// The restore mode of the guest whose working set was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum RecordedMode {
    /// Its memory was mapped: pages are those that the kernel had mapped for it, neighbours of touched ones included.
    Mapped,
    /// Its memory came lazily: pages are those that it requested.
    Lazy,
    /// The record is a bitmap of an image: pages are those of its clusters, in no order, and nothing else is known.
    Image,
}

/// Pages of a snapshot that a guest touched after its start.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkingSet {
    /// The snapshot's id ([`Snapshot::id`]).
    pub snapshot: Uuid,
    /// How the guest was restored.
    pub mode: RecordedMode,
    /// When the recording began, in seconds since 1970; 0 if that is not known.
    pub begun: u64,
    /// How long it took; 0 if that is not known.
    pub duration: Duration,
    /// The pages in about the order of their first touch. No page is in it twice.
    pub ranges: Vec<BlockRange>,
}

impl WorkingSet {
    /// Reads the working set of a snapshot: the one beside it, else the one that is inside of a packed one. `None` if
    /// there is neither. Nothing is beside an object of a store.
    ///
    /// # Errors
    /// [`SnapshotError::WorkingSet`] if the file there is not this snapshot's working set; that it cannot be read.
    pub fn of(snapshot: &Snapshot) -> Result<Option<Self>, SnapshotError> {
        let beside = if snapshot.is_remote() { None } else { Self::beside(snapshot)? };
        if beside.is_some() { Ok(beside) } else { Self::inside(snapshot) }
    }

    fn beside(snapshot: &Snapshot) -> Result<Option<Self>, SnapshotError> {
        let path = Self::path_of(snapshot)?;
        let failed = |source| SnapshotError::io("read it", &path, None, source);
        let invalid = |why| SnapshotError::WorkingSet { path: path.clone(), why };
        let Some(mut file) = sidecar::open(rustix::fs::CWD, path.as_os_str()).map_err(failed)? else { return Ok(None) };
        let length = file.metadata().map_err(failed)?.len();
        if length > format::LENGTH_MAX {
            return Err(invalid(InvalidWorkingSet::Damaged("it is too long")));
        }
        let mut bytes = Vec::new();
        file.by_ref().take(format::LENGTH_MAX).read_to_end(&mut bytes).map_err(failed)?;
        Self::decode(&bytes, snapshot.id(), &snapshot.memory().stored).map(Some).map_err(invalid)
    }

    /// Decodes a working set of the snapshot with this id and these RAM blocks; a bitmap of each is given, whose length
    /// alone counts.
    ///
    /// # Errors
    /// The bytes are not its working set.
    pub fn decode(bytes: &[u8], snapshot: Uuid, blocks: &[PageBitmap]) -> Result<Self, InvalidWorkingSet> {
        format::decode(bytes, snapshot, blocks)
    }

    /// Returns its bytes in a file. [`decode`](Self::decode) takes up to 262,144 ranges.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        format::encode(self)
    }

    /// The name that the working set of a snapshot has: the snapshot's own, links resolved, and `.working-set`.
    ///
    /// # Errors
    /// The snapshot's name cannot be resolved.
    pub fn path_of(snapshot: &Snapshot) -> Result<PathBuf, SnapshotError> {
        Ok(name_for(&resolved_path(snapshot)?))
    }

    /// Number of its pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.ranges.iter().map(|range| range.pages.len()).sum()
    }
}

/// A working set's file that is prepared before a recording: what would refuse it refuses it then. Dropped without
/// [`publish`](Self::publish), it leaves nothing.
#[derive(Debug)]
pub struct WorkingSetFile {
    file: UnnamedFile,
    /// The snapshot's name, links resolved, and the file that has it.
    snapshot: (PathBuf, FileNumbers),
}

/// Numbers of a file: device and inode.
type FileNumbers = (u64, u64);

impl WorkingSetFile {
    /// Prepares the file beside a snapshot, mode 0600. It will replace an older working set.
    ///
    /// # Errors
    /// [`SnapshotError::WorkingSet`] if another file has the name; as [`UnnamedFile::create`], for example if the
    /// directory is not writable.
    pub fn create(snapshot: &Snapshot) -> Result<Self, SnapshotError> {
        let failed = |error: std::io::Error| SnapshotError::io("look at it", snapshot.path(), None, error);
        if snapshot.is_remote() {
            let (path, what) =
                (snapshot.path().to_path_buf(), "nothing is recorded beside an object of a store".to_owned());
            return Err(SnapshotError::Misuse { path, what });
        }
        let resolved = resolved_path(snapshot)?;
        let path = name_for(&resolved);
        let stat = rustix::fs::fstat(snapshot).map_err(|errno| failed(errno.into()))?;
        check_free(&path)?;
        let file = UnnamedFile::create(&path, true).map_err(|error| match error {
            SnapshotError::Locked { path, .. } => SnapshotError::Locked { path, by: RECORDED },
            error => error,
        })?;
        Ok(Self { file, snapshot: (resolved, (stat.st_dev, stat.st_ino)) })
    }

    /// Writes a working set, makes it durable, and gives it its name, which is returned.
    ///
    /// # Errors
    /// As [`create`](Self::create) and [`UnnamedFile::publish`]; [`InvalidWorkingSet::SnapshotGone`]; that it cannot be
    /// written.
    pub fn publish(self, set: &WorkingSet) -> Result<PathBuf, SnapshotError> {
        let Self { file, snapshot: (snapshot, numbers) } = self;
        let failed = |error| SnapshotError::io("write it", file.target(), None, error);
        file.file().write_all_at(&set.encode(), 0).map_err(failed)?;
        check_free(file.target())?;
        if rustix::fs::stat(&snapshot).map_or(true, |stat| (stat.st_dev, stat.st_ino) != numbers) {
            let path = file.target().to_owned();
            return Err(SnapshotError::WorkingSet { path, why: InvalidWorkingSet::SnapshotGone });
        }
        file.publish(Durability::Synced)
    }
}

/// The name of the working set of the snapshot that has this name.
fn name_for(snapshot: &Path) -> PathBuf {
    PathBuf::from(sidecar::name_for(snapshot.as_os_str()))
}

/// The snapshot's name, links resolved.
fn resolved_path(snapshot: &Snapshot) -> Result<PathBuf, SnapshotError> {
    let path = snapshot.path();
    std::fs::canonicalize(path).map_err(|error| SnapshotError::io("find it", path, None, error))
}

/// The holder of the lock of a working set that will be replaced.
const RECORDED: &str = "another recording will replace it; wait for that to end";

/// Refuses to replace a file that is no working set.
fn check_free(path: &Path) -> Result<(), SnapshotError> {
    let is_free = sidecar::is_free(rustix::fs::CWD, path.as_os_str());
    if is_free.map_err(|error| SnapshotError::io("look at it", path, None, error))? {
        return Ok(());
    }
    Err(SnapshotError::WorkingSet { path: path.to_owned(), why: InvalidWorkingSet::Foreign })
}

/// Notes a range of pages in a bitmap of those that were noted; false if one of them was already.
fn note_once(seen: &mut PageBitmap, pages: PageRange) -> bool {
    let is_new = seen.count_in(pages) == 0;
    seen.set_range(pages);
    is_new
}

/// Bitmaps as long as these, without a page in them.
fn empty_like(blocks: &[PageBitmap]) -> Vec<PageBitmap> {
    blocks.iter().map(|block| PageBitmap::new(block.len())).collect()
}

#[cfg(test)]
mod tests {
    use limosa_page::PageNumber;

    use super::*;

    #[test]
    fn a_range_is_new_only_if_none_of_its_pages_was_seen() {
        let mut seen = PageBitmap::new(100);
        let range = |start, end| PageRange::new(PageNumber(start), PageNumber(end));
        assert!(note_once(&mut seen, range(10, 20)));
        assert!(note_once(&mut seen, range(20, 30)));
        assert!(!note_once(&mut seen, range(5, 11)));
        assert_eq!(seen.count(), 25);
        assert_eq!(empty_like(&[seen])[0].count(), 0);
    }
}
