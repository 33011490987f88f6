//! Files beside an image that say what it is.

use std::path::{Path, PathBuf};

use limosa_image::reference::Reference;
use limosa_qemu::find_overlay_ledger;

/// The path of a file beside another one.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut beside = path.to_owned();
    beside.as_mut_os_string().push(suffix);
    beside
}

/// Returns the absolute path of an image that is a file, and that of its log of epochs, whether that exists or not.
pub(super) fn log_of(reference: &Reference) -> std::io::Result<Option<(PathBuf, PathBuf)>> {
    let Some(path) = reference.path().filter(|path| *reference == Reference::file(*path)) else { return Ok(None) };
    let image = std::path::absolute(path)?;
    if !std::fs::metadata(&image).is_ok_and(|found| found.is_file()) {
        return Ok(None);
    }
    let log = beside(&image, ".epochs");
    Ok(Some((image, log)))
}

/// Refuses an image whose VM's last writes are in overlays beside it.
///
/// # Errors
/// They are; the record of it cannot be read.
pub(super) fn refuse_overlaid(reference: &Reference) -> anyhow::Result<()> {
    // With any options: QEMU has one by its path.
    let Some(path) = reference.path() else { return Ok(()) };
    let image = std::path::absolute(path)?;
    if let Some(ledger) = find_overlay_ledger(&image)? {
        anyhow::bail!(
            "{}: the last writes of its protected VM are in overlays beside it, says {}; end the protection, or if the VM \
             is lost bring the image to its checkpoint with `limosa protect failover` or `limosa run`, or to all that the \
             VM wrote with `limosa protect merge`",
            image.display(),
            ledger.display()
        );
    }
    Ok(())
}

/// Refuses an image whose VM is, or was, protected, and that does not have all of its writes: they are in overlays, or
/// in a log.
///
/// # Errors
/// It does not have them.
pub(crate) fn refuse_incomplete(reference: &Reference) -> anyhow::Result<()> {
    refuse_overlaid(reference)?;
    if let Some((image, log)) = log_of(reference)?.filter(|(_, log)| log.exists()) {
        anyhow::bail!(
            "{}: {} has what a protected VM has written to it; `limosa serve --fenced` brings it to the image",
            image.display(),
            log.display()
        );
    }
    Ok(())
}
