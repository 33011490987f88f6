//! The images that are served, by their names on the command line or at the control socket.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::Context as _;
use limosa_console::{anyhow_error_line, say};
use limosa_export::{Export, Exports};
use limosa_image::chain::Image;
use limosa_image::qcow2::JournalFolder;
use limosa_image::reference::{Location, Reference};
use limosa_image::{Format, Guess, GuestOffset, ImageError, guess};
use limosa_page::to_usize;
use limosa_storage::{Buffer, Operation, block_on};
use parking_lot::Mutex;

use super::beside::refuse_overlaid;
use super::epochs::{self, Boot, EpochLog};
use super::wanted::Wanted;
use super::{on_top, overlay};
use crate::args::ServeArgs;
use crate::img::open::named;
use crate::img::options::{Name, Source};

/// How the images of exports were opened, by the exports' names.
#[derive(Debug)]
pub(super) struct Images {
    wanted: Mutex<HashMap<String, Wanted>>,
    journals: Option<JournalFolder>,
    boot: Boot,
}

impl Images {
    /// Returns the identifier of the time since the machine was booted.
    pub(super) const fn boot(&self) -> Boot {
        self.boot
    }

    /// Returns where images have their journals.
    pub(super) const fn journals(&self) -> Option<&JournalFolder> {
        self.journals.as_ref()
    }

    /// Notes how the image of an export was opened.
    pub(super) fn note(&self, export: &Export, wanted: Wanted) {
        self.wanted.lock().insert(export.name().to_owned(), wanted);
    }

    /// Returns how the image of an export was opened.
    pub(super) fn wanted(&self, export: &Export) -> Option<Wanted> {
        self.wanted.lock().get(export.name()).cloned()
    }

    /// Forgets an export.
    pub(super) fn forget(&self, name: &str) {
        self.wanted.lock().remove(name);
    }
}

/// Opens an image, or the overlay in which its disk continues; `wanted` becomes that.
///
/// # Errors
/// It cannot be opened, another process has it open, or the part that was asked for is not in it.
pub(super) fn open_export(wanted: &mut Wanted, boot: Boot) -> anyhow::Result<Export> {
    let image = follow(wanted, boot)?;
    closed_on_failure(&image, || export(wanted, &image, wanted.bitmaps.clone()))
}

/// Opens an image for a server that starts. It may be started again after a kill, and its guests wait for it: a dirty
/// bitmap that the kill has spoiled is left out, with a warning.
///
/// # Errors
/// As of [`open_export`].
fn open_at_start(wanted: &mut Wanted, boot: Boot) -> anyhow::Result<Export> {
    let image = follow(wanted, boot)?;
    closed_on_failure(&image, || export_at_start(wanted, &image))
}

/// Closes an image that cannot be served: its journal goes with it.
fn closed_on_failure(image: &Image, export: impl FnOnce() -> anyhow::Result<Export>) -> anyhow::Result<Export> {
    let exported = export();
    if exported.is_err() {
        let _ = block_on(image.as_disk().close());
    }
    exported
}

fn export_at_start(wanted: &Wanted, image: &Image) -> anyhow::Result<Export> {
    let disk = image.as_disk();
    // Who reads the bitmaps of an image that does not change relies on them.
    if wanted.bitmaps.is_empty() || disk.is_read_only() {
        return export(wanted, image, wanted.bitmaps.clone());
    }
    let found = block_on(disk.bitmaps())?;
    let was_closed = image.replayed() == 0 && image.repair_report().is_none();
    let (mut usable, mut missing) = (Vec::new(), Vec::new());
    for name in &wanted.bitmaps {
        match found.iter().find(|bitmap| bitmap.name == *name) {
            Some(bitmap) if bitmap.set.is_none() => missing.push((name, "it was not stored by who used it")),
            None if !was_closed => missing.push((name, "it does not exist, and the image was not closed")),
            _ => usable.push(name.clone()),
        }
    }
    let export = export(wanted, image, usable)?;
    for (name, why) in missing {
        say!("limosa: {}: clients cannot read bitmap {name:?}: {why}", wanted.source.name);
    }
    Ok(export)
}

/// Opens the image in which a disk continues; `wanted` becomes that, with the name of the first one.
fn follow(wanted: &mut Wanted, boot: Boot) -> anyhow::Result<Image> {
    let name = match &wanted.name {
        Some(name) => name.clone(),
        None => file_name(&named(&wanted.source)?.reference)?,
    };
    *wanted = overlay::follow(Wanted { name: Some(name), ..wanted.clone() })?;
    refuse_overlaid(&named(&wanted.source)?.reference)?;
    // To open it may change its times.
    let proved = EpochLog::proved(wanted, boot);
    let image = wanted.open_image()?;
    let checked = epochs::bring(wanted, &image, proved, boot).and_then(|recovery| {
        warn_of_header(wanted, &image)?;
        refuse_uncompressed(wanted, &image)?;
        Ok(recovery)
    });
    match checked {
        Ok(recovery) => {
            wanted.recovery = recovery;
            Ok(image)
        }
        Err(error) => {
            let _ = block_on(image.as_disk().close());
            Err(error)
        }
    }
}

/// Refuses an image that cannot have compressed contents, if they are asked for. The overlay in which it continues, and
/// the image below, have what they can.
fn refuse_uncompressed(wanted: &Wanted, image: &Image) -> anyhow::Result<()> {
    if let Some(compress) = wanted.compress.filter(|_| wanted.below.is_none() && !wanted.is_read_only()) {
        image.as_disk().compressor(compress.level)?;
    }
    Ok(())
}

/// Warns if an image is served as raw that begins as one of another format: its clients would see, and write, the
/// image's tables.
fn warn_of_header(wanted: &Wanted, image: &Image) -> anyhow::Result<()> {
    let disk = image.as_disk();
    // A format that was guessed is what it looks like.
    if image.is_guessed() || disk.format() != Format::Raw.name() {
        return Ok(());
    }
    let start = Buffer::zeroed(to_usize(disk.len().min(512)));
    block_on(disk.read(GuestOffset(0), start.clone().into()))?;
    let mut bytes = start.to_vec();
    bytes.resize(512, 0);
    let found = match guess(&bytes) {
        Guess::Known(Format::Raw) => return Ok(()),
        Guess::Known(format) => format.name(),
        Guess::Foreign(name) => name,
    };
    say!("limosa: {}: begins like a {found} image, but is served as raw", wanted.source.name);
    Ok(())
}

fn export(wanted: &Wanted, image: &Image, bitmaps: Vec<String>) -> anyhow::Result<Export> {
    let name = wanted.name.clone().unwrap_or_default();
    let export = Export::new(name, image.as_disk())?.read_only(wanted.is_read_only());
    let export = export.description(wanted.description.as_str())?.bitmaps(bitmaps)?;
    Ok(export.part(wanted.offset, wanted.size)?)
}

/// Opens all images of the command line, and adds them.
///
/// # Errors
/// As of [`open_export`]; two have the same name.
pub(super) fn open(args: &ServeArgs, journals: Option<JournalFolder>, exports: &Exports) -> anyhow::Result<Images> {
    let images = Images { wanted: Mutex::default(), journals, boot: Boot::of_now() };
    for (number, image) in args.images.iter().enumerate() {
        let name = match args.name.get(number) {
            Some(name) => Some(name.clone()),
            None => (args.images.len() == 1).then(String::new),
        };
        let how = &args.how;
        let mut source = Source {
            name: Name(image.clone()),
            image_opts: how.image_opts,
            format: how.format.clone(),
            cache: how.cache,
            io: how.aio.unwrap_or_default(),
            force_share: how.shared,
            untrusted: args.open.untrusted,
        };
        if let Some(overlay) = &args.overlay {
            source = on_top::overlay(&source, overlay)?;
        }
        let is_object = matches!(named(&source)?.reference.location, Location::Object(_));
        let mut wanted = Wanted {
            source,
            // Objects are only read.
            read_only: how.read_only || is_object,
            snapshot: how.snapshot.clone(),
            name,
            description: how.description.clone(),
            bitmaps: how.bitmap.clone(),
            offset: how.offset,
            size: how.size,
            compress: how.compress(),
            fenced: how.fenced,
            epoch: how.epoch,
            recovery: None,
            journals: images.journals.clone(),
            below: None,
        };
        let opened = open_at_start(&mut wanted, images.boot).map_err(|error| explained(error, &wanted))?;
        let disk = opened.disk();
        match exports.add(opened) {
            Ok(export) => images.note(&export, wanted),
            Err(error) => {
                let _ = block_on(disk.close());
                return Err(error).context("use --name to tell them apart");
            }
        }
    }
    Ok(images)
}

/// Says what helps if an image cannot be written.
fn explained(error: anyhow::Error, wanted: &Wanted) -> anyhow::Error {
    let kinds = [ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem];
    let is_denied = matches!(
        error.downcast_ref(),
        Some(ImageError::Storage(error)) if error.operation == Operation::Open && kinds.contains(&error.kind())
    );
    if wanted.is_read_only() || !is_denied {
        return error;
    }
    anyhow::anyhow!("{}; --read-only serves an image that cannot be written", anyhow_error_line(&error))
}

/// The name of an image's file, which names its export among others.
fn file_name(reference: &Reference) -> anyhow::Result<String> {
    let name = reference.path().and_then(Path::file_name).and_then(OsStr::to_str);
    let name = name.with_context(|| format!("{reference}: the file has no name in UTF-8; use --name"))?;
    Ok(name.to_owned())
}
