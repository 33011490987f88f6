//! Disks that QEMU opens itself, as part of a VM's checkpoints: an overlay for the writes of each epoch.
//!
//! The number of an epoch is that of its checkpoint: overlay n has what the VM wrote between the checkpoints n-1 and n.
//! It is made and opened while the VM runs, and put over the disk by one transaction for all disks, while the VM stands
//! still for checkpoint n-1.
//!
//! ```text
//!        prepare n+1          seal n            count n           merged
//! image ◄─ n      (n+1)   image ◄─ n ◄─ n+1   image ◄═ n ◄─ n+1   image ◄─ n+1
//!          writes                       writes     merging  writes         writes
//! ```
//!
//! The law: **the disk of the newest checkpoint that counts, n, is the image with the overlays up to n over it, at
//! every moment.** So overlay n is merged into the image once checkpoint n counts, and has replaced the one before. A
//! merge that is cut off, in QEMU or here, changes nothing: the overlay covers what it has brought to the image. A file
//! beside the image, the ledger, says which epochs the image has.
//!
//! Facts found with QEMU 11.1, whose COLO has stopped the VM (run state `colo`, and `finish-migrate` for the base):
//!
//! * The transaction is accepted and takes 2 to 11 ms; opening an overlay takes 4 to 24 ms, while the VM runs.
//! * QEMU refuses an overlay over a node on which a `block-commit` works, even one that is below it: a merge has to be
//!   over before the VM may be stopped.
//! * A node whose file was merged is in nobody's chain any more, but keeps the ones below it: they are closed from the
//!   top down. The node above gets the image as its backing file, in its header as well.
//! * The image is opened read-only again at the end of a merge, and has everything then.

mod bring;
mod ledger;
mod live;
mod merge;
mod undo;

use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::job_record::{OVERLAY_SUFFIX, overlay_digits};

use ledger::{ImageState, Ledger};

pub use bring::bring as bring_overlays;
pub(crate) use bring::check as check_overlays;
pub use bring::check_bringable as check_bringable_overlays;
pub use live::EpochOverlays;
pub use merge::merge_overlays;
pub(crate) use undo::undo as undo_chain;

/// Most overlays of one protection beside an image that are looked for: a folder may hold any files.
const FOUND_MAX: usize = 64;

/// Returns the file beside an image that says that its VM is, or was, protected with overlays, in which the last writes
/// are: the image alone is its disk at no instant. `None`: there is no such file, or a failover has brought the image
/// to its checkpoint.
///
/// # Errors
/// The file cannot be read, or this limosa does not know its form.
pub fn find_overlay_ledger(image: &Path) -> io::Result<Option<PathBuf>> {
    let ledger = Ledger::read(image);
    let path = Ledger::path(image);
    match ledger.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))? {
        None | Some(Ledger { image: ImageState::Brought { .. }, .. }) => Ok(None),
        Some(_) => Ok(Some(path)),
    }
}

/// The file of the overlay of an epoch.
fn file(image: &Path, overlays: Uuid, epoch: u64) -> PathBuf {
    let mut file = image.to_owned();
    file.as_mut_os_string().push(format!("{OVERLAY_SUFFIX}{}-{epoch}", overlay_digits(overlays)));
    file
}

/// The block job that merges, of a disk whose nodes have names that begin so.
fn job_of(nodes: &str) -> String {
    format!("{nodes}merge")
}

/// The epochs whose overlays are beside the image, in order.
///
/// # Errors
/// The folder cannot be read, or has too many of them.
fn found(image: &Path, overlays: Uuid) -> io::Result<Vec<u64>> {
    let folder = image.parent().unwrap_or(Path::new("/"));
    let first = file(image, overlays, 0);
    // Without the number.
    let Some(prefix) = first.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix('0')) else {
        return Ok(Vec::new());
    };
    let mut epochs = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(prefix));
        epochs.extend(digits.and_then(|digits| digits.parse::<u64>().ok()));
        if epochs.len() > FOUND_MAX {
            return Err(io::Error::other("more overlays are beside it than one protection has"));
        }
    }
    epochs.sort_unstable();
    Ok(epochs)
}

/// Removes the overlay of an epoch, if it is there.
fn remove(image: &Path, overlays: Uuid, epoch: u64) -> io::Result<()> {
    match std::fs::remove_file(file(image, overlays, epoch)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::ledger::Stamp;
    use super::*;

    #[test]
    fn an_image_has_no_ledger_when_a_failover_has_brought_it_to_its_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("d");
        std::fs::write(&image, "").unwrap();
        assert_eq!(find_overlay_ledger(&image).unwrap(), None);
        let stamp = Stamp::of(&image).unwrap();
        for (state, is_found) in [
            (ImageState::Merged { epoch: 0, stamp }, true),
            (ImageState::Merging { epoch: 1 }, true),
            (ImageState::Bringing { epoch: 1 }, true),
            (ImageState::Ending, true),
            (ImageState::Brought { epoch: 1, stamp }, false),
        ] {
            Ledger::new(Uuid::nil(), state).write(&image).unwrap();
            let found = is_found.then(|| folder.path().join("d.overlays"));
            assert_eq!(find_overlay_ledger(&image).unwrap(), found, "{state:?}");
        }
        for none in ["d/file", &"x".repeat(250)] {
            assert_eq!(find_overlay_ledger(&folder.path().join(none)).unwrap(), None);
        }
        std::fs::write(folder.path().join("d.overlays"), "no ledger").unwrap();
        assert!(find_overlay_ledger(&image).unwrap_err().to_string().contains("d.overlays"));
    }

    #[test]
    fn only_the_overlays_of_the_protection_are_found_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("d");
        let (ours, other) = (Uuid::from_u128(7 << 64), Uuid::from_u128(8 << 64));
        for (id, epoch) in [(ours, 10), (ours, 9), (other, 3)] {
            std::fs::write(file(&image, id, epoch), "").unwrap();
        }
        std::fs::write(folder.path().join("d.overlay-0000000000000007-x"), "").unwrap();
        assert_eq!(found(&image, ours).unwrap(), [9, 10]);
        assert!(remove(&image, ours, 9).is_ok() && remove(&image, ours, 9).is_ok());
        assert_eq!(found(&image, ours).unwrap(), [10]);
        assert_eq!(found(&image, other).unwrap(), [3]);
    }
}
