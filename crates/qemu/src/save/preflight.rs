//! The checks of a VM before anything is changed: whether it can be saved, and the facts for its snapshot's record.

use std::path::PathBuf;
use std::time::Duration;

use limosa_snapshot::{BackingFile, Disk as RecordedDisk, Manifest};
use limosa_stream::Configuration;

use super::options::{DiskPolicy, SaveOptions};
use super::overlay::{self, Planned};
use super::served::{self, PlannedServed};
use super::unseen_writes;
use crate::conflict::{Conflict, DiskConflict, StateConflict};
use crate::disk_server::{Remote, is_nbd};
use crate::job::JobError;
use crate::job_record::overlay_digits;
use crate::monitor::{Device, Disk, Monitor, RunState};

/// How long QEMU may take to finish with an earlier migration.
const RELEASED_WITHIN: Duration = Duration::from_secs(5);

/// The VM as it was found.
#[derive(Debug)]
pub(super) struct Preflight {
    /// Whether its virtual CPUs were running.
    pub(super) was_running: bool,
    /// Whether it must stand still while its memory is sent, and is stopped before if it runs.
    pub(super) stands_still: bool,
    /// Whether memory goes out slowly at first, until QEMU has heard which pages are free.
    pub(super) waits_for_hints: bool,
    /// The snapshot's record so far.
    pub(super) manifest: Manifest,
    /// Overlays for the disks.
    pub(super) overlays: Vec<Planned>,
    /// Overlays for the disks that are served.
    pub(super) served: Vec<PlannedServed>,
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
        let machine = monitor.machine()?;
        if Configuration::new(&machine).is_before_configuration() {
            return Err(JobError::refused(format!(
                "QEMU saves a VM of machine type {machine} in an older form, which limosa does not read (types up to 2.3); \
                 give the VM a newer machine type"
            )));
        }
        // A guest that sleeps is woken by its devices: its CPUs are stopped, but the VM is not.
        let was_running = status.running || is_live(&status.state);
        let stands_still = unseen_writes::are_possible(monitor, options)?;
        if stands_still {
            unseen_writes::expect_awake(&status.state)?;
        }
        // QEMU does not ask the balloon of a stopped VM.
        let may_ask = was_running && !stands_still;
        let waits_for_hints = options.hint_wait.is_some() && may_ask && monitor.has_free_page_hints()?;
        let goes_on = was_running && !options.stop;
        let Disks { own, remote } = disks(monitor, options, goes_on)?;
        let mut manifest = Manifest::new();
        manifest.disks = own.iter().map(record_disk).collect::<Result<_, _>>()?;
        let digits = overlay_digits(manifest.id);
        let is_none = own.is_empty() && remote.disks.is_empty() && remote.devices.is_empty();
        if options.disks == DiskPolicy::Overlay && !is_none {
            overlay::check(monitor)?;
        }
        let overlays = overlay::plan(options, own, &digits)?;
        overlay::note(&mut manifest, &overlays);
        let taken: Vec<_> = overlay::records(&overlays).into_iter().map(|overlay| overlay.file).collect();
        let served = served::plan(monitor, options, &remote, (&digits, &taken))?;
        manifest.disks.extend(served::recorded(&served)?);
        let version = monitor.version();
        manifest.qemu_version = Some(version.to_string());
        manifest.machine = Some(machine);
        manifest.guest_memory = monitor.guest_memory()?;
        manifest.vm_uuid = monitor.uuid()?;
        manifest.vm_name = monitor.vm_name()?;
        manifest.run_state = Some(status.state.to_string());
        Ok(Self { was_running, stands_still, waits_for_hints, manifest, overlays, served })
    }

    /// Whether disks get overlays.
    pub(super) const fn has_overlays(&self) -> bool {
        !self.overlays.is_empty() || !self.served.is_empty()
    }

    /// Freezes the disks at the instant of the save: QEMU has stopped the VM and waits.
    pub(super) fn put_overlays(&self, monitor: &Monitor) -> Result<(), JobError> {
        // QEMU's own come last: all of them or none.
        served::put(&self.served)?;
        overlay::put(monitor, &self.overlays)
    }
}

/// The writable disks of a VM.
#[derive(Debug, Default)]
struct Disks {
    /// Those that QEMU has files for.
    own: Vec<Disk>,
    /// Those that servers have.
    remote: Remote,
}

/// Returns the writable disks, if the policy allows them.
fn disks(monitor: &Monitor, options: &SaveOptions, goes_on: bool) -> Result<Disks, JobError> {
    let policy = options.disks;
    if policy == DiskPolicy::Ignore {
        return Ok(Disks::default());
    }
    let disks = monitor.disks()?;
    let mut foreign: Vec<_> = monitor.devices()?.into_iter().filter(Device::is_external_disk).collect();
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
    let is_served = |device: &Device| device.kind.starts_with("vhost-user-blk") && !options.disk_servers.is_empty();
    let devices = foreign.extract_if(.., |device| is_served(device)).collect();
    if let Some(device) = foreign.first() {
        let is_block = device.kind.starts_with("vhost-user-blk");
        return Err(JobError::conflict(
            format!("the disk of {} is served by another process, so its state cannot be recorded", device.kind),
            Conflict::Disk(if is_block { DiskConflict::Served } else { DiskConflict::NotFreezable }),
        ));
    }
    let (disks, own) = disks.into_iter().partition(|disk| disk.path.is_none() && !options.disk_servers.is_empty());
    Ok(Disks { own, remote: Remote { disks, devices } })
}

fn record_disk(disk: &Disk) -> Result<RecordedDisk, JobError> {
    let path = disk.path.clone().ok_or_else(|| {
        JobError::conflict(
            format!(
                "the disk {} ({}) is no file of this host, so its state cannot be recorded",
                disk.device, disk.filename
            ),
            Conflict::Disk(if is_nbd(&disk.filename) { DiskConflict::Served } else { DiskConflict::NotFreezable }),
        )
    })?;
    let mut recorded = record(&disk.node, Some(disk.device.clone()), path, &disk.format)?;
    recorded.backing = disk.lower_files().map(BackingFile::record).collect();
    Ok(recorded)
}

/// Records the disks as they are when the VM has stopped: until then it may have written to them.
pub(super) fn record_disks_again(manifest: &mut Manifest) -> Result<(), JobError> {
    for disk in &mut manifest.disks {
        let (overlay, export) = (disk.overlay.take(), disk.export.take());
        let backing = std::mem::take(&mut disk.backing);
        *disk = record(&disk.node, disk.device.clone(), disk.path.clone(), &disk.format)?;
        (disk.overlay, disk.export) = (overlay, export);
        disk.backing = backing.into_iter().map(|below| BackingFile::record(below.path)).collect();
    }
    Ok(())
}

pub(super) fn record(
    node: &str,
    device: Option<String>,
    path: PathBuf,
    format: &str,
) -> Result<RecordedDisk, JobError> {
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
