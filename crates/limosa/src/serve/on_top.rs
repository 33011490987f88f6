//! `--overlay`: a qcow2 image on top of one that is not written.
//!
//! Law: an overlay that exists is used only if it is on top of the image that is given; and if that is an object, only
//! if its contents are those that the overlay was made on. Blocks of two objects would be mixed otherwise. The overlay
//! has a line about them in its header.

use std::path::Path;

use anyhow::Context as _;
use limosa_console::say;
use limosa_image::chain::{self, NamedImage};
use limosa_image::info::ImageInfo;
use limosa_image::qcow2::{CreateOptions, Header};
use limosa_image::reference::{Location, Reference};
use limosa_storage::{FileOptions, FileStorage, LockPolicy, block_on};
use rustix::io::Errno;

use super::overlay::create_file;
use crate::img::open::named;
use crate::img::options::{Name, Source};
use crate::remote;

/// Returns the overlay on top of an image, and creates it if it does not exist.
///
/// # Errors
/// One that exists has another backing file, or is of other contents; the image cannot be opened; the overlay cannot be
/// created.
pub(super) fn overlay(base: &Source, path: &Path) -> anyhow::Result<Source> {
    let location = absolute(&named(base)?.reference)?;
    // The overlay has nothing but the name.
    let is_plain = Reference::from_name(location.to_string()).is_ok_and(|named| named.location == location);
    anyhow::ensure!(is_plain, "--overlay: {location} has options that its name does not; give the image by its name");
    if !path.try_exists().with_context(|| path.display().to_string())? {
        match create(base, &location, path) {
            // Another server was faster.
            Err(error) if error.downcast_ref() == Some(&Errno::EXIST) => {}
            created => created.with_context(|| path.display().to_string())?,
        }
    }
    let overlay = Source { name: Name(path.into()), image_opts: false, format: Some("qcow2".into()), ..base.clone() };
    check(&overlay, &location, path)?;
    Ok(overlay)
}

fn create(base: &Source, location: &Location, path: &Path) -> anyhow::Result<()> {
    let NamedImage { reference, options, .. } = named(base)?;
    let disk = block_on(chain::open(&reference, &options))?;
    let content = remote::content(&location.to_string()).map(|content| content_line(location, &content));
    let options = CreateOptions::default()
        .size(disk.len())
        .backing_file(Some(location.to_string().into()))
        .backing_format(Some(disk.format().to_owned()))
        .backing_content(content);
    create_file(path, &options)
}

/// Checks an overlay, and has every later opening of the object below it fail if that is another one.
fn check(overlay: &Source, location: &Location, path: &Path) -> anyhow::Result<()> {
    let name = path.display();
    if matches!(location, Location::Object(_)) {
        let file = FileOptions { read_only: true, lock: LockPolicy::None, ..FileOptions::default() };
        let header = block_on(Header::read_to_examine(&*FileStorage::open(path, &file)?))?;
        let of_location = content_line(location, "");
        match header.extensions.backing_content.as_deref().and_then(|found| found.strip_prefix(&of_location)) {
            Some(content) => remote::expect(&location.to_string(), content),
            None => say!("limosa: {name}: has no record of the object below it: a replacement cannot be noticed"),
        }
    }
    let NamedImage { reference, options, .. } = named(overlay)?;
    let chain = block_on(ImageInfo::of_chain(&reference, &options)).with_context(|| name.to_string())?;
    let below = chain.get(1).map(|image| Reference::from_name(&image.filename)).transpose()?;
    let below = below.map(|below| absolute(&below)).transpose()?;
    if below.as_ref() != Some(location) {
        let found = below.map_or_else(|| "no image".to_owned(), |below| below.to_string());
        anyhow::bail!("{name}: is on top of {found}, not of {location}; name another file");
    }
    Ok(())
}

/// The line in the overlay's header: the name as well, because an image may get another backing file.
pub(crate) fn content_line(location: &Location, content: &str) -> String {
    format!("{location}\n{content}")
}

/// The place of an image by a name that holds in every folder.
fn absolute(reference: &Reference) -> anyhow::Result<Location> {
    Ok(match reference.path() {
        Some(path) => Location::File(std::path::absolute(path).with_context(|| path.display().to_string())?),
        None => reference.location.clone(),
    })
}
