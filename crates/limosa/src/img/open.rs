//! Opening images for the commands.
//!
//! Law: no image is written that another process has open: locks tell, unless `-U` is given. With
//! `--untrusted` no file is opened that was not named on the command line.

use std::sync::Arc;

use limosa_image::Disk;
use limosa_image::Format;
use limosa_image::Policy;
use limosa_image::chain::{self, Image, ImageFile, OpenOptions};
use limosa_image::qcow2::Qcow2Options;
use limosa_image::reference::Reference;
use limosa_storage::{LockPolicy, block_on};

use super::options::Source;
use limosa_console::say;

/// The name of an image.
///
/// # Errors
/// It names something else than a file, or options that limosa does not have.
pub(crate) fn reference(source: &Source) -> anyhow::Result<Reference> {
    Ok(if source.image_opts { Reference::from_options(source.name.text()?)? } else { Reference::named(&source.name)? })
}

/// How an image is opened: to be read.
///
/// # Errors
/// It is said to be of a format that limosa does not have.
pub(crate) fn how(source: &Source) -> anyhow::Result<OpenOptions> {
    Ok(OpenOptions {
        format: source.format.as_deref().map(str::parse).transpose()?,
        read_only: true,
        cache: source.cache,
        io: source.io,
        lock: if source.force_share { LockPolicy::None } else { LockPolicy::Auto },
        policy: if source.untrusted { Policy::Refuse } else { Policy::Follow },
        ..OpenOptions::default()
    })
}

/// Opens an image, with all that lies below it, to be read.
///
/// # Errors
/// It is not there, is not an image, or refers to a file that must not be opened.
pub(crate) fn to_read(source: &Source) -> anyhow::Result<Arc<dyn Disk>> {
    Ok(block_on(chain::open(&reference(source)?, &how(source)?))?)
}

/// Opens an image, with all that lies below it, to be written.
///
/// # Errors
/// As of [`to_read`]; another process has it open.
pub(crate) fn to_write(source: &Source, qcow2: Qcow2Options) -> anyhow::Result<Arc<dyn Disk>> {
    let how = OpenOptions { read_only: false, qcow2, ..how(source)? };
    let image = block_on(chain::open_image(&reference(source)?, &how))?;
    if let Image::Qcow2(qcow2) = &image
        && let Some(report) = qcow2.repaired()
    {
        say!(
            "limosa: {}: was not closed properly; its refcounts were repaired before writing ({} leaked clusters, {} \
             corruptions)",
            source.name,
            report.leaks_fixed,
            report.corruptions_fixed
        );
    }
    let disk = image.disk();
    if disk.format() == Format::Raw.name() && source.format.is_none() && !source.image_opts {
        warn_of_guess(source);
    }
    Ok(disk)
}

/// The warning before a write to an image that was probed as raw.
pub(crate) fn warn_of_guess(source: &Source) {
    say!(
        "limosa: {}: format not given; probed as raw (use -f raw). Writes that would make its first sector look like \
         another format are refused",
        source.name
    );
}

/// Opens the file that an image lies in, and nothing that it refers to.
///
/// # Errors
/// It is not there, or looks like a format that limosa does not have.
pub(crate) fn file(source: &Source, read_only: bool) -> anyhow::Result<ImageFile> {
    Ok(block_on(ImageFile::open(&reference(source)?, &OpenOptions { read_only, ..how(source)? }))?)
}
