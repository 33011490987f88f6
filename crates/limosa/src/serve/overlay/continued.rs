//! Images whose disks continue in overlays: a file beside the image says so, for the next server.
//!
//! Law: **a server does not write to an image that an overlay stands on.** The file `IMAGE.continued` has the path of
//! the overlay, and is durable before a byte is written to that. A server that is started with the image, as it was the
//! first time, serves the overlay. If that does not exist, because it was committed or given up, it serves the image. A
//! block device has no such file: there the user sees to it.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use limosa_console::say;
use limosa_image::Format;
use limosa_image::chain::MAX_CHAIN_DEPTH;
use limosa_image::reference::Reference;
use limosa_qemu::is_same_file;
use limosa_storage::replace_file;
use rustix::fs::unlink;

use super::files;
use crate::serve::beside::beside;
use crate::serve::wanted::Wanted;

/// The longest path that is read.
const PATH_MOST: u64 = 4096;

fn mark_of(image: &Path) -> PathBuf {
    beside(image, ".continued")
}

/// Says durably that an image's disk continues in an overlay. Beside a block device nothing can be said.
pub(super) fn mark(image: &Path, overlay: &Path) -> anyhow::Result<()> {
    if !std::fs::metadata(image).with_context(|| image.display().to_string())?.is_file() {
        return Ok(());
    }
    let text = overlay.to_str().with_context(|| format!("{}: the path must be UTF-8", overlay.display()))?;
    let mark = mark_of(image);
    replace_file(&mark, text.as_bytes()).with_context(|| mark.display().to_string())
}

/// The image's disk does not continue elsewhere any more. If the file stays, it names an overlay that does not exist.
pub(super) fn unmark(image: &Path) {
    let _ = unlink(mark_of(image));
}

/// As [`unmark`], if the disk continues in this overlay.
pub(super) fn unmark_from(image: &Path, overlay: &Path) {
    if read(&mark_of(image)).is_ok_and(|marked| marked == overlay) {
        unmark(image);
    }
}

/// Returns the path of the overlay that a mark names.
fn read(mark: &Path) -> std::io::Result<PathBuf> {
    let mut text = String::new();
    File::open(mark)?.take(PATH_MOST).read_to_string(&mut text)?;
    Ok(text.into())
}

/// Returns how the image is opened in which the disk continues.
///
/// # Errors
/// The file beside an image cannot be read, or names no overlay of the image.
pub(in crate::serve) fn follow(mut wanted: Wanted) -> anyhow::Result<Wanted> {
    for _ in 0..MAX_CHAIN_DEPTH {
        let Some(overlay) = next(&wanted)? else { return Ok(wanted) };
        say!("limosa: {}: its disk continues in {}, which is served", wanted.source.name, overlay.display());
        wanted = above(&wanted, &overlay);
    }
    anyhow::bail!("{}: its disk continues in too many overlays", wanted.source.name)
}

/// How an overlay of an image is opened.
pub(super) fn above(wanted: &Wanted, overlay: &Path) -> Wanted {
    Wanted { below: Some(Arc::new(wanted.clone())), ..wanted.at(overlay, Format::Qcow2) }
}

/// Returns the overlay in which an image's disk continues; `None`: the image is read only, or not continued.
fn next(wanted: &Wanted) -> anyhow::Result<Option<PathBuf>> {
    let Wanted { source, read_only, snapshot, .. } = wanted;
    if *read_only || snapshot.is_some() || source.image_opts {
        return Ok(None);
    }
    let Ok(reference) = Reference::from_name(&source.name) else { return Ok(None) };
    let Some(path) = reference.path() else { return Ok(None) };
    let (image, mark) = (std::path::absolute(path)?, mark_of(&std::path::absolute(&source.name.0)?));
    let overlay = match read(&mark) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        read => read.with_context(|| mark.display().to_string())?,
    };
    if !overlay.try_exists().with_context(|| overlay.display().to_string())? {
        return Ok(None);
    }
    let refused = || {
        let (image, mark, overlay) = (image.display(), mark.display(), overlay.display());
        format!("{image} is not written, because its disk continues in {overlay}, says {mark}; remove {mark} to do so")
    };
    anyhow::ensure!(!source.untrusted, refused());
    let below = files(&above(wanted, &overlay)).with_context(refused)?.into_iter().nth(1);
    anyhow::ensure!(
        below.is_some_and(|below| below.reference.path().is_some_and(|below| is_same_file(below, &image))),
        refused()
    );
    Ok(Some(overlay))
}
