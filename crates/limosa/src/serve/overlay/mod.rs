//! Overlays of images that are being served: one is put on an image, and committed into it.
//!
//! Laws: the overlay has its name only when it is complete and durable, before a byte is written to it. So after a
//! server was killed the overlay is served if it exists, and the image if it does not ([`follow`]). The image is closed
//! before, and not written afterwards. The overlay gets the image's dirty bitmaps before that, and follows the disk
//! with them. If something fails, the image is served as before. An overlay is removed when all that it has is durable
//! in the image below it, before anything else is written to that; or if nothing was ever written to it.

mod bitmaps;
mod continued;

use std::fs::File;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use limosa_export::Export;
use limosa_image::chain::{self, ImageFile, NamedImage};
use limosa_image::commit::{CommitOptions, CommitRequest};
use limosa_image::qcow2::{self, CreateOptions};
use limosa_image::reference::Reference;
use limosa_image::{Format, Guess, GuestOffset, guess};
use limosa_page::directory_of;
use limosa_storage::{
    Buffer, CacheMode, Create, FileOptions, FileStorage, LockPolicy, Storage as _, block_on, sync_folder,
};
use rustix::fs::{CWD, RenameFlags, renameat_with, unlink};

use super::beside::{beside, refuse_incomplete};
use super::wanted::Wanted;
use crate::img::open::named;
pub(super) use continued::follow;

/// The longest file that an overlay without contents can be: its L1 table has at most 32 MiB, and there are some
/// clusters besides.
const UNFINISHED_MOST: u64 = 40 << 20;

/// An overlay that was created and is not served yet.
#[derive(Debug)]
pub(super) struct Unused {
    /// The name of the export whose image it is for.
    pub(super) export: String,
    /// The image.
    pub(super) image: PathBuf,
    /// Its length, and the disk's when it was created.
    length: u64,
}

/// Creates an empty overlay of an export's image at `path`, durably.
///
/// # Errors
/// The image cannot have an overlay; a file exists at `path`, or cannot be written.
pub(super) fn create(export: &Export, wanted: &Wanted, path: &Path) -> anyhow::Result<Unused> {
    let image = image_below(export, wanted)?;
    let disk = export.disk();
    let compressor = wanted.compress.and_then(|_| disk.compressor(None).ok());
    let options = CreateOptions::default()
        .size(disk.len())
        .backing_file(Some(image.clone().into()))
        .backing_format(Some(disk.format().into()))
        .compression(compressor.map(|compressor| compressor.compression()).unwrap_or_default());
    create_file(path, &options).with_context(|| path.display().to_string())?;
    Ok(Unused { export: export.name().to_owned(), image, length: disk.len() })
}

/// Serves an overlay at `path`, which was created for an export's image, in place of that. Requests in flight get
/// `within`. Returns how the overlay is opened; if that fails, it is removed.
///
/// # Errors
/// The export has another image by now, or no such bitmap; files cannot be written, closed or opened.
pub(super) fn put(
    export: &Export,
    wanted: &Wanted,
    (path, unused, cleared): (&Path, &Unused, &[String]),
    within: Duration,
) -> anyhow::Result<Wanted> {
    let overlay = continued::above(wanted, path);
    let replaced = check(export, wanted, (unused, cleared)).and_then(|has_bitmaps| {
        let open = || {
            if has_bitmaps {
                bitmaps::copy(wanted, path, cleared).context("its dirty bitmaps")?;
            }
            continued::mark(&unused.image, path)?;
            overlay.open_disk()
        };
        export.replace_disk(within, open, || wanted.open_disk())
    });
    if let Err(error) = replaced {
        // It is empty, and may not come back after a power cut, when more was written to the image below it.
        let _ = remove(path);
        // The disk may continue in another overlay by now, which is why this one was refused.
        continued::unmark_from(&unused.image, path);
        return Err(error);
    }
    Ok(overlay)
}

/// Checks that an overlay can be put on an export's image, and returns whether the image has dirty bitmaps.
fn check(export: &Export, wanted: &Wanted, (unused, cleared): (&Unused, &[String])) -> anyhow::Result<bool> {
    let disk = export.disk();
    let (image, name) = (image_below(export, wanted)?, disk.name());
    anyhow::ensure!(image == unused.image, "{name} is served now, and the overlay is of {}", unused.image.display());
    anyhow::ensure!(disk.len() == unused.length, "{name} has become longer since the overlay was created");
    let has_bitmaps = check_cleared(export, cleared)?;
    // What opening it again would need, if the overlay fails when it is closed.
    File::options().read(true).write(true).open(&image).with_context(|| image.display().to_string())?;
    Ok(has_bitmaps)
}

/// Checks that the overlay of an export's image can have these bitmaps begin empty, and returns whether the image has
/// bitmaps. One that cannot be relied on is left behind when an overlay is put on the image: who wants it cleared would
/// believe that it follows the disk from then on.
///
/// # Errors
/// A bitmap does not exist, or cannot be relied on.
pub(super) fn check_cleared(export: &Export, cleared: &[String]) -> anyhow::Result<bool> {
    let disk = export.disk();
    let (bitmaps, image) = (block_on(disk.bitmaps())?, disk.name());
    for name in cleared {
        let bitmap = bitmaps.iter().find(|bitmap| bitmap.name == *name);
        let bitmap = bitmap.with_context(|| format!("{image}: it has no bitmap {name:?}"))?;
        anyhow::ensure!(
            bitmap.set.is_some(),
            "{image}: bitmap {name:?} was not stored by who used it, and does not say what was written: remove it, add \
             it again, and make a full backup"
        );
    }
    Ok(!bitmaps.is_empty())
}

/// Brings the contents of an export's overlay to the image below it, serves that, and removes the overlay. Requests
/// wait meanwhile; those in flight get `within`. Returns how the image is opened, and the bytes that were copied.
///
/// # Errors
/// The export's image is no overlay of an image that can be written; files cannot be read, written, closed or opened.
/// The overlay is served as before.
pub(super) fn commit(export: &Export, wanted: &Wanted, within: Duration) -> anyhow::Result<Committed> {
    let overlay = image_below(export, wanted)?;
    let (below, has_bitmaps) = check_commit(export, wanted, &overlay)?;
    let (mut bytes, mut removed) = (0, Ok(()));
    let open = || {
        keep_guess(wanted, &below)?;
        let mut request = CommitRequest::new(named(&wanted.source)?);
        request.options = CommitOptions::default().keep_overlay(true);
        let counters = block_on(request.prepare())?.run(&|_| ControlFlow::Continue(()))?;
        bytes = counters.bytes_written + counters.bytes_copied;
        // The images below the overlay are open for that, too.
        let bitmaps = if has_bitmaps { bitmaps::read(wanted)? } else { Vec::new() };
        let disk = below.open_disk()?;
        let done = bitmaps::bring(bitmaps, &*disk).context("dirty bitmaps").and_then(|()| {
            // As long as requests wait: it would hide what is written to the image from now on.
            unlink(&overlay).with_context(|| format!("cannot remove {}", overlay.display()))
        });
        if let Err(error) = done {
            let _ = block_on(disk.close());
            disk.unlock();
            return Err(error);
        }
        removed = sync_folder(&overlay).context("its folder");
        continued::unmark(Path::new(&below.source.name.0));
        Ok(disk)
    };
    export.replace_disk(within, open, || wanted.open_disk())?;
    let removed = removed.with_context(|| format!("{} may be there again after a power cut", overlay.display()));
    Ok(Committed { below, bytes, removed })
}

/// The result of a commit.
#[derive(Debug)]
pub(super) struct Committed {
    /// How the image is opened that is served now.
    pub(super) below: Wanted,
    /// Bytes that were copied.
    pub(super) bytes: u64,
    /// Whether the overlay is gone for good.
    pub(super) removed: anyhow::Result<()>,
}

/// Checks what can be checked before the overlay is closed. Returns how the image below it is opened, and whether there
/// are dirty bitmaps.
fn check_commit(export: &Export, wanted: &Wanted, overlay: &Path) -> anyhow::Result<(Wanted, bool)> {
    let file = files(wanted)?.into_iter().nth(1);
    let file = file.with_context(|| format!("{}: it has no backing file", overlay.display()))?;
    let below = match &wanted.below {
        Some(below) => Wanted::clone(below),
        None => wanted_below(wanted, &file)?,
    };
    let has_bitmaps = !block_on(export.disk().bitmaps())?.is_empty();
    anyhow::ensure!(
        !has_bitmaps || file.format == Format::Qcow2,
        "the image below has no place for the dirty bitmaps of {}: remove them first",
        overlay.display()
    );
    // The overlay itself is removed, and not a link to it.
    let is_file = std::fs::symlink_metadata(overlay).is_ok_and(|found| found.is_file());
    anyhow::ensure!(is_file, "{}: only a file that is no link can be committed and removed", overlay.display());
    let below_path = file.reference.path().context("the image below is in no file")?;
    refuse_incomplete(&Reference::file(below_path))?;
    for path in [overlay, below_path] {
        File::options().read(true).write(true).open(path).with_context(|| path.display().to_string())?;
    }
    Ok((below, has_bitmaps))
}

/// Refuses contents for an image whose format is probed that would make it look like another format.
fn keep_guess(overlay: &Wanted, below: &Wanted) -> anyhow::Result<()> {
    if below.source.format.is_some() || below.source.image_opts {
        return Ok(());
    }
    let format = below.open_to_read()?.format();
    let disk = overlay.open_to_read()?;
    let start = Buffer::zeroed(512);
    let read = block_on(disk.read(GuestOffset(0), start.clone().into()));
    block_on(disk.close())?;
    disk.unlock();
    read?;
    let is_same = format != Format::Raw.name() || guess(&start.to_vec()) == Guess::Known(Format::Raw);
    anyhow::ensure!(is_same, "{}: with it its image would look like another format", overlay.source.name);
    Ok(())
}

/// How the image below an overlay is opened that another server put on it.
fn wanted_below(wanted: &Wanted, below: &ImageFile) -> anyhow::Result<Wanted> {
    let plain = |path: &&Path| !below.guessed && below.reference == Reference::file(*path).format(Some(below.format));
    let path = below.reference.path().filter(plain);
    let path = path.with_context(|| format!("{}: stop serving it and use `limosa img commit`", below.reference))?;
    Ok(wanted.at(path, below.format))
}

/// Opens the files of an export's image and of all below it, without locks.
fn files(wanted: &Wanted) -> anyhow::Result<Vec<ImageFile>> {
    let NamedImage { reference, options, .. } = named(&wanted.source)?;
    Ok(block_on(chain::files(&reference, &options.lock(LockPolicy::None)))?)
}

/// Returns the absolute paths of an export's image and of all below it.
///
/// # Errors
/// One cannot be opened.
pub(super) fn paths(wanted: &Wanted) -> anyhow::Result<Vec<String>> {
    let path = |file: &ImageFile| {
        let path = file.reference.path().with_context(|| format!("{}: only files are handed over", file.reference))?;
        let path = std::path::absolute(path)?;
        let text = path.to_str().with_context(|| format!("{}: the path must be UTF-8", path.display()))?;
        Ok(text.to_owned())
    };
    files(wanted)?.iter().map(path).collect()
}

/// Removes an overlay, durably.
///
/// # Errors
/// The kernel's.
pub(super) fn remove(overlay: &Path) -> anyhow::Result<()> {
    unlink(overlay).with_context(|| format!("cannot remove {}", overlay.display()))?;
    sync_folder(overlay).context("its folder")
}

/// Returns the path of the image that the overlay refers to.
fn image_below(export: &Export, wanted: &Wanted) -> anyhow::Result<PathBuf> {
    let Wanted { source, .. } = wanted;
    anyhow::ensure!(!export.is_read_only(), "{:?} is served read-only: nothing is written to its image", export.name());
    anyhow::ensure!(!source.untrusted, "the server runs with --untrusted, which forbids that images refer to others");
    let reference = Reference::from_name(&source.name)?;
    let path = reference.path().filter(|path| !source.image_opts && reference == Reference::file(*path));
    let refused = || format!("{}: only an image that is given by its path can be given an overlay", source.name);
    Ok(std::path::absolute(path.with_context(refused)?)?)
}

/// Opens the folder of a file.
fn folder_of(path: &Path) -> anyhow::Result<File> {
    File::open(directory_of(path)).context("its folder")
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

/// Creates an empty overlay, durably. At no time there is an incomplete one at `path`. An existing file stays.
///
/// # Errors
/// The kernel's; [`rustix::io::Errno::EXIST`]: there is a file.
pub(super) fn create_file(path: &Path, options: &CreateOptions) -> anyhow::Result<()> {
    let folder = folder_of(path)?;
    let unfinished = beside(path, ".unfinished");
    let new = FileOptions { cache: CacheMode::Writeback, create: Create::New, ..FileOptions::default() };
    let file = match FileStorage::open(&unfinished, &new) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            remove_left_over(&unfinished)?;
            FileStorage::open(&unfinished, &new)
        }
        made => made,
    }?;
    let written = block_on(async {
        qcow2::create(&*file, None, options).await?;
        anyhow::Ok(file.flush().await?)
    });
    let named = written.and_then(|()| Ok(renameat_with(CWD, &unfinished, CWD, path, RenameFlags::NOREPLACE)?));
    if named.is_err() {
        let _ = unlink(&unfinished);
    }
    named?;
    Ok(folder.sync_all()?)
}
