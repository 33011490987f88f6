//! Changes that a dead job had a server of disks make: overlays of a save, and epochs of a protection.
//!
//! The server undoes them, however far they came. It does that while the VM runs or not, and while it does, requests of
//! the VM wait.
//!
//! Law: **only servers that the user named are asked.** The record is inside QEMU, and a process that controls QEMU
//! must not have disks of other VMs changed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::disk_server::{DiskServer, check_served, end_epochs};
use crate::file_identity::is_same_file;
use crate::job::JobError;
use crate::job_record::{JobRecord, ServedEpochs, ServedOverlay};

/// The least time that the server gets: a commit that has begun is not ended.
const AT_LEAST: Duration = Duration::from_secs(30);

/// Undoes the job's overlays of served disks by `limit`, unless the snapshot stands on the frozen files, or may
/// (`keep`), or their server is not among `servers`. Returns how many were undone, and adds what a person must know of
/// the others to `notices`.
pub(super) fn undo_all(
    record: &JobRecord,
    servers: &[PathBuf],
    (keep, limit): (bool, Instant),
    notices: &mut Vec<String>,
) -> usize {
    let mut undone = 0;
    for overlay in &record.served_overlays {
        let ServedOverlay { device, export, frozen, file, control } = overlay;
        if keep {
            notices.push(format!("the disk {device} continues in {file}: the snapshot stands on {frozen}"));
            continue;
        }
        let done = named(servers, control).and_then(|()| undo(overlay, limit));
        let [control, export, path] = [control, export, file].map(|text| quoted(text));
        match done {
            Ok(()) => undone += 1,
            Err(error) => notices.push(format!(
                "the disk {device} may continue in {file}, over {frozen}, because {error}; \
                 `limosa serve ctl {control} commit {export} {path}` merges them"
            )),
        }
    }
    undone
}

/// Ends the epochs of the job's disks by `limit`. Returns how many disks are as they were, and adds what a person must
/// know of the others to `notices`.
pub(super) fn end_all_epochs(
    record: &JobRecord,
    servers: &[PathBuf],
    limit: Instant,
    notices: &mut Vec<String>,
) -> usize {
    let mut ended = 0;
    for disk in &record.served_epochs {
        let ServedEpochs { device, control, export, keeper } = disk;
        match named(servers, control).and_then(|()| end_epochs(disk, remaining(limit))) {
            Ok(()) => ended += 1,
            Err(error) => {
                let [control, export] = [control, export].map(|text| quoted(text));
                notices.push(format!(
                    "what the VM writes to the disk {device} stays in a log, because {error}; \
                     `limosa serve ctl {control} unprotect {export}`, as its keeper {keeper}, brings it to the image"
                ));
            }
        }
    }
    ended
}

/// Returns why the epochs of a disk of the job cannot be ended: its server is gone, or does not answer.
pub(super) fn lost_disk(record: &JobRecord, servers: &[PathBuf]) -> Option<String> {
    // A server that was told to end has removed its socket.
    let is_named = |disk: &&ServedEpochs| {
        let control = Path::new(&disk.control);
        named(servers, &disk.control).is_ok()
            || servers.iter().any(|server| std::path::absolute(server).is_ok_and(|server| server == control))
    };
    record.served_epochs.iter().filter(is_named).find_map(|disk| {
        let error = check_served(disk).err()?;
        Some(format!("the disk {} is lost with its server ({error})", disk.device))
    })
}

/// Fails unless the user named this server.
fn named(servers: &[PathBuf], control: &str) -> Result<(), JobError> {
    let is_named = servers.iter().any(|server| is_same_file(server, Path::new(control)));
    if is_named { Ok(()) } else { Err(JobError::refused("its server was not named")) }
}

fn remaining(limit: Instant) -> Duration {
    limit.saturating_duration_since(Instant::now()).max(AT_LEAST)
}

/// A word of a shell's command.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn undo(overlay: &ServedOverlay, limit: Instant) -> Result<(), JobError> {
    DiskServer::connect(Path::new(&overlay.control))?.undo(&overlay.export, &overlay.file, remaining(limit))
}
