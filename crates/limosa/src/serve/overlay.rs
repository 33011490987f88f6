//! `limosa serve ctl snapshot`: an overlay on top of an image that is being served.
//!
//! Laws: the overlay has its name only when it is complete and durable, before a byte is written to it. So after a
//! server was killed the overlay is served if it exists, and the image if it does not. The image is closed before, and
//! not written afterwards. The overlay gets the image's dirty bitmaps before that, and follows the disk with them. If
//! something fails, the image is served as before.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use limosa_export::Export;
use limosa_image::qcow2::{self, CheckOptions, CreateOptions, change_bitmap};
use limosa_image::reference::Reference;
use limosa_image::{BitmapAction, DirtyBitmap, Disk};
use limosa_storage::{CacheMode, Create, FileOptions, FileStorage, Storage as _, block_on};
use rustix::fs::{CWD, RenameFlags, renameat_with, unlink};

use super::images::Wanted;
use crate::img::options::{Name, Source};

/// The longest file that an overlay without contents can be: its L1 table has at most 32 MiB, and there are some
/// clusters besides.
const UNFINISHED_MOST: u64 = 40 << 20;

/// Serves a new overlay at `path` in place of an export's image. Requests in flight get `within`. Returns how the
/// overlay is opened.
///
/// # Errors
/// Its image cannot have an overlay; a file exists at `path`; files cannot be written, closed or opened.
pub(super) fn put(
    export: &Export,
    wanted: &Wanted,
    (path, cleared): (&Path, &[String]),
    within: Duration,
) -> anyhow::Result<Wanted> {
    let image = image_below(export, wanted)?;
    let bitmaps = block_on(export.disk().bitmaps())?;
    if let Some(name) = cleared.iter().find(|name| !bitmaps.iter().any(|bitmap| bitmap.name == **name)) {
        anyhow::bail!("{}: it has no bitmap {name:?}", image.display());
    }
    // What opening it again would need, if the overlay fails when it is closed.
    File::options().read(true).write(true).open(&image).with_context(|| image.display().to_string())?;
    let disk = export.disk();
    create(path, &image, &*disk).with_context(|| path.display().to_string())?;
    drop(disk);
    let overlay = Wanted {
        source: Source {
            name: Name(path.into()),
            image_opts: false,
            format: Some("qcow2".into()),
            ..wanted.source.clone()
        },
        ..wanted.clone()
    };
    let open = || {
        copy_bitmaps(&image, path, &bitmaps, cleared).context("its dirty bitmaps")?;
        overlay.open_disk()
    };
    let replaced = export.replace_disk(within, open, || wanted.open_disk());
    if let Err(error) = replaced {
        // It is empty, and may not come back after a power cut, when more was written to the image below it.
        let _ = unlink(path);
        let _ = folder_of(path).and_then(|folder| Ok(folder.sync_all()?));
        return Err(error);
    }
    Ok(overlay)
}

/// Copies the dirty bitmaps of an image that was closed to its overlay, except the bits of those that are `cleared`.
/// Those that cannot be relied on are left out.
fn copy_bitmaps(image: &Path, overlay: &Path, bitmaps: &[DirtyBitmap], cleared: &[String]) -> anyhow::Result<()> {
    if bitmaps.iter().all(|bitmap| bitmap.set.is_none()) {
        return Ok(());
    }
    let from = FileStorage::open(image, &FileOptions::read_only_default())?;
    let to = FileStorage::open(overlay, &FileOptions::default())?;
    for bitmap in bitmaps.iter().filter(|bitmap| bitmap.set.is_some()) {
        let name = &bitmap.name;
        let mut actions = vec![BitmapAction::Add { granularity: Some(bitmap.granularity) }];
        if !cleared.contains(name) {
            actions.push(BitmapAction::Merge { source: name.clone() });
        }
        if !bitmap.enabled {
            actions.push(BitmapAction::Disable);
        }
        block_on(change_bitmap(&*to, name, &actions, Some(&*from), CheckOptions::default()))?;
    }
    Ok(())
}

/// Returns the path of the image that the overlay refers to.
fn image_below(export: &Export, wanted: &Wanted) -> anyhow::Result<PathBuf> {
    let Wanted { source, .. } = wanted;
    anyhow::ensure!(!export.is_read_only(), "{:?} is served read-only: nothing is written to its image", export.name());
    anyhow::ensure!(!source.untrusted, "the server runs with --untrusted, which forbids that images refer to others");
    let reference = Reference::from_name(&source.name)?;
    let is_path = !source.image_opts && reference == Reference::file(&reference.path);
    anyhow::ensure!(is_path, "{}: only an image that is given by its path can be given an overlay", source.name);
    Ok(std::path::absolute(reference.path)?)
}

fn folder_of(path: &Path) -> anyhow::Result<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).context("its folder")
}

/// Removes an overlay that a killed server has not finished. One that is being made is locked.
fn remove_left_over(unfinished: &Path) -> anyhow::Result<()> {
    let refused = |why: &str| anyhow::anyhow!("{}: {why}; remove it if nobody needs it", unfinished.display());
    let file = FileStorage::open(unfinished, &FileOptions::default()).map_err(|error| refused(&error.to_string()))?;
    if file.length()? > UNFINISHED_MOST {
        return Err(refused("it is too long to be an overlay that was not finished"));
    }
    Ok(unlink(unfinished)?)
}

/// Creates an empty overlay, durably. At no time there is an incomplete one at `path`.
fn create(path: &Path, image: &Path, disk: &dyn Disk) -> anyhow::Result<()> {
    let options = CreateOptions::default()
        .size(disk.len())
        .backing_file(Some(image.into()))
        .backing_format(Some(disk.format().into()));
    let folder = folder_of(path)?;
    let mut unfinished = OsString::from(path);
    unfinished.push(".unfinished");
    let unfinished = PathBuf::from(unfinished);
    let new = FileOptions { cache: CacheMode::Writeback, create: Create::New, ..FileOptions::default() };
    let file = match FileStorage::open(&unfinished, &new) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            remove_left_over(&unfinished)?;
            FileStorage::open(&unfinished, &new)
        }
        made => made,
    }?;
    let written = block_on(async {
        qcow2::create(&*file, None, &options).await?;
        anyhow::Ok(file.flush().await?)
    });
    let named = written.and_then(|()| Ok(renameat_with(CWD, &unfinished, CWD, path, RenameFlags::NOREPLACE)?));
    if named.is_err() {
        let _ = unlink(&unfinished);
    }
    named?;
    Ok(folder.sync_all()?)
}
