//! What becomes of the overlays that a save has put, or was to put, over the disks.
//!
//! Law: **no write is lost, and no file that is in use goes.** An overlay that nobody uses is closed and its file removed. One that the
//! VM writes to is merged back into the disk below, which then takes its place: the VM is as it was found. That is done only where
//! no snapshot stands on the disk below; if one does, or may, the VM goes on with the overlay.
//!
//! The VM runs while this goes on; QEMU's own job takes care of what it writes meanwhile.

use std::io;
use std::path::Path;
use std::time::Instant;

use limosa_snapshot::{Snapshot, SnapshotError};

use crate::image::has_data;
use crate::marker::{JobMarker, JobPhase, Overlay};
use crate::monitor::Monitor;
use crate::process::Liveness;
use crate::qmp::QmpError;

/// Undoes the job's overlays as far as they can and may be undone, by `limit`; adds what a person must know to `notices`.
pub(super) fn settle(
    monitor: &Monitor,
    marker: &JobMarker,
    limit: Instant,
    remarks: &mut Vec<String>,
    notices: &mut Vec<String>,
) -> Result<(), QmpError> {
    if marker.overlays.is_empty() {
        return Ok(());
    }
    let keep = may_be_published(marker);
    let mut undone = 0;
    for overlay in &marker.overlays {
        match undo(monitor, overlay, keep, limit)? {
            None => {
                undone += 1;
                if let Err(error) = remove(Path::new(&overlay.file)) {
                    notices.push(format!("cannot remove {}, which nobody uses: {error}", overlay.file));
                }
            }
            Some(why) => notices.push(format!(
                "the disk {} goes on in {}, over {}, because {why}; QEMU's block-commit of node {} merges them",
                overlay.device, overlay.file, overlay.frozen, overlay.node
            )),
        }
    }
    if undone == marker.overlays.len() {
        remarks.push("the disks are as they were".to_owned());
    }
    Ok(())
}

/// QEMU has ended in the middle of the job: removes the overlays that hold nothing, because the disks below are all there is then.
/// What a person must know of the others.
pub(crate) fn abandoned(marker: &JobMarker) -> Vec<String> {
    let mut notices = Vec::new();
    for overlay in &marker.overlays {
        let file = Path::new(&overlay.file);
        let unmade = match file.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => false,
            Ok(found) => found.len() == 0,
        };
        let empty = if unmade { Ok(true) } else { has_data(file).map(|data| !data) };
        notices.push(match empty {
            Ok(true) => match remove(file) {
                Ok(()) => continue,
                Err(error) => format!("cannot remove {}, which holds nothing: {error}", overlay.file),
            },
            Ok(false) => format!(
                "the last writes to the disk {} are in {}, over {}: start the VM anew with the former",
                overlay.device, overlay.file, overlay.frozen
            ),
            Err(why) => format!("whether {} holds writes to {} cannot be told: {why}", overlay.file, overlay.frozen),
        });
    }
    notices
}

/// Closes one overlay, after merging it back if need be; otherwise why it stays.
fn undo(monitor: &Monitor, overlay: &Overlay, keep: bool, limit: Instant) -> Result<Option<String>, QmpError> {
    match monitor.remove_node(&overlay.node) {
        Ok(_) => return Ok(None),
        Err(in_use) if !in_use.is_refusal() => return Err(in_use),
        Err(_) if keep => return Ok(Some("the snapshot stands on the latter".to_owned())),
        Err(_) => {}
    }
    match monitor.merge_overlay(&overlay.node, &overlay.base, limit) {
        Ok(true) => {}
        Ok(false) => return Ok(Some("merging them took too long".to_owned())),
        Err(error) if error.is_refusal() => return Ok(Some(error.to_string())),
        Err(other) => return Err(other),
    }
    match monitor.remove_node(&overlay.node) {
        Ok(_) => Ok(None),
        Err(error) if error.is_refusal() => Ok(Some("merging them failed (QEMU's log says why)".to_owned())),
        Err(other) => Err(other),
    }
}

/// Whether the job's snapshot stands under its name, or may: only a file that is certainly not there says no.
fn may_be_published(marker: &JobMarker) -> bool {
    match marker.phase {
        JobPhase::Working => false,
        JobPhase::Publishing => {
            // Not every path is text, and not every host has that file.
            let can_look =
                !marker.path.contains(char::REPLACEMENT_CHARACTER) && marker.process.liveness() != Liveness::Elsewhere;
            let path = Path::new(&marker.path);
            !can_look
                || match path.symlink_metadata() {
                    Err(error) => error.kind() != io::ErrorKind::NotFound,
                    Ok(_) => match Snapshot::open(path) {
                        Ok(there) => there.manifest().is_none_or(|manifest| manifest.id == marker.snapshot),
                        // A snapshot is whole before it has its name: what is none is somebody else's file.
                        Err(error) => matches!(error, SnapshotError::Io { .. }),
                    },
                }
        }
        JobPhase::Undecided | JobPhase::Published => true,
    }
}

fn remove(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
