//! Whether the destination's disks are those that the stored memory belongs to.
//!
//! Law: **nothing writes to a frozen file.** A VM that went on with overlays depends on the files that its snapshot
//! froze, and so does every other VM restored from it. So each recorded disk must be below an overlay of its own in the
//! destination, a fresh one, or open for reading only.
//!
//! A disk that was not frozen is the restored VM's own; that it has not changed is all that is asked of it.

use std::path::Path;

use limosa_snapshot::{Disk as RecordedDisk, Manifest, check_disks};

use crate::conflict::{Conflict, DiskConflict};
use crate::disk_image::{Others, has_data};
use crate::file_identity::is_same_file;
use crate::job::{JobContext, JobError};
use crate::monitor::{Disk, Monitor};

/// Refuses disks that are not the snapshot's.
pub(super) fn check(monitor: &Monitor, manifest: &Manifest, watch: JobContext<'_>) -> Result<(), JobError> {
    if let Some(change) = check_disks(manifest).first() {
        return Err(JobError::conflict(change.to_string(), Conflict::Disk(DiskConflict::Changed)));
    }
    let mut here = None;
    for (recorded, overlay) in manifest.disks.iter().filter_map(|disk| Some((disk, disk.overlay.as_deref()?))) {
        let here = match &here {
            Some(disks) => disks,
            None => here.insert(monitor.all_disks()?),
        };
        stands_on(recorded, overlay, here, watch)?;
    }
    Ok(())
}

/// Checks one frozen disk.
fn stands_on(recorded: &RecordedDisk, overlay: &Path, here: &[Disk], watch: JobContext<'_>) -> Result<(), JobError> {
    let frozen = &recorded.path;
    let format = if matches!(recorded.format.as_str(), "file" | "host_device") { "raw" } else { &recorded.format };
    let refused = |why: String| {
        let make = format!("qemu-img create -f qcow2 -F {format} -b {} NEW.qcow2", frozen.display());
        Err(JobError::refused(format!("{why}; make an overlay for this QEMU with '{make}' and start it with that")))
    };
    for disk in here {
        let top = disk.path.as_deref();
        if disk.writable && top.is_some_and(|top| is_same_file(top, frozen)) {
            return refused(format!(
                "the disk {} of this QEMU would write to {}, on which the overlay {} of the VM that was saved stands",
                disk.device,
                frozen.display(),
                overlay.display()
            ));
        }
        if disk.writable && top.is_some_and(|top| is_same_file(top, overlay)) {
            return refused(format!(
                "the disk {} of this QEMU is {}, with which the VM that was saved went on: it is newer than the memory",
                disk.device,
                overlay.display()
            ));
        }
    }
    let name = recorded.device.as_deref().unwrap_or_default();
    // Its own device if there is one of that name; QEMU may have been started in other words.
    let named = here.iter().find(|disk| disk.device == name);
    let on_it = |disk: &&Disk| uppermost(disk).is_some_and(|path| is_same_file(path, frozen));
    let Some(disk) = named.map_or_else(|| here.iter().find(on_it), |disk| Some(disk).filter(on_it)) else {
        return refused(match named {
            Some(disk) => {
                format!("the disk {} of this QEMU does not stand directly on {}", disk.device, frozen.display())
            }
            None => format!("no disk of this QEMU stands directly on {}", frozen.display()),
        });
    };
    let Some(top) = disk.path.as_deref().filter(|_| disk.writable) else { return Ok(()) };
    match has_data(top, &disk.format, Others::Allowed) {
        Ok(false) => Ok(()),
        Ok(true) => refused(format!(
            "the disk {} of this QEMU is {}, which has been written to since it was made: it is newer than the memory",
            disk.device,
            top.display()
        )),
        Err(why) => {
            (watch.notice)(&format!("whether {} is a fresh overlay is unknown: {why}", top.display()));
            Ok(())
        }
    }
}

/// The uppermost image that the VM cannot write to.
fn uppermost(disk: &Disk) -> Option<&Path> {
    if disk.writable { disk.backing.first()?.as_deref() } else { disk.path.as_deref() }
}
