//! Puts an overlay on another backing file.
//!
//! Law: the overlay reads the same at any moment, whether the rebase is interrupted, fails, or is done. First the
//! overlay takes over, durably, all contents that the new backing file does not have; over the old one it reads the
//! same with and without them. Then its header changes, in one step ([`change_backing`]).
//!
//! With [`RebaseMode::HeaderOnly`] the header is all that changes: for a backing file that was moved, or whose contents
//! the caller knows to be the same.

mod copier;
mod padded;

use std::ffi::OsString;
use std::sync::Arc;

use limosa_storage::{Storage, block_on};

use super::operation::{OperationError, Progress, ProgressObserver};
use crate::chain::{self, ImageFile, NamedImage, OpenOptions};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::probe::Format;
use crate::qcow2::{
    CheckOptions, CheckReport, Features, Header, ImageParts, Qcow2, Qcow2Options, Repair, change_backing, repair_with,
};
use crate::reference::{BackingOverride, Location, Reference};
use crate::setters::setters;
use copier::Copier;
use padded::Padded;

/// How to copy what the new backing file does not have.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RebaseOptions {
    /// Pieces in flight at the same time.
    pub max_in_flight: usize,
    /// Bytes that are compared at once.
    pub chunk_size: u64,
    /// Whether whole clusters that are copied are compressed.
    pub compress: bool,
}

setters!(RebaseOptions { max_in_flight: usize, chunk_size: u64, compress: bool });

impl Default for RebaseOptions {
    fn default() -> Self {
        Self { max_in_flight: 8, chunk_size: 1 << 20, compress: false }
    }
}

/// Counts of a rebase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RebaseCounters {
    /// Bytes read of both backing files together.
    pub bytes_read: u64,
    /// Bytes of contents written to the overlay.
    pub bytes_written: u64,
    /// Bytes of the overlay that say now that they are zeros.
    pub bytes_zeroed: u64,
}

impl RebaseCounters {
    const fn add(&mut self, other: &Self) {
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.bytes_zeroed += other.bytes_zeroed;
    }
}

/// A backing file as a header names it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackingName {
    /// Its name; a relative path is one from the overlay's folder.
    pub name: OsString,
    /// Its format.
    pub format: String,
}

impl BackingName {
    /// A backing file of this name and format.
    #[must_use]
    pub fn new(name: impl Into<OsString>, format: impl Into<String>) -> Self {
        Self { name: name.into(), format: format.into() }
    }
}

/// The extent of a rebase.
#[derive(Debug, Clone)]
pub enum RebaseMode {
    /// Contents that the new backing file does not have are copied into the overlay. The new backing file is opened
    /// like this, to be read.
    Copy(Box<OpenOptions>),
    /// Nothing is copied, and no backing file is opened.
    HeaderOnly,
}

/// A rebase of an image that is given by name.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RebaseRequest {
    /// The overlay.
    pub overlay: NamedImage,
    /// The new backing file; `None`: the overlay has all of its contents itself.
    pub backing: Option<BackingName>,
    /// The extent.
    pub mode: RebaseMode,
    /// The way of copying.
    pub options: RebaseOptions,
}

/// An overlay's files, and the contents to copy into it.
#[derive(Debug)]
#[non_exhaustive]
pub struct RebaseImages {
    /// The overlay, not in use, over its old backing file.
    pub overlay: ImageParts,
    /// The new backing file, open; `None`: the overlay gets no backing file.
    pub new: Option<Arc<dyn Disk>>,
    /// The number of files from the overlay's down to the new backing file, if that is in the overlay's chain already.
    pub shared_from: Option<u32>,
}

impl RebaseImages {
    /// An overlay and a new backing file that is not in its chain.
    #[must_use]
    pub const fn new(overlay: ImageParts, new: Option<Arc<dyn Disk>>) -> Self {
        Self { overlay, new, shared_from: None }
    }
}

impl RebaseRequest {
    /// A rebase with the default options.
    #[must_use]
    pub fn new(overlay: NamedImage, backing: Option<BackingName>, mode: RebaseMode) -> Self {
        Self { overlay, backing, mode, options: RebaseOptions::default() }
    }

    /// Opens the overlay, and for [`RebaseMode::Copy`] the backing files.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: the overlay is raw, or would be its own backing file; an image cannot be opened.
    pub async fn prepare(self) -> Result<Rebase, ImageError> {
        let NamedImage { reference, options } = &self.overlay;
        let writable = OpenOptions { read_only: false, snapshot: None, ..options.clone() };
        let open = match &self.mode {
            RebaseMode::HeaderOnly => {
                let file = ImageFile::open(reference, &writable).await?;
                if file.format != Format::Qcow2 {
                    let what = "it is not a qcow2 image".to_owned();
                    return Err(ImageError::Unsupported { image: Arc::clone(file.storage.name()), what });
                }
                let rebase = Rebase { file: file.storage, backing: self.backing, copy: None, options: self.options };
                return Ok(rebase);
            }
            RebaseMode::Copy(open) => open,
        };
        let (mut new, mut shared_from) = (None, None);
        if let Some(backing) = &self.backing {
            let (reference, open) = backing.open(&reference.location, open)?;
            shared_from = self.shared_from(&reference, &open).await?;
            new = Some(chain::open(&reference, &open).await?);
        }
        let overlay = chain::open_offline(reference, &writable).await?;
        Ok(Rebase::new(RebaseImages { overlay, new, shared_from }, self.backing, self.options))
    }

    /// How far down the overlay's chain the new backing file is, if it is in it.
    async fn shared_from(&self, new: &Reference, open: &OpenOptions) -> Result<Option<u32>, ImageError> {
        let NamedImage { reference, options } = &self.overlay;
        let new = chain::files(new, open).await?;
        let overlay = reference.location.identity();
        if new.iter().any(|file| file.identity().is_some() && file.identity() == overlay) {
            let what = "it would be part of its own backing chain".to_owned();
            return Err(ImageError::Unsupported { image: reference.to_string().into(), what });
        }
        // What the caller says of the chain is not what the new backing file would say of its own.
        let Some(first) = new.first().filter(|_| reference.backing == BackingOverride::AsWritten) else {
            return Ok(None);
        };
        let old = chain::files(reference, &OpenOptions { read_only: true, ..options.clone() }).await?;
        Ok(old
            .iter()
            .skip(1)
            .position(|file| file.is_same_image(first))
            .and_then(|above| u32::try_from(above + 1).ok()))
    }
}

impl BackingName {
    /// The file, as readers of the overlay find it, and the options that it is opened with.
    fn open(&self, overlay: &Location, open: &OpenOptions) -> Result<(Reference, OpenOptions), ImageError> {
        let format: Format = self.format.parse().map_err(|error: crate::UnknownFormat| ImageError::Unsupported {
            image: self.name.to_string_lossy().into(),
            what: error.to_string(),
        })?;
        let reference = Reference::from_image(&self.name, overlay)?;
        let open = OpenOptions { format: Some(format), read_only: true, snapshot: None, ..open.clone() };
        Ok((reference, open))
    }
}

/// A rebase whose images are open.
#[derive(Debug)]
pub struct Rebase {
    file: Arc<dyn Storage>,
    backing: Option<BackingName>,
    /// `None`: only the header changes.
    copy: Option<RebaseImages>,
    options: RebaseOptions,
}

/// A rebase that is done.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Rebased {
    /// Counts of what was copied.
    pub counters: RebaseCounters,
    /// Repairs of an overlay that was not closed: [`Qcow2::repair_report`].
    pub repaired: Option<CheckReport>,
}

impl Rebase {
    /// A rebase of images that are open. Nothing else uses them.
    #[must_use]
    pub fn new(images: RebaseImages, backing: Option<BackingName>, options: RebaseOptions) -> Self {
        Self { file: Arc::clone(&images.overlay.file), backing, copy: Some(images), options }
    }

    /// Returns the number of internal snapshots of the overlay. What they have from the backing file they read from the
    /// new one afterwards.
    #[must_use]
    pub fn snapshots(&self) -> u32 {
        self.copy.as_ref().map_or(0, |images| images.overlay.header.snapshots.1)
    }

    /// Copies what has to be copied, and changes the header.
    ///
    /// # Errors
    /// [`OperationError`]. The overlay then reads as before, over its old backing file.
    pub fn run(self, watch: ProgressObserver<'_>) -> Result<Rebased, OperationError> {
        block_on(self.carry_out(watch))
    }

    async fn carry_out(self, watch: ProgressObserver<'_>) -> Result<Rebased, OperationError> {
        let Self { file, backing, copy, options } = self;
        let backing = backing.map(|BackingName { name, format }| (name, Some(format)));
        let Some(mut images) = copy else {
            change_backing(&*file, backing, |_| {}).await?;
            let _ = watch(Progress::new(1, 1, 0));
            return Ok(Rebased::default());
        };
        let mut repaired = None;
        if images.overlay.header.features.dirty() && !images.overlay.header.features.corrupt() {
            // Before the bitmaps are laid aside: their space counts as used.
            let options = CheckOptions::default();
            let cipher = images.overlay.cipher.as_deref();
            repaired = Some(repair_with(&*file, cipher, Repair::Refcounts, options).await?);
            images.overlay.header = Header::read(&*file).await?;
        }
        // The guest's contents stay the same, and so its bitmaps hold; a writer would mark them as outdated.
        let bitmaps = images.overlay.header.features.bitmaps();
        if bitmaps {
            lay_bitmaps_aside(&*file, &mut images.overlay.header).await?;
        }
        let copied = copy_into(images, &options, watch).await;
        let counters = match copied {
            Ok(counters) => counters,
            Err(error) => {
                if bitmaps {
                    // The first failure is returned; without it the bitmaps are lost, and nothing else.
                    let _ = put_bitmaps_back(&*file).await;
                }
                return Err(error);
            }
        };
        let speak_of_bitmaps = |header: &mut Header| {
            header.features.autoclear |= if bitmaps { Features::BITMAPS } else { 0 };
        };
        change_backing(&*file, backing, speak_of_bitmaps).await?;
        Ok(Rebased { counters, repaired })
    }
}

/// Has the header say no more that there are bitmaps, durably. They keep their space.
async fn lay_bitmaps_aside(file: &dyn Storage, header: &mut Header) -> Result<(), ImageError> {
    header.features.autoclear &= !Features::BITMAPS;
    header.write_fields(file).await?;
    Ok(file.flush().await?)
}

async fn put_bitmaps_back(file: &dyn Storage) -> Result<(), ImageError> {
    let mut header = Header::read(file).await?;
    header.features.autoclear |= Features::BITMAPS;
    header.write_fields(file).await?;
    Ok(file.flush().await?)
}

/// Copies into the overlay what the new backing file does not have, durably.
async fn copy_into(
    images: RebaseImages,
    options: &RebaseOptions,
    watch: ProgressObserver<'_>,
) -> Result<RebaseCounters, OperationError> {
    let RebaseImages { overlay, new, shared_from } = images;
    let ImageParts { file, data_file, backing, header, cipher, .. } = overlay;
    let old = Arc::new(Padded::new(backing, file.name(), header.size));
    let parts = ImageParts::new(file, header).data_file(data_file).backing(Some(old)).cipher(cipher);
    let overlay = Qcow2::open(parts, Qcow2Options::default()).await?;
    let counters = Copier::new(&*overlay, new.as_ref(), shared_from, options, watch)?.run().await?;
    overlay.close().await?;
    Ok(counters)
}
