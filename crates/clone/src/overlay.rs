//! A clone's overlay on a frozen disk, and the images that a frozen disk consists of.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use limosa_image::chain::{self, ImageFile, OpenOptions};
use limosa_image::info::ImageInfo;
use limosa_image::qcow2::{CreateOptions, create};
use limosa_image::reference::Reference;
use limosa_image::{Format, ImageError, Policy};
use limosa_snapshot::Disk;
use limosa_storage::{Create, FileOptions, FileStorage, LockPolicy, block_on};
use serde::{Deserialize, Serialize};

use crate::command_line::{FrozenDisk, Layer};
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
    let name: OsString = match backing {
        Backing::Absolute => disk.path().into(),
        Backing::Relative => relative(path.parent().unwrap_or(Path::new("/")), disk.path()).into(),
    };
    let options = FileOptions { create: Create::New, ..FileOptions::default() };
    let storage = FileStorage::open(path, &options).map_err(|error| failed(error.into()))?;
    let format = disk.layers.first().map(|top| top.format.clone());
    let options = CreateOptions::default().size(disk.length).backing_file(Some(name)).backing_format(format);
    block_on(create(&*storage, None, &options)).map(|_| ()).map_err(failed)
}

/// Reads the images that a recorded disk consists of.
///
/// # Errors
/// One of them cannot be read, or has a format that limosa-image does not have. The disk's own format is not probed
/// instead, because the guest chooses the first bytes of such a disk.
pub(crate) fn read_frozen(recorded: &Disk) -> Result<FrozenDisk, CloneError> {
    let path = std::path::absolute(&recorded.path).map_err(CloneError::path("find", &recorded.path))?;
    let format: Format = image_format(&recorded.format)
        .parse()
        .map_err(|error| CloneError::Disk { why: format!("{}: {error}", path.display()) })?;
    let options = read_beside_others(format);
    let read = async {
        let files = chain::files(&Reference::file(&*path), &options).await?;
        let length = match files.first() {
            Some(top) => ImageInfo::of(top).await?.virtual_size,
            None => 0,
        };
        Ok((length, files.iter().map(layer).collect()))
    };
    let (length, layers) = block_on(read).map_err(|source| CloneError::FrozenDisk { path: path.clone(), source })?;
    Ok(FrozenDisk { length, layers })
}

/// Options for an image that others read and nothing writes, so that it needs no lock.
pub(crate) fn read_beside_others(format: Format) -> OpenOptions {
    OpenOptions::default().format(Some(format)).read_only(true).lock(LockPolicy::None).policy(Policy::Follow)
}

fn layer(file: &ImageFile) -> Layer {
    let reference = &file.reference;
    let path = reference.path();
    let is_plain =
        |path: &Path| *reference == Reference::file(path).format(reference.format) && path.to_str().is_some();
    Layer {
        path: path.map_or_else(|| reference.to_string().into(), Path::to_owned),
        format: file.format.name().to_owned(),
        is_device: file.file_storage().is_some_and(FileStorage::is_block_device),
        is_plain: path.is_some_and(is_plain),
    }
}

/// Returns the format of a disk that QEMU opened with this driver. A disk without a format node has the driver of its
/// protocol, and is raw.
fn image_format(driver: &str) -> &str {
    if matches!(driver, "file" | "host_device") { "raw" } else { driver }
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

    fn recorded(path: &Path, format: &str) -> Disk {
        Disk::from_file("disk", None, path, format).unwrap()
    }

    /// Makes a qcow2 image of 1 GiB over another, whose name it has as given.
    fn image(path: &Path, below: Option<(&str, &str)>) {
        let storage = FileStorage::open(path, &FileOptions { create: Create::New, ..FileOptions::default() }).unwrap();
        let options = CreateOptions::default().size(1 << 30);
        let options = options.backing_file(below.map(|(name, _)| name.into()));
        block_on(create(&*storage, None, &options.backing_format(below.map(|(_, format)| format.to_owned())))).unwrap();
    }

    #[test]
    fn an_overlay_is_as_long_as_its_disk_and_names_it_as_asked() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        std::fs::write(&disk, vec![7; 3 << 20]).unwrap();
        let frozen = read_frozen(&recorded(&disk, "raw")).unwrap();
        for (backing, name) in [(Backing::Absolute, disk.to_str().unwrap()), (Backing::Relative, "disk")] {
            let overlay = folder.path().join(format!("{backing:?}"));
            make(&overlay, &frozen, backing).unwrap();
            let made = read_frozen(&recorded(&overlay, "qcow2")).unwrap();
            assert_eq!((made.length, &made.layers[1..]), (3 << 20, &frozen.layers[..]));
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
        image(&disk, None);
        let bytes = std::fs::metadata(&disk).unwrap().len();
        for (format, length) in [("raw", Some(bytes)), ("file", Some(bytes)), ("qcow2", Some(1 << 30)), ("vpc", None)] {
            let found = read_frozen(&recorded(&disk, format));
            assert_eq!(found.is_ok(), length.is_some(), "{format}: {found:?}");
            assert!(length.is_none_or(|bytes| found.unwrap().length == bytes.next_multiple_of(512)), "{format}");
        }
    }

    #[test]
    fn the_images_of_a_frozen_disk_are_known_by_path_and_format() {
        let folder = tempfile::tempdir().unwrap();
        let [base, middle, top, part] = ["base", "middle", "top", "part"].map(|name| folder.path().join(name));
        std::fs::write(&base, vec![0; 1 << 20]).unwrap();
        image(&middle, Some(("base", "raw")));
        image(&top, Some((middle.to_str().unwrap(), "qcow2")));
        let found = read_frozen(&recorded(&top, "qcow2")).unwrap().layers;
        let known: Vec<_> = found.iter().map(|layer| (&layer.path, layer.format.as_str(), layer.is_plain)).collect();
        assert_eq!(known, [(&top, "qcow2", true), (&middle, "qcow2", true), (&base, "raw", true)]);
        let named = format!(
            r#"json:{{"driver":"raw","offset":512,"file":{{"driver":"file","filename":"{}"}}}}"#,
            base.display()
        );
        image(&part, Some((&named, "raw")));
        assert!(!read_frozen(&recorded(&part, "qcow2")).unwrap().layers[1].is_plain);
        std::fs::remove_file(&base).unwrap();
        assert!(matches!(read_frozen(&recorded(&top, "qcow2")), Err(CloneError::FrozenDisk { .. })));
    }
}
