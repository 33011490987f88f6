//! Whether the destination's disks are those that the stored memory belongs to.
//!
//! Law: **nothing writes to a frozen file.** A VM that went on with overlays depends on the files that its snapshot
//! froze, and so does every other VM restored from it. So each recorded disk must be below an overlay of its own in the
//! destination, a fresh one, or open for reading only.
//!
//! A disk that a server serves is looked at there: QEMU does not show its image.
//!
//! A disk that was not frozen is the restored VM's own; that it has not changed is all that is asked of it.

use std::path::{Path, PathBuf};

use limosa_snapshot::{Disk as RecordedDisk, Manifest, check_disks};

use crate::conflict::{Conflict, DiskConflict};
use crate::disk_image::{Others, has_data};
use crate::disk_server::{Remote, Served, check_epochs, find};
use crate::file_identity::is_same_file;
use crate::job::{JobContext, JobError};
use crate::monitor::{Disk, Monitor};
use crate::overlays::check_overlays;

/// A disk of the destination.
struct Here {
    device: String,
    /// Its image.
    top: PathBuf,
    /// The image below that.
    below: Option<PathBuf>,
    format: String,
    writable: bool,
}

/// Refuses disks that are not the snapshot's. `servers`: the control sockets of servers of the destination's disks.
pub(super) fn check(
    monitor: &Monitor,
    manifest: &Manifest,
    servers: &[PathBuf],
    watch: JobContext<'_>,
) -> Result<(), JobError> {
    if let Some(change) = check_disks(manifest).first() {
        return Err(JobError::conflict(change.to_string(), Conflict::Disk(DiskConflict::Changed)));
    }
    check_epochs(&manifest.protected_disks, manifest.checkpoint.unwrap_or(0), servers)?;
    check_overlays(&manifest.overlaid_disks, manifest.checkpoint.unwrap_or(0))?;
    let mut here = None;
    for (recorded, overlay) in manifest.disks.iter().filter_map(|disk| Some((disk, disk.overlay.as_deref()?))) {
        let here = match &here {
            Some(disks) => disks,
            None => here.insert(disks(monitor, servers)?),
        };
        stands_on(recorded, overlay, here, watch).map_err(|error| match error {
            JobError::Refused { why, conflict: None } if recorded.export.is_some() && servers.is_empty() => {
                JobError::conflict(why, Conflict::Disk(DiskConflict::Served))
            }
            other => other,
        })?;
    }
    Ok(())
}

/// The disks of the destination whose images are known.
fn disks(monitor: &Monitor, servers: &[PathBuf]) -> Result<Vec<Here>, JobError> {
    let (own, others): (Vec<_>, Vec<_>) = monitor.all_disks()?.into_iter().partition(|disk| disk.path.is_some());
    let mut here: Vec<_> = own.into_iter().filter_map(Here::of_qemu).collect();
    if !servers.is_empty() {
        let mut devices = monitor.devices()?;
        devices.retain(|device| device.kind.starts_with("vhost-user-blk"));
        for served in find(monitor, &Remote { disks: others, devices }, servers)? {
            if served.image.is_other {
                return Err(JobError::refused(format!("the disk {} is a part of its image", served.device)));
            }
            // What an earlier VM wrote may be in the server's memory.
            if !served.image.read_only {
                served.server.flush(&served.export)?;
            }
            here.extend(Here::of_server(served));
        }
    }
    Ok(here)
}

impl Here {
    fn of_qemu(disk: Disk) -> Option<Self> {
        let Disk { device, path, backing, format, writable, .. } = disk;
        Some(Self { device, top: path?, below: backing.into_iter().next().flatten(), format, writable })
    }

    fn of_server(served: Served) -> Option<Self> {
        let mut files = served.image.files.into_iter();
        let (top, below) = (files.next()?, files.next());
        let (format, writable) = (served.image.format, !served.image.read_only);
        Some(Self { device: served.device, top, below, format, writable })
    }
}

/// Checks one frozen disk.
fn stands_on(recorded: &RecordedDisk, overlay: &Path, here: &[Here], watch: JobContext<'_>) -> Result<(), JobError> {
    let frozen = &recorded.path;
    let format = if matches!(recorded.format.as_str(), "file" | "host_device") { "raw" } else { &recorded.format };
    let refused = |why: String| {
        let make = format!("qemu-img create -f qcow2 -F {format} -b {} NEW.qcow2", frozen.display());
        Err(JobError::refused(format!("{why}; make an overlay for this QEMU with '{make}' and start it with that")))
    };
    for disk in here {
        if disk.writable && is_same_file(&disk.top, frozen) {
            return refused(format!(
                "the disk {} of this QEMU would write to {}, on which the overlay {} of the VM that was saved stands",
                disk.device,
                frozen.display(),
                overlay.display()
            ));
        }
        if disk.writable && is_same_file(&disk.top, overlay) {
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
    let on_it = |disk: &&Here| uppermost(disk).is_some_and(|path| is_same_file(path, frozen));
    let Some(disk) = named.map_or_else(|| here.iter().find(on_it), |disk| Some(disk).filter(on_it)) else {
        return refused(match named {
            Some(disk) => {
                format!("the disk {} of this QEMU does not stand directly on {}", disk.device, frozen.display())
            }
            None => format!("no disk of this QEMU stands directly on {}", frozen.display()),
        });
    };
    if !disk.writable {
        return Ok(());
    }
    let top = &disk.top;
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
fn uppermost(disk: &Here) -> Option<&Path> {
    if disk.writable { disk.below.as_deref() } else { Some(&disk.top) }
}
