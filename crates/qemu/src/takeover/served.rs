//! Overlays that a save had a server of disks put, when the save died.
//!
//! The server undoes them, however far they came. It does that while the VM runs or not, and while it does, requests of
//! the VM wait.
//!
//! Law: **only servers that the user named are asked.** The record is inside QEMU, and a process that controls QEMU
//! must not have disks of other VMs changed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::disk_server::DiskServer;
use crate::file_identity::is_same_file;
use crate::job::JobError;
use crate::job_record::{JobRecord, ServedOverlay};

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
        let is_named = servers.iter().any(|server| is_same_file(server, Path::new(control)));
        let done = if is_named { undo(overlay, limit) } else { Err(JobError::refused("its server was not named")) };
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

/// A word of a shell's command.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn undo(overlay: &ServedOverlay, limit: Instant) -> Result<(), JobError> {
    let within = limit.saturating_duration_since(Instant::now()).max(AT_LEAST);
    DiskServer::connect(Path::new(&overlay.control))?.undo(&overlay.export, &overlay.file, within)
}
