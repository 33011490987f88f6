//! The record of a clone: `clone.json` in its directory.
//!
//! It is replaced by a rename, so a reader finds the old one or the new one.

use std::fs;
use std::path::{Path, PathBuf};

use limosa_qemu::ProcessIdentity;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::CloneError;

/// The file's name in a clone's directory.
pub(crate) const RECORD: &str = "clone.json";
/// Longest record that is read, in bytes: thousands of disks.
const RECORD_LIMIT: u64 = 4 << 20;

/// A clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its name, which is that of its directory.
    pub name: String,
    /// Its number, from 1.
    pub number: u64,
    /// The snapshot's absolute path.
    pub snapshot: PathBuf,
    /// The snapshot's id, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<Uuid>,
    /// Its QEMU; none before it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessIdentity>,
    /// The socket of its monitor (QMP).
    pub monitor: PathBuf,
    /// The file with QEMU's output.
    pub log: PathBuf,
    /// The overlays that were made for it.
    #[serde(default)]
    pub overlays: Vec<OverlayRecord>,
    /// Whether QEMU has its VM.
    pub loaded: bool,
    /// When it was started, in seconds since 1970.
    pub created: u64,
}

/// An overlay of a clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayRecord {
    /// The overlay.
    pub path: PathBuf,
    /// The frozen disk below it.
    pub backing: PathBuf,
}

impl Record {
    /// Reads the record of the clone in `folder`; none if that is no clone.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, CloneError> {
        let path = folder.join(RECORD);
        let failed = |error| Err(CloneError::path("read", &path)(error));
        match fs::metadata(&path) {
            Ok(found) if found.len() > RECORD_LIMIT => {
                return failed(std::io::Error::other(format!("{} bytes are no record of a clone", found.len())));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => return Ok(None),
            Err(error) => return failed(error),
            Ok(_) => {}
        }
        let text = fs::read(&path).map_err(CloneError::path("read", &path))?;
        serde_json::from_slice(&text).map(Some).or_else(|error| failed(error.into()))
    }

    /// Writes it, in place of an older one.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), CloneError> {
        let (path, temporary) = (folder.join(RECORD), folder.join(format!(".{RECORD}")));
        let text = serde_json::to_vec_pretty(self).map_err(|error| CloneError::path("write", &path)(error.into()))?;
        fs::write(&temporary, text).map_err(CloneError::path("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(CloneError::path("write", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_and_damaged_or_missing_ones_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Record::read(folder.path()).unwrap(), None);
        let record = Record {
            name: "001".into(),
            number: 1,
            snapshot: "/srv/vm".into(),
            snapshot_id: None,
            process: Some(ProcessIdentity::own()),
            monitor: "/d/001/qmp".into(),
            log: "/d/001/log".into(),
            overlays: vec![OverlayRecord { path: "/d/001/disk".into(), backing: "/srv/disk".into() }],
            loaded: true,
            created: 7,
        };
        record.write(folder.path()).unwrap();
        assert_eq!(Record::read(folder.path()).unwrap(), Some(record));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        fs::write(folder.path().join(RECORD), "{").unwrap();
        assert!(Record::read(folder.path()).is_err());
        assert_eq!(Record::read(&folder.path().join(RECORD)).unwrap(), None, "a file is no clone");
    }
}
