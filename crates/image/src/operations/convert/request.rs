//! Conversions of images that are given by name.
//!
//! Law: an existing file is not touched before all sources are open. A target that was just created reads as zeros, and
//! an existing one is not assumed to. A file that was created for a conversion that fails is removed again, since it
//! looks like the copy.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use limosa_storage::{Io, block_on};

use super::bitmaps::Bitmaps;
use super::source::Source;
use super::{ConvertCounters, ConvertOptions, convert_on_threads};
use crate::chain::{self, Image, NamedImage, OpenOptions};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::new_image::{CreatedFiles, NewImage, UnfinishedFiles};
use crate::operations::operation::{OperationError, ProgressObserver};
use crate::probe::Format;
use crate::reference::Location;

/// The name of the new target's passphrase: one that QEMU's objects cannot have.
const SECRET: &str = "(target)";

/// A conversion of images that are given by name.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConvertRequest {
    /// The sources, which are concatenated.
    pub sources: Vec<NamedImage>,
    /// The target.
    pub target: ConvertTarget,
    /// The way of copying. For a new target, `backing_length` and `target_is_zero` are determined from it.
    pub options: ConvertOptions,
    /// Whether the dirty bitmaps of the source, which is the only one, are copied, too.
    pub bitmaps: Option<CopyBitmaps>,
}

/// Bitmaps that are copied with the contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyBitmaps {
    /// All: one that cannot be relied on is refused.
    All,
    /// Those that can be relied on.
    Usable,
}

/// The target of a conversion.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ConvertTarget {
    /// An image that exists.
    Existing(NamedImage),
    /// An image that is created.
    New(NewTarget),
}

impl ConvertTarget {
    /// Where its bytes are.
    fn location(&self) -> Location {
        match self {
            Self::Existing(named) => named.reference.location.clone(),
            Self::New(new) => new.image.location.clone(),
        }
    }
}

/// A target that is created. It becomes as long as the sources.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NewTarget {
    /// The image; its size is set.
    pub image: NewImage,
    /// The I/O backend of its file.
    pub io: Io,
    /// How its backing file, if it has one, is opened to learn its length.
    pub backing: OpenOptions,
}

impl NewTarget {
    /// A target whose backing file, if it has one, is opened like this.
    #[must_use]
    pub const fn new(image: NewImage, io: Io, backing: OpenOptions) -> Self {
        Self { image, io, backing }
    }
}

/// A conversion whose images are open.
#[derive(Debug)]
pub struct PreparedConversion<'a> {
    sources: Vec<Arc<dyn Disk>>,
    target: Image,
    options: ConvertOptions,
    length: u64,
    created: Option<CreatedFiles<'a>>,
    bitmaps: Option<Bitmaps>,
}

impl ConvertRequest {
    /// A conversion with the default options.
    #[must_use]
    pub fn new(sources: Vec<NamedImage>, target: ConvertTarget) -> Self {
        Self { sources, target, options: ConvertOptions::default(), bitmaps: None }
    }

    /// Opens the sources, creates the target if it is new, and opens it.
    ///
    /// # Errors
    /// [`OperationError::Image`]: an image cannot be opened or created; [`OperationError::Backing`]: nor can the new
    /// target's backing file; [`OperationError::SameFile`]; [`OperationError::SharedBacking`];
    /// [`OperationError::TooLarge`]; bitmaps that cannot be copied.
    pub async fn prepare(self, unfinished: &UnfinishedFiles) -> Result<PreparedConversion<'_>, OperationError> {
        let Self { sources: named, target, mut options, bitmaps } = self;
        let location = target.location();
        let same = || OperationError::SameFile { target: location.to_string() };
        let identity = location.identity();
        if identity.is_some() && named.iter().any(|source| source.reference.location.identity() == identity) {
            return Err(same());
        }
        let mut sources = Vec::with_capacity(named.len());
        for source in &named {
            let (disk, identities) = chain::open_with_identities(&source.reference, &source.options).await?;
            // The locks of files tell that a source stands on the target.
            if location.path().is_none() && identity.as_ref().is_some_and(|target| identities.contains(target)) {
                return Err(same());
            }
            sources.push(disk);
        }
        let length = Source::new(&sources, options.window.as_ref())?.len();
        let bitmaps = match (bitmaps, sources.first()) {
            (Some(_), Some(source)) if named.iter().any(|source| source.options.snapshot.is_some()) => {
                let what = "bitmaps are of the disk as it is now, and cannot be copied from a snapshot".to_owned();
                return Err(ImageError::Unsupported { image: Arc::clone(source.name()), what }.into());
            }
            (Some(which), Some(source)) => Some(Bitmaps::of(&**source, which == CopyBitmaps::Usable).await?),
            _ => None,
        };
        let (target, created) = match target {
            ConvertTarget::Existing(target) => (target, None),
            ConvertTarget::New(new) => {
                let made = new.create(sources.len(), length, unfinished).await?;
                (options.backing_length, options.target_is_zero) = (made.below, made.is_zero);
                (made.image, Some(made.files))
            }
        };
        let options_of_target = OpenOptions { read_only: false, ..target.options };
        let target = chain::open_image(&target.reference, &options_of_target).await?;
        Ok(PreparedConversion { sources, target, options, length, created, bitmaps })
    }
}

/// A target that was just created.
struct Made<'a> {
    image: NamedImage,
    files: CreatedFiles<'a>,
    /// Length of its backing image in bytes.
    below: Option<u64>,
    is_zero: bool,
}

impl NewTarget {
    async fn create(
        mut self,
        sources: usize,
        length: u64,
        unfinished: &UnfinishedFiles,
    ) -> Result<Made<'_>, OperationError> {
        self.image.set_size(length);
        let below = match self.image.backing_file() {
            Some(backing) if sources > 1 => {
                return Err(OperationError::SharedBacking { backing: backing.to_string_lossy().into_owned() });
            }
            Some(backing) => {
                let name = backing.to_string_lossy().into_owned();
                let failed = |source| OperationError::Backing { backing: name.clone(), source };
                match self.image.backing().map_err(failed)? {
                    Some(backing) => Some(backing.length(&self.backing).await.map_err(failed)?),
                    None => None,
                }
            }
            None => None,
        };
        if self.image.has_detached_header() {
            let what = "a header in a file of its own has no contents: create it first".to_owned();
            return Err(ImageError::Unsupported { image: self.image.location.to_string().into(), what }.into());
        }
        let files = self.image.create(unfinished).await?;
        let NewImage { location, cache, .. } = &self.image;
        // A device keeps its contents, except in an image that says which of them count; so does an export.
        let is_device = |path| fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device());
        let device = location.path().is_none_or(is_device);
        let is_zero = below.is_none()
            && match self.image.format() {
                Format::Qcow2 => true,
                Format::Raw => !device,
                // What was never written is decrypted to anything.
                Format::Luks => false,
            };
        let mut reference = self.image.reference()?;
        let mut secrets = self.backing.secrets.clone();
        if let Some(passphrase) = self.image.passphrase() {
            secrets.insert(SECRET, passphrase.clone());
            reference.key_secret = Some(SECRET.to_owned());
        }
        // What the backing file refers to was checked above.
        let policy = self.backing.policy.clone();
        let options = OpenOptions { cache: *cache, io: self.io, policy, secrets, ..OpenOptions::default() };
        Ok(Made { image: NamedImage::new(reference, options), files, below, is_zero })
    }
}

impl PreparedConversion<'_> {
    /// Returns the target.
    #[must_use]
    pub const fn target(&self) -> &Image {
        &self.target
    }

    /// Returns the number of bytes that are converted.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// Returns the names of bitmaps that are not copied, because they cannot be relied on.
    #[must_use]
    pub fn skipped_bitmaps(&self) -> &[String] {
        self.bitmaps.as_ref().map_or(&[], |bitmaps| &bitmaps.skipped)
    }

    /// Returns whether the window of [`ConvertOptions::window`] begins past the end of a source.
    #[must_use]
    pub fn begins_past_end(&self) -> bool {
        let window = self.options.window.as_ref();
        window.is_some_and(|window| self.sources.iter().any(|disk| window.start > window.end.min(disk.len())))
    }

    /// Copies the sources with a thread for each request, and closes the target.
    ///
    /// # Errors
    /// [`OperationError`]. Files that were created for the target are removed.
    pub fn run(self, watch: ProgressObserver<'_>) -> Result<ConvertCounters, OperationError> {
        let target = self.target.as_disk();
        let counters = convert_on_threads(&self.sources, &*target, &self.options, watch)?;
        if let (Some(bitmaps), Some(source)) = (self.bitmaps, self.sources.first()) {
            bitmaps.copy(&**source, &*target)?;
        }
        let finished = block_on(target.close());
        finished.map_err(|source| OperationError::CloseTarget { target: target.name().to_string(), source })?;
        if let Some(created) = self.created {
            created.keep();
        }
        Ok(counters)
    }
}
