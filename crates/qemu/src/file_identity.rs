//! Files by the numbers that the kernel gives them.

use std::fs::Metadata;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{Stat, fstat, stat};

/// A file of this host by its device and inode numbers, as stat(2) reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

impl FileId {
    /// Returns the file that a path leads to, through links.
    ///
    /// # Errors
    /// The kernel's, for example if there is no such file.
    pub fn of_path(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&stat(path)?))
    }

    /// Returns the file of an open descriptor.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of_descriptor(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::from(&fstat(file)?))
    }
}

impl From<&Stat> for FileId {
    fn from(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }
}

impl From<&Metadata> for FileId {
    fn from(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// Whether two paths are the same text, or lead to one file through links of either kind.
#[must_use]
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    one == other || FileId::of_path(one).is_ok_and(|one| FileId::of_path(other).is_ok_and(|other| one == other))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_of_either_kind_lead_to_one_file_and_a_copy_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let [file, soft, hard, copy, missing] =
            ["file", "soft", "hard", "copy", "missing"].map(|name| folder.path().join(name));
        fs::write(&file, "x").unwrap();
        fs::write(&copy, "x").unwrap();
        symlink(&file, &soft).unwrap();
        fs::hard_link(&file, &hard).unwrap();
        assert!(is_same_file(&file, &soft) && is_same_file(&soft, &hard) && is_same_file(&missing, &missing));
        assert!(!is_same_file(&file, &copy) && !is_same_file(&file, &missing));
        let open = fs::File::open(&soft).unwrap();
        assert_eq!(FileId::of_descriptor(&open).unwrap(), FileId::of_path(&hard).unwrap());
    }
}
