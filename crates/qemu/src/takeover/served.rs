//! Overlays that a save had a server of disks put, when the save died.
//!
//! The server undoes them, however far they came. It does that while the VM runs or not, and while it does, requests of
//! the VM wait.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::disk_server::DiskServer;
use crate::job::JobError;
use crate::job_record::{JobRecord, ServedOverlay};

/// The least time that the server gets: a commit that has begun is not ended.
const AT_LEAST: Duration = Duration::from_secs(30);

/// Undoes the job's overlays of served disks by `limit`, unless the snapshot stands on the frozen files, or may
/// (`keep`). Returns how many were undone, and adds what a person must know of the others to `notices`.
pub(super) fn undo_all(record: &JobRecord, keep: bool, limit: Instant, notices: &mut Vec<String>) -> usize {
    let mut undone = 0;
    for overlay in &record.served_overlays {
        let ServedOverlay { device, export, frozen, file, control } = overlay;
        if keep {
            notices.push(format!("the disk {device} continues in {file}: the snapshot stands on {frozen}"));
            continue;
        }
        match undo(overlay, limit) {
            Ok(()) => undone += 1,
            Err(error) => notices.push(format!(
                "the disk {device} may continue in {file}, over {frozen}, because {error}; \
                 `limosa serve ctl {control} commit '{export}'` merges them"
            )),
        }
    }
    undone
}

fn undo(overlay: &ServedOverlay, limit: Instant) -> Result<(), JobError> {
    let within = limit.saturating_duration_since(Instant::now()).max(AT_LEAST);
    DiskServer::connect(Path::new(&overlay.control))?.undo(&overlay.export, &overlay.file, within)
}
