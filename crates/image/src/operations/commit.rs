//! Moves the contents of an overlay into an image below it.
//!
//! Law: the overlay reads the same at any moment, whether the commit is interrupted, fails, or is done. First the base
//! becomes as long as the overlay. Then it takes the contents of the images above it, durably. Only then the overlay is
//! emptied. The overlay's contents cover those of the base, so a base with a part of the contents changes nothing; once
//! the base has them all, the overlay may lose any of its own.
//!
//! Images between the overlay and the base read as something else afterwards.

use std::ffi::OsString;
use std::sync::Arc;

use limosa_storage::{Storage, block_on};

use super::convert::{ConvertCounters, ConvertOptions, SECTOR, convert_on_threads};
use super::operation::{OperationError, ProgressObserver};
use crate::chain::{ChainWithBase, Image, NamedImage, OpenOptions, open_with_base};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::preallocation::Preallocation;
use crate::qcow2::{CheckOptions, ImageParts, Qcow2, Qcow2Options, empty};
use crate::setters::setters;

/// How to commit.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CommitOptions {
    /// Whether the overlay keeps its contents.
    pub keep_overlay: bool,
    /// Pieces in flight at the same time.
    pub max_in_flight: usize,
}

setters!(CommitOptions { keep_overlay: bool, max_in_flight: usize });

impl Default for CommitOptions {
    fn default() -> Self {
        Self { keep_overlay: false, max_in_flight: 8 }
    }
}

/// A commit of an image that is given by name.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CommitRequest {
    /// The overlay.
    pub overlay: NamedImage,
    /// The name of the image that takes its contents; `None`: its backing file. With a name the overlay keeps its
    /// contents, since the images between them would not read the same without.
    pub base: Option<OsString>,
    /// The way of committing.
    pub options: CommitOptions,
}

impl CommitRequest {
    /// A commit into the backing file, with the default options.
    #[must_use]
    pub fn new(overlay: NamedImage) -> Self {
        Self { overlay, base: None, options: CommitOptions::default() }
    }

    /// Opens the overlay and the base, and everything between and below them.
    ///
    /// # Errors
    /// As [`open_with_base`] and [`Commit::new`].
    pub async fn prepare(self) -> Result<Commit, ImageError> {
        let keep_overlay = self.options.keep_overlay || self.base.is_some();
        let NamedImage { reference, options } = self.overlay;
        let options = OpenOptions { read_only: keep_overlay, snapshot: None, ..options };
        let chain = open_with_base(&reference, &options, self.base.as_deref()).await?;
        Commit::new(chain, self.options.keep_overlay(keep_overlay)).await
    }
}

/// A commit whose images are open.
#[derive(Debug)]
pub struct Commit {
    overlay: Arc<dyn Disk>,
    file: Arc<dyn Storage>,
    data_file: Option<Arc<dyn Storage>>,
    base: Image,
    layers: u32,
    options: CommitOptions,
}

impl Commit {
    /// A commit of the topmost image of a chain. Nothing else uses these images.
    ///
    /// # Errors
    /// [`ImageError::NeedsRepair`]: the overlay is marked as corrupt, and would be emptied; it cannot be read.
    pub async fn new(chain: ChainWithBase, options: CommitOptions) -> Result<Self, ImageError> {
        let ChainWithBase { top, base, layers } = chain;
        let ImageParts { file, data_file, backing, header, cipher, .. } = top;
        if header.features.corrupt() && !options.keep_overlay {
            let what = "it is marked as corrupt: repair it before it is emptied".to_owned();
            return Err(ImageError::NeedsRepair { image: Arc::clone(file.name()), what });
        }
        let parts = ImageParts::new(Arc::clone(&file), header);
        let parts = parts.data_file(data_file.clone()).backing(backing).cipher(cipher);
        // Its contents do not change until it is emptied.
        let overlay = Qcow2::open(parts, Qcow2Options::default().read_only(true)).await?;
        Ok(Self { overlay, file, data_file, base, layers, options })
    }

    /// Returns the base.
    #[must_use]
    pub const fn base(&self) -> &Image {
        &self.base
    }

    /// Returns the bytes of the overlay's disk.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.overlay.len()
    }

    /// Moves the contents, with a thread for each request, and closes the images.
    ///
    /// # Errors
    /// [`OperationError`]. The overlay then reads as before.
    pub fn run(self, watch: ProgressObserver<'_>) -> Result<ConvertCounters, OperationError> {
        let Self { overlay, file, data_file, base, layers, options } = self;
        let target = base.as_disk();
        let before = target.len();
        block_on(grow(&base, overlay.len()))?;
        let copy =
            ConvertOptions::default().max_in_flight(options.max_in_flight).backing_length(Some(before)).layers(layers);
        let counters = convert_on_threads(&[Arc::clone(&overlay)], &*target, &copy, watch)?;
        // All of it has to be durable before anything of the overlay goes.
        let finished = block_on(target.close());
        finished.map_err(|source| OperationError::CloseTarget { target: target.name().to_string(), source })?;
        block_on(overlay.close())?;
        if !options.keep_overlay {
            block_on(empty(&*file, data_file.as_deref(), CheckOptions::default()))?;
        }
        Ok(counters)
    }
}

/// Makes the base at least as long as the overlay; what is new of it reads as zeros, as the overlay does there.
async fn grow(base: &Image, length: u64) -> Result<(), OperationError> {
    let length = length.checked_next_multiple_of(SECTOR).ok_or(OperationError::TooLarge)?;
    if base.as_disk().len() >= length {
        return Ok(());
    }
    match base {
        Image::Raw(raw) | Image::Luks(raw) => raw.resize(length, Preallocation::Off).await?,
        Image::Qcow2(qcow2) => qcow2.grow(length).await?,
    }
    Ok(())
}
