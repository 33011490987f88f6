//! Conversions of images that are given by name.
//!
//! Law: an existing file is not touched before all sources are open. A target that was just created reads as zeros, and
//! an existing one is not assumed to. A file that was created for a conversion that fails is removed again, since it
//! looks like the copy.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use limosa_page::broken_invariant;
use limosa_storage::{Io, block_on};

use super::bitmaps::Bitmaps;
use super::resume::{Beginning, Paths, Resumable, ResumeOptions, source_state};
use super::source::Source;
use super::stream::{InputStream, OutputImage, PipeRest, RawInput, Streams, open_qcow2, unsupported};
use super::{ConvertCounters, ConvertOptions, convert_on_threads, convert_recorded, convert_stream};
use crate::chain::{self, Image, NamedImage, OpenOptions};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::new_image::{CreatedFiles, NewImage, NewImageFormat, UnfinishedFiles};
use crate::operations::info::ImageInfo;
use crate::operations::operation::{OperationError, ProgressObserver};
use crate::preallocation::Preallocation;
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
    /// The way of copying. For a new target, `backing_length` and `target_is_zero` are determined from it; for an
    /// [`Overlay`](ConvertTarget::Overlay), also `target_has_contents`. Pieces for a server's export are at least
    /// [`ConvertOptions::EXPORT_PIECE`].
    pub options: ConvertOptions,
    /// Whether the dirty bitmaps of the source, which is the only one, are copied, too.
    pub bitmaps: Option<CopyBitmaps>,
    /// Whether the copy can be continued if it is interrupted. Its target is a new file, which gets its name when it is
    /// complete.
    pub resume: Option<ResumeOptions>,
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
    /// An image that exists, and its backing image, which has the contents of the source's backing image: they are not
    /// copied.
    Overlay {
        /// The image.
        image: NamedImage,
        /// The backing image. One that is not the image's own is refused.
        backing: Box<NamedImage>,
    },
    /// An image that is created.
    New(NewTarget),
}

impl ConvertTarget {
    /// Returns where its bytes are.
    #[must_use]
    pub fn location(&self) -> Location {
        match self {
            Self::Existing(named) | Self::Overlay { image: named, .. } => named.reference.location.clone(),
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
    /// The source, if it is raw and comes through a pipe.
    input: Option<RawInput>,
    /// The rest of a source from a pipe, behind its contents.
    rest: Option<PipeRest>,
    target: Target,
    options: ConvertOptions,
    length: u64,
    created: Option<CreatedFiles<'a>>,
    bitmaps: Option<Bitmaps>,
    /// The copy, if it can be continued, and how it begins.
    resumable: Option<(Resumable, Beginning)>,
}

/// An open target.
#[derive(Debug)]
enum Target {
    Image(Image),
    Stream(Arc<OutputImage>),
}

impl Target {
    fn as_disk(&self) -> Arc<dyn Disk> {
        match self {
            Self::Image(image) => image.as_disk(),
            Self::Stream(output) => Arc::clone(output) as Arc<dyn Disk>,
        }
    }
}

impl ConvertRequest {
    /// A conversion with the default options.
    #[must_use]
    pub fn new(sources: Vec<NamedImage>, target: ConvertTarget) -> Self {
        Self { sources, target, options: ConvertOptions::default(), bitmaps: None, resume: None }
    }

    /// Opens the sources, creates the target if it is new, and opens it.
    ///
    /// # Errors
    /// [`OperationError::Image`]: an image cannot be opened or created; [`OperationError::Backing`]: nor can the new
    /// target's backing file; [`OperationError::SameFile`]; [`OperationError::SharedBacking`];
    /// [`OperationError::TooLarge`]; bitmaps that cannot be copied; an overlay has another backing file, or none.
    pub async fn prepare(self, unfinished: &UnfinishedFiles) -> Result<PreparedConversion<'_>, OperationError> {
        self.prepare_streams(Streams::default(), unfinished).await
    }

    /// As [`prepare`](Self::prepare), where the only source, the target or both are pipes. A source from a pipe takes
    /// the place of [`sources`](Self::sources), which are none; a target that is one has the new target's format.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare); [`ImageError::Unsupported`]: the image cannot be read or written in order.
    pub async fn prepare_streams(
        self,
        streams: Streams,
        unfinished: &UnfinishedFiles,
    ) -> Result<PreparedConversion<'_>, OperationError> {
        let Self { sources: named, target, mut options, bitmaps, resume } = self;
        let Streams { input, output } = streams;
        let location = target.location();
        let same = || OperationError::SameFile { target: location.to_string() };
        if output.is_none() && location.path().is_none() {
            options.chunk_size = options.chunk_size.max(ConvertOptions::EXPORT_PIECE);
        }
        let identity = location.identity().filter(|_| output.is_none());
        if identity.is_some() && named.iter().any(|source| source.reference.location.identity() == identity) {
            return Err(same());
        }
        let mut sources = Vec::with_capacity(named.len());
        for source in &named {
            let (disk, identities) = chain::open_with_identities(&source.reference, &source.options).await?;
            // A source that stands on the target: locks tell it too, where there are any.
            if identity.as_ref().is_some_and(|target| identities.contains(target)) {
                return Err(same());
            }
            sources.push(disk);
        }
        if resume.is_some() {
            let is_stream = input.is_some() || output.is_some();
            check_resume(&target, is_stream || bitmaps.is_some() || options.out_of_order || options.salvage)?;
        }
        let (input, rest) = match input {
            Some(input) => open_input(input, &options, &mut sources).await?,
            None => (None, None),
        };
        let source = Source::new(&sources, options.window.as_ref())?;
        // Of a stream the length is not known: a new target has what was read ahead, and grows.
        let length = input.as_ref().map_or(source.len(), RawInput::known_length);
        if let Some(output) = output {
            let ConvertTarget::New(NewTarget { image, .. }) = target else {
                let what = "a pipe is a new image, not one that exists";
                return Err(unsupported(&output.name, what).into());
            };
            let whole = input.is_none().then_some(&source);
            let output = Arc::new(OutputImage::begin(output, &image.format, whole).await?);
            (options.target_is_zero, options.out_of_order) = (true, false);
            let target = Target::Stream(output);
            return Ok(PreparedConversion {
                sources,
                input,
                rest,
                target,
                options,
                length,
                created: None,
                bitmaps: None,
                resumable: None,
            });
        }
        let bitmaps = match (bitmaps, sources.first()) {
            (Some(_), Some(source)) if named.iter().any(|source| source.options.snapshot.is_some()) => {
                let what = "bitmaps are of the disk as it is now, and cannot be copied from a snapshot".to_owned();
                return Err(ImageError::Unsupported { image: Arc::clone(source.name()), what }.into());
            }
            (Some(which), Some(source)) => Some(Bitmaps::of(&**source, which == CopyBitmaps::Usable).await?),
            _ => None,
        };
        let mut resumable = None;
        let (target, created) = match target {
            ConvertTarget::New(mut new) if let Some(resume) = &resume => {
                let (copy, image) = new.continue_copy((&named, length), resume, &mut options, unfinished).await?;
                resumable = Some(copy);
                (open_target(&image).await?, None)
            }
            ConvertTarget::Existing(target) => (open_target(&target).await?, None),
            ConvertTarget::Overlay { image, backing } => {
                if sources.len() != 1 {
                    return Err(OperationError::SharedBacking { backing: backing.reference.to_string() });
                }
                let (image, length) = open_overlay(&image, &backing).await?;
                options.backing_length = Some(length);
                (options.target_has_contents, options.target_is_zero) = (true, false);
                (image, None)
            }
            ConvertTarget::New(new) => {
                if let Some(input) = &input {
                    new.check_growth(input.name())?;
                }
                let made = new.create(sources.len(), length, unfinished).await?;
                (options.backing_length, options.target_is_zero) = (made.below, made.is_zero);
                (open_target(&made.image).await?, Some(made.files))
            }
        };
        let target = Target::Image(target);
        Ok(PreparedConversion { sources, input, rest, target, options, length, created, bitmaps, resumable })
    }
}

/// Opens an image to be written.
async fn open_target(NamedImage { reference, options }: &NamedImage) -> Result<Image, ImageError> {
    chain::open_image(reference, &OpenOptions { read_only: false, ..options.clone() }).await
}

/// Opens an image to be written, whose backing image must be `backing`. Returns the length of that in bytes.
async fn open_overlay(image: &NamedImage, backing: &NamedImage) -> Result<(Image, u64), ImageError> {
    let refuse = |what: &str| Err(unsupported(&image.reference.to_string().into(), what));
    let options = OpenOptions { read_only: false, ..image.options.clone() };
    let (opened, own) = chain::open_overlay(&image.reference, &options).await?;
    let Some(own) = own else { return refuse("it has no backing file") };
    let NamedImage { reference, options } = backing;
    let format = reference.format.or(options.format).unwrap_or(own.format);
    if format != own.format || !own.is_at(reference, reference.location.identity()) {
        let own = format!("its backing file is {} ({})", own.reference, own.format);
        return refuse(&format!("{own}, not {reference} ({format})"));
    }
    Ok((opened, ImageInfo::of(&own).await?.virtual_size))
}

/// Opens the image in a stream: a raw one is returned; another one is added to the sources, and what follows its
/// contents is returned.
async fn open_input(
    mut input: InputStream,
    options: &ConvertOptions,
    sources: &mut Vec<Arc<dyn Disk>>,
) -> Result<(Option<RawInput>, Option<PipeRest>), OperationError> {
    let refuse = |name, what: &str| Err(unsupported(name, what).into());
    if !sources.is_empty() {
        return refuse(&input.name, "a pipe must be the only source");
    }
    if options.salvage {
        return refuse(&input.name, "what cannot be read from a pipe cannot be read again");
    }
    match input.find_format()? {
        Format::Raw => {
            let mut raw = RawInput::new(input, options.window.as_ref())?;
            raw.fill_ahead()?;
            Ok((Some(raw), None))
        }
        Format::Qcow2 => {
            let (disk, rest) = open_qcow2(input).await?;
            sources.push(disk);
            Ok((None, Some(rest)))
        }
        Format::Luks => refuse(&input.name, "an encrypted image cannot be read from a pipe; store it in a file first"),
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
    /// Refuses what a target cannot have that grows while it is written.
    fn check_growth(&self, source: &Arc<str>) -> Result<(), ImageError> {
        let (preallocation, has_data_file, has_backing) = match &self.image.format {
            NewImageFormat::Raw(options) => (options.preallocation, false, false),
            NewImageFormat::Qcow2(options) => {
                (options.preallocation, options.data_file.is_some(), options.backing_file.is_some())
            }
            NewImageFormat::Luks(options) => (options.preallocation, false, false),
        };
        let what = if preallocation != Preallocation::Off {
            "a target cannot be preallocated before the length of what comes through a pipe is known"
        } else if has_data_file {
            "a target with a data file cannot grow by what comes through a pipe"
        } else if has_backing {
            "what comes through a pipe cannot be compared with a backing file before it is read"
        } else {
            return Ok(());
        };
        Err(unsupported(source, what))
    }

    /// Opens the target of a copy of `length` bytes that is continued, or creates it.
    async fn continue_copy(
        &mut self,
        (sources, length): (&[NamedImage], u64),
        resume: &ResumeOptions,
        options: &mut ConvertOptions,
        unfinished: &UnfinishedFiles,
    ) -> Result<((Resumable, Beginning), NamedImage), OperationError> {
        let Some(path) = self.image.location.path() else {
            return Err(ImageError::from(broken_invariant("a copy that can be continued is in a file")).into());
        };
        let paths = Paths::of(path)?;
        let state = source_state(sources).await?;
        let (mut copy, beginning) = Resumable::open(paths.clone(), length, &resume.request, &state).await?;
        let (at, below, is_zero) = match beginning {
            Beginning::New => {
                self.image.location = Location::File(paths.part);
                let made = match self.clone().create(sources.len(), length, unfinished).await {
                    Ok(made) => made,
                    Err(error) => {
                        copy.abandon();
                        return Err(error);
                    }
                };
                made.files.keep();
                copy.created().await?;
                (0, made.below, made.is_zero)
            }
            Beginning::At(at) => {
                self.image.location = Location::File(paths.part);
                copy.repair(self.image.format()).await?;
                // Behind the last record anything may have been written.
                (at, self.below(sources.len()).await?, false)
            }
            Beginning::Complete => (length, None, false),
        };
        self.image.set_size(length);
        (options.start, options.backing_length, options.target_is_zero) = (at, below, is_zero);
        Ok(((copy, beginning), self.opened()?))
    }

    /// Length of the backing image in bytes, if there is one.
    async fn below(&self, sources: usize) -> Result<Option<u64>, OperationError> {
        Ok(match self.image.backing_file() {
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
        })
    }

    async fn create(
        mut self,
        sources: usize,
        length: u64,
        unfinished: &UnfinishedFiles,
    ) -> Result<Made<'_>, OperationError> {
        self.image.set_size(length);
        let below = self.below(sources).await?;
        if self.image.has_detached_header() {
            let what = "a header in a file of its own has no contents: create it first";
            return Err(unsupported(&self.image.location.to_string().into(), what).into());
        }
        let files = self.image.create(unfinished, &self.backing.tls).await?;
        let location = &self.image.location;
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
        Ok(Made { image: self.opened()?, files, below, is_zero })
    }

    /// The image that was created, by name, and how it is opened.
    fn opened(&self) -> Result<NamedImage, ImageError> {
        let mut reference = self.image.reference()?;
        let mut secrets = self.backing.secrets.clone();
        if let Some(passphrase) = self.image.passphrase() {
            secrets.insert(SECRET, passphrase.clone());
            reference.key_secret = Some(SECRET.to_owned());
        }
        // What the backing file refers to was checked when its length was asked for.
        let (cache, policy, tls) = (self.image.cache, self.backing.policy.clone(), self.backing.tls.clone());
        let objects = self.backing.objects.clone();
        let options = OpenOptions { cache, io: self.io, policy, secrets, tls, objects, ..OpenOptions::default() };
        Ok(NamedImage::new(reference, options))
    }
}

/// Refuses a conversion that cannot be continued. `other`: what is asked for needs all of it in one go.
fn check_resume(target: &ConvertTarget, other: bool) -> Result<(), ImageError> {
    let location = target.location();
    let what = match target {
        _ if other => "pipes, bitmaps, writes out of order and unreadable sources exclude continuing a copy",
        ConvertTarget::Existing(_) | ConvertTarget::Overlay { .. } => "only a copy into a new image can be continued",
        _ if location.path().is_none() => "only a copy into a file can be continued",
        ConvertTarget::New(new) if new.image.cache.ignores_flush() => {
            "a copy can be continued only if its cache mode makes contents durable"
        }
        ConvertTarget::New(NewTarget { image: NewImage { format: NewImageFormat::Qcow2(options), .. }, .. })
            if options.data_file.is_some() =>
        {
            "a copy with a data file cannot be continued"
        }
        ConvertTarget::New(_) => return Ok(()),
    };
    Err(unsupported(&location.to_string().into(), what))
}

impl PreparedConversion<'_> {
    /// Returns the target; `None`: it is a pipe.
    #[must_use]
    pub const fn target(&self) -> Option<&Image> {
        match &self.target {
            Target::Image(image) => Some(image),
            Target::Stream(_) => None,
        }
    }

    /// Returns the number of bytes that are converted; `None`: the source is a pipe, whose length is not known yet.
    #[must_use]
    pub const fn length(&self) -> Option<u64> {
        if self.input.is_some() { None } else { Some(self.length) }
    }

    /// Returns how many bytes an interrupted copy, which this one continues, has already; `None`: it begins.
    #[must_use]
    pub const fn resumed_at(&self) -> Option<u64> {
        match &self.resumable {
            Some((_, Beginning::At(at))) => Some(*at),
            Some((_, Beginning::Complete)) => Some(self.length),
            Some((_, Beginning::New)) | None => None,
        }
    }

    /// Returns the names of bitmaps that are not copied, because they cannot be relied on.
    #[must_use]
    pub fn skipped_bitmaps(&self) -> &[String] {
        self.bitmaps.as_ref().map_or(&[], |bitmaps| &bitmaps.skipped)
    }

    /// Returns whether the window of [`ConvertOptions::window`] begins past the end of a source.
    #[must_use]
    pub fn begins_past_end(&self) -> bool {
        if let Some(input) = &self.input {
            return input.begins_past_end();
        }
        let window = self.options.window.as_ref();
        window.is_some_and(|window| self.sources.iter().any(|disk| window.start > window.end.min(disk.len())))
    }

    /// Copies the sources with a thread for each request, and closes the target.
    ///
    /// # Errors
    /// [`OperationError`]. Files that were created for the target are removed.
    pub fn run(self, watch: ProgressObserver<'_>) -> Result<ConvertCounters, OperationError> {
        if let Some(copy) = self.resumable {
            return run_resumable(&self.sources, self.target, &self.options, copy, watch);
        }
        let target = self.target.as_disk();
        let counters = match self.input {
            None => convert_on_threads(&self.sources, &*target, &self.options, watch)?,
            Some(input) => {
                let grows = self.created.is_some() || matches!(self.target, Target::Stream(_));
                convert_stream(input, &*target, &self.options, grows, watch)?
            }
        };
        if let (Some(bitmaps), Some(source)) = (self.bitmaps, self.sources.first()) {
            bitmaps.copy(&**source, &*target)?;
        }
        if let Some(rest) = self.rest {
            block_on(rest.check())?;
        }
        let finished = block_on(target.close());
        finished.map_err(|source| OperationError::CloseTarget { target: target.name().to_string(), source })?;
        if let Some(created) = self.created {
            created.keep();
        }
        Ok(counters)
    }
}

/// Copies what is left of a copy that can be continued, and gives the target its name.
fn run_resumable(
    sources: &[Arc<dyn Disk>],
    target: Target,
    options: &ConvertOptions,
    (mut copy, beginning): (Resumable, Beginning),
    watch: ProgressObserver<'_>,
) -> Result<ConvertCounters, OperationError> {
    let format = match &target {
        Target::Image(Image::Qcow2(_)) => Format::Qcow2,
        _ => Format::Raw,
    };
    let disk = target.as_disk();
    drop(target);
    let checkpoints = copy.checkpoints();
    let counters = convert_recorded(sources, &*disk, options, &checkpoints, watch)?;
    copy.recorded(checkpoints);
    let closed = block_on(disk.close());
    closed.map_err(|source| OperationError::CloseTarget { target: disk.name().to_string(), source })?;
    // Its locks are released before it gets its name.
    drop(disk);
    // Space that was allocated ahead of a cut, and was not used since.
    if matches!(beginning, Beginning::At(_)) {
        block_on(copy.repair(format))?;
    }
    block_on(copy.complete(beginning == Beginning::Complete))?;
    Ok(counters)
}
