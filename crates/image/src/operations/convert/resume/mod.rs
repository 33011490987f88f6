//! Conversions that are continued where they were interrupted.
//!
//! Law: the target has its name only when it is complete. Until then the copy is in a file beside it, whose name ends
//! in [`PART`], with a journal ([`journal`]): neither can be mistaken for the image. A copy is continued only from the
//! same source, with the same request, and from where everything is durable.
//!
//! The order: the journal says that a target is being created; the target is created; the journal names it; contents
//! are flushed, then recorded; the target is closed, recorded as complete, and renamed; the journal is removed. A copy
//! that is cut off between any two of these is continued.

mod journal;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_lock::Mutex;
use limosa_storage::{Buffer, Create, FileOptions, FileStorage, Io, Operation, Storage, StorageError};

use crate::chain::{self, NamedImage};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::operations::operation::{DiskOperation, OperationError};
use crate::probe::Format;
use crate::qcow2::{self, CheckOptions, Repair};
use journal::{Record, hex};

/// The end of the name of a target that is not complete.
const PART: &str = ".limosa-part";
/// The end of the name of its journal.
const JOURNAL: &str = ".limosa-journal";
/// Bytes of a source's beginning that its identity includes.
const HEAD: u64 = 64 << 10;
/// The shortest time between two records.
const INTERVAL: Duration = Duration::from_millis(250);

/// A conversion that can be continued if it is interrupted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResumeOptions {
    /// The options that determine the target's contents, as text: a copy that was begun with others is not continued.
    pub request: String,
}

impl ResumeOptions {
    /// A conversion by this request.
    #[must_use]
    pub const fn new(request: String) -> Self {
        Self { request }
    }
}

/// The files of a target that is not complete.
#[derive(Debug, Clone)]
pub(super) struct Paths {
    target: PathBuf,
    /// Where the copy is until it is complete.
    pub(super) part: PathBuf,
    journal: PathBuf,
}

/// A copy whose progress is recorded.
#[derive(Debug)]
pub(super) struct Resumable {
    paths: Paths,
    storage: Arc<dyn Storage>,
    record: Record,
}

/// How a copy begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beginning {
    /// The target has to be created.
    New,
    /// This many bytes are copied.
    At(u64),
    /// It is complete, and has its name.
    Complete,
}

impl Paths {
    /// The files for a target at this path. A symbolic link stays, and what it leads to is replaced.
    pub(super) fn of(path: &Path) -> Self {
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let beside = |end: &str| {
            let mut name = OsString::from(&target);
            name.push(end);
            PathBuf::from(name)
        };
        Self { part: beside(PART), journal: beside(JOURNAL), target }
    }

    fn refuse(&self, why: &str) -> OperationError {
        OperationError::CannotResume {
            target: self.target.display().to_string(),
            why: format!("{why}; remove {} and {} to begin again", self.journal.display(), self.part.display()),
        }
    }

    fn failed(&self, operation: Operation, path: &Path, error: io::Error) -> OperationError {
        let name = Arc::from(path.to_string_lossy());
        ImageError::from(StorageError::for_storage(operation, &name, error)).into()
    }

    /// Makes the names of files durable.
    fn sync_folder(&self) -> Result<(), OperationError> {
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|error| self.failed(Operation::Flush, folder, error))
    }
}

impl Resumable {
    /// Opens the journal of a copy, or begins one.
    ///
    /// # Errors
    /// [`OperationError::CannotResume`]: it is of another copy, or says what cannot be; another process copies; what
    /// the kernel says.
    pub(super) async fn open(
        paths: Paths,
        length: u64,
        request: &str,
        source: &str,
    ) -> Result<(Self, Beginning), OperationError> {
        // A target that is in use is not replaced.
        if let Ok(metadata) = fs::metadata(&paths.target) {
            if !metadata.is_file() {
                return Err(paths.refuse("it is not a regular file"));
            }
            drop(FileStorage::open(&paths.target, &FileOptions::default()).map_err(ImageError::from)?);
        }
        let options = |create| FileOptions { create, io: Io::CallerThread, ..FileOptions::default() };
        let wanted = Record::new(length, request, source);
        let (storage, found) = match FileStorage::open(&paths.journal, &options(Create::New)) {
            Ok(storage) => {
                if paths.part.exists() {
                    drop(fs::remove_file(&paths.journal));
                    return Err(paths.refuse("there is a part of a copy without a journal"));
                }
                (storage, None)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let storage = FileStorage::open(&paths.journal, &options(Create::No)).map_err(ImageError::from)?;
                let found = journal::read(&*storage).await.map_err(ImageError::from)?;
                // A journal is empty until its first record is durable, and there is no target before that.
                if found.is_none() && paths.part.exists() {
                    return Err(paths.refuse("its journal is damaged"));
                }
                (storage, found)
            }
            Err(error) => return Err(ImageError::from(error).into()),
        };
        let storage: Arc<dyn Storage> = storage;
        let (record, beginning) = match found.filter(|found| found.target != 0) {
            None => (wanted, Beginning::New),
            Some(found) => {
                let beginning = check(&paths, &found, &wanted)?;
                (found, beginning)
            }
        };
        let mut resumable = Self { paths, storage, record };
        if beginning == Beginning::New {
            resumable.write().await?;
            resumable.paths.sync_folder()?;
            match fs::remove_file(&resumable.paths.part) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(resumable.paths.failed(Operation::Open, &resumable.paths.part, error));
                }
                _ => {}
            }
        }
        Ok((resumable, beginning))
    }

    async fn write(&mut self) -> Result<(), OperationError> {
        Ok(journal::write(&*self.storage, &mut self.record).await.map_err(ImageError::from)?)
    }

    /// Records that the target has been created.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) async fn created(&mut self) -> Result<(), OperationError> {
        let part = &self.paths.part;
        let metadata = fs::metadata(part).map_err(|error| self.paths.failed(Operation::Open, part, error))?;
        self.paths.sync_folder()?;
        self.record.target = metadata.ino();
        self.write().await
    }

    /// Gives the complete target, which is closed, its name, and removes the journal.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) async fn complete(mut self, is_renamed: bool) -> Result<(), OperationError> {
        if !is_renamed {
            let part = File::open(&self.paths.part).and_then(|file| file.sync_all());
            part.map_err(|error| self.paths.failed(Operation::Flush, &self.paths.part, error))?;
            self.record.position = self.record.length;
            self.write().await?;
            fs::rename(&self.paths.part, &self.paths.target)
                .map_err(|error| self.paths.failed(Operation::Open, &self.paths.target, error))?;
            self.paths.sync_folder()?;
        }
        fs::remove_file(&self.paths.journal)
            .map_err(|error| self.paths.failed(Operation::Open, &self.paths.journal, error))
    }

    /// Gives back space that an interrupted copy had allocated and not used.
    ///
    /// # Errors
    /// The image is damaged; what the kernel says.
    pub(super) async fn repair(&self, format: Format) -> Result<(), OperationError> {
        if format != Format::Qcow2 {
            return Ok(());
        }
        let storage = FileStorage::open(&self.paths.part, &FileOptions::default()).map_err(ImageError::from)?;
        qcow2::repair(&*storage, Repair::Leaks, CheckOptions::default()).await?;
        Ok(())
    }

    /// The records of this copy, from now on.
    pub(super) fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(Arc::clone(&self.storage), self.record.clone(), INTERVAL)
    }

    /// Takes over what was recorded.
    pub(super) fn recorded(&mut self, checkpoints: Checkpoints) {
        self.record = checkpoints.state.into_inner().record;
    }
}

/// Checks that what is found is of the wanted copy, and returns where it continues.
fn check(paths: &Paths, found: &Record, wanted: &Record) -> Result<Beginning, OperationError> {
    if found.request != wanted.request {
        let why = format!("it was begun with other options: {}, not {}", found.request, wanted.request);
        return Err(paths.refuse(&why));
    }
    if found.source != wanted.source || found.length != wanted.length {
        return Err(paths.refuse("the source has changed since it was begun"));
    }
    if found.position > found.length || !found.position.is_multiple_of(super::SECTOR) {
        return Err(paths.refuse("its journal says what cannot be"));
    }
    let inode = |path: &Path| fs::metadata(path).ok().map(|metadata| metadata.ino());
    match inode(&paths.part) {
        Some(part) if part == found.target => Ok(Beginning::At(found.position)),
        None if found.position == found.length && inode(&paths.target) == Some(found.target) => Ok(Beginning::Complete),
        Some(_) => Err(paths.refuse("the part of the copy is not the file that was written")),
        None => Err(paths.refuse("the part of the copy is gone")),
    }
}

/// The records of a copy that is under way.
#[derive(Debug)]
pub(super) struct Checkpoints {
    storage: Arc<dyn Storage>,
    interval: Duration,
    state: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    record: Record,
    /// When the next record is due.
    due: Instant,
}

impl Checkpoints {
    fn new(storage: Arc<dyn Storage>, record: Record, interval: Duration) -> Self {
        Self { storage, interval, state: Mutex::new(Progress { record, due: Instant::now() + interval }) }
    }

    /// Records that the target has everything up to `position`, if a record is due: makes it durable first.
    ///
    /// # Errors
    /// What the target or the journal says.
    pub(super) async fn note(&self, target: &dyn Disk, position: u64) -> Result<(), OperationError> {
        let mut state = self.state.lock().await;
        let began = Instant::now();
        if began < state.due || position <= state.record.position {
            return Ok(());
        }
        target.flush().await.map_err(OperationError::at(DiskOperation::Flushing, position))?;
        state.record.position = position;
        journal::write(&*self.storage, &mut state.record).await.map_err(ImageError::from)?;
        // Flushes take a tenth of the time at most.
        state.due = Instant::now() + self.interval.max(began.elapsed() * 10);
        Ok(())
    }
}

/// Describes the state of sources: of every file of their chains the length, the time of the last change, the inode and
/// the beginning.
///
/// # Errors
/// [`ImageError::Unsupported`]: a source is no regular file, so nobody knows whether it has changed; what the kernel
/// says.
pub(super) async fn source_state(sources: &[NamedImage]) -> Result<String, OperationError> {
    let mut state = String::new();
    for source in sources {
        for file in chain::files(&source.reference, &source.options).await? {
            let name = file.storage.name();
            let metadata = file.reference.path().and_then(|path| fs::metadata(path).ok()).filter(fs::Metadata::is_file);
            let Some(metadata) = metadata else {
                let what = "it is no regular file, so a change while a copy is interrupted would not be noticed";
                return Err(super::stream::unsupported(name, what).into());
            };
            let head = Buffer::zeroed(limosa_page::to_usize(HEAD.min(metadata.len())));
            file.storage.read(0, head.clone().into()).await.map_err(ImageError::from)?;
            let digest = hex(&head.to_vec());
            let (seconds, nanos) = (metadata.mtime(), metadata.mtime_nsec());
            let of =
                format!("{} bytes, changed {seconds}.{nanos:09}, inode {}, {digest}; ", metadata.len(), metadata.ino());
            state.push_str(&of);
        }
    }
    Ok(state)
}

#[cfg(test)]
mod tests;
