//! The record of a clone: `clone.json` in its directory.
//!
//! It is replaced by a rename, so a reader finds the old one or the new one. Its names are relative to the directory,
//! which may be moved.

use std::fs;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use limosa_page::invariant;
use limosa_qemu::{Liveness, ProcessIdentity};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::CloneError;
use crate::overlay::Backing;
use crate::phase::Phase;

/// The file's name in a clone's directory.
pub(crate) const RECORD: &str = "clone.json";
/// The name that a record has until it is complete.
pub(crate) const UNFINISHED_RECORD: &str = ".clone.json";
/// The name of the monitor's socket in a clone's directory.
pub(crate) const MONITOR: &str = "qmp";
/// The name of the file with QEMU's output in a clone's directory.
pub(crate) const LOG: &str = "log";
/// The version of the record that is written. Others are not read.
const VERSION: u32 = 1;
/// Longest record that is read, in bytes: thousands of disks.
const RECORD_LIMIT: u64 = 4 << 20;

/// A clone, as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Record {
    /// The format of the record: 1.
    version: u32,
    /// The clone's number, from 1.
    pub number: u64,
    /// The last phase that was written down.
    pub phase: Phase,
    /// The snapshot.
    pub snapshot: SnapshotIdentity,
    /// Its QEMU; `None` before it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessIdentity>,
    /// The overlays that were made for it.
    #[serde(default)]
    pub overlays: Vec<OverlayRecord>,
    /// The purpose of its QEMU if that waits in a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolPurpose>,
    /// Names in its directory that the command line gives to QEMU: serial files, sockets, pid files.
    #[serde(default)]
    pub outputs: Vec<PathBuf>,
    /// When it was started, in seconds since 1970.
    pub created: u64,
}

/// The name of the clone of this number, which is that of its directory.
pub(crate) fn name_of(number: u64) -> String {
    format!("{number:03}")
}

/// The snapshot of a clone, with what tells its file from another of the same name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SnapshotIdentity {
    /// Its absolute path when the clone was made.
    pub path: PathBuf,
    /// Its id, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Uuid>,
    /// The number of the device that its file is on.
    pub device: u64,
    /// The file's inode number.
    pub inode: u64,
}

/// The purpose of a QEMU in a pool, beside its snapshot: it is taken for a clone of the same purpose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PoolPurpose {
    /// The command line that was given, with its placeholders.
    pub command: Vec<String>,
    /// The working directory, from which relative paths in the command line start.
    pub directory: PathBuf,
    /// The RAM blocks that it maps.
    pub mapped: Vec<String>,
    /// How its overlays name the disks below them.
    pub backing: Backing,
}

/// An overlay of a clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OverlayRecord {
    /// The overlay's name in the clone's directory.
    pub name: PathBuf,
    /// The frozen disk below it.
    pub backing: PathBuf,
    /// Snapshots that were saved with it: it stays when its clone is removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<PathBuf>,
}

impl SnapshotIdentity {
    /// The identity of the open file `file` of this path.
    pub(crate) fn of(path: &Path, id: Option<Uuid>, file: BorrowedFd<'_>) -> Result<Self, CloneError> {
        let found = rustix::fs::fstat(file).map_err(|error| CloneError::path("read", path)(error.into()))?;
        Ok(Self { path: path.to_path_buf(), id, device: found.st_dev, inode: found.st_ino })
    }

    /// Whether both are one file, also under different names.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        (self.id, self.device, self.inode) == (other.id, other.device, other.inode)
    }
}

/// Sends a signal to a process that is still the one with this identity: its start time is looked at right before.
pub(crate) fn signal(process: &ProcessIdentity, signal: Signal) {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
    if let (Some(pid), Liveness::Alive) = (pid, process.liveness()) {
        let _ = kill_process(pid, signal);
    }
}

impl Record {
    /// The record of a clone that is prepared.
    pub(crate) fn prepared(
        number: u64,
        snapshot: SnapshotIdentity,
        overlays: Vec<OverlayRecord>,
        outputs: Vec<PathBuf>,
    ) -> Self {
        let created = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let created = created.map_or(0, |elapsed| elapsed.as_secs());
        let (version, phase, process, pool) = (VERSION, Phase::Prepared, None, None);
        Self { version, number, phase, snapshot, process, overlays, pool, outputs, created }
    }

    /// Whether its QEMU lives, on this host.
    pub(crate) fn is_alive(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.liveness() == Liveness::Alive)
    }

    /// Reads the record of the clone in `folder`; `None` if that is not a clone.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, CloneError> {
        /// All that is read of a record of another version.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let path = folder.join(RECORD);
        let failed = |error| Err(CloneError::path("read", &path)(error));
        match fs::metadata(&path) {
            Ok(found) if found.len() > RECORD_LIMIT => {
                return failed(std::io::Error::other(format!("{} bytes are too long for a record", found.len())));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => return Ok(None),
            Err(error) => return failed(error),
            Ok(_) => {}
        }
        let text = fs::read(&path).map_err(CloneError::path("read", &path))?;
        match serde_json::from_slice::<Versioned>(&text) {
            Err(error) => failed(error.into()),
            Ok(Versioned { version }) if version != VERSION => {
                failed(std::io::Error::other(format!("record of version {version}, expected version {VERSION}")))
            }
            Ok(_) => serde_json::from_slice(&text).map(Some).or_else(|error| failed(error.into())),
        }
    }

    /// Writes it in place of an older one.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), CloneError> {
        let (path, temporary) = (folder.join(RECORD), folder.join(UNFINISHED_RECORD));
        let text = serde_json::to_vec_pretty(self).map_err(|error| CloneError::path("write", &path)(error.into()))?;
        fs::write(&temporary, text).map_err(CloneError::path("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(CloneError::path("write", &path))
    }

    /// Writes it in place of an older one, and makes it durable.
    pub(crate) fn write_durably(&self, folder: &Path) -> Result<(), CloneError> {
        self.write(folder)?;
        for path in [folder.join(RECORD), folder.to_path_buf()] {
            fs::File::open(&path).and_then(|file| file.sync_all()).map_err(CloneError::path("make durable", path))?;
        }
        Ok(())
    }

    /// Writes down that the clone has entered a phase.
    pub(crate) fn enter(&mut self, phase: Phase, folder: &Path) -> Result<(), CloneError> {
        invariant(self.phase.can_follow(phase), "the phases of a clone follow each other")?;
        self.phase = phase;
        if phase != Phase::Waiting {
            self.pool = None;
        }
        self.write(folder)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn record() -> Record {
        let snapshot = SnapshotIdentity { path: "/srv/vm".into(), id: None, device: 1, inode: 2 };
        let overlays =
            vec![OverlayRecord { name: "disk0.qcow2".into(), backing: "/srv/disk".into(), snapshots: Vec::new() }];
        Record::prepared(1, snapshot, overlays, vec!["serial".into()])
    }

    #[test]
    fn a_record_comes_back_and_damaged_or_missing_ones_are_distinguished() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Record::read(folder.path()).unwrap(), None);
        let mut record = record();
        record.process = Some(ProcessIdentity::own());
        record.enter(Phase::Waiting, folder.path()).unwrap();
        assert_eq!(Record::read(folder.path()).unwrap(), Some(record.clone()));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        record.version = 2;
        record.write(folder.path()).unwrap();
        let error = Record::read(folder.path()).unwrap_err();
        assert!(std::error::Error::source(&error).unwrap().to_string().contains("version 2"), "{error:?}");
        fs::write(folder.path().join(RECORD), "{").unwrap();
        assert!(Record::read(folder.path()).is_err());
        assert_eq!(Record::read(&folder.path().join(RECORD)).unwrap(), None, "a file is no clone");
    }

    #[test]
    fn a_phase_that_does_not_follow_is_a_broken_invariant() {
        let folder = tempfile::tempdir().unwrap();
        let entered = std::panic::catch_unwind(|| record().enter(Phase::Running, folder.path()));
        assert!(!matches!(entered, Ok(Ok(()))));
        assert_eq!(Record::read(folder.path()).unwrap(), None);
    }
}
