//! The copy of a snapshot that cannot be mapped itself, which the clones of a directory share.
//!
//! A packed snapshot has no bytes that a VM can map. Unpacked once into the clones' directory, it has.
//!
//! The law: **a copy is nobody's only one.** It has a name that nothing else is given, it is removed only if it holds
//! the snapshot that its name says, and only if no clone of the directory has it as its memory.

use std::fs;
use std::path::{Path, PathBuf};

use limosa_snapshot::{HeldSnapshot, Snapshot};
use uuid::Uuid;

const SUFFIX: &str = "unpacked";

/// Returns where the copy of a snapshot is that the clones of a directory share: `DIR/ID.unpacked`.
#[must_use]
pub fn copy_path(folder: &Path, snapshot: Uuid) -> PathBuf {
    folder.join(format!("{snapshot}.{SUFFIX}"))
}

/// Removes the copies in a directory of clones but for those of the snapshots in `needed`. One that is being served or
/// used to start clones stays.
pub(crate) fn remove_copies_but(needed: &[Uuid], folder: &Path) {
    for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if let Some(id) = id_in_name(&path)
            && !needed.contains(&id)
        {
            // What is left is removed with the next clone.
            let _ = remove(&path, id);
        }
    }
}

/// Removes the copy of this snapshot. Nothing is done if another file has its name.
fn remove(path: &Path, id: Uuid) -> Result<(), limosa_snapshot::SnapshotError> {
    if !fs::symlink_metadata(path).is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    let held = HeldSnapshot::lock(path)?;
    if Snapshot::open(path)?.id() == id { held.remove() } else { Ok(()) }
}

fn id_in_name(path: &Path) -> Option<Uuid> {
    let name = path.file_name()?.to_str()?.strip_suffix(SUFFIX)?.strip_suffix('.')?;
    Uuid::try_parse(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_known_by_its_name() {
        let id = Uuid::new_v4();
        assert_eq!(id_in_name(&copy_path(Path::new("/run/clones"), id)), Some(id));
        for other in ["001", "vm.unpacked", ".unpacked", "vm.limosa"] {
            assert_eq!(id_in_name(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn what_is_not_the_copy_that_its_name_says_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = copy_path(folder.path(), Uuid::new_v4());
        fs::write(&path, "somebody's file").unwrap();
        remove_copies_but(&[], folder.path());
        assert!(path.exists());
    }
}
