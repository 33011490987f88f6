//! Conversions that are continued where they were interrupted.
//!
//! Law: the target has its name only when it is complete. Until then the copy is in a file beside it, whose name ends
//! in `.limosa-part`, with a journal ([`journal`]): neither can be mistaken for the image. A copy is continued only
//! from the same source, with the same request, and from where everything is durable.
//!
//! The order: the journal says that a target is being created; the target is created; the journal names it; contents
//! are flushed, then recorded; the target is closed, recorded as complete, and renamed; the journal is removed. A copy
//! that is cut off between any two of these is continued.

mod files;
mod journal;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_lock::Mutex;
use limosa_storage::{Buffer, FileOptions, FileStorage, Operation, Storage};

use crate::chain::{self, NamedImage};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::operations::operation::{DiskOperation, OperationError};
use crate::probe::Format;
use crate::qcow2::{self, CheckOptions, Repair};
pub(super) use files::Paths;
use journal::{Found, Record, hex};

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

/// A copy whose progress is recorded.
#[derive(Debug)]
pub(super) struct Resumable {
    paths: Paths,
    storage: Arc<dyn Storage>,
    record: Record,
    /// The file that has the target's name until the copy is complete.
    replaced: Option<Arc<FileStorage>>,
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
        let replaced = paths.open_replaced()?;
        let wanted = Record::new(length, request, source);
        let (storage, is_new) = paths.open_journal()?;
        let found = match journal::read(&*storage).await.map_err(ImageError::from)? {
            Found::Record(found) => Some(found),
            Found::Blank if is_new && paths.part.exists() => {
                drop(fs::remove_file(&paths.journal));
                return Err(paths.refuse_found("there is a part of a copy without a journal"));
            }
            // A journal is empty until its first record is durable, and there is no target before that.
            Found::Blank if paths.part.exists() => return Err(paths.refuse_found("its journal is damaged")),
            Found::Blank => None,
            Found::Other => return Err(paths.refuse_found("its journal is damaged, or is not a journal")),
        };
        let storage: Arc<dyn Storage> = storage;
        let (record, beginning) = match found.filter(|found| found.target != 0) {
            None => (wanted, Beginning::New),
            Some(found) => {
                let beginning = check(&paths, &found, &wanted)?;
                (found, beginning)
            }
        };
        let mut resumable = Self { paths, storage, record, replaced };
        if beginning == Beginning::New {
            resumable.write().await?;
            resumable.paths.sync_folder()?;
            match fs::remove_file(&resumable.paths.part) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(resumable.paths.failed(Operation::Open, &resumable.paths.part, error));
                }
                _ => {}
            }
            if resumable.replaced.is_some() {
                resumable.paths.make_private_part()?;
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

    /// Removes what there is of a copy whose target could not be created.
    pub(super) fn abandon(self) {
        drop(fs::remove_file(&self.paths.part));
        drop(fs::remove_file(&self.paths.journal));
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
            self.paths.give_name(self.replaced.as_deref())?;
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
        return Err(paths.refuse_found(&why));
    }
    if found.source != wanted.source || found.length != wanted.length {
        return Err(paths.refuse_found("the source has changed since it was begun"));
    }
    if found.position > found.length || !found.position.is_multiple_of(super::SECTOR) {
        return Err(paths.refuse_found("its journal says what cannot be"));
    }
    let inode = |path: &Path| fs::metadata(path).ok().map(|metadata| metadata.ino());
    match inode(&paths.part) {
        Some(part) if part == found.target => Ok(Beginning::At(found.position)),
        None if found.position == found.length && inode(&paths.target) == Some(found.target) => Ok(Beginning::Complete),
        Some(_) => Err(paths.refuse_found("the part of the copy is not the file that was written")),
        None => Err(paths.refuse_found("the part of the copy is gone")),
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

/// Describes the state of sources: of every file of their chains the length, the times of the last changes, the inode
/// and the beginning.
///
/// # Errors
/// [`ImageError::Unsupported`]: a source is no regular file, so a change of it would not be noticed; what the kernel
/// says.
pub(super) async fn source_state(sources: &[NamedImage]) -> Result<String, OperationError> {
    let mut state = String::new();
    for source in sources {
        for file in chain::files(&source.reference, &source.options).await? {
            push_state(&mut state, &*file.storage, file.reference.path()).await?;
            if let Some(header) = &file.header {
                push_state(&mut state, &**header, file.reference.header.as_deref()).await?;
            }
        }
    }
    Ok(state)
}

/// Adds the state of a file.
async fn push_state(state: &mut String, storage: &dyn Storage, path: Option<&Path>) -> Result<(), OperationError> {
    let Some(metadata) = path.and_then(|path| fs::metadata(path).ok()).filter(fs::Metadata::is_file) else {
        let what = "it is no regular file, so a change while a copy is interrupted would not be noticed";
        return Err(super::stream::unsupported(storage.name(), what).into());
    };
    let head = Buffer::zeroed(limosa_page::to_usize(HEAD.min(metadata.len())));
    storage.read(0, head.clone().into()).await.map_err(ImageError::from)?;
    let (modified, changed) = ((metadata.mtime(), metadata.mtime_nsec()), (metadata.ctime(), metadata.ctime_nsec()));
    let _ = write!(
        state,
        "{} bytes, modified {}.{:09}, changed {}.{:09}, inode {} of device {}, {}; ",
        metadata.len(),
        modified.0,
        modified.1,
        changed.0,
        changed.1,
        metadata.ino(),
        metadata.dev(),
        hex(&head.to_vec())
    );
    Ok(())
}

#[cfg(test)]
mod tests;
