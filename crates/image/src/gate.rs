//! The files that an image may have opened.
//!
//! Law: an image opens no other file unless the opener of the image allows it. An image is data from outside; a backing
//! file's name in it can be that of any file that we can read, and a data file's that of any that we can write.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The files that an image may have opened. Files that the caller names are always allowed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Policy {
    /// None.
    #[default]
    Refuse,
    /// Those in these folders and below, after all symbolic links. Processes that can replace folders there while
    /// images are opened are trusted.
    Within(Vec<PathBuf>),
    /// Every one, as QEMU's tools do.
    Follow,
}

/// The purpose of a file that an image refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum FilePurpose {
    /// Contents that the image does not have itself.
    #[strum(to_string = "a backing file")]
    Backing,
    /// The image's contents.
    #[strum(to_string = "a data file")]
    DataFile,
    /// The header of an encrypted image.
    #[strum(to_string = "an encryption header")]
    EncryptionHeader,
}

/// Why a file may not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    /// The image may not have any file opened.
    #[error("it is not trusted to have {0}")]
    Untrusted(FilePurpose),
    /// The file is not there, or cannot be looked for.
    #[error("{0}")]
    Absent(io::Error),
    /// The file is outside of the allowed directories.
    #[error("{0} must be in one of the allowed directories")]
    Outside(FilePurpose),
}

impl Policy {
    /// Decides about what is in no file: an export of a server.
    pub(crate) const fn admit_remote(&self, purpose: FilePurpose) -> Result<(), Refusal> {
        match self {
            Self::Follow => Ok(()),
            Self::Refuse => Err(Refusal::Untrusted(purpose)),
            Self::Within(_) => Err(Refusal::Outside(purpose)),
        }
    }

    /// Returns the path by which the file may be opened.
    pub(crate) fn admit(&self, purpose: FilePurpose, path: &Path) -> Result<PathBuf, Refusal> {
        match self {
            Self::Follow => Ok(path.to_owned()),
            Self::Refuse => Err(Refusal::Untrusted(purpose)),
            Self::Within(folders) => {
                let real = fs::canonicalize(path).map_err(Refusal::Absent)?;
                let inside = |folder: &PathBuf| fs::canonicalize(folder).is_ok_and(|folder| real.starts_with(folder));
                if folders.iter().any(inside) {
                    return Ok(real);
                }
                Err(Refusal::Outside(purpose))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_out_of_a_folder_is_not_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("base"), "").unwrap();
        fs::write(folder.path().join("secret"), "").unwrap();
        symlink("../secret", inner.join("link")).unwrap();
        let policy = Policy::Within(vec![inner.clone()]);
        let admit = |name: &str| policy.admit(FilePurpose::Backing, &inner.join(name));
        assert_eq!(admit("base").unwrap(), fs::canonicalize(inner.join("base")).unwrap());
        assert_eq!(admit("../inner/base").unwrap(), fs::canonicalize(inner.join("base")).unwrap());
        for outside in ["link", "../secret"] {
            assert_eq!(
                admit(outside).unwrap_err().to_string(),
                "a backing file must be in one of the allowed directories"
            );
        }
        assert!(admit("absent").is_err());
    }

    #[test]
    fn an_export_is_in_no_folder() {
        let admit = |policy: Policy| policy.admit_remote(FilePurpose::Backing).is_ok();
        assert_eq!([Policy::Refuse, Policy::Within(vec!["/".into()]), Policy::Follow].map(admit), [false, false, true]);
    }

    #[test]
    fn nothing_is_allowed_unless_it_is_said() {
        assert!(
            Policy::default()
                .admit(FilePurpose::DataFile, Path::new("/dev/null"))
                .unwrap_err()
                .to_string()
                .contains("a data file")
        );
        assert_eq!(Policy::Follow.admit(FilePurpose::Backing, Path::new("a")).unwrap(), Path::new("a"));
    }
}
