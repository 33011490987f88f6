//! Overlays of a save that died: removed, merged back, or kept with their snapshot.
//!
//! Law: **no write is lost, and no file that is in use is removed.** An overlay that nothing uses is closed and its
//! file removed. One that the VM writes to is merged back into the disk below, which then takes its place: the VM is as
//! it was found. That is done only where no snapshot stands on the disk below; if one does, or may, the VM continues
//! with the overlay.
//!
//! The VM runs while this continues; QEMU's own job takes care of what it writes meanwhile.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use limosa_snapshot::{Snapshot, SnapshotError};
use uuid::Uuid;

use crate::disk_image::{Others, has_data};
use crate::job_record::{JobPhase, JobRecord, OVERLAY_SUFFIX, Overlay, overlay_digits};
use crate::monitor::Monitor;
use crate::overlays::undo_chain;
use crate::process::Liveness;
use crate::qmp::QmpError;
use crate::takeover::served;

/// How long a QEMU that has closed its monitor may take to close its images too.
const CLOSED_WITHIN: Duration = Duration::from_secs(5);

/// Undoes those of the job's overlays that can and may be undone, by `limit`; adds what a person must know to
/// `notices`.
pub(super) fn undo_all(
    monitor: &Monitor,
    record: &JobRecord,
    (servers, limit): (&[PathBuf], Instant),
    remarks: &mut Vec<String>,
    notices: &mut Vec<String>,
) -> Result<(), QmpError> {
    if !record.has_changed_disks() {
        return Ok(());
    }
    let keep = may_be_published(record);
    let mut undone = 0;
    for overlay in &record.overlays {
        match undo(monitor, overlay, keep, limit)? {
            None => {
                undone += 1;
                if let Err(error) = remove(Path::new(&overlay.file), record.snapshot) {
                    notices.push(format!("cannot remove unused {}: {error}", overlay.file));
                }
            }
            Some(why) => notices.push(format!(
                "the disk {} continues in {}, over {}, because {why}; QEMU's block-commit of node {} merges them",
                overlay.device, overlay.file, overlay.frozen, overlay.node
            )),
        }
    }
    undone += served::undo_all(record, servers, (keep, limit), notices);
    undone += served::end_all_epochs(record, servers, limit, notices);
    for chain in &record.chains {
        match undo_chain(monitor, chain, record.snapshot, limit)? {
            None => undone += 1,
            Some(notice) => notices.push(notice),
        }
    }
    let changed =
        [record.overlays.len(), record.served_overlays.len(), record.served_epochs.len(), record.chains.len()];
    if undone == changed.iter().sum::<usize>() {
        remarks.push("the disks are as they were".to_owned());
    }
    Ok(())
}

/// QEMU has ended in the middle of the job: removes the overlays that hold nothing, because the disks below are all
/// there is then. Those of served disks are undone by `servers`. Returns notices about the others.
pub(crate) fn abandoned(record: &JobRecord, servers: &[PathBuf]) -> Vec<String> {
    let mut notices = Vec::new();
    for overlay in &record.overlays {
        let file = Path::new(&overlay.file);
        let unmade = match file.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => false,
            Ok(found) => found.len() == 0,
        };
        let empty = if unmade { Ok(true) } else { is_unused_and_empty(file) };
        notices.push(match empty {
            Ok(true) => match remove(file, record.snapshot) {
                Ok(()) => continue,
                Err(error) => format!("cannot remove {}, which holds nothing: {error}", overlay.file),
            },
            Ok(false) => format!(
                "the last writes to the disk {} are in {}, over {}: start the VM again with the former",
                overlay.device, overlay.file, overlay.frozen
            ),
            Err(why) => format!("whether {} holds writes to {} is unknown: {why}", overlay.file, overlay.frozen),
        });
    }
    // Their server is there all the same, and has the VM's last writes.
    let limit = Instant::now() + CLOSED_WITHIN;
    served::undo_all(record, servers, (may_be_published(record), limit), &mut notices);
    notices
}

/// Whether no process has the image open, and it holds nothing. A monitor that is gone does not prove that QEMU is: one
/// that still writes to the image holds QEMU's lock on it.
fn is_unused_and_empty(file: &Path) -> Result<bool, String> {
    let limit = Instant::now() + CLOSED_WITHIN;
    loop {
        match has_data(file, "qcow2", Others::Refused) {
            Err(_) if Instant::now() < limit => std::thread::sleep(Duration::from_millis(20)),
            found => return found.map(|data| !data),
        }
    }
}

/// Closes one overlay, after merging it back if need be; otherwise returns why it stays.
fn undo(monitor: &Monitor, overlay: &Overlay, keep: bool, limit: Instant) -> Result<Option<String>, QmpError> {
    match monitor.remove_node(&overlay.node) {
        Ok(_) => return Ok(None),
        Err(in_use) if !in_use.is_refusal() => return Err(in_use),
        Err(_) if keep => return Ok(Some("the snapshot stands on the latter".to_owned())),
        Err(_) => {}
    }
    let why = match monitor.merge_overlay(&overlay.node, &overlay.base, limit) {
        Ok(true) => "merging them failed (QEMU's log says why)".to_owned(),
        Ok(false) => "merging them took too long".to_owned(),
        Err(error) if error.is_refusal() => error.to_string(),
        Err(other) => return Err(other),
    };
    // The graph says whether the disk is below again, also after a failed job: it may have been done in the last
    // moment.
    match monitor.remove_node(&overlay.node) {
        Ok(_) => Ok(None),
        Err(error) if error.is_refusal() => Ok(Some(why)),
        Err(other) => Err(other),
    }
}

/// Whether the job's snapshot stands under its name, or may: only a file that is certainly absent counts as no.
fn may_be_published(record: &JobRecord) -> bool {
    match record.phase {
        JobPhase::Working => false,
        JobPhase::Publishing => {
            // Not every path is text, and not every host has that file.
            let can_look =
                !record.path.contains(char::REPLACEMENT_CHARACTER) && record.process.liveness() != Liveness::Elsewhere;
            let path = Path::new(&record.path);
            !can_look
                || match path.symlink_metadata() {
                    Err(error) => error.kind() != io::ErrorKind::NotFound,
                    Ok(_) => match Snapshot::open(path) {
                        Ok(there) => there.manifest().is_none_or(|manifest| manifest.id == record.snapshot),
                        // A snapshot is whole before it has its name: a file that is not whole is not of this job.
                        Err(error) => matches!(error, SnapshotError::Io { .. }),
                    },
                }
        }
        JobPhase::Undecided | JobPhase::Published => true,
    }
}

/// Removes an overlay's file. Its name comes out of the record, which QEMU keeps, and a process that controls QEMU must
/// not have other files removed.
fn remove(file: &Path, snapshot: Uuid) -> io::Result<()> {
    let ours = format!("{OVERLAY_SUFFIX}{}", overlay_digits(snapshot));
    if !file.file_name().is_some_and(|name| name.to_string_lossy().contains(&ours)) {
        return Err(io::Error::other(format!(
            "its name does not have {ours} in it, as those of this save's overlays do"
        )));
    }
    match std::fs::remove_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_that_is_named_for_the_save_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let snapshot = Uuid::from_u128(0x0123_4567_89ab_cdef_0000_0000_0000_0000);
        let (ours, second, other) = ("d.overlay-0123456789abcdef", "d.overlay-0123456789abcdef-1", "passwd");
        for name in [ours, second, other] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert!(remove(&folder.path().join(ours), snapshot).is_ok());
        assert!(remove(&folder.path().join(second), snapshot).is_ok());
        assert!(remove(&folder.path().join(other), snapshot).is_err());
        assert!(remove(&folder.path().join(ours), Uuid::nil()).is_err());
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [other]);
    }
}
