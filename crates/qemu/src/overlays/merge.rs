//! All overlays of a disk, merged into its image: the protection is over and the VM is off. What the VM has written is
//! all that there is.
//!
//! Law: **it can be repeated as long as the ledger is there**, since an overlay covers what it has brought to the
//! image. Without a ledger an overlay may have been merged, and the image written since: merging it again would destroy
//! that.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use limosa_image::Format;
use limosa_snapshot::OverlaidDisk;
use uuid::Uuid;

use super::bring::{merge, wait_closed};
use super::ledger::{ImageState, Ledger, Stamp};
use super::{file, found, remove};
use crate::disk_image::{Others, has_data};
use crate::job::JobError;

/// The first bytes of a qcow2 image.
const QCOW2: [u8; 4] = *b"QFI\xfb";

/// Brings all that the VM has written to its disks to their images, also what no checkpoint has: they are the disks of
/// no checkpoint any more. The VM is off. It can be repeated, also after a kill.
///
/// # Errors
/// An image is in use, or was written since; a failover has brought one to a checkpoint. Every disk is tried; the error
/// is that of the first one that failed.
pub fn merge_overlays(disks: &[OverlaidDisk]) -> Result<(), JobError> {
    merge_each(disks, Writers::Unknown)
}

/// Whether somebody else may have written to an image meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writers {
    /// Its QEMU had it until now.
    None,
    /// Anybody may.
    Unknown,
}

/// As [`merge_overlays`].
pub(super) fn merge_each(disks: &[OverlaidDisk], writers: Writers) -> Result<(), JobError> {
    let merge = |disk: &OverlaidDisk| {
        let OverlaidDisk { device, path, overlays, format } = disk;
        let format: Result<Format, _> = format.parse();
        let merged =
            format.map_err(|error| error.to_string()).and_then(|format| merge_all((path, format), *overlays, writers));
        merged.map_err(|why| {
            let image = path.display();
            JobError::refused(format!("the overlays of the disk {device} cannot be merged into {image}: {why}"))
        })
    };
    disks.iter().map(merge).fold(Ok(()), Result::and)
}

/// Merges all overlays of an image, and removes them and its ledger.
fn merge_all((image, format): (&Path, Format), overlays: Uuid, writers: Writers) -> Result<(), String> {
    let at = |error: io::Error| format!("{}: {error}", image.display());
    let ledger = Ledger::read(image).map_err(|error| format!("{}: {error}", Ledger::path(image).display()))?;
    let there = found(image, overlays).map_err(at)?;
    match ledger.filter(|ledger| ledger.overlays == overlays) {
        Some(ledger) => {
            let stamp = Stamp::of(image).map_err(at)?;
            let mut epochs = plan(ledger.image, (writers == Writers::Unknown).then_some(stamp), &there)?;
            // One whose making was cut off has nothing in it, and nobody has opened it.
            if let Some(last) = epochs.last()
                && !is_qcow2(&file(image, overlays, *last)).map_err(at)?
            {
                epochs.pop();
            }
            wait_closed(image, format)?;
            Ledger::new(overlays, ImageState::Ending).write(image).map_err(at)?;
            epochs.iter().try_for_each(|epoch| merge(image, format, &file(image, overlays, *epoch)))?;
            Ledger::remove(image, overlays).map_err(at)?;
        }
        None => {
            for epoch in &there {
                let top = file(image, overlays, *epoch);
                if is_qcow2(&top).map_err(at)? && has_data(&top, Format::Qcow2.name(), Others::Refused)? {
                    return Err(format!("{} may be merged already, and the image written since", top.display()));
                }
            }
        }
    }
    there.iter().try_for_each(|epoch| remove(image, overlays, *epoch)).map_err(at)
}

/// Decides which of the overlays that are there have to be merged, in their order. `stamp`: the image's, if it may have
/// been written.
fn plan(image: ImageState, stamp: Option<Stamp>, there: &[u64]) -> Result<Vec<u64>, String> {
    let merged = match image {
        ImageState::Brought { epoch, .. } => return Err(format!("it is as of checkpoint {epoch}")),
        ImageState::Merged { stamp: left, .. } if stamp.is_some_and(|stamp| stamp != left) => {
            return Err("it was written since".to_owned());
        }
        ImageState::Merged { epoch, .. } => epoch,
        ImageState::Merging { epoch } => epoch.saturating_sub(1),
        // Those that are there and were merged before come first, and the others over them.
        ImageState::Bringing { .. } | ImageState::Ending => there.first().map_or(0, |first| first.saturating_sub(1)),
    };
    let wanted: Vec<u64> = there.iter().copied().filter(|epoch| *epoch > merged).collect();
    match (merged.saturating_add(1)..).zip(&wanted).find(|(expected, epoch)| expected != *epoch) {
        Some((missing, _)) => Err(format!("its overlay of checkpoint {missing} is not there")),
        None => Ok(wanted),
    }
}

/// Whether a file begins as a qcow2 image.
fn is_qcow2(path: &Path) -> io::Result<bool> {
    let mut start = Vec::new();
    File::open(path)?.take(4).read_to_end(&mut start)?;
    Ok(start == QCOW2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(at: i64) -> Stamp {
        serde_json::from_value(serde_json::json!({ "size": 1, "modified": [at, 0] })).unwrap()
    }

    #[test]
    fn overlays_are_merged_from_the_first_one_that_the_image_does_not_have_wholly() {
        let (now, before) = (stamp(2), stamp(1));
        let epochs = |image, there: &[u64]| plan(image, Some(now), there);
        assert_eq!(epochs(ImageState::Merged { epoch: 3, stamp: now }, &[3, 4, 5]), Ok(vec![4, 5]));
        assert_eq!(epochs(ImageState::Merging { epoch: 3 }, &[2, 3, 4, 5]), Ok(vec![3, 4, 5]));
        assert_eq!(epochs(ImageState::Bringing { epoch: 3 }, &[3, 4]), Ok(vec![3, 4]));
        assert_eq!(epochs(ImageState::Ending, &[2, 3, 4]), Ok(vec![2, 3, 4]));
        assert_eq!(epochs(ImageState::Ending, &[]), Ok(Vec::new()));
        let why = |image, there: &[u64]| epochs(image, there).unwrap_err();
        assert!(why(ImageState::Merged { epoch: 3, stamp: before }, &[4]).contains("written since"));
        assert_eq!(plan(ImageState::Merged { epoch: 3, stamp: before }, None, &[4]), Ok(vec![4]));
        assert!(why(ImageState::Brought { epoch: 3, stamp: now }, &[4]).contains("as of checkpoint 3"));
        assert!(why(ImageState::Merging { epoch: 3 }, &[4]).contains("of checkpoint 3 is not there"));
        assert!(why(ImageState::Ending, &[2, 4]).contains("of checkpoint 3 is not there"));
    }
}
