//! Images that exist, as the command line names them.
//!
//! Law: no image is written that another process has open: locks tell, unless `-U` is given. With
//! `--untrusted` no file is opened that was not named on the command line.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use limosa_image::Disk;
use limosa_image::Policy;
use limosa_image::chain::{self, Image, ImageFile, NamedImage, OpenOptions};
use limosa_image::qcow2::{CheckReport, Qcow2Options};
use limosa_image::reference::Reference;
use limosa_storage::{Io, LockPolicy, block_on};

use super::object;
use super::options::Source;
use crate::program::say_named;
use crate::serve::beside::refuse_incomplete;
use crate::serve::journals;

/// Resolves an image's name and options; it is opened to be read. One that a server that was killed has left with
/// changes in its journal is refused, and one of a protected VM, whose writes are in a log or in overlays.
///
/// # Errors
/// As of [`named`]; it has a log or overlays.
pub(crate) fn resolve(source: &Source) -> anyhow::Result<NamedImage> {
    let NamedImage { reference, options, .. } = named(source)?;
    refuse_incomplete(&reference)?;
    Ok(NamedImage::new(reference, no_journal(options)))
}

/// Has images refused that have changes in a journal of a usual folder.
pub(crate) fn no_journal(options: OpenOptions) -> OpenOptions {
    options.unreplayed(journals::existing())
}

/// Resolves an image's name and options; it is opened to be read.
///
/// # Errors
/// The name is no file's, the format is not supported, or an option is unknown.
pub(crate) fn named(source: &Source) -> anyhow::Result<NamedImage> {
    let reference = if source.image_opts {
        Reference::from_options(source.name.text()?)?
    } else {
        Reference::from_name(&source.name)?
    };
    let options = OpenOptions::default()
        .format(source.format.as_deref().map(str::parse).transpose()?)
        .read_only(true)
        .cache(source.cache)
        .io(source.io)
        .lock(if source.force_share { LockPolicy::None } else { LockPolicy::Auto })
        .policy(policy(source.untrusted));
    Ok(NamedImage::new(reference, object::usable(options)))
}

/// As [`resolve`], of an image that is no pipe.
///
/// # Errors
/// As of [`resolve`].
pub(crate) fn resolve_file(source: &Source) -> anyhow::Result<NamedImage> {
    if !source.image_opts && source.name.0 == "-" && !Path::new("-").exists() {
        anyhow::bail!("-: only convert and dd read pipes; store the image in a file first");
    }
    resolve(source)
}

/// For commands that read tables, one after the other: with their small reads, a switch to another thread or a ring
/// costs more than the read.
pub(crate) fn one_by_one(options: &OpenOptions) -> OpenOptions {
    options.clone().io(Io::CallerThread)
}

/// The files that an image may have opened.
pub(crate) const fn policy(untrusted: bool) -> Policy {
    if untrusted { Policy::Refuse } else { Policy::Follow }
}

/// Opens an image, with its backing files, to be read.
///
/// # Errors
/// It is not there, is not an image, or refers to a file that must not be opened.
pub(crate) fn to_read(source: &Source) -> anyhow::Result<Arc<dyn Disk>> {
    let NamedImage { reference, options, .. } = resolve_file(source)?;
    Ok(block_on(chain::open(&reference, &options))?)
}

/// Opens an image, with its backing files, to be written.
///
/// # Errors
/// As of [`to_read`]; another process has it open.
pub(crate) fn to_write(source: &Source, qcow2: Qcow2Options) -> anyhow::Result<Arc<dyn Disk>> {
    let NamedImage { reference, options, .. } = resolve_file(source)?;
    let image = block_on(chain::open_image(&reference, &options.read_only(false).qcow2(qcow2)))?;
    warn(source, &image);
    Ok(image.as_disk())
}

/// Warns before writing if the image was repaired or its format was guessed.
pub(crate) fn warn(source: &Source, image: &Image) {
    if image.replayed() > 0 {
        say_named!(
            "{}: the process that had it open was killed; {} changes were taken from its journal",
            source.name,
            image.replayed()
        );
    }
    if let Some(report) = image.repair_report() {
        let kept = if image.replayed() > 0 { "acknowledged" } else { "flushed" };
        warn_of_repair(&source.name, report, kept);
    }
    if image.is_guessed() {
        warn_of_guess(source);
    }
}

/// Reports the repair of an image that was not closed. `kept`: what of its writes it has.
pub(crate) fn warn_of_repair(name: &impl Display, report: &CheckReport, kept: &str) {
    let found = match (report.corruptions_fixed, report.leaks_fixed) {
        (0, 0) => "are up to date".to_owned(),
        (late, leaked) => {
            format!("were brought up to date ({late} were late, {leaked} leaked clusters are free again)")
        }
    };
    say_named!("{name}: was not closed properly: its refcounts {found}; nothing that was {kept} is lost");
}

/// The warning before a write to an image that was probed as raw.
pub(crate) fn warn_of_guess(source: &Source) {
    let option = if source.image_opts { "driver=raw" } else { "-f raw" };
    say_named!(
        "{}: format not given; probed as raw (use {option}). Writes that would make its first sector look like \
         another format are refused",
        source.name
    );
}

/// Opens the file of an image, without the files that it refers to.
///
/// # Errors
/// It is not there, or looks like a format that limosa does not have.
pub(crate) fn file(source: &Source, read_only: bool) -> anyhow::Result<ImageFile> {
    let NamedImage { reference, options, .. } = resolve_file(source)?;
    Ok(block_on(ImageFile::open(&reference, &options.read_only(read_only)))?)
}
