//! The checks of a VM before anything is changed: whether it can be saved, and the facts for its snapshot's record.

use std::path::PathBuf;
use std::time::Duration;

use limosa_snapshot::{BackingFile, Disk as RecordedDisk, Manifest};

use super::options::{DiskPolicy, SaveOptions};
use super::overlay::{self, Planned};
use crate::conflict::{Conflict, DiskConflict, StateConflict};
use crate::job::JobError;
use crate::monitor::{Disk, Monitor, RunState};

/// How long QEMU may take to finish with an earlier migration.
const RELEASED_WITHIN: Duration = Duration::from_secs(5);

/// The VM as it was found.
#[derive(Debug)]
pub(super) struct Preflight {
    /// Whether its virtual CPUs were running.
    pub(super) was_running: bool,
    /// Whether memory goes out slowly at first, until QEMU has heard which pages are free.
    pub(super) waits_for_hints: bool,
    /// The snapshot's record so far.
    pub(super) manifest: Manifest,
    /// Overlays for the disks.
    pub(super) overlays: Vec<Planned>,
}

impl Preflight {
    /// Checks the VM; refuses one that cannot be saved, or not consistently.
    pub(super) fn check(monitor: &Monitor, options: &SaveOptions) -> Result<Self, JobError> {
        let status = monitor.status()?;
        match status.state {
            RunState::Inmigrate => {
                return Err(JobError::refused(
                    "this QEMU waits for an incoming VM; there is nothing to save in it yet",
                ));
            }
            RunState::Postmigrate => {
                return Err(JobError::conflict(
                    "the VM has been stopped by an earlier save or migration",
                    Conflict::State(StateConflict::HandedOver),
                ));
            }
            _ => {}
        }
        let migration = monitor.migration()?;
        if !migration.status.is_over() {
            return Err(JobError::refused(format!(
                "another migration of this VM is under way ({}); wait for its end, or cancel it",
                migration.status
            )));
        }
        // A migration that is begun before that is refused, and leaves QEMU in `setup` for good.
        if !monitor.wait_migration_released(RELEASED_WITHIN)? {
            return Err(JobError::refused("QEMU has not let go of the migration before; try again in a moment"));
        }
        if !migration.blocked_reasons.is_empty() {
            return Err(JobError::refused(format!(
                "this VM cannot be saved as it is: {}; remove what blocks it",
                migration.blocked_reasons.join("; ")
            )));
        }
        // A guest that sleeps is woken by its devices: its CPUs are stopped, but the VM is not.
        let was_running = status.running || is_live(&status.state);
        // QEMU does not ask the balloon of a stopped VM.
        let waits_for_hints = options.hint_wait.is_some() && was_running && monitor.has_free_page_hints()?;
        let goes_on = was_running && !options.stop;
        let disks = disks(monitor, options.disks, goes_on)?;
        let mut manifest = Manifest::new();
        manifest.disks = disks.iter().map(record_disk).collect::<Result<_, _>>()?;
        let overlays = overlay::plan(monitor, options, disks, manifest.id)?;
        overlay::note(&mut manifest, &overlays);
        let version = monitor.version();
        manifest.qemu_version = Some(version.to_string());
        manifest.machine = Some(monitor.machine()?);
        manifest.guest_memory = monitor.guest_memory()?;
        manifest.vm_uuid = monitor.uuid()?;
        manifest.vm_name = monitor.vm_name()?;
        manifest.run_state = Some(status.state.to_string());
        Ok(Self { was_running, waits_for_hints, manifest, overlays })
    }
}

/// Returns the writable disks, if the policy allows them.
fn disks(monitor: &Monitor, policy: DiskPolicy, goes_on: bool) -> Result<Vec<Disk>, JobError> {
    if policy == DiskPolicy::Ignore {
        return Ok(Vec::new());
    }
    let disks = monitor.disks()?;
    let foreign: Vec<_> = monitor.devices()?.into_iter().filter(|device| device.is_external_disk()).collect();
    if policy == DiskPolicy::Check && goes_on && (!disks.is_empty() || !foreign.is_empty()) {
        let names =
            disks.iter().map(|disk| disk.device.clone()).chain(foreign.iter().map(|device| device.kind.clone()));
        let names: Vec<_> = names.collect();
        return Err(JobError::conflict(
            format!(
                "the VM has writable disks ({}) that it would go on changing: its memory and its disks would be of \
                 different instants",
                names.join(", ")
            ),
            Conflict::Disk(DiskConflict::StillWritten),
        ));
    }
    if let Some(device) = foreign.first() {
        return Err(JobError::conflict(
            format!("the disk of {} is served by another process, so its state cannot be recorded", device.kind),
            Conflict::Disk(DiskConflict::NotFreezable),
        ));
    }
    Ok(disks)
}

fn record_disk(disk: &Disk) -> Result<RecordedDisk, JobError> {
    let path = disk.path.clone().ok_or_else(|| {
        JobError::conflict(
            format!(
                "the disk {} ({}) is no file of this host, so its state cannot be recorded",
                disk.device, disk.filename
            ),
            Conflict::Disk(DiskConflict::NotFreezable),
        )
    })?;
    let mut recorded = record(&disk.node, Some(disk.device.clone()), path, &disk.format)?;
    recorded.backing = disk.lower_files().map(BackingFile::record).collect();
    Ok(recorded)
}

/// Records the disks as they are when the VM has stopped: until then it may have written to them.
pub(super) fn record_disks_again(manifest: &mut Manifest) -> Result<(), JobError> {
    for disk in &mut manifest.disks {
        let (overlay, backing) = (disk.overlay.take(), std::mem::take(&mut disk.backing));
        *disk = record(&disk.node, disk.device.clone(), disk.path.clone(), &disk.format)?;
        disk.overlay = overlay;
        disk.backing = backing.into_iter().map(|below| BackingFile::record(below.path)).collect();
    }
    Ok(())
}

fn record(node: &str, device: Option<String>, path: PathBuf, format: &str) -> Result<RecordedDisk, JobError> {
    RecordedDisk::from_file(node, device, &path, format).map_err(|source| JobError::Io {
        what: "look at the disk",
        path,
        source,
    })
}

/// Whether a VM in this state continues by itself once its CPUs may run.
pub(super) fn is_live(state: &RunState) -> bool {
    matches!(state, RunState::Running | RunState::Suspended)
}
