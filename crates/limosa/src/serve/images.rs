//! The images that are served, by their names on the command line.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::Context as _;
use limosa_export::{Export, Exports};
use limosa_image::chain::{self, NamedImage};
use limosa_image::reference::Reference;
use limosa_storage::block_on;

use crate::args::ServeArgs;
use crate::img::open::{resolve, warn};
use crate::img::options::Source;

/// Opens all images.
///
/// # Errors
/// One cannot be opened, another process has it open, or the part that was asked for is not in it.
pub(super) fn open(args: &ServeArgs) -> anyhow::Result<Exports> {
    let exports = Exports::new();
    for (number, image) in args.images.iter().enumerate() {
        let source = Source {
            cache: args.cache,
            io: args.aio.unwrap_or_default(),
            force_share: args.shared,
            ..args.open.source(image, args.format.as_ref(), args.image_opts)
        };
        let NamedImage { reference, options, .. } = resolve(&source)?;
        let read_only = args.read_only || args.snapshot.is_some();
        let options = options.read_only(read_only).snapshot(args.snapshot.clone());
        let image = block_on(chain::open_image(&reference, &options))?;
        if !read_only {
            warn(&source, &image);
        }
        let name = match args.name.get(number) {
            Some(name) => name.clone(),
            None if args.images.len() == 1 => String::new(),
            None => file_name(&reference)?,
        };
        let export = Export::new(name, image.as_disk())?.read_only(read_only);
        let export = export.description(args.description.as_str())?.part(args.offset, args.size)?;
        exports.add(export).context("use --name to tell them apart")?;
    }
    Ok(exports)
}

/// The name of an image's file, which names its export among others.
fn file_name(reference: &Reference) -> anyhow::Result<String> {
    let name = Path::new(&reference.path).file_name().and_then(OsStr::to_str);
    let name = name.with_context(|| format!("{reference}: the file has no name in UTF-8; use --name"))?;
    Ok(name.to_owned())
}
