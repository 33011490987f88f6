//! Opening an image with its backing files.
//!
//! Law: a chain has an end. No file is in it twice, by device and inode, under any name; its length has a limit; only
//! its first file is written, and that of the base that a caller names ([`open_with_base`]); every other file than the
//! first is opened only if the [`Policy`] allows it.

mod base;
mod vm_state;

use std::any::Any;
use std::ffi::OsStr;
use std::fmt::Display;
use std::io;
use std::path::Path;
use std::sync::Arc;

use limosa_page::broken_invariant;
use limosa_storage::{CacheMode, Create, FileOptions, FileStorage, Io, LockPolicy, Storage};

use crate::disk::Disk;
use crate::error::ImageError;
use crate::gate::{FilePurpose, Policy, Refusal};
use crate::location::{Connections, Identity};
use crate::luks::{self, EncryptedStorage, LuksError, Passphrase, Secrets, SectorCipher};
use crate::probe::{Format, probe};
use crate::qcow2::{
    self, CheckOptions, CheckReport, Encryption, Header, ImageParts, Journal, JournalFolder, Qcow2, Qcow2Options,
    Repair, SnapshotChoice,
};
use crate::raw::{Raw, RawOptions};
use crate::reference::{BackingOverride, DataFileOverride, Location, ObjectStores, Reference, TlsCredentials};
use crate::setters::setters;
use base::Base;
pub use base::{ChainWithBase, open_with_base};
pub use vm_state::VmState;

/// The most files in a chain.
pub const MAX_CHAIN_DEPTH: usize = 200;

/// How an image is opened.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Its format, if its reference does not have one; `None`: it is probed.
    pub format: Option<Format>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Cache mode of all files.
    pub cache: CacheMode,
    /// I/O backend of all files.
    pub io: Io,
    /// Whether others are kept from its files.
    pub lock: LockPolicy,
    /// The other files that may be opened.
    pub policy: Policy,
    /// Options of each qcow2 image, but for its `read_only`.
    pub qcow2: Qcow2Options,
    /// The image is read as it was when this snapshot was taken, and not written.
    pub snapshot: Option<SnapshotChoice>,
    /// The passphrases that encrypted images of the chain name ([`Reference::key_secret`]).
    pub secrets: Secrets,
    /// The credentials that exports of the chain name ([`Location::Nbd`]).
    pub tls: TlsCredentials,
    /// The client of object stores, if images of the chain are there ([`Location::Object`]).
    pub objects: ObjectStores,
    /// The folder of the image's journal, if it is qcow2 of version 3 and written: what was acknowledged survives there
    /// when the process is killed and clients continue with the next one.
    pub journals: Option<JournalFolder>,
    /// Folders of journals that are not brought to the image: while a journal there has changes of it, the image is not
    /// opened ([`ImageError::Unreplayed`]), nor is one that stands on it, because that is not what was acknowledged.
    /// An image that is opened without locks is not refused: one that is in use has changes there at any time.
    pub unreplayed: Vec<JournalFolder>,
}

setters!(OpenOptions {
    format: Option<Format>,
    read_only: bool,
    cache: CacheMode,
    io: Io,
    lock: LockPolicy,
    policy: Policy,
    qcow2: Qcow2Options,
    snapshot: Option<SnapshotChoice>,
    secrets: Secrets,
    tls: TlsCredentials,
    objects: ObjectStores,
    journals: Option<JournalFolder>,
    unreplayed: Vec<JournalFolder>,
});

impl OpenOptions {
    /// Of files below the image, which are not written.
    fn below(&self) -> Self {
        let qcow2 = self.qcow2.clone().compress(None);
        let unreplayed = self.unreplayed.iter().chain(&self.journals).cloned().collect();
        Self { format: None, read_only: true, snapshot: None, journals: None, unreplayed, qcow2, ..self.clone() }
    }

    fn connections(&self) -> Connections<'_> {
        Connections { tls: &self.tls, objects: &self.objects }
    }

    fn file(&self) -> FileOptions {
        FileOptions { cache: self.cache, io: self.io, read_only: self.read_only, create: Create::No, lock: self.lock }
    }
}

/// An image by name, with the options that it is opened with.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NamedImage {
    /// The name.
    pub reference: Reference,
    /// The options.
    pub options: OpenOptions,
}

impl NamedImage {
    /// The image of this name, opened with these options.
    #[must_use]
    pub const fn new(reference: Reference, options: OpenOptions) -> Self {
        Self { reference, options }
    }
}

/// The file of an image, open, without the files that it refers to.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ImageFile {
    /// Its name.
    pub reference: Reference,
    /// Its bytes.
    pub storage: Arc<dyn Storage>,
    /// The header of an encrypted image, if it is in a file of its own.
    pub header: Option<Arc<FileStorage>>,
    /// Its format.
    pub format: Format,
    /// Whether the format was probed.
    pub guessed: bool,
}

/// An image in use.
#[derive(Debug, Clone)]
pub enum Image {
    /// The bytes as they are.
    Raw(Arc<Raw>),
    /// qcow2.
    Qcow2(Arc<Qcow2>),
    /// The decrypted bytes.
    Luks(Arc<Raw>),
}

impl Image {
    /// Returns it as a disk of any format.
    #[must_use]
    pub fn as_disk(&self) -> Arc<dyn Disk> {
        match self {
            Self::Raw(raw) | Self::Luks(raw) => Arc::clone(raw) as Arc<dyn Disk>,
            Self::Qcow2(qcow2) => Arc::clone(qcow2) as Arc<dyn Disk>,
        }
    }

    /// Returns whether it was probed as raw, without a given format.
    #[must_use]
    pub fn is_guessed(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.is_guessed(),
            Self::Qcow2(_) | Self::Luks(_) => false,
        }
    }

    /// Returns how many changes were brought to it from its journal when it was opened: [`Qcow2::replayed`].
    #[must_use]
    pub fn replayed(&self) -> usize {
        match self {
            Self::Raw(_) | Self::Luks(_) => 0,
            Self::Qcow2(qcow2) => qcow2.replayed(),
        }
    }

    /// Returns what was repaired when it was opened: [`Qcow2::repair_report`].
    #[must_use]
    pub fn repair_report(&self) -> Option<&CheckReport> {
        match self {
            Self::Raw(_) | Self::Luks(_) => None,
            Self::Qcow2(qcow2) => qcow2.repair_report(),
        }
    }
}

impl ImageFile {
    /// Opens the file that a reference names, and finds out what it is.
    ///
    /// # Errors
    /// The kernel's; it looks like a format that limosa does not have.
    pub async fn open(reference: &Reference, options: &OpenOptions) -> Result<Self, ImageError> {
        let file_options = reference.settings.override_options(options.file());
        let storage = reference.location.open(&file_options, options.connections())?;
        let (format, guessed) = match reference.format.or(options.format) {
            Some(format) => (format, false),
            None => (probe(&*storage).await?, true),
        };
        let open_header = |path| FileStorage::open(path, &file_options);
        let header = reference.header.as_ref().map(open_header).transpose()?;
        let file = Self { reference: reference.clone(), storage, header, format, guessed };
        if file_options.lock != LockPolicy::None {
            file.refuse_unreplayed(&options.unreplayed).await?;
        }
        Ok(file)
    }

    /// Refuses an image that has changes in a journal of one of these folders.
    async fn refuse_unreplayed(&self, folders: &[JournalFolder]) -> Result<(), ImageError> {
        let Some(file) = self.file_storage().filter(|_| self.format == Format::Qcow2) else { return Ok(()) };
        for journals in folders {
            match journals.refuse_unreplayed(file) {
                // Another image has taken its place, or it was repaired: the journal is not this image's.
                Err(ImageError::Unreplayed { .. })
                    if Header::read_to_examine(file).await.is_ok_and(|header| !header.features.dirty()) => {}
                looked => looked?,
            }
        }
        Ok(())
    }

    /// Returns its file, if it is in one.
    #[must_use]
    pub fn file_storage(&self) -> Option<&FileStorage> {
        (&*self.storage as &dyn Any).downcast_ref()
    }

    /// Returns the identity of its bytes, if it has any.
    pub(crate) fn identity(&self) -> Option<Identity> {
        match self.file_storage() {
            Some(file) => Some(Identity::File(file.identity())),
            None => self.reference.location.identity(),
        }
    }

    /// Whether `other` is the same image in the same bytes; `false` also of bytes that have no identity.
    pub(crate) fn is_same_image(&self, other: &Self) -> bool {
        self.format == other.format && self.is_at(&other.reference, other.identity())
    }

    /// Whether a reference, to bytes of this identity, is one to this image; `false` also of bytes that have none.
    pub(crate) fn is_at(&self, reference: &Reference, identity: Option<Identity>) -> bool {
        identity.is_some()
            && self.identity() == identity
            && (self.reference.offset, self.reference.size) == (reference.offset, reference.size)
            && self.reference.backing == reference.backing
    }

    /// Opens the contents of an image in the format `luks`.
    pub(crate) async fn decrypted(&self, secrets: &Secrets) -> Result<EncryptedStorage, ImageError> {
        let passphrase = passphrase(&*self.storage, &self.reference, secrets)?;
        let file = Arc::clone(&self.storage);
        match &self.header {
            Some(header) => luks::open_detached(file, Arc::<FileStorage>::clone(header), passphrase).await,
            None => luks::open(file, passphrase).await,
        }
    }

    /// Checks the image, and repairs it if that is asked for; `None`: images of its format have no tables. An encrypted
    /// image needs no secret; a repair that copies contents fails without one.
    ///
    /// # Errors
    /// As [`check`](qcow2::check()), [`repair`](qcow2::repair) and [`cipher`](qcow2::cipher()).
    pub async fn check(&self, repair: Option<Repair>, secrets: &Secrets) -> Result<Option<CheckReport>, ImageError> {
        let (storage, options) = (&*self.storage, CheckOptions::default());
        let what = match (self.format, repair) {
            (Format::Raw | Format::Luks, _) => return Ok(None),
            (Format::Qcow2, None) => return qcow2::check(storage, options).await.map(Some),
            (Format::Qcow2, Some(what)) => what,
        };
        if self.reference.key_secret.is_some() {
            let header = Header::read_to_examine(storage).await?;
            // What has the old encryption is copied as it is.
            if header.encryption != Encryption::Aes {
                let passphrase = passphrase(storage, &self.reference, secrets)?;
                let cipher = qcow2::cipher(storage, &header, passphrase).await?;
                return qcow2::repair_encrypted(storage, &cipher, what, options).await.map(Some);
            }
        }
        qcow2::repair(storage, what, options).await.map(Some)
    }
}

/// One image of a chain, before it is put together.
struct Level {
    file: ImageFile,
    header: Option<Header>,
    data_file: Option<Arc<FileStorage>>,
}

/// Opens an image with its backing files. A qcow2 image that is opened to be written, and whose lazy refcounts were not
/// written because it was not closed, is repaired first: [`Image::repair_report`] of [`open_image`].
///
/// # Errors
/// [`ImageError::Refused`]: it refers to a file that may not be opened, that is in the chain already, or that cannot be
/// named; what is wrong with any of its images; what the kernel says.
pub async fn open(reference: &Reference, options: &OpenOptions) -> Result<Arc<dyn Disk>, ImageError> {
    Ok(open_image(reference, options).await?.as_disk())
}

/// As [`open`], for what only images of one format can do.
///
/// # Errors
/// As [`open`].
pub async fn open_image(reference: &Reference, options: &OpenOptions) -> Result<Image, ImageError> {
    let (top, below) = levels(reference, options).await?;
    top.attach_backing(below, options).await
}

/// As [`open`], with the identities of all that it opened.
pub(crate) async fn open_with_identities(
    reference: &Reference,
    options: &OpenOptions,
) -> Result<(Arc<dyn Disk>, Vec<Identity>), ImageError> {
    let mut walk = Walk::new(reference, options);
    let (top, below, _) = walk.levels().await?;
    Ok((top.attach_backing(below, options).await?.as_disk(), walk.seen.0))
}

/// As [`open_image`], with the file of its backing image, if it has one.
pub(crate) async fn open_overlay(
    reference: &Reference,
    options: &OpenOptions,
) -> Result<(Image, Option<ImageFile>), ImageError> {
    let mut walk = Walk::new(reference, options);
    let (top, below, _) = walk.levels().await?;
    Ok((top.attach_backing(below, options).await?, walk.second))
}

/// A qcow2 image that is changed as a whole, as [`resize`](crate::qcow2::resize()) does, with all that lies below it:
/// the image itself is not in use.
///
/// # Errors
/// As [`open`]; it is not qcow2.
pub async fn open_offline(reference: &Reference, options: &OpenOptions) -> Result<ImageParts, ImageError> {
    let (top, below) = levels(reference, options).await?;
    let name = Arc::clone(top.file.storage.name());
    let cipher = top.cipher(options).await?;
    let parts = top.parts(below);
    let parts = parts.map_err(|_| ImageError::Unsupported { image: name, what: "it is not a qcow2 image".into() })?;
    Ok(parts.cipher(cipher))
}

/// Opens the files of an image and of all below it, the topmost first. Data files are not opened.
///
/// # Errors
/// The header of one of them cannot be read; [`ImageError::Refused`]: a file may not be opened, or is in the chain
/// already.
pub async fn files(reference: &Reference, options: &OpenOptions) -> Result<Vec<ImageFile>, ImageError> {
    let mut walk = Walk::new(reference, options);
    let mut found = Vec::new();
    while let Some(file) = walk.next().await? {
        if file.format == Format::Qcow2 && file.reference.backing == BackingOverride::AsWritten {
            let header = Header::read_to_examine(&*file.storage).await?;
            let (image, location) = (file.storage.name(), &file.reference.location);
            if let Some(backing) = &header.backing {
                walk.written(image, written(&header, &backing.name, image, location)?)?;
            }
        } else if let BackingOverride::Other(backing) = &file.reference.backing {
            walk.set_next(backing);
        }
        found.push(file);
    }
    Ok(found)
}

/// The topmost image of a chain, and its opened backing image.
async fn levels(reference: &Reference, options: &OpenOptions) -> Result<(Level, Option<Image>), ImageError> {
    let (top, below, _) = Walk::new(reference, options).levels().await?;
    Ok((top, below))
}

/// A way down a chain, file by file.
struct Walk<'a> {
    options: &'a OpenOptions,
    below: OpenOptions,
    /// The image below the first one that is written, too.
    base: Option<Base>,
    seen: Seen,
    next: Option<Reference>,
    /// How many images were opened, and the last one's name.
    depth: usize,
    last: Option<Arc<str>>,
    /// The file of the first image's backing image.
    second: Option<ImageFile>,
}

impl<'a> Walk<'a> {
    fn new(reference: &Reference, options: &'a OpenOptions) -> Self {
        let next = Some(reference.clone());
        let (below, seen) = (options.below(), Seen::default());
        Self { options, below, base: None, seen, next, depth: 0, last: None, second: None }
    }

    /// The options of the image that was opened last.
    fn options(&self) -> &OpenOptions {
        match &self.base {
            _ if self.depth <= 1 => self.options,
            Some(base) if base.is_at(self.depth) => base.options(),
            _ => &self.below,
        }
    }

    /// Opens the whole chain: the topmost image, its opened backing image, and of those below it the base, with the
    /// number of images above it.
    async fn levels(&mut self) -> Result<(Level, Option<Image>, Option<(Image, u32)>), ImageError> {
        let mut chain: Vec<Level> = Vec::new();
        while let Some(file) = self.next().await? {
            let level = Level::of(file, self).await?;
            level.below(self)?;
            chain.push(level);
        }
        let (mut image, mut base) = (None, None);
        while let Some(level) = chain.pop() {
            self.depth = chain.len() + 1;
            if chain.is_empty() {
                return Ok((level, image, base));
            }
            let opened = level.attach_backing(image, self.options()).await?;
            if self.base.as_ref().is_some_and(|base| base.is_at(self.depth)) {
                let layers = u32::try_from(chain.len());
                base = Some((opened.clone(), layers.map_err(|_| broken_invariant("a chain's length has a limit"))?));
            }
            image = Some(opened);
        }
        Err(broken_invariant("a chain has a first image").into())
    }

    /// Opens the next image's file: `None` at the end.
    async fn next(&mut self) -> Result<Option<ImageFile>, ImageError> {
        let Some(reference) = self.next.take() else { return Ok(None) };
        let by = self.last.as_ref();
        if let Some(by) = by
            && self.depth >= MAX_CHAIN_DEPTH
        {
            let why = format!("a chain has at most {MAX_CHAIN_DEPTH} files; merge some of them");
            return Err(refused(by, &reference, why));
        }
        self.depth += 1;
        let identity = self.seen.look(by, &reference.location)?;
        if let (Some(identity), Some(base)) = (&identity, &mut self.base) {
            base.look(self.depth, identity);
        }
        let opened = ImageFile::open(&reference, self.options()).await;
        let file = match (opened, by) {
            // The error names the image that refers to the missing file, too.
            (Err(ImageError::Storage(error)), Some(by)) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refused(by, &reference, error.source.to_string()));
            }
            (opened, _) => opened?,
        };
        if let Some(identity) = file.identity() {
            self.seen.take(by, &reference.location, identity)?;
        }
        if let (Some(path), Some(header)) = (&reference.header, &file.header) {
            self.seen.take(by, &Location::File(path.clone()), Identity::File(header.identity()))?;
        }
        self.last = Some(Arc::clone(file.storage.name()));
        if self.depth == 2 {
            self.second = Some(file.clone());
        }
        Ok(Some(file))
    }

    /// Continues with the file that `image` refers to, if that is allowed.
    fn written(&mut self, image: &Arc<str>, mut reference: Reference) -> Result<(), ImageError> {
        admit_all(&self.options.policy, image, &mut reference)?;
        self.next = Some(reference);
        Ok(())
    }

    /// Continues with the caller's override.
    fn set_next(&mut self, reference: &Reference) {
        self.next = Some(reference.clone());
    }
}

impl Level {
    async fn of(file: ImageFile, walk: &mut Walk<'_>) -> Result<Self, ImageError> {
        if file.format != Format::Qcow2 {
            return Ok(Self { file, header: None, data_file: None });
        }
        let header = Header::read_for_reading(&*file.storage).await?;
        let image = file.storage.name();
        let unsupported = |what: &str| ImageError::Unsupported { image: Arc::clone(image), what: what.to_owned() };
        let data_file = match (&file.reference.data_file, &header.extensions.data_file) {
            (DataFileOverride::Other(_), _) if !header.features.data_file() => {
                return Err(unsupported("it has no data file, but one was given"));
            }
            _ if !header.features.data_file() => None,
            (DataFileOverride::Other(path), _) => Some(path.clone()),
            (DataFileOverride::Nothing, _) => return Err(unsupported("it has a data file, which it was not given")),
            (DataFileOverride::AsWritten, Some(name)) => {
                // Unlike a backing file's, the name is one from where we were started: so stock tools have it.
                let named =
                    Reference::path_from_name(name).map_err(|error| refused(image, &name.display(), error.why))?;
                Some(admit(&walk.options.policy, FilePurpose::DataFile, image, &named)?)
            }
            (DataFileOverride::AsWritten, None) => {
                return Err(unsupported("it does not name its data file; use data-file.filename=NAME"));
            }
        };
        let data_file = match data_file {
            Some(path) => {
                let location = Location::File(path.clone());
                walk.seen.look(Some(image), &location)?;
                let storage =
                    FileStorage::open(&path, &file.reference.settings.override_options(walk.options().file()))?;
                walk.seen.take(Some(image), &location, Identity::File(storage.identity()))?;
                Some(storage)
            }
            None => None,
        };
        Ok(Self { file, header: Some(header), data_file })
    }

    /// Continues with its backing file.
    fn below(&self, walk: &mut Walk<'_>) -> Result<(), ImageError> {
        let Some(header) = &self.header else { return Ok(()) };
        let (image, reference) = (self.file.storage.name(), &self.file.reference);
        match (&reference.backing, &header.backing) {
            (BackingOverride::Nothing, _) | (BackingOverride::AsWritten, None) => Ok(()),
            (BackingOverride::Other(backing), _) => {
                walk.set_next(backing);
                Ok(())
            }
            (BackingOverride::AsWritten, Some(backing)) => {
                walk.written(image, written(header, &backing.name, image, &reference.location)?)
            }
        }
    }

    /// The parts of a qcow2 image; any other file as it is.
    fn parts(self, backing: Option<Image>) -> Result<ImageParts, Box<ImageFile>> {
        let Self { file, header, data_file } = self;
        let Some(header) = header else { return Err(Box::new(file)) };
        let data_file = data_file.map(|storage| storage as Arc<dyn Storage>);
        let backing = backing.as_ref().map(Image::as_disk);
        Ok(ImageParts::new(file.storage, header).data_file(data_file).backing(backing))
    }

    /// Its journal in this folder, if it can have one.
    fn journal(&self, folder: Option<&JournalFolder>) -> Result<Option<Journal>, ImageError> {
        let header = self.header.as_ref().filter(|header| header.version > 2);
        let open = |(folder, header): (_, &Header)| match self.file.file_storage() {
            Some(storage) => Journal::open(folder, storage, &header.geometry()),
            None => Err(ImageError::Unsupported {
                image: Arc::clone(self.file.storage.name()),
                what: "only an image in a file can have a journal".into(),
            }),
        };
        folder.zip(header).map(open).transpose()
    }

    /// The cipher of a qcow2 image's contents, if they are encrypted.
    async fn cipher(&self, options: &OpenOptions) -> Result<Option<Arc<SectorCipher>>, ImageError> {
        let ImageFile { storage, reference, .. } = &self.file;
        let Some(header) = self.header.as_ref().filter(|header| header.encryption != Encryption::None) else {
            return Ok(None);
        };
        if let Some(asked) = reference.encryption.filter(|asked| *asked != header.encryption) {
            let what = format!("it is encrypted with {}, not with {asked}", header.encryption);
            return Err(ImageError::Unsupported { image: Arc::clone(storage.name()), what });
        }
        let passphrase = passphrase(&**storage, reference, &options.secrets)?;
        Ok(Some(qcow2::cipher(&**storage, header, passphrase).await?))
    }

    async fn attach_backing(self, backing: Option<Image>, options: &OpenOptions) -> Result<Image, ImageError> {
        let read_only = options.read_only || options.snapshot.is_some() || self.file.reference.settings.read_only;
        let journal = self.journal(options.journals.as_ref().filter(|_| !read_only))?;
        let cipher = self.cipher(options).await?;
        let mut parts = match self.parts(backing) {
            Ok(parts) => parts,
            Err(file) => {
                if let Some(snapshot) = &options.snapshot {
                    let what = format!("it is {}, and has no snapshot with {snapshot}", file.format);
                    return Err(ImageError::Unsupported { image: Arc::clone(file.storage.name()), what });
                }
                if file.format == Format::Luks {
                    let contents = file.decrypted(&options.secrets).await?;
                    return Ok(Image::Luks(Raw::open_luks(contents, read_only)?));
                }
                let ImageFile { reference, storage, guessed, .. } = *file;
                let raw = RawOptions { offset: reference.offset, size: reference.size, read_only, guessed };
                return Ok(Image::Raw(Raw::open(storage, &raw)?));
            }
        };
        if let Some(snapshot) = &options.snapshot {
            parts.header = snapshot.apply(&*parts.file, parts.header).await?;
            // They are of the disk as it is now: of a snapshot they would say what they do not know.
            parts.header.extensions.bitmaps = None;
        }
        parts.journal = journal;
        parts.cipher = cipher;
        Ok(Image::Qcow2(Qcow2::open(parts, Qcow2Options { read_only, ..options.qcow2.clone() }).await?))
    }
}

/// The passphrase of an encrypted image.
pub(crate) fn passphrase<'a>(
    storage: &dyn Storage,
    reference: &Reference,
    secrets: &'a Secrets,
) -> Result<&'a Passphrase, ImageError> {
    let fault = |source| ImageError::Encryption { image: Arc::clone(storage.name()), source };
    let name = reference.key_secret.as_deref().ok_or_else(|| fault(LuksError::NoSecret))?;
    secrets.get(name).ok_or_else(|| fault(LuksError::Options(format!("there is no secret {name:?}"))))
}

/// The reference that an image has to its backing file, with the format that it has for it.
fn written(header: &Header, name: &OsStr, image: &Arc<str>, location: &Location) -> Result<Reference, ImageError> {
    let found = Reference::from_image(name, location);
    let mut reference = found.map_err(|error| refused(image, &name.display(), error.why))?;
    if let Some(format) = header.extensions.backing_format.as_ref().filter(|format| !format.is_empty()) {
        let format = format.parse::<Format>().map_err(|error| refused(image, &name.display(), error.to_string()))?;
        reference.format = reference.format.or(Some(format));
    }
    Ok(reference)
}

/// Asks for everything that a reference names that an image has.
fn admit_all(policy: &Policy, image: &Arc<str>, reference: &mut Reference) -> Result<(), ImageError> {
    match &mut reference.location {
        Location::File(path) => *path = admit(policy, FilePurpose::Backing, image, path)?,
        remote => {
            let admitted = policy.admit_remote(FilePurpose::Backing);
            admitted.map_err(|refusal| not_admitted(policy, image, &*remote, &refusal))?;
        }
    }
    if let Some(path) = &mut reference.header {
        *path = admit(policy, FilePurpose::EncryptionHeader, image, path)?;
    }
    if let DataFileOverride::Other(path) = &mut reference.data_file {
        *path = admit(policy, FilePurpose::DataFile, image, path)?;
    }
    match &mut reference.backing {
        BackingOverride::Other(backing) => admit_all(policy, image, backing),
        BackingOverride::AsWritten | BackingOverride::Nothing => Ok(()),
    }
}

fn admit(
    policy: &Policy,
    purpose: FilePurpose,
    image: &Arc<str>,
    path: &Path,
) -> Result<std::path::PathBuf, ImageError> {
    policy.admit(purpose, path).map_err(|refusal| not_admitted(policy, image, &path.display(), &refusal))
}

fn not_admitted(policy: &Policy, image: &Arc<str>, reference: &dyn Display, refusal: &Refusal) -> ImageError {
    let (image, untrusted) = (Arc::clone(image), matches!(policy, Policy::Refuse));
    ImageError::Refused { image, reference: reference.to_string(), why: refusal.to_string(), untrusted }
}

fn refused(image: &Arc<str>, reference: &dyn Display, why: String) -> ImageError {
    ImageError::Refused { image: Arc::clone(image), reference: reference.to_string(), why, untrusted: false }
}

/// The files and exports of a chain.
#[derive(Default)]
struct Seen(Vec<Identity>);

impl Seen {
    /// Before a file is opened: a second time would be in the way of the first one's locks. One without an identity is
    /// reported by the attempt to open it.
    fn look(&self, by: Option<&Arc<str>>, location: &Location) -> Result<Option<Identity>, ImageError> {
        let identity = location.identity();
        if let Some(identity) = &identity {
            self.check(by, location, identity)?;
        }
        Ok(identity)
    }

    fn take(&mut self, by: Option<&Arc<str>>, location: &Location, identity: Identity) -> Result<(), ImageError> {
        self.check(by, location, &identity)?;
        self.0.push(identity);
        Ok(())
    }

    fn check(&self, by: Option<&Arc<str>>, location: &Location, identity: &Identity) -> Result<(), ImageError> {
        match by {
            Some(by) if self.0.contains(identity) => {
                Err(refused(by, location, "that file is already part of the chain".into()))
            }
            _ => Ok(()),
        }
    }
}
