//! The journal of an image in use: changes of L2 entries that the file does not have yet, in memory that outlives this
//! process.
//!
//! What is flushed survives a power cut. A server that is killed is less than that: its clients continue, and the next
//! server answers the flush that covers their earlier writes. So those must not be lost with the memory of the killed
//! one. Contents are in the file already; what the tables in memory say is in the journal.
//!
//! Law: an entry is changed in memory only when its record is in the journal, and both under the lock of the entry's
//! slice. A record goes only when the file has what it says. The records of a half are older than what a flush captures
//! that was begun with that half full, so they go together when it succeeds; what is changed meanwhile is recorded in
//! the other half. A half of a flush that failed stays until one succeeds.
//!
//! The image has its dirty bit set as long as its journal may have records. Other programs that write the image repair
//! it and clear the bit: a journal with records and an image without the bit do not belong together any more.

mod recorder;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_storage::{FileStorage, Operation, Storage as _, StorageError};
use rustix::fs::OFlags;
use rustix::process::geteuid;

pub(super) use self::recorder::Recorder;
use crate::error::ImageError;
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::journal::{self, EntryChange, Subject};

/// The kernel's identifier of the time since the machine was booted.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Flags of a journal that is opened: it is not found through a link.
const FLAGS: i32 = OFlags::NOFOLLOW.bits().cast_signed();

/// A folder of journals, each of an image in use: what a process that is killed had acknowledged and not brought to the
/// image's tables. The next one that opens the image with the same folder brings it there.
#[derive(Debug, Clone)]
pub struct JournalFolder {
    path: PathBuf,
    boot: [u64; 2],
}

impl JournalFolder {
    /// The folder at `path`, which is made if it is not there; then nobody else may look into it. It has to be the same
    /// for all processes that open an image one after the other. A filesystem in memory suffices: after the machine was
    /// booted a journal says nothing.
    ///
    /// # Errors
    /// The kernel's. [`io::ErrorKind::PermissionDenied`]: another user may write there.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(path)?;
        Self::checked(path)
    }

    /// As [`open`](Self::open), without making it; `None`: it is not there.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub fn find(path: &Path) -> io::Result<Option<Self>> {
        match Self::checked(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => found.map(Some),
        }
    }

    fn checked(path: &Path) -> io::Result<Self> {
        let found = fs::metadata(path)?;
        let (mode, owner) = (found.mode(), found.uid());
        if mode & 0o022 != 0 || ![0, geteuid().as_raw()].contains(&owner) {
            let why = "another user may write to it, and to the images whose journals are there";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let text = fs::read_to_string(BOOT_ID)?;
        let boot = journal::identifier(&text);
        let boot = boot.ok_or_else(|| io::Error::other(format!("{BOOT_ID} is no identifier: {text:?}")))?;
        Ok(Self { path: path.to_path_buf(), boot })
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses an image whose journal has changes that were not brought to it. Its file is locked, so that no process
    /// records changes meanwhile.
    ///
    /// # Errors
    /// [`ImageError::Unreplayed`]; the kernel's.
    pub(crate) fn refuse_unreplayed(&self, image: &FileStorage) -> Result<(), ImageError> {
        let path = self.journal_of(image);
        let read = OpenOptions::new().read(true).custom_flags(FLAGS).open(&path).and_then(|file| Journal::read(&file));
        let contents = match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            read => {
                read.map_err(|error| StorageError::for_storage(Operation::Open, &path.to_string_lossy().into(), error))?
            }
        };
        match journal::decode(&contents) {
            Some((kept, found)) if !found.is_empty() && (kept.boot, kept.birth) == (self.boot, image.birth()) => {
                let (image, changes) = (Arc::clone(image.name()), found.len());
                Err(ImageError::Unreplayed { image, journal: path.into(), changes })
            }
            _ => Ok(()),
        }
    }

    /// The path of an image's journal.
    fn journal_of(&self, image: &FileStorage) -> PathBuf {
        let identity = image.identity();
        self.path.join(format!("{:x}-{:x}.journal", identity.device, identity.inode))
    }
}

/// The journal of an image, as the last process that had the image open left it.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    subject: Subject,
    /// The changes that were found.
    found: Vec<EntryChange>,
}

impl Journal {
    /// Opens the journal of an image in a folder; it is made if it is not there. One of another file that had the same
    /// inode, or of a time before the machine was booted, has no changes. The image's file is locked, so that nobody
    /// else uses the journal.
    ///
    /// # Errors
    /// The kernel's. [`ImageError::Journal`]: it has changes of an image of another layout.
    pub fn open(folder: &JournalFolder, image: &FileStorage, layout: &Geometry) -> Result<Self, ImageError> {
        let path = folder.journal_of(image);
        let name: Arc<str> = path.to_string_lossy().into();
        let failed = |error: io::Error| StorageError::for_storage(Operation::Open, &name, error);
        let mut file = OpenOptions::new();
        file.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(FLAGS);
        let file = file.open(&path).map_err(failed)?;
        let contents = Self::read(&file).map_err(failed)?;
        let subject =
            Subject { boot: folder.boot, birth: image.birth(), layout: (layout.cluster_bits, layout.extended_l2) };
        let found = match journal::decode(&contents) {
            Some((kept, found)) if (kept.boot, kept.birth) == (subject.boot, subject.birth) => {
                if !found.is_empty() && kept.layout != subject.layout {
                    let why = "which has clusters of another size now".to_owned();
                    return Err(refused(&path, found.len(), image.name(), why));
                }
                found
            }
            _ => Vec::new(),
        };
        Ok(Self { path, file, subject, found })
    }

    fn read(file: &File) -> io::Result<Vec<u8>> {
        let mut contents = Vec::new();
        file.take(journal::bytes() as u64).read_to_end(&mut contents)?;
        Ok(contents)
    }

    /// Returns the changes that a killed process had recorded.
    pub(in crate::qcow2) fn found(&self) -> &[EntryChange] {
        &self.found
    }

    /// An image to which the changes that were found cannot be brought.
    pub(in crate::qcow2) fn refused(&self, image: &Arc<str>, why: String) -> ImageError {
        refused(&self.path, self.found.len(), image, why)
    }

    /// The changes that were found are in the image, durably.
    pub(super) fn replayed(&self) -> Result<(), ImageError> {
        let cleared = self.file.set_len(0);
        let name = self.path.to_string_lossy().into();
        Ok(cleared.map_err(|error| StorageError::for_storage(Operation::SetLength, &name, error))?)
    }

    /// Begins without records.
    pub(super) fn begin(self) -> Result<Recorder, ImageError> {
        let name = self.path.to_string_lossy().into();
        let recorder = Recorder::begin(self.path, self.file, &self.subject);
        Ok(recorder.map_err(|error| StorageError::for_storage(Operation::Write, &name, error))?)
    }
}

fn refused(journal: &Path, changes: usize, image: &Arc<str>, why: String) -> ImageError {
    ImageError::Journal { image: Arc::clone(image), journal: journal.into(), changes, why }
}
