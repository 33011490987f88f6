//! Whose VM a directory of checkpoints is: the primary's, or that of this host since a failover.
//!
//! Law: **a protection whose checkpoints a VM continues from is never kept again**: its primary is told so, and does
//! not run the VM. A later protection, that of the survivor, is another one. The checkpoint says which protection it is
//! of; a file beside it has those that were failed over, as keepers and failovers are processes that come and go.
//!
//! Law: **one VM continues from a protection.** Those whose VM continues are marked, from before it runs. The mark of
//! one whose QEMU did not start is taken away, so that another failover may try; its primary stays turned away.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use limosa_snapshot::{CHECKPOINT_NAME, Manifest, Snapshot};
use limosa_storage::replace_file;
use uuid::Uuid;

use super::desk::VmName;
use crate::error::ProtectError;

/// The file with the protections that were failed over, a line each, the newest last.
const TAKEN_OVER: &str = ".taken-over";
/// The end of the line of one that a VM continues from.
const CONTINUED: &str = " continued";
/// Most of them that are remembered.
const REMEMBERED: usize = 64;
/// Most bytes of the file that are read.
const READ_MAX: u64 = 16 << 10;

/// Whether the VM of this protection was failed over.
///
/// # Errors
/// The file cannot be read.
pub(super) fn is_taken_over(directory: &Path, protection: Uuid) -> io::Result<bool> {
    Ok(read(directory)?.iter().any(|taken| taken.protection == protection))
}

/// A protection that was failed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Taken {
    protection: Uuid,
    /// Whether a VM continues from it.
    is_continued: bool,
}

impl Taken {
    /// The protection of a line; `None`: it is not one.
    fn of_line(line: &str) -> Option<Self> {
        let (protection, is_continued) = match line.strip_suffix(CONTINUED) {
            Some(protection) => (protection, true),
            None => (line, false),
        };
        Some(Self { protection: protection.parse().ok()?, is_continued })
    }

    fn line(self) -> String {
        format!("{}{}\n", self.protection, if self.is_continued { CONTINUED } else { "" })
    }
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

/// Records that a VM continues from the checkpoint with this manifest in this directory: `limosa keep` then refuses the
/// primary whose checkpoint it is, for ever. To be called by a failover that has the directory, before its VM runs.
/// Returns false if a VM continues from it already: the failover must not run another one.
///
/// # Errors
/// The record cannot be read, or not be made durable: the VM must not run.
pub fn take_over(directory: &Path, manifest: &Manifest) -> Result<bool, ProtectError> {
    // That of an older limosa has none.
    let Some(protection) = manifest.protection else { return Ok(true) };
    let take = || {
        let mut all = read(directory)?;
        let known = all.iter().position(|taken| taken.protection == protection);
        if let Some(known) = known.map(|at| all.remove(at))
            && known.is_continued
        {
            return Ok(false);
        }
        all.push(Taken { protection, is_continued: true });
        write(directory, &all)?;
        Ok(true)
    };
    take().map_err(failed(directory))
}

/// Returns whether a VM continues, or has continued, from the checkpoint with this manifest in this directory: a
/// failover has [taken](take_over) it, and not [given it back](give_back).
///
/// # Errors
/// The record cannot be read.
pub fn has_survivor(directory: &Path, manifest: &Manifest) -> Result<bool, ProtectError> {
    let Some(protection) = manifest.protection else { return Ok(false) };
    let all = read(directory).map_err(failed(directory))?;
    Ok(all.contains(&Taken { protection, is_continued: true }))
}

/// Records that the VM of a failover that has [taken](take_over) the checkpoint with this manifest in this directory
/// has never run: another failover may take it. Its primary stays refused.
///
/// # Errors
/// The record cannot be read, or not be made durable: other failovers are refused.
pub fn give_back(directory: &Path, manifest: &Manifest) -> Result<(), ProtectError> {
    let Some(protection) = manifest.protection else { return Ok(()) };
    let unmark = || {
        let mut all = read(directory)?;
        all.iter_mut().filter(|taken| taken.protection == protection).for_each(|taken| taken.is_continued = false);
        write(directory, &all)
    };
    unmark().map_err(failed(directory))
}

fn failed(directory: &Path) -> impl FnOnce(io::Error) -> ProtectError {
    |source| ProtectError::Ownership { directory: directory.to_owned(), source }
}

/// Writes the newest protections of a list, durably.
fn write(directory: &Path, all: &[Taken]) -> io::Result<()> {
    let forgotten = all.len().saturating_sub(REMEMBERED);
    let lines: String = all.iter().skip(forgotten).map(|taken| taken.line()).collect();
    replace_file(&directory.join(TAKEN_OVER), lines.as_bytes())
}

/// Reads the protections; none if the file is missing.
fn read(directory: &Path) -> io::Result<Vec<Taken>> {
    let mut text = String::new();
    match File::open(directory.join(TAKEN_OVER)) {
        Ok(file) => file.take(READ_MAX).read_to_string(&mut text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    Ok(text.lines().filter_map(Taken::of_line).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_the_oldest_are_forgotten_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let taken = |at: usize| Taken { protection: Uuid::new_v4(), is_continued: at.is_multiple_of(3) };
        let all: Vec<_> = (0..REMEMBERED + 3).map(taken).collect();
        assert!(!is_taken_over(path, all[0].protection).unwrap());
        write(path, &all).unwrap();
        assert_eq!(read(path).unwrap(), all[3..]);
        let known: Vec<_> = all.iter().map(|taken| is_taken_over(path, taken.protection).unwrap()).collect();
        assert_eq!(known.iter().position(|known| *known), Some(3));
        assert!(known.iter().skip(3).all(|known| *known));
        assert!(!is_taken_over(path, Uuid::new_v4()).unwrap());
    }

    #[test]
    fn lines_of_something_else_are_no_protections() {
        let folder = tempfile::tempdir().unwrap();
        let one = Uuid::new_v4();
        std::fs::write(folder.path().join(TAKEN_OVER), format!("x\n{one} continue\n{one} continued\n\n")).unwrap();
        assert_eq!(read(folder.path()).unwrap(), [Taken { protection: one, is_continued: true }]);
    }

    #[test]
    fn one_failover_has_a_checkpoint_until_it_gives_it_back() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut manifest) = (folder.path(), Manifest::new());
        assert!(take_over(path, &manifest).unwrap() && !has_survivor(path, &manifest).unwrap());
        let protection = Uuid::new_v4();
        manifest.protection = Some(protection);
        for _ in 0..2 {
            assert!(!has_survivor(path, &manifest).unwrap());
            assert!(take_over(path, &manifest).unwrap());
            assert!(!take_over(path, &manifest).unwrap());
            assert!(has_survivor(path, &manifest).unwrap() && is_taken_over(path, protection).unwrap());
            give_back(path, &manifest).unwrap();
            assert!(is_taken_over(path, protection).unwrap(), "its primary stays refused");
        }
    }
}
