//! Overlays of disks that a server serves (`limosa serve`): the server puts them, at the same instant as QEMU its own.
//!
//! In time they go with the [others](super::overlay). The VM is stopped meanwhile, and nothing else writes to its
//! disks, so those of several servers are of one instant although each is asked on its own.

use std::path::PathBuf;

use limosa_snapshot::{BackingFile, Disk as RecordedDisk};

use super::options::SaveOptions;
use super::overlay::{place_for, text};
use super::preflight::record;
use crate::conflict::{Conflict, DiskConflict};
use crate::disk_server::{Remote, Served, find};
use crate::job::JobError;
use crate::job_record::ServedOverlay;
use crate::monitor::Monitor;

/// A served disk and the overlay that it gets.
#[derive(Debug)]
pub(super) struct PlannedServed {
    disk: Served,
    overlay: ServedOverlay,
}

/// Plans overlays for disks that the servers of the options serve. `taken`: the overlays of the other disks.
pub(super) fn plan(
    monitor: &Monitor,
    options: &SaveOptions,
    remote: &Remote,
    (digits, taken): (&str, &[String]),
) -> Result<Vec<PlannedServed>, JobError> {
    let mut planned: Vec<PlannedServed> = Vec::new();
    for disk in find(monitor, remote, &options.disk_servers)? {
        let same = |other: &&PlannedServed| {
            other.overlay.control == disk.server.control().to_string_lossy() && other.overlay.export == disk.export
        };
        if let Some(other) = planned.iter().find(same) {
            return Err(JobError::conflict(
                format!("the disks {} and {} are the same export, {:?}", other.disk.device, disk.device, disk.export),
                Conflict::Disk(DiskConflict::SharedFile),
            ));
        }
        if disk.image.read_only {
            continue;
        }
        if disk.image.is_other {
            return Err(JobError::conflict(
                format!("no overlay can be put over the disk {}: it is a part of its image", disk.device),
                Conflict::Disk(DiskConflict::NotFreezable),
            ));
        }
        let Some(image) = disk.image.files.first().cloned() else { continue };
        let is_device = std::fs::metadata(&image).is_ok_and(|found| !found.is_file());
        let place = place_for(&disk.device, &image, options.overlay_dir.as_deref(), digits, is_device)?;
        let mut file = text(&place)?;
        if planned.iter().map(|one| &one.overlay.file).chain(taken).any(|other| *other == file) {
            file = format!("{file}-s{}", planned.len());
        }
        let overlay = ServedOverlay {
            device: disk.device.clone(),
            control: text(disk.server.control())?,
            export: disk.export.clone(),
            frozen: text(&image)?,
            file,
        };
        planned.push(PlannedServed { disk, overlay });
    }
    Ok(planned)
}

/// Returns the overlays for the job's record.
pub(super) fn records(planned: &[PlannedServed]) -> Vec<ServedOverlay> {
    planned.iter().map(|one| one.overlay.clone()).collect()
}

/// Returns the disks for the snapshot's record.
pub(super) fn recorded(planned: &[PlannedServed]) -> Result<Vec<RecordedDisk>, JobError> {
    let disk = |PlannedServed { disk, overlay }: &PlannedServed| {
        let device = Some(disk.device.clone());
        let mut recorded = record(&disk.node, device, PathBuf::from(&overlay.frozen), &disk.image.format)?;
        recorded.backing = disk.image.files.iter().skip(1).map(BackingFile::record).collect();
        recorded.overlay = Some(PathBuf::from(&overlay.file));
        recorded.export = Some(overlay.export.clone());
        Ok(recorded)
    };
    planned.iter().map(disk).collect()
}

/// Has the overlays created. They are in the job's record already, so a failure leaves nothing.
pub(super) fn prepare(planned: &[PlannedServed]) -> Result<(), JobError> {
    planned
        .iter()
        .try_for_each(|one| one.disk.server.prepare(&one.overlay.export, &one.overlay.frozen, &one.overlay.file))
}

/// Freezes the disks at the instant of the save: QEMU has stopped the VM and waits.
pub(super) fn put(planned: &[PlannedServed]) -> Result<(), JobError> {
    planned.iter().try_for_each(|one| one.disk.server.put(&one.overlay.export, &one.overlay.file))
}
