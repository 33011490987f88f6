//! Creating images by the paths of their files.
//!
//! Law: a file that was created for an image, and whose image was not completed, is removed: it looks like an image.
//! A file that was there before stays. Files are created and noted under one lock, so a removal misses none.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use limosa_page::broken_invariant;
use limosa_storage::{CacheMode, Create, FileOptions, FileStorage, Storage, StorageError};
use parking_lot::{Mutex, MutexGuard};

use crate::chain::{self, OpenOptions};
use crate::error::ImageError;
use crate::location::Connections;
use crate::luks::Passphrase;
use crate::operations::info::ImageInfo;
use crate::probe::Format;
use crate::reference::{BackingOverride, DataFileOverride, Location, ObjectStores, Reference, TlsCredentials};
use crate::{luks, qcow2, raw};

/// A new image, by the place of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewImage {
    /// The file to create, or an export that exists; an existing one is overwritten.
    pub location: Location,
    /// Cache mode of its files while they are written.
    pub cache: CacheMode,
    /// Bytes that the filesystem should allocate at a time, if it takes such hints.
    pub extent_size_hint: Option<u32>,
    /// The format, with its options.
    pub format: NewImageFormat,
}

/// The format of a new image, with its options.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NewImageFormat {
    /// A raw image.
    Raw(raw::CreateOptions),
    /// A qcow2 image.
    Qcow2(Box<qcow2::CreateOptions>),
    /// An encrypted image in the format `luks`.
    Luks(Box<luks::CreateOptions>),
}

impl NewImage {
    /// A new image of this format.
    #[must_use]
    pub fn new(location: impl Into<Location>, cache: CacheMode, format: NewImageFormat) -> Self {
        Self { location: location.into(), cache, extent_size_hint: None, format }
    }

    /// Sets `extent_size_hint`.
    #[must_use]
    pub fn extent_size_hint(self, extent_size_hint: Option<u32>) -> Self {
        Self { extent_size_hint, ..self }
    }

    /// Returns the format.
    #[must_use]
    pub const fn format(&self) -> Format {
        match self.format {
            NewImageFormat::Raw(_) => Format::Raw,
            NewImageFormat::Qcow2(_) => Format::Qcow2,
            NewImageFormat::Luks(_) => Format::Luks,
        }
    }

    /// Sets the virtual size in bytes.
    pub const fn set_size(&mut self, bytes: u64) {
        match &mut self.format {
            NewImageFormat::Raw(options) => options.size = bytes,
            NewImageFormat::Qcow2(options) => options.size = bytes,
            NewImageFormat::Luks(options) => options.size = bytes,
        }
    }

    /// Returns the passphrase of an encrypted image.
    #[must_use]
    pub fn passphrase(&self) -> Option<&Passphrase> {
        match &self.format {
            NewImageFormat::Raw(_) => None,
            NewImageFormat::Qcow2(options) => options.encryption.as_ref().map(|encryption| &encryption.passphrase),
            NewImageFormat::Luks(options) => Some(&options.passphrase),
        }
    }

    /// Returns the name of the backing file, as the image will have it.
    #[must_use]
    pub fn backing_file(&self) -> Option<&OsString> {
        match &self.format {
            NewImageFormat::Raw(_) | NewImageFormat::Luks(_) => None,
            NewImageFormat::Qcow2(options) => options.backing_file.as_ref(),
        }
    }

    /// Returns whether it is the header of an encrypted disk, and not the disk.
    pub(crate) fn has_detached_header(&self) -> bool {
        matches!(&self.format, NewImageFormat::Luks(options) if options.detached)
    }

    /// Returns the backing image; `None` without one. The name is resolved as the new image's readers resolve it.
    /// Nothing is opened.
    ///
    /// # Errors
    /// Its name or its format is not supported.
    pub fn backing(&self) -> Result<Option<NewBacking>, ImageError> {
        let NewImageFormat::Qcow2(new) = &self.format else { return Ok(None) };
        let qcow2::CreateOptions { backing_file: Some(name), backing_format, .. } = &**new else { return Ok(None) };
        let format = backing_format.as_deref().map(str::parse).transpose();
        let format = format.map_err(|error: crate::UnknownFormat| ImageError::Unsupported {
            image: self.location.to_string().into(),
            what: error.to_string(),
        })?;
        let reference = Reference::from_image(name, &self.location)?;
        Ok(Some(NewBacking { reference, format, overlay: self.location.clone() }))
    }

    /// Returns the reference by which the image is opened after it was created: to the files that the caller named, and
    /// to none that is found in it. A server may give back other bytes than were written to its export.
    ///
    /// # Errors
    /// The name or the format of its backing file is not supported, or its data file's name.
    pub fn reference(&self) -> Result<Reference, ImageError> {
        let backing = match self.backing()? {
            Some(NewBacking { mut reference, format, .. }) => {
                reference.format = reference.format.or(format);
                BackingOverride::Other(Box::new(reference))
            }
            None => BackingOverride::Nothing,
        };
        Ok(Reference {
            format: Some(self.format()),
            data_file: self.data_file()?.map_or(DataFileOverride::Nothing, DataFileOverride::Other),
            backing,
            ..Reference::at(self.location.clone())
        })
    }

    /// Returns the path of its external data file, if it has one. Relative to the working directory, not to the
    /// image's: readers of the image resolve it like this.
    fn data_file(&self) -> Result<Option<PathBuf>, ImageError> {
        let NewImageFormat::Qcow2(options) = &self.format else { return Ok(None) };
        Ok(options.data_file.as_ref().map(Reference::path_from_name).transpose()?)
    }

    /// Creates the image, and its external data file if it has one. Files that did not exist before are removed again
    /// unless they are [kept](CreatedFiles::keep). `credentials`: those that an export may name.
    ///
    /// # Errors
    /// [`ImageError::Options`]: the format's options contradict each other; a file cannot be created or written.
    pub async fn create<'a>(
        &self,
        unfinished: &'a UnfinishedFiles,
        credentials: &TlsCredentials,
    ) -> Result<CreatedFiles<'a>, ImageError> {
        let mut files = CreatedFiles { unfinished, paths: Vec::new() };
        match &self.format {
            NewImageFormat::Raw(options) => raw::create(&*self.open(&mut files, credentials)?, options).await?,
            NewImageFormat::Luks(options) => luks::create(&*self.open(&mut files, credentials)?, options).await?,
            NewImageFormat::Qcow2(options) => {
                // Before anything is overwritten.
                options.check().map_err(|source| ImageError::options(self.location.to_string(), source))?;
                let own = self.location.identity();
                if own.is_some() && self.backing()?.is_some_and(|backing| backing.reference.location.identity() == own)
                {
                    let what = "it cannot be its own backing file".to_owned();
                    return Err(ImageError::Unsupported { image: self.location.to_string().into(), what });
                }
                let data_file = self.data_file()?.map(|path| files.create(&path, self.cache)).transpose()?;
                let file = self.open(&mut files, credentials)?;
                let data_file = data_file.as_ref().map(|data_file| &**data_file as &dyn Storage);
                qcow2::create(&*file, data_file, options).await?;
            }
        }
        Ok(files)
    }

    /// Creates or opens the place of its bytes.
    fn open(
        &self,
        files: &mut CreatedFiles<'_>,
        credentials: &TlsCredentials,
    ) -> Result<Arc<dyn Storage>, StorageError> {
        let Some(path) = self.location.path() else {
            // An object is written by other means: it refuses to be opened.
            let connections = Connections { tls: credentials, objects: &ObjectStores::default() };
            return self.location.open(&FileOptions { cache: self.cache, ..FileOptions::default() }, connections);
        };
        let file = files.create(path, self.cache)?;
        if let Some(bytes) = self.extent_size_hint.filter(|bytes| *bytes > 0) {
            file.set_extent_size_hint(bytes)?;
        }
        Ok(file)
    }
}

/// Files that were created for images that are not complete yet.
#[derive(Debug, Default)]
pub struct UnfinishedFiles(Mutex<Vec<PathBuf>>);

/// The removal of unfinished files: while it lives, no further file is created.
#[derive(Debug)]
#[must_use = "dropping it allows files to be created again"]
pub struct RemovalGuard<'a> {
    removed: Vec<PathBuf>,
    #[expect(dead_code, reason = "held, not read")]
    held: MutexGuard<'a, Vec<PathBuf>>,
}

impl RemovalGuard<'_> {
    /// Returns the files that were removed.
    #[must_use]
    pub fn removed(&self) -> &[PathBuf] {
        &self.removed
    }
}

impl UnfinishedFiles {
    /// No files.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Removes all of them, for a process that is about to end.
    pub fn remove_all(&self) -> RemovalGuard<'_> {
        Self::remove(self.0.lock())
    }

    /// As [`remove_all`](Self::remove_all), for a thread that may be creating a file itself; `None`: nothing is
    /// removed, because a file was still being created after `wait`.
    pub fn try_remove_all(&self, wait: Duration) -> Option<RemovalGuard<'_>> {
        self.0.try_lock_for(wait).map(Self::remove)
    }

    fn remove(mut paths: MutexGuard<'_, Vec<PathBuf>>) -> RemovalGuard<'_> {
        let mut removed = std::mem::take(&mut *paths);
        // One that is gone already needs no removal, and there is nobody left to report another failure to.
        removed.retain(|path| fs::remove_file(path).is_ok());
        RemovalGuard { removed, held: paths }
    }

    fn create(&self, path: &Path, options: &FileOptions) -> Result<Arc<FileStorage>, StorageError> {
        let mut paths = self.0.lock();
        let file = FileStorage::open(path, options)?;
        paths.push(path.to_owned());
        Ok(file)
    }

    fn forget(&self, path: &Path, remove: bool) {
        let mut paths = self.0.lock();
        paths.retain(|unfinished| unfinished != path);
        if remove {
            let _ = fs::remove_file(path);
        }
    }
}

/// The files that an image was created in, without those that existed before. They are removed on drop.
#[derive(Debug)]
#[must_use = "the files are removed unless they are kept"]
pub struct CreatedFiles<'a> {
    unfinished: &'a UnfinishedFiles,
    paths: Vec<PathBuf>,
}

impl CreatedFiles<'_> {
    /// Keeps the files: the image is complete.
    pub fn keep(mut self) {
        self.paths.drain(..).for_each(|path| self.unfinished.forget(&path, false));
    }

    fn create(&mut self, path: &Path, cache: CacheMode) -> Result<Arc<FileStorage>, StorageError> {
        let options = |create| FileOptions { cache, create, ..FileOptions::default() };
        match self.unfinished.create(path, &options(Create::New)) {
            Ok(file) => {
                self.paths.push(path.to_owned());
                Ok(file)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => FileStorage::open(path, &options(Create::No)),
            Err(error) => Err(error),
        }
    }
}

impl Drop for CreatedFiles<'_> {
    fn drop(&mut self) {
        self.paths.drain(..).for_each(|path| self.unfinished.forget(&path, true));
    }
}

/// The backing image of a [`NewImage`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBacking {
    reference: Reference,
    format: Option<Format>,
    /// The new image.
    overlay: Location,
}

impl NewBacking {
    /// Opens it, read-only, and returns its length in bytes.
    ///
    /// # Errors
    /// It cannot be opened; [`ImageError::Unsupported`]: the new image is itself in the chain, and would be lost.
    pub async fn length(&self, options: &OpenOptions) -> Result<u64, ImageError> {
        let options = OpenOptions { format: self.format, read_only: true, ..options.clone() };
        // All of the chain, but without its contents: those may be encrypted, and nobody has to know the secret yet.
        let chain = chain::files(&self.reference, &options).await?;
        let overlay = self.overlay.identity();
        if overlay.is_some() && chain.iter().any(|file| file.identity() == overlay) {
            let what = "it would be part of its own backing chain".to_owned();
            return Err(ImageError::Unsupported { image: self.overlay.to_string().into(), what });
        }
        let first = chain.first().ok_or_else(|| broken_invariant("a chain has a first image"))?;
        Ok(ImageInfo::of(first).await?.virtual_size)
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::block_on;

    use super::*;

    fn raw_image(path: PathBuf) -> NewImage {
        NewImage::new(path, CacheMode::Unsafe, NewImageFormat::Raw(raw::CreateOptions::default().size(4096)))
    }

    #[test]
    fn a_new_file_is_removed_unless_it_is_kept_and_an_existing_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (new, old) = (folder.path().join("new"), folder.path().join("old"));
        fs::write(&old, "contents").unwrap();
        let unfinished = UnfinishedFiles::new();
        for path in [&new, &old] {
            drop(block_on(raw_image(path.clone()).create(&unfinished, &TlsCredentials::default())).unwrap());
        }
        assert_eq!((new.exists(), fs::metadata(&old).unwrap().len()), (false, 4096));
        block_on(raw_image(new.clone()).create(&unfinished, &TlsCredentials::default())).unwrap().keep();
        drop(unfinished.remove_all());
        assert!(new.exists());
    }

    #[test]
    fn an_interrupted_process_removes_what_is_unfinished() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let unfinished = UnfinishedFiles::new();
        let files = block_on(raw_image(path.clone()).create(&unfinished, &TlsCredentials::default())).unwrap();
        assert_eq!(unfinished.remove_all().removed(), std::slice::from_ref(&path));
        assert!(!path.exists());
        files.keep();
    }

    #[test]
    fn options_that_contradict_each_other_leave_existing_files_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("old");
        fs::write(&path, "contents").unwrap();
        let options = qcow2::CreateOptions::default().cluster_size(3);
        let image = NewImage::new(&*path, CacheMode::Unsafe, NewImageFormat::Qcow2(Box::new(options)));
        let unfinished = UnfinishedFiles::new();
        assert!(matches!(
            block_on(image.create(&unfinished, &TlsCredentials::default())),
            Err(ImageError::Options { .. })
        ));
        assert_eq!(fs::read(&path).unwrap(), b"contents");
    }
}
