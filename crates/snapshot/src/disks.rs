//! Whether a stored VM's disks are still as its memory expects them.
//!
//! A guest that was stopped with file systems mounted holds parts of its disks in memory. Restoring that memory over a
//! disk that was written since destroys the file system, quietly. Size and modification time recorded at the
//! save tell; contents are not compared.
//!
//! The manifest comes from a file, so its paths are only looked at: `stat`, and for block devices an open that reads
//! nothing.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::manifest::Manifest;

/// A writable disk of a stored VM, as it was when the VM stopped, or was frozen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The block node's name in the source QEMU.
    #[serde(default)]
    pub node: String,
    /// The device it is attached to (qdev id or path), if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The file or block device.
    pub path: PathBuf,
    /// The image format, by QEMU's driver name ("qcow2", "raw").
    #[serde(default)]
    pub format: String,
    /// Length of the file or block device in bytes.
    pub size: u64,
    /// Modification time in nanoseconds since 1970; absent where it means nothing (block devices).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtime_ns: Option<i64>,
    /// The overlay that the VM went on with when this disk was frozen; absent if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<PathBuf>,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

impl Disk {
    /// Records a disk in its present state.
    ///
    /// # Errors
    /// If the path cannot be looked at, or is neither a regular file nor a block device.
    pub fn record(
        node: impl Into<String>,
        device: Option<String>,
        path: impl Into<PathBuf>,
        format: impl Into<String>,
    ) -> io::Result<Self> {
        let path = path.into();
        let (size, mtime_ns) = measure(&path)?;
        Ok(Self {
            node: node.into(),
            device,
            path,
            format: format.into(),
            size,
            mtime_ns,
            overlay: None,
            others: Map::new(),
        })
    }
}

/// A disk that has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskChange {
    /// The disk as recorded.
    pub disk: Disk,
    /// The difference.
    pub difference: Difference,
}

/// How a disk differs from its record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Difference {
    /// The file does not exist.
    Missing,
    /// It cannot be looked at.
    Unreadable {
        /// Why.
        why: String,
    },
    /// Its length is another.
    Size {
        /// Length now, in bytes.
        now: u64,
    },
    /// It was written since.
    Modified {
        /// Modification time now, in nanoseconds since 1970; absent if it has become a block device.
        now_ns: Option<i64>,
    },
}

impl fmt::Display for DiskChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "disk {} ({}) ", self.disk.node, self.disk.path.display())?;
        match &self.difference {
            Difference::Missing => write!(f, "is missing"),
            Difference::Unreadable { why } => write!(f, "cannot be looked at: {why}"),
            Difference::Size { now } => write!(f, "has {now} bytes, {} when the VM was saved", self.disk.size),
            Difference::Modified { .. } => write!(f, "was written after the VM was saved"),
        }
    }
}

/// The manifest's disks that have changed since the save; empty if none has.
pub fn check_disks(manifest: &Manifest) -> Vec<DiskChange> {
    manifest
        .disks
        .iter()
        .filter_map(|disk| difference(disk).map(|difference| DiskChange { disk: disk.clone(), difference }))
        .collect()
}

fn difference(disk: &Disk) -> Option<Difference> {
    match measure(&disk.path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Some(Difference::Missing),
        Err(e) => Some(Difference::Unreadable { why: e.to_string() }),
        Ok((now, _)) if now != disk.size => Some(Difference::Size { now }),
        Ok((_, now_ns)) if disk.mtime_ns.is_some() && now_ns != disk.mtime_ns => Some(Difference::Modified { now_ns }),
        Ok(_) => None,
    }
}

/// Length and modification time.
fn measure(path: &Path) -> io::Result<(u64, Option<i64>)> {
    let metadata = std::fs::metadata(path)?;
    let kind = metadata.file_type();
    if kind.is_file() {
        return Ok((metadata.len(), nanoseconds(metadata.mtime(), metadata.mtime_nsec())));
    }
    if kind.is_block_device() {
        let mut device = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        return Ok((device.seek(SeekFrom::End(0))?, None));
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a regular file nor a block device"))
}

/// None for a time that does not fit, years after 2262.
fn nanoseconds(seconds: i64, rest: i64) -> Option<i64> {
    seconds.checked_mul(1_000_000_000)?.checked_add(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest_with(path: &Path) -> Manifest {
        let mut manifest = Manifest::new();
        manifest.disks.push(Disk::record("drive0", None, path, "raw").unwrap());
        manifest
    }

    #[test]
    fn an_untouched_disk_has_not_changed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"contents").unwrap();
        let manifest = manifest_with(file.path());
        assert_eq!(manifest.disks[0].size, 8);
        assert_eq!(check_disks(&manifest), []);
    }

    #[test]
    fn a_grown_disk_is_reported_with_both_sizes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"contents").unwrap();
        let manifest = manifest_with(file.path());
        std::fs::write(file.path(), b"other contents").unwrap();
        let changes = check_disks(&manifest);
        assert_eq!(changes[0].difference, Difference::Size { now: 14 });
        assert!(changes[0].to_string().contains("14 bytes, 8 when"), "{}", changes[0]);
    }

    #[test]
    fn a_disk_written_in_place_is_reported_by_its_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"contents").unwrap();
        let manifest = manifest_with(file.path());
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        file.as_file().set_modified(later).unwrap();
        assert!(matches!(check_disks(&manifest)[0].difference, Difference::Modified { now_ns: Some(_) }));
    }

    #[test]
    fn a_missing_disk_and_one_that_became_a_directory_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, b"contents").unwrap();
        let manifest = manifest_with(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(check_disks(&manifest)[0].difference, Difference::Missing);
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(check_disks(&manifest)[0].difference, Difference::Unreadable { .. }));
    }
}
