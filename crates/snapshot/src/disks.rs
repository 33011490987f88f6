//! Whether a stored VM's disks are still as its memory expects them.
//!
//! A guest that was stopped with file systems mounted holds parts of its disks in memory. Restoring that memory over a
//! disk that was written since destroys the file system, quietly. Size and modification time recorded at the
//! save tell, of the disk's file and of the images below it; contents are not compared.
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
use uuid::Uuid;

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
    /// The name of the export over which the VM had the disk from a server; absent if QEMU had the file itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// The images that it stands on, the uppermost first; empty in files of older versions, which did not record them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backing: Vec<BackingFile>,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// A disk of a protected VM, whose writes a server keeps apart until their checkpoint counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectedDisk {
    /// The device, for messages.
    pub device: String,
    /// The image.
    pub path: PathBuf,
    /// The image format, by QEMU's driver name ("qcow2", "raw").
    pub format: String,
    /// The name of its export.
    pub export: String,
    /// The control socket of its server.
    pub control: PathBuf,
    /// Its keeper, as the server knows it.
    pub keeper: String,
    /// Identifies the log with its epochs.
    pub log: Uuid,
}

/// A disk of a protected VM whose writes are in an overlay for each checkpoint, beside its image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlaidDisk {
    /// The device, for messages.
    pub device: String,
    /// The image. With the overlays up to that of the checkpoint's number over it, it is the disk.
    pub path: PathBuf,
    /// The image format, by QEMU's driver name ("qcow2", "raw").
    pub format: String,
    /// Identifies the overlays.
    pub overlays: Uuid,
}

/// An image below a disk, as it was when the VM stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BackingFile {
    /// The file or block device.
    pub path: PathBuf,
    /// Its length in bytes; absent if it could not be looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Modification time in nanoseconds since 1970; absent for block devices, and if it could not be looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtime_ns: Option<i64>,
    /// Keys that this version does not know.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

impl BackingFile {
    /// Records an image in its present state. A relative path is one of QEMU's working directory, so it is not looked
    /// at.
    pub fn record(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let found = if path.is_absolute() { measure(&path).ok() } else { None };
        let (size, mtime_ns) = found.map_or((None, None), |(size, mtime_ns)| (Some(size), mtime_ns));
        Self { path, size, mtime_ns, others: Map::new() }
    }
}

impl Disk {
    /// Records a disk in its present state, without the images below it.
    ///
    /// # Errors
    /// If the path cannot be looked at, or is neither a regular file nor a block device.
    pub fn from_file(
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
            export: None,
            backing: Vec::new(),
            others: Map::new(),
        })
    }
}

/// A disk that has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskChange {
    /// The disk as recorded.
    pub disk: Disk,
    /// The image below it that has changed, as recorded; absent if it is the disk's own file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<BackingFile>,
    /// The difference.
    pub difference: DiskDifference,
}

/// How a disk differs from its record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum DiskDifference {
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
        let Self { disk, backing, difference } = self;
        write!(f, "disk {} ({}) ", disk.node, disk.path.display())?;
        if let Some(backing) = backing {
            write!(f, "stands on {}, which ", backing.path.display())?;
        }
        match difference {
            DiskDifference::Missing => write!(f, "is missing"),
            DiskDifference::Unreadable { why } => write!(f, "cannot be looked at: {why}"),
            DiskDifference::Size { now } => {
                let recorded = backing.as_ref().and_then(|backing| backing.size).unwrap_or(disk.size);
                write!(f, "has {now} bytes, {recorded} when the VM was saved")
            }
            DiskDifference::Modified { .. } => write!(f, "was written after the VM was saved"),
        }
    }
}

/// The manifest's disks that have changed since the save, each with the first of its files that has; empty if none has.
pub fn check_disks(manifest: &Manifest) -> Vec<DiskChange> {
    manifest.disks.iter().filter_map(change).collect()
}

fn change(disk: &Disk) -> Option<DiskChange> {
    let changed = |backing, difference| DiskChange { disk: disk.clone(), backing, difference };
    if let Some(difference) = difference(&disk.path, disk.size, disk.mtime_ns) {
        return Some(changed(None, difference));
    }
    disk.backing.iter().find_map(|below| {
        let difference = difference(&below.path, below.size?, below.mtime_ns)?;
        Some(changed(Some(below.clone()), difference))
    })
}

/// Returns how a file differs from its recorded length and modification time.
fn difference(path: &Path, size: u64, mtime_ns: Option<i64>) -> Option<DiskDifference> {
    match measure(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Some(DiskDifference::Missing),
        Err(e) => Some(DiskDifference::Unreadable { why: e.to_string() }),
        Ok((now, _)) if now != size => Some(DiskDifference::Size { now }),
        Ok((_, now_ns)) if mtime_ns.is_some() && now_ns != mtime_ns => Some(DiskDifference::Modified { now_ns }),
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
        manifest.disks.push(Disk::from_file("drive0", None, path, "raw").unwrap());
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
        assert_eq!(changes[0].difference, DiskDifference::Size { now: 14 });
        assert!(changes[0].to_string().contains("14 bytes, 8 when"), "{}", changes[0]);
    }

    #[test]
    fn a_disk_written_in_place_is_reported_by_its_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"contents").unwrap();
        let manifest = manifest_with(file.path());
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        file.as_file().set_modified(later).unwrap();
        assert!(matches!(check_disks(&manifest)[0].difference, DiskDifference::Modified { now_ns: Some(_) }));
    }

    #[test]
    fn a_missing_disk_and_one_that_became_a_directory_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, b"contents").unwrap();
        let manifest = manifest_with(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(check_disks(&manifest)[0].difference, DiskDifference::Missing);
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(check_disks(&manifest)[0].difference, DiskDifference::Unreadable { .. }));
    }

    #[test]
    fn a_lower_file_that_was_written_is_reported_and_one_that_was_never_looked_at_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let [top, link, base] = ["top", "link", "base"].map(|name| directory.path().join(name));
        std::fs::write(&top, b"top").unwrap();
        std::fs::write(&base, b"base").unwrap();
        std::os::unix::fs::symlink("base", &link).unwrap();
        let mut manifest = manifest_with(&top);
        let relative = BackingFile::record("no/such/file");
        assert_eq!(relative.size, None);
        manifest.disks[0].backing = vec![relative, BackingFile::record(&link)];
        assert_eq!(check_disks(&manifest), []);
        let text = serde_json::to_string(&manifest).unwrap();
        assert_eq!(serde_json::from_str::<Manifest>(&text).unwrap(), manifest);
        std::fs::write(&base, b"longer than it was").unwrap();
        let changes = check_disks(&manifest);
        assert_eq!(changes[0].backing.as_ref().map(|below| &below.path), Some(&link));
        let said = changes[0].to_string();
        assert!(said.contains(&format!("stands on {}, which has 18 bytes, 4 when", link.display())), "{said}");
        std::fs::remove_file(&link).unwrap();
        assert_eq!(check_disks(&manifest)[0].difference, DiskDifference::Missing);
        manifest.disks[0].backing.clear();
        assert_eq!(check_disks(&manifest), [], "an older version's record has no lower files");
    }
}
