//! The list of a directory's snapshots.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::time::SystemTime;

use limosa_page::error_with_causes;
use limosa_storage::FileIdentity;

use super::SnapshotDirectory;
use crate::entry::{SnapshotEntry, fill, is_cut_snapshot};
use crate::error::PackError;
use crate::head;
use crate::open::open_snapshot;

impl SnapshotDirectory {
    /// Returns its snapshots in the order of their time. Other files are left out, unless they cannot be looked into.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<SnapshotEntry>, PackError> {
        let mut entries: Vec<_> = self.names()?.into_iter().filter_map(|name| self.entry(name)).collect();
        entries.sort_by(|a, b| (a.saved, a.written, &a.name).cmp(&(b.saved, b.written, &b.name)));
        Ok(entries)
    }

    /// Looks at a file; `None`: it is no snapshot.
    fn entry(&self, name: OsString) -> Option<SnapshotEntry> {
        let path = self.path_of(&name);
        let mut entry = SnapshotEntry::new(name);
        let (file, metadata) = match self.open_regular(&entry.name) {
            Ok(opened) => opened?,
            Err(error) => {
                entry.fault = Some(error_with_causes(&error));
                return Some(entry);
            }
        };
        entry.file = Some(FileIdentity::of(&metadata));
        entry.saved = u64::try_from(metadata.mtime()).unwrap_or(0);
        entry.written = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        entry.allocated = metadata.blocks().saturating_mul(512);
        entry.is_packed = head::is_image(&file);
        entry.is_encrypted = head::is_encrypted(&file);
        match self.look_into(&file, &path) {
            Ok(Some(image)) => {
                entry.base = image.base_name;
                entry.id = image.record.map(|record| record.id);
            }
            Ok(None) if entry.is_packed => return None,
            Ok(None) => {}
            Err(error) => {
                entry.fault = Some(error_with_causes(&error));
                return Some(entry);
            }
        }
        entry.is_base_known = true;
        match open_snapshot(&path, &self.access()) {
            Ok(snapshot) => fill(&mut entry, &snapshot),
            // A disk image, or no snapshot at all.
            Err(error) if entry.id.is_none() && !is_cut_snapshot(&error) => return None,
            Err(error) => entry.fault = Some(error_with_causes(&error)),
        }
        Some(entry)
    }
}
