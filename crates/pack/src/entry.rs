//! A snapshot of a directory or of a folder of a store, as a list and a plan have it.

use std::ffi::OsString;
use std::time::SystemTime;

use limosa_page::PAGE_SIZE;
use limosa_snapshot::{Snapshot, SnapshotError};
use limosa_storage::FileIdentity;
use uuid::Uuid;

use crate::error::PackError;

/// A snapshot of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotEntry {
    /// The file's name.
    pub name: OsString,
    /// The file, if it can be opened.
    pub file: Option<FileIdentity>,
    /// The snapshot's id, if it can be read.
    pub id: Option<Uuid>,
    /// The VM: its uuid, else its name, else nothing.
    pub vm: String,
    /// The VM's name, if it has one.
    pub vm_name: Option<String>,
    /// When it was saved, in seconds since 1970; when the file was written, if that is not recorded.
    pub saved: u64,
    /// When the file was written. One that is packed again keeps its time.
    pub written: SystemTime,
    /// Bytes that the file takes on the disk.
    pub allocated: u64,
    /// Bytes of pages that it stores, those of its bases included.
    pub page_bytes: u64,
    /// Whether it is packed.
    pub is_packed: bool,
    /// Whether the file is encrypted.
    pub is_encrypted: bool,
    /// The name of the file that it stands on.
    pub base: Option<OsString>,
    /// Whether it is known what it stands on. A file that cannot be looked into may stand on any other one.
    pub is_base_known: bool,
    /// Why it cannot be restored, if it cannot be read.
    pub fault: Option<String>,
}

/// A snapshot of a plan: a name may be another file's when the plan is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotFile {
    /// The file's name.
    pub name: OsString,
    /// The file, if it could be opened.
    pub file: Option<FileIdentity>,
    /// The snapshot's id.
    pub id: Option<Uuid>,
    /// Bytes that the file takes on the disk.
    pub allocated: u64,
}

impl SnapshotEntry {
    /// An entry that has a name, and is not looked into yet.
    pub(crate) const fn new(name: OsString) -> Self {
        Self {
            name,
            file: None,
            id: None,
            vm: String::new(),
            vm_name: None,
            saved: 0,
            written: SystemTime::UNIX_EPOCH,
            allocated: 0,
            page_bytes: 0,
            is_packed: false,
            is_encrypted: false,
            base: None,
            is_base_known: false,
            fault: None,
        }
    }

    /// The snapshot as a plan has it.
    #[must_use]
    pub fn planned(&self) -> SnapshotFile {
        SnapshotFile { name: self.name.clone(), file: self.file, id: self.id, allocated: self.allocated }
    }
}

/// Adds what the snapshot itself says.
pub(crate) fn fill(entry: &mut SnapshotEntry, snapshot: &Snapshot) {
    entry.id = Some(snapshot.id());
    entry.page_bytes = snapshot.stored_pages().saturating_mul(PAGE_SIZE);
    if let Some(manifest) = snapshot.manifest() {
        let uuid = manifest.vm_uuid.map(|uuid| uuid.to_string());
        entry.vm_name.clone_from(&manifest.vm_name);
        entry.vm = uuid.or_else(|| manifest.vm_name.clone()).unwrap_or_default();
        if manifest.finished > 0 {
            entry.saved = manifest.finished;
        }
    }
}

/// Whether a file was a snapshot once.
pub(crate) fn is_cut_snapshot(error: &PackError) -> bool {
    matches!(error, PackError::Snapshot(SnapshotError::Structure { .. }) | PackError::Base { .. })
}
