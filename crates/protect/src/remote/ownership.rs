//! Whose VM a directory of checkpoints is: the primary's, or that of this host since a failover.
//!
//! Law: **a protection whose checkpoints a VM continues from is never kept again**: its primary is told so, and does
//! not run the VM. A later protection, that of the survivor, is another one. The checkpoint says which protection it is
//! of; a file beside it has those that were failed over, as keepers and failovers are processes that come and go.
//!
//! Law: **one VM continues from a protection.** A second file has those whose VM continues, from before it runs. One
//! whose QEMU did not start is taken out again, so that another failover may try; its primary stays turned away.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use limosa_snapshot::{CHECKPOINT_NAME, Manifest, Snapshot};
use limosa_storage::replace_file;
use uuid::Uuid;

use super::desk::VmName;
use crate::error::ProtectError;

/// The file with the protections that were failed over, the newest last.
const TAKEN_OVER: &str = ".taken-over";
/// The file with those of them that a VM continues from.
const CONTINUED: &str = ".continued";
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

/// Refuses a directory whose checkpoint is of another VM than that of `manifest`, and says why: a base would replace
/// it.
pub(crate) fn refuse_other_vm(directory: &Path, manifest: &Manifest) -> Result<(), String> {
    let path = directory.join(CHECKPOINT_NAME);
    // One that cannot be read is no VM's.
    let Ok(snapshot) = Snapshot::open(&path) else { return Ok(()) };
    let Some(other) = snapshot.manifest() else { return Ok(()) };
    if VmName::of(manifest).may_be(&VmName::of(other)) {
        return Ok(());
    }
    let uuid = other.vm_uuid.map(|uuid| uuid.to_string());
    let name = other.vm_name.clone().or(uuid).unwrap_or_default();
    Err(format!("{} is of another VM ({name}): move it away, or choose another directory", path.display()))
}

/// Records that a VM continues from the checkpoint in this directory: `limosa keep` then refuses the primary whose
/// checkpoint it is, for ever. To be called by a failover that has the directory, before its VM runs. Returns false if
/// a VM continues from it already: the failover must not run another one.
///
/// # Errors
/// The checkpoint cannot be read, or the record cannot be made durable: the VM must not run.
pub fn take_over(directory: &Path) -> Result<bool, ProtectError> {
    let Some(protection) = of_checkpoint(directory)? else { return Ok(true) };
    let noted = note(directory, TAKEN_OVER, protection).and_then(|_| note(directory, CONTINUED, protection));
    noted.map_err(failed(directory))
}

/// Returns whether a VM continues, or has continued, from the checkpoint in this directory: a failover has
/// [taken](take_over) it, and not [given it back](give_back).
///
/// # Errors
/// The checkpoint or the record cannot be read.
pub fn has_survivor(directory: &Path) -> Result<bool, ProtectError> {
    let Some(protection) = of_checkpoint(directory)? else { return Ok(false) };
    Ok(read(directory, CONTINUED).map_err(failed(directory))?.contains(&protection))
}

/// Records that the VM of a failover that has [taken](take_over) the checkpoint in this directory has never run:
/// another failover may take it. Its primary stays refused.
///
/// # Errors
/// The checkpoint cannot be read, or the record cannot be made durable: other failovers are refused.
pub fn give_back(directory: &Path) -> Result<(), ProtectError> {
    let Some(protection) = of_checkpoint(directory)? else { return Ok(()) };
    let forget = || {
        let mut continued = read(directory, CONTINUED)?;
        continued.retain(|other| *other != protection);
        write(directory, CONTINUED, &continued)
    };
    forget().map_err(failed(directory))
}

/// Returns the protection of a directory's checkpoint; `None`: that of an older limosa has none.
fn of_checkpoint(directory: &Path) -> Result<Option<Uuid>, ProtectError> {
    let snapshot = Snapshot::open(&directory.join(CHECKPOINT_NAME))?;
    Ok(snapshot.manifest().and_then(|manifest| manifest.protection))
}

fn failed(directory: &Path) -> impl FnOnce(io::Error) -> ProtectError {
    |source| ProtectError::Ownership { directory: directory.to_owned(), source }
}

/// Records a protection in a file; false if it was recorded already.
fn note(directory: &Path, name: &str, protection: Uuid) -> io::Result<bool> {
    let mut noted = read(directory, name)?;
    if noted.contains(&protection) {
        return Ok(false);
    }
    noted.push(protection);
    write(directory, name, &noted)?;
    Ok(true)
}

/// Writes the newest protections of a list to a file, durably.
fn write(directory: &Path, name: &str, protections: &[Uuid]) -> io::Result<()> {
    let forgotten = protections.len().saturating_sub(REMEMBERED);
    let lines: String = protections.iter().skip(forgotten).map(|protection| format!("{protection}\n")).collect();
    replace_file(&directory.join(name), lines.as_bytes())
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
            assert!(note(path, TAKEN_OVER, *protection).unwrap());
            assert!(!note(path, TAKEN_OVER, *protection).unwrap());
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
