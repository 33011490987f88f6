//! `--overlay`: a qcow2 image on top of one that is not written.
//!
//! Law: an overlay that exists is used only if it stands on the image that is given.

use std::path::Path;

use anyhow::Context as _;
use limosa_image::Format;
use limosa_image::chain::{self, NamedImage};
use limosa_image::info::ImageInfo;
use limosa_image::reference::{Location, Reference};
use limosa_storage::{CacheMode, block_on};

use crate::img::create::new_image;
use crate::img::format_options::FormatOptions;
use crate::img::interrupt::UNFINISHED;
use crate::img::object;
use crate::img::open::named;
use crate::img::options::{Name, Source};

/// Returns the overlay on top of an image, and creates it if it does not exist.
///
/// # Errors
/// One that exists has another backing file; the image cannot be opened; the overlay cannot be created.
pub(super) fn overlay(base: &Source, path: &Path) -> anyhow::Result<Source> {
    let NamedImage { reference, options, .. } = named(base)?;
    let location = absolute(&reference)?;
    // The overlay has nothing but the name.
    let is_plain = Reference::from_name(location.to_string()).is_ok_and(|named| named.location == location);
    anyhow::ensure!(is_plain, "--overlay: {location} has options that its name does not; give the image by its name");
    let overlay = Source { name: Name(path.into()), image_opts: false, format: Some("qcow2".into()), ..base.clone() };
    if path.exists() {
        let NamedImage { reference, options, .. } = named(&overlay)?;
        let chain = block_on(ImageInfo::of_chain(&reference, &options))?;
        let below = chain.get(1).map(|image| Reference::from_name(&image.filename)).transpose()?;
        let below = below.map(|below| absolute(&below)).transpose()?;
        if below.as_ref() != Some(&location) {
            let found = below.map_or_else(|| "no image".to_owned(), |below| below.to_string());
            anyhow::bail!("{}: is on top of {found}, not of {location}; name another file", path.display());
        }
        return Ok(overlay);
    }
    let disk = block_on(chain::open(&reference, &options))?;
    let mut format = FormatOptions::parse(Format::Qcow2.name(), "")?;
    format.set("size", disk.len().to_string())?;
    format.set("backing_file", location.to_string())?;
    format.set("backing_fmt", disk.format())?;
    let image = new_image(&overlay.name, CacheMode::default(), &format)?;
    block_on(image.create(&UNFINISHED, &object::tls())).with_context(|| path.display().to_string())?.keep();
    Ok(overlay)
}

/// The place of an image by a name that holds in every folder.
fn absolute(reference: &Reference) -> anyhow::Result<Location> {
    Ok(match reference.path() {
        Some(path) => Location::File(std::path::absolute(path).with_context(|| path.display().to_string())?),
        None => reference.location.clone(),
    })
}
