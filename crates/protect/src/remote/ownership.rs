//! Whose VM a directory of checkpoints is: the primary's, or that of this host since a failover.
//!
//! Law: **a protection whose checkpoints a VM continues from is never kept again**: its primary is told so, and does
//! not run the VM. A later protection, that of the survivor, is another one. The checkpoint says which protection it is
//! of; a file beside it has those that were failed over, as keepers and failovers are processes that come and go.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

use limosa_snapshot::{CHECKPOINT_NAME, Snapshot};
use uuid::Uuid;

use crate::error::ProtectError;

/// The file with the protections that were failed over, the newest last.
const TAKEN_OVER: &str = ".taken-over";
/// Most of them that are remembered.
const REMEMBERED: usize = 64;
/// Most bytes of the file that are read.
const READ_MAX: u64 = 16 << 10;

/// Whether the VM of this protection was failed over.
///
/// # Errors
/// The file cannot be read.
pub(super) fn is_taken_over(directory: &Path, protection: Uuid) -> io::Result<bool> {
    Ok(read(directory, TAKEN_OVER)?.contains(&protection))
}

/// Records that a VM continues from the checkpoint in this directory: `limosa keep` then refuses the primary whose
/// checkpoint it is, for ever. To be called by a failover that has the directory, before its VM runs. Returns false if
/// that was recorded already: another failover may have the VM.
///
/// # Errors
/// The checkpoint cannot be read, or the record cannot be made durable: the VM must not run.
pub fn take_over(directory: &Path) -> Result<bool, ProtectError> {
    let snapshot = Snapshot::open(&directory.join(CHECKPOINT_NAME))?;
    // One of a VM on its own host has none.
    let protection = snapshot.manifest().and_then(|manifest| manifest.protection);
    let Some(protection) = protection else { return Ok(true) };
    note(directory, protection).map_err(|source| ProtectError::Ownership { directory: directory.to_owned(), source })
}

/// Records that this protection was failed over; false if it was recorded already.
fn note(directory: &Path, protection: Uuid) -> io::Result<bool> {
    let mut taken = read(directory, TAKEN_OVER)?;
    if taken.contains(&protection) {
        return Ok(false);
    }
    taken.push(protection);
    let forgotten = taken.len().saturating_sub(REMEMBERED);
    let lines: String = taken.iter().skip(forgotten).map(|protection| format!("{protection}\n")).collect();
    replace(directory, TAKEN_OVER, &lines)?;
    Ok(true)
}

/// Reads the lines of a file that are protections; none if it is missing.
fn read(directory: &Path, name: &str) -> io::Result<Vec<Uuid>> {
    let mut text = String::new();
    match File::open(directory.join(name)) {
        Ok(file) => file.take(READ_MAX).read_to_string(&mut text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Replaces a file, durably.
fn replace(directory: &Path, name: &str, text: &str) -> io::Result<()> {
    let aside = directory.join(format!("{name}.new"));
    let mut file = File::create(&aside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&aside, directory.join(name))?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protection_that_was_taken_over_is_remembered_and_the_oldest_are_forgotten_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let all: Vec<_> = (0..REMEMBERED + 3).map(|_| Uuid::new_v4()).collect();
        assert!(!is_taken_over(path, all[0]).unwrap());
        for protection in &all {
            assert!(note(path, *protection).unwrap());
            assert!(!note(path, *protection).unwrap());
            assert!(is_taken_over(path, *protection).unwrap());
        }
        let known: Vec<_> = all.iter().map(|protection| is_taken_over(path, *protection).unwrap()).collect();
        assert_eq!(known.iter().position(|known| *known), Some(3));
        assert!(known.iter().skip(3).all(|known| *known));
        assert!(!is_taken_over(path, Uuid::new_v4()).unwrap());
    }

    #[test]
    fn a_directory_without_a_checkpoint_is_not_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        take_over(folder.path()).unwrap_err();
    }
}
