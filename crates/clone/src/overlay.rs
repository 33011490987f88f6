//! A clone's overlay on a frozen disk.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use limosa_image::chain::{self, OpenOptions};
use limosa_image::info::ImageInfo;
use limosa_image::qcow2::{CreateOptions, create};
use limosa_image::reference::Reference;
use limosa_image::{ImageError, Policy};
use limosa_storage::{Create, FileOptions, FileStorage, LockPolicy, block_on};
use serde::{Deserialize, Serialize};

use crate::command_line::FrozenDisk;
use crate::error::CloneError;

/// How an overlay names the disk below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backing {
    /// By its absolute path: the overlay may be moved, the disk may not.
    #[default]
    Absolute,
    /// By its path from the overlay's directory: both may be moved together.
    Relative,
}

/// Makes an empty overlay at `path`, which must be free.
pub(crate) fn make(path: &Path, disk: &FrozenDisk, backing: Backing) -> Result<(), CloneError> {
    let failed = |source: ImageError| CloneError::Overlay { path: path.to_path_buf(), source };
    let frozen = std::path::absolute(&disk.path).map_err(CloneError::path("find", &disk.path))?;
    let name: OsString = match backing {
        Backing::Absolute => frozen.clone().into(),
        Backing::Relative => relative(path.parent().unwrap_or(Path::new("/")), &frozen).into(),
    };
    let size = length(&frozen, &disk.format)?;
    let options = FileOptions { create: Create::New, ..FileOptions::default() };
    let storage = FileStorage::open(path, &options).map_err(|error| failed(error.into()))?;
    let format = Some(image_format(&disk.format).to_owned());
    let options = CreateOptions::default().size(size).backing_file(Some(name)).backing_format(format);
    block_on(create(&*storage, None, &options)).map(|_| ()).map_err(failed)
}

/// Whether a disk's file names a backing image. A file that cannot be read may name one.
pub(crate) fn has_backing(disk: &FrozenDisk) -> bool {
    let Ok(reference) = Reference::named(&disk.path) else { return true };
    let Ok(options) = frozen_options(&disk.path, &disk.format) else { return true };
    block_on(ImageInfo::of_chain(&reference, &options)).map_or(true, |chain| chain.len() > 1)
}

/// Returns the length of a disk in bytes.
fn length(path: &Path, format: &str) -> Result<u64, CloneError> {
    let failed = |source: ImageError| CloneError::Overlay { path: path.to_path_buf(), source };
    let reference = Reference::named(path).map_err(|error| CloneError::Disk { why: error.to_string() })?;
    Ok(block_on(chain::open(&reference, &frozen_options(path, format)?)).map_err(failed)?.len())
}

/// Returns the format of a disk that QEMU opened with this driver. A disk without a format node has the driver of its
/// protocol, and is raw.
fn image_format(driver: &str) -> &str {
    if matches!(driver, "file" | "host_device") { "raw" } else { driver }
}

/// Returns how a frozen disk is opened: other clones read it, and nothing writes it, so it needs no lock.
///
/// # Errors
/// A format that limosa-image does not have. It is not probed instead, because the guest chooses the first bytes of
/// such a disk.
fn frozen_options(path: &Path, format: &str) -> Result<OpenOptions, CloneError> {
    let format = image_format(format)
        .parse()
        .map_err(|error| CloneError::Disk { why: format!("{}: {error}", path.display()) })?;
    let options = OpenOptions::default().format(Some(format)).read_only(true);
    Ok(options.lock(LockPolicy::None).policy(Policy::Follow))
}

/// The path of `to` from the directory `from`; both are absolute.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| Component::ParentDir);
    up.chain(to.components().skip(common)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_lead_from_one_to_the_other() {
        for (from, to, path) in [
            ("/c/1", "/srv/disk", "../../srv/disk"),
            ("/srv/c/1", "/srv/disk", "../../disk"),
            ("/srv", "/srv/disk", "disk"),
            ("/", "/disk", "disk"),
        ] {
            assert_eq!(relative(Path::new(from), Path::new(to)), Path::new(path));
        }
    }

    #[test]
    fn an_overlay_is_as_long_as_its_disk_and_names_it_as_asked() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        std::fs::write(&disk, vec![7; 3 << 20]).unwrap();
        let frozen = FrozenDisk { path: disk.clone(), format: "raw".into() };
        for (backing, name) in [(Backing::Absolute, disk.to_str().unwrap()), (Backing::Relative, "disk")] {
            let overlay = folder.path().join(format!("{backing:?}"));
            make(&overlay, &frozen, backing).unwrap();
            assert_eq!(length(&overlay, "qcow2").unwrap(), 3 << 20);
            let bytes = std::fs::read(&overlay).unwrap();
            assert!(bytes.windows(name.len()).any(|window| window == name.as_bytes()), "{name}");
            assert!(make(&overlay, &frozen, backing).is_err(), "it is there already");
        }
    }

    #[test]
    fn a_frozen_disk_is_never_probed() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        // A guest has written the header of an image into its disk.
        let storage = FileStorage::open(&disk, &FileOptions { create: Create::New, ..FileOptions::default() }).unwrap();
        let header = CreateOptions::default().size(1 << 30);
        block_on(create(&*storage, None, &header)).unwrap();
        drop(storage);
        let bytes = std::fs::metadata(&disk).unwrap().len();
        let frozen = |format: &str| FrozenDisk { path: disk.clone(), format: format.into() };
        for (number, (format, length_of)) in
            [("raw", Some(bytes)), ("file", Some(bytes)), ("vpc", None)].into_iter().enumerate()
        {
            let overlay = folder.path().join(format!("overlay{number}"));
            let made = make(&overlay, &frozen(format), Backing::Absolute);
            assert_eq!(made.is_ok(), length_of.is_some(), "{format}: {made:?}");
            assert!(length_of.is_none_or(|bytes| length(&overlay, "qcow2").unwrap() == bytes.next_multiple_of(512)));
        }
        assert!(has_backing(&frozen("vpc")), "a file that cannot be read may name one");
    }
}
