//! Files beside an image that say what it is.

use std::path::{Path, PathBuf};

use limosa_image::reference::Reference;

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

/// Refuses an image that has a log: it is not complete.
///
/// # Errors
/// It has one.
pub(crate) fn refuse_log(reference: &Reference) -> anyhow::Result<()> {
    if let Some((image, log)) = log_of(reference)?.filter(|(_, log)| log.exists()) {
        anyhow::bail!(
            "{}: {} has what a protected VM has written to it; `limosa serve --fenced` brings it to the image",
            image.display(),
            log.display()
        );
    }
    Ok(())
}
