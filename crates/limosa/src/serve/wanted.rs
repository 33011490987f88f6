//! An image to serve, and how.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_image::chain::{self, Image, NamedImage, OpenOptions};
use limosa_image::qcow2::{JournalFolder, SnapshotChoice};
use limosa_image::reference::Reference;
use limosa_image::{Compress, Disk, Format, ImageError};
use limosa_storage::{LockHolders, OpenError, block_on};
use uuid::Uuid;

use crate::img::open::{named, warn};
use crate::img::options::{Name, Source};

/// Time in which the kernel ends what a killed process had in flight.
const RELEASED: Duration = Duration::from_secs(5);
/// Interval at which a lock is tried again.
const TICK: Duration = Duration::from_millis(5);

/// The epoch of a protected VM that an image was brought to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recovery {
    pub(super) log: Uuid,
    pub(super) epoch: u64,
}

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
    /// Whether whole clusters that clients write are stored compressed.
    pub(super) compress: Option<Compress>,
    /// Whether the VM that was protected on it is known to be off.
    pub(super) fenced: bool,
    /// The epoch of that VM that it is served as of; `None`: the last one that was kept.
    pub(super) epoch: Option<u64>,
    /// The epoch that it was brought to when it was opened.
    pub(super) recovery: Option<Recovery>,
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

    /// Returns how another image is opened that takes its place: by its path and format, and otherwise the same.
    pub(super) fn at(&self, path: &Path, format: Format) -> Self {
        let format = Some(format.name().into());
        let source = Source { name: Name(path.into()), image_opts: false, format, ..self.source.clone() };
        Self { source, ..self.clone() }
    }

    /// Opens its disk.
    ///
    /// # Errors
    /// It cannot be opened, or another process has it open.
    pub(super) fn open_disk(&self) -> anyhow::Result<Arc<dyn Disk>> {
        Ok(self.open_image()?.as_disk())
    }

    /// Opens the image, for what only images of one format have.
    ///
    /// # Errors
    /// As of [`open_disk`](Self::open_disk).
    pub(super) fn open_image(&self) -> anyhow::Result<Image> {
        if self.snapshot.is_some() && !self.bitmaps.is_empty() {
            anyhow::bail!("--bitmap and --snapshot exclude each other: bitmaps are of the disk as it is now");
        }
        let NamedImage { reference, options, .. } = named(&self.source)?;
        let qcow2 = options.qcow2.clone().compress(self.compress);
        let options = options
            .read_only(self.is_read_only())
            .snapshot(self.snapshot.clone())
            .journals(self.journals.clone())
            .unreplayed(self.journals.iter().filter(|_| self.is_read_only()).cloned().collect())
            .qcow2(qcow2);
        let image = open_when_released(&reference, &options).map_err(|error| self.explained(error))?;
        if !self.is_read_only() {
            warn(&self.source, &image);
        }
        Ok(image)
    }

    /// Says if a lock is this server's own.
    fn explained(&self, error: ImageError) -> anyhow::Error {
        let is_own = matches!(
            &error,
            ImageError::Storage(error) if matches!(
                error.open_error(),
                Some(OpenError::Locked { holders: LockHolders::ThisProcess, .. })
            )
        );
        let error = anyhow::Error::from(error);
        if !is_own {
            return error;
        }
        let name = &self.source.name;
        error.context(format!("{name}: this server serves it, or an image below it, already"))
    }

    /// Opens its disk to be read only, without a journal.
    ///
    /// # Errors
    /// As of [`open_disk`](Self::open_disk).
    pub(super) fn open_to_read(&self) -> anyhow::Result<Arc<dyn Disk>> {
        Self { read_only: true, journals: None, ..self.clone() }.open_disk()
    }

    pub(super) const fn is_read_only(&self) -> bool {
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
        // A confined server cannot look at other processes.
        let is_left = matches!(
            error.open_error(),
            Some(OpenError::Locked { holders: LockHolders::NoneVisible | LockHolders::Unknown, .. })
        );
        if !is_left || begun.elapsed() > RELEASED {
            return Err(error.into());
        }
        thread::sleep(TICK);
    }
}
