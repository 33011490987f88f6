//! The images that are served, by their names on the command line or at the control socket.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use limosa_export::{Export, Exports};
use limosa_image::Disk;
use limosa_image::chain::{self, NamedImage};
use limosa_image::qcow2::SnapshotChoice;
use limosa_image::reference::Reference;
use limosa_storage::block_on;
use parking_lot::Mutex;

use crate::args::ServeArgs;
use crate::img::open::{resolve, warn};
use crate::img::options::{Name, Source};

/// An image to serve, and how.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) source: Source,
    pub(super) read_only: bool,
    pub(super) snapshot: Option<SnapshotChoice>,
    /// The export's name; `None`: that of the image's file.
    pub(super) name: Option<String>,
    pub(super) description: String,
    /// Offset of the export in the disk.
    pub(super) offset: u64,
    pub(super) size: Option<u64>,
}

impl Wanted {
    /// Opens it.
    ///
    /// # Errors
    /// It cannot be opened, another process has it open, or the part that was asked for is not in it.
    pub(super) fn open(&self) -> anyhow::Result<Export> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => file_name(&resolve(&self.source)?.reference)?,
        };
        let export = Export::new(name, self.open_disk()?)?.read_only(self.is_read_only());
        Ok(export.description(self.description.as_str())?.part(self.offset, self.size)?)
    }

    /// Opens its disk.
    ///
    /// # Errors
    /// It cannot be opened, or another process has it open.
    pub(super) fn open_disk(&self) -> anyhow::Result<Arc<dyn Disk>> {
        let NamedImage { reference, options, .. } = resolve(&self.source)?;
        let options = options.read_only(self.is_read_only()).snapshot(self.snapshot.clone());
        let image = block_on(chain::open_image(&reference, &options))?;
        if !self.is_read_only() {
            warn(&self.source, &image);
        }
        Ok(image.as_disk())
    }

    const fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some()
    }
}

/// How the images of exports were opened, by the exports' names.
#[derive(Debug, Default)]
pub(super) struct Images(Mutex<HashMap<String, Wanted>>);

impl Images {
    /// Notes how the image of an export was opened.
    pub(super) fn note(&self, export: &Export, wanted: Wanted) {
        self.0.lock().insert(export.name().to_owned(), wanted);
    }

    /// Returns how the image of an export was opened.
    pub(super) fn wanted(&self, export: &Export) -> Option<Wanted> {
        self.0.lock().get(export.name()).cloned()
    }

    /// Forgets an export.
    pub(super) fn forget(&self, name: &str) {
        self.0.lock().remove(name);
    }
}

/// Opens all images of the command line, and adds them.
///
/// # Errors
/// As of [`Wanted::open`]; two have the same name.
pub(super) fn open(args: &ServeArgs, exports: &Exports) -> anyhow::Result<Images> {
    let images = Images::default();
    for (number, image) in args.images.iter().enumerate() {
        let name = match args.name.get(number) {
            Some(name) => Some(name.clone()),
            None => (args.images.len() == 1).then(String::new),
        };
        let how = &args.how;
        let wanted = Wanted {
            source: Source {
                name: Name(image.clone()),
                image_opts: how.image_opts,
                format: how.format.clone(),
                cache: how.cache,
                io: how.aio.unwrap_or_default(),
                force_share: how.shared,
                untrusted: args.open.untrusted,
            },
            read_only: how.read_only,
            snapshot: how.snapshot.clone(),
            name,
            description: how.description.clone(),
            offset: how.offset,
            size: how.size,
        };
        let export = exports.add(wanted.open()?).context("use --name to tell them apart")?;
        images.note(&export, wanted);
    }
    Ok(images)
}

/// The name of an image's file, which names its export among others.
fn file_name(reference: &Reference) -> anyhow::Result<String> {
    let name = Path::new(&reference.path).file_name().and_then(OsStr::to_str);
    let name = name.with_context(|| format!("{reference}: the file has no name in UTF-8; use --name"))?;
    Ok(name.to_owned())
}
