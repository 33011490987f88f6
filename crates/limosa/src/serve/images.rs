//! The images that are served, by their names on the command line or at the control socket.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_export::{Export, Exports};
use limosa_image::chain::{self, Image, NamedImage, OpenOptions};
use limosa_image::qcow2::{JournalFolder, SnapshotChoice};
use limosa_image::reference::Reference;
use limosa_image::{Disk, ImageError};
use limosa_storage::{OpenError, block_on};
use parking_lot::Mutex;

use crate::args::ServeArgs;
use crate::img::open::{resolve, warn};
use crate::img::options::{Name, Source};

/// Time in which the kernel ends what a killed process had in flight.
const RELEASED: Duration = Duration::from_secs(5);
/// Interval at which a lock is tried again.
const TICK: Duration = Duration::from_millis(5);

/// An image to serve, and how.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) source: Source,
    pub(super) read_only: bool,
    pub(super) snapshot: Option<SnapshotChoice>,
    /// The export's name; `None`: that of the image's file.
    pub(super) name: Option<String>,
    pub(super) description: String,
    /// Dirty bitmaps that clients can read.
    pub(super) bitmaps: Vec<String>,
    /// Offset of the export in the disk.
    pub(super) offset: u64,
    pub(super) size: Option<u64>,
    /// Where it has its journal.
    pub(super) journals: Option<JournalFolder>,
    /// The image that it is an overlay of, if this server put it on that.
    pub(super) below: Option<Arc<Self>>,
}

impl Wanted {
    /// Returns whether it is the image at this path.
    pub(super) fn is_of(&self, path: &Path) -> bool {
        !self.source.image_opts && std::path::absolute(&self.source.name.0).is_ok_and(|image| image == path)
    }

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
        let export = export.description(self.description.as_str())?.bitmaps(self.bitmaps.clone())?;
        Ok(export.part(self.offset, self.size)?)
    }

    /// Opens its disk.
    ///
    /// # Errors
    /// It cannot be opened, or another process has it open.
    pub(super) fn open_disk(&self) -> anyhow::Result<Arc<dyn Disk>> {
        let NamedImage { reference, options, .. } = resolve(&self.source)?;
        let options =
            options.read_only(self.is_read_only()).snapshot(self.snapshot.clone()).journals(self.journals.clone());
        let image = open_when_released(&reference, &options)?;
        if !self.is_read_only() {
            warn(&self.source, &image);
        }
        Ok(image.as_disk())
    }

    const fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some()
    }
}

/// Opens an image. One that is locked and open in no process is waited for: the kernel releases the locks of a server
/// that was killed only when it has ended what that had in flight.
fn open_when_released(reference: &Reference, options: &OpenOptions) -> Result<Image, ImageError> {
    let begun = Instant::now();
    loop {
        let error = match block_on(chain::open_image(reference, options)) {
            Err(ImageError::Storage(error)) => error,
            opened => return opened,
        };
        let is_left = matches!(error.open_error(), Some(OpenError::Locked { processes, .. }) if processes.is_empty());
        if !is_left || begun.elapsed() > RELEASED {
            return Err(error.into());
        }
        thread::sleep(TICK);
    }
}

/// How the images of exports were opened, by the exports' names.
#[derive(Debug)]
pub(super) struct Images {
    wanted: Mutex<HashMap<String, Wanted>>,
    journals: Option<JournalFolder>,
}

impl Images {
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

/// Opens all images of the command line, and adds them.
///
/// # Errors
/// As of [`Wanted::open`]; two have the same name.
pub(super) fn open(args: &ServeArgs, journals: Option<JournalFolder>, exports: &Exports) -> anyhow::Result<Images> {
    let images = Images { wanted: Mutex::default(), journals };
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
            bitmaps: how.bitmap.clone(),
            offset: how.offset,
            size: how.size,
            journals: images.journals.clone(),
            below: None,
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
