//! Writing objects: of a file that is uploaded while it is written, and of bytes that come in order.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use limosa_image::convert::OutputStream;
use limosa_image::reference::shown_object;
use limosa_page::to_usize;
use limosa_remote::{FollowedFile, ObjectUrl, RemoteError, Upload, UploadOptions, Uploaded, check_target, follow};
use limosa_storage::{FileOptions, FileStorage, Io, LockPolicy, StorageError};
use parking_lot::Mutex;

use super::client::{cache_directory, note_upload};
use super::{Sent, staging_folder};

/// The name of an object.
pub(crate) type Url = ObjectUrl;

/// Returns the object that a name of a target means; `None`: it means a file.
///
/// # Errors
/// It begins as the URL of one, and is not valid.
pub(crate) fn target(name: &OsStr) -> anyhow::Result<Option<ObjectUrl>> {
    let Some(text) = name.to_str().filter(|text| ObjectUrl::is_one(text)) else { return Ok(None) };
    Ok(Some(text.parse().with_context(|| shown_object(text))?))
}

/// Fails if there is an object already that an upload would not replace.
///
/// # Errors
/// There is; the store's.
pub(crate) fn check(url: &ObjectUrl) -> anyhow::Result<()> {
    Ok(check_target(url, &upload_options())?)
}

fn upload_options() -> UploadOptions {
    let options = UploadOptions::default();
    match cache_directory() {
        Some(directory) => options.records_in(directory),
        None => options,
    }
}

/// A file without a name, in which an image is made that becomes an object: its tables are written last and
/// elsewhere, and an object is written once and in order.
#[derive(Debug)]
pub(crate) struct Staging(File);

impl Staging {
    /// Makes one, in `$TMPDIR` or `/var/tmp`.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new() -> anyhow::Result<Self> {
        use rustix::fs::{CWD, Mode, OFlags, openat};
        let folder = staging_folder();
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = openat(CWD, &folder, flags, Mode::from_raw_mode(0o600));
        let file = file.with_context(|| format!("{}: no temporary file (set TMPDIR)", folder.display()))?;
        Ok(Self(file.into()))
    }

    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// The name under which this process can open it.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// Uploads it to an object that must not exist, also while it is written: at most `most` bytes. That ends when
    /// `cancelled` is set. `is_repeatable`: the same command makes the same bytes, and continues the upload.
    ///
    /// # Errors
    /// The store's; the object exists already.
    pub(crate) fn follow(
        &self,
        url: &ObjectUrl,
        most: u64,
        is_repeatable: bool,
        cancelled: Arc<AtomicBool>,
    ) -> anyhow::Result<Followed> {
        let options = FileOptions { io: Io::CallerThread, lock: LockPolicy::None, ..FileOptions::default() };
        let file = FileStorage::from_fd(self.0.try_clone()?.into(), &url.to_string(), &options)?;
        let mut options = upload_options();
        options.cancelled = cancelled;
        if !is_repeatable {
            options.records = None;
        }
        Ok(Followed(follow(file, url, most, &options)?))
    }
}

/// A file that is uploaded while it is written.
#[derive(Debug)]
pub(crate) struct Followed(FollowedFile);

impl Followed {
    /// Whether the upload has failed already; [`finish`](Self::finish) says why.
    pub(crate) fn has_failed(&self) -> bool {
        self.0.has_failed()
    }

    /// Uploads the rest of the file.
    ///
    /// # Errors
    /// The store's; the object exists already.
    pub(crate) fn finish(self) -> anyhow::Result<Sent> {
        sent(self.0.finish())
    }

    /// Ends the upload of a file that is of no use. Returns whether it was cancelled so that the same one continues it.
    pub(crate) fn give_up(self) -> bool {
        matches!(cause(&self.0.give_up()), Some(RemoteError::Cancelled { is_kept: true }))
    }
}

/// Bytes that become an object while they are made, in order.
#[derive(Debug)]
pub(crate) struct ObjectStream {
    url: ObjectUrl,
    writing: Arc<Mutex<Writing>>,
}

#[derive(Debug, Default)]
struct Writing {
    /// `None`: not begun.
    upload: Option<Upload>,
    /// The part that is being filled.
    part: Vec<u8>,
    /// The first failure of the store.
    failure: Option<StorageError>,
}

impl ObjectStream {
    pub(crate) fn new(url: &ObjectUrl) -> Self {
        Self { url: url.clone(), writing: Arc::default() }
    }

    /// Returns the stream for a conversion. When the upload begins it asks for a flag; when that is set, writes fail.
    pub(crate) fn output(&self, cancelled: fn() -> Arc<AtomicBool>) -> OutputStream {
        let (url, writing) = (self.url.clone(), Arc::clone(&self.writing));
        OutputStream::opened_by(self.url.to_string(), move |length| {
            let length = length.ok_or_else(|| io::Error::other("its length is not known"))?;
            let mut options = upload_options();
            options.cancelled = cancelled();
            let begun = Upload::begin(&url, length, &options);
            {
                let mut writing = writing.lock();
                let upload = writing.keep(begun)?;
                writing.upload = Some(upload);
            }
            Ok(Box::new(Parts(writing)))
        })
    }

    /// Uploads the rest after a conversion, whose own failure counts if the store has not failed.
    ///
    /// # Errors
    /// Both.
    pub(crate) fn finish(self, converted: anyhow::Result<()>) -> anyhow::Result<Sent> {
        let Writing { upload, part, failure } = std::mem::take(&mut *self.writing.lock());
        if let Some(failure) = failure {
            // The upload ends before it is said whether it can be continued.
            drop(upload);
            return sent(Err(failure));
        }
        let Some(mut upload) = upload else {
            converted?;
            anyhow::bail!("{}: nothing was written", self.url)
        };
        if let Err(error) = converted {
            // It may have ended because it was cancelled.
            return upload.check().map_or_else(|cancelled| sent(Err(cancelled)), |()| Err(error));
        }
        let rest = if part.is_empty() { Ok(()) } else { upload.put(part) };
        sent(rest.and_then(|()| upload.finish()))
    }
}

impl Writing {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, StorageError> {
        let Some(upload) = &mut self.upload else { return Ok(0) };
        upload.check()?;
        let size = to_usize(upload.part_size());
        let taken = bytes.len().min(size.saturating_sub(self.part.len()));
        self.part.extend_from_slice(bytes.get(..taken).unwrap_or(bytes));
        if self.part.len() == size {
            upload.put(std::mem::take(&mut self.part))?;
        }
        Ok(taken)
    }

    /// Keeps a failure of the store: a conversion tells only what became of it.
    fn keep<T>(&mut self, outcome: Result<T, StorageError>) -> io::Result<T> {
        outcome.map_err(|failure| {
            let text = io::Error::other(failure.to_string());
            self.failure.get_or_insert(failure);
            text
        })
    }
}

/// The writer of the parts of an object.
struct Parts(Arc<Mutex<Writing>>);

impl Write for Parts {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut writing = self.0.lock();
        let written = writing.write(bytes);
        writing.keep(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn sent(outcome: Result<Uploaded, StorageError>) -> anyhow::Result<Sent> {
    match outcome {
        Ok(done) => {
            note_upload(done.counters);
            Ok(Sent::Whole { length: done.length, requests: done.counters.requests })
        }
        Err(error) => match cause(&error) {
            Some(RemoteError::Cancelled { is_kept }) => Ok(Sent::Cancelled { is_kept: *is_kept }),
            Some(RemoteError::UnknownUpload) => Ok(Sent::Forgotten),
            _ => Err(error.into()),
        },
    }
}

fn cause(error: &StorageError) -> Option<&RemoteError> {
    error.source.get_ref().and_then(|cause| cause.downcast_ref())
}
