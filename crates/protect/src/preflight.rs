//! The checks of a VM before anything is changed.

use std::collections::BTreeSet;
use std::time::Duration;

use limosa_qemu::monitor::{Device, Monitor, NetworkBackend, RunState, Settings};
use limosa_qemu::qmp::Version;
use limosa_qemu::{EpochDisks, EpochOverlays, background_settings, why_no_background_snapshot};
use limosa_snapshot::{FenceScope, Manifest, Transport};

use crate::convergence::DOWNTIME_LIMIT;
use crate::error::ProtectError;
use crate::options::{CheckpointMethod, CheckpointTiming, ProtectDisks, ProtectOptions};
use crate::overlays;
use crate::writable::WritableDisks;

/// How long QEMU may take to finish with an earlier migration.
const RELEASED_WITHIN: Duration = Duration::from_secs(5);

/// Shortest time between background snapshots.
const SHORTEST_IN_BACKGROUND: Duration = Duration::from_secs(1);

/// Longest time between checkpoints with filters, which let output go by themselves after 71 minutes.
const LONGEST_WITH_FILTERS: Duration = Duration::from_secs(3600);

/// The first QEMU whose COLO works under TCG. Fact: before it the first checkpoint hangs QEMU for good.
const FIRST_WITH_TCG: Version = Version::new(11, 1, 0);
/// The first QEMU whose COLO needs a return path; older ones take the answers of COLO for messages of one.
const FIRST_WITH_RETURN_PATH: Version = Version::new(11, 1, 0);
/// The first QEMU of 10.0 that enters COLO; that of 10.1 is not known.
const FIRST_OF_10_0: Version = Version::new(10, 0, 7);
const END_OF_10_0: Version = Version::new(10, 1, 0);
const FIRST_OF_10_2: Version = Version::new(10, 2, 0);

/// The VM as it was found.
#[derive(Debug)]
pub(crate) struct Preflight {
    /// The record of its checkpoints.
    pub(crate) manifest: Manifest,
    /// The disks that belong to them.
    pub(crate) disks: EpochDisks,
    /// The disks that belong to them by overlays.
    pub(crate) overlays: EpochOverlays,
    /// The disks that it has.
    pub(crate) writable: WritableDisks,
    /// Whether this QEMU needs a return path for COLO.
    pub(crate) return_path: bool,
    /// The ids and kinds of its devices.
    devices: BTreeSet<(String, String)>,
}

impl Preflight {
    /// Checks the VM, whose output is held by this number of gates; refuses one that cannot be protected, and says why.
    pub(crate) fn check(monitor: &Monitor, options: &ProtectOptions, gates: usize) -> Result<Self, ProtectError> {
        let refused = |why: String| Err(ProtectError::Refused(why));
        overlays::check(options)?;
        let (version, kvm) = (monitor.version(), monitor.has_kvm()?);
        match options.method {
            CheckpointMethod::Colo => check_version(version, kvm)?,
            CheckpointMethod::Background => {
                if let Some(why) = why_no_background_snapshot(version) {
                    return refused(why);
                }
                check_timing(options.every)?;
            }
        }
        let status = monitor.status()?;
        if status.state != RunState::Running {
            return refused(format!("the VM does not run ({}): a checkpoint would start it", status.state));
        }
        let migration = monitor.migration()?;
        if !migration.status.is_over() {
            return refused(format!("a migration of this VM is under way ({}): wait for its end", migration.status));
        }
        if !monitor.wait_migration_released(RELEASED_WITHIN)? {
            return refused("QEMU has not let go of the migration before; try again in a moment".into());
        }
        if !migration.blocked_reasons.is_empty() {
            let reasons = migration.blocked_reasons.join("; ");
            return refused(format!("the VM cannot be migrated, and so not protected: {reasons}"));
        }
        let devices = monitor.devices()?;
        if let Some(device) = devices.iter().find(|device| device.is_assigned()) {
            return refused(format!(
                "device {} ({}) is hardware of the host, whose state QEMU cannot save many times a second",
                device.id, device.kind
            ));
        }
        if let Some(device) = devices.iter().find(|device| device.kind.starts_with("virtio-mem")) {
            return refused(format!("device {} ({}) cannot be in checkpoints", device.id, device.kind));
        }
        let mut manifest = Manifest::new();
        manifest.id = options.id.unwrap_or(manifest.id);
        let disks = match &options.disks {
            ProtectDisks::Served(servers) if servers.is_empty() => refuse_disks(monitor, &devices)?,
            ProtectDisks::Served(_) if options.method == CheckpointMethod::Background => {
                return refused("disks cannot be sealed at the instant of a background snapshot".into());
            }
            ProtectDisks::Served(servers) => EpochDisks::find(monitor, servers, manifest.id)?,
            ProtectDisks::Overlays(servers) if !servers.is_empty() => {
                EpochDisks::find_beside_files(monitor, servers, manifest.id)?
            }
            ProtectDisks::Overlays(_) | ProtectDisks::Ignore => EpochDisks::default(),
        };
        let overlays = match &options.disks {
            ProtectDisks::Overlays(_) => EpochOverlays::find(monitor, manifest.id, &disks)?,
            ProtectDisks::Served(_) | ProtectDisks::Ignore => EpochOverlays::default(),
        };
        manifest.overlaid_disks = overlays.in_manifest();
        if options.filters && gates > 0 {
            return refused("output is held by gates or by filters, and not by both".into());
        }
        if options.filters && options.every.is_by_output() {
            return refused("filters do not say when something wants to leave: a period is needed".into());
        }
        if options.filters && options.every.longest() >= LONGEST_WITH_FILTERS {
            return refused("filters hold output for at most an hour, so checkpoints must be made more often".into());
        }
        if gates > 0 {
            check_gates(&monitor.network_backends()?, gates)?;
        }
        manifest.protection = Some(manifest.id);
        manifest.fence_scope = Some(fence_scope(monitor, &devices, options)?);
        manifest.qemu_version = Some(version.to_string());
        manifest.machine = Some(monitor.machine()?);
        manifest.guest_memory = monitor.guest_memory()?;
        manifest.vm_uuid = monitor.uuid()?;
        manifest.vm_name = monitor.vm_name()?;
        manifest.run_state = Some(RunState::Running.to_string());
        manifest.transport = Some(Transport::Socket);
        let (writable, devices) = (WritableDisks::find(monitor, options)?, names(devices));
        let return_path = version >= FIRST_WITH_RETURN_PATH;
        Ok(Self { manifest, disks, overlays, writable, return_path, devices })
    }

    /// Refuses a VM that has got or lost devices since: nothing would hold the output of a new network, or seal a new
    /// disk. To be called when the migration is under way: QEMU adds and removes none from then on.
    pub(crate) fn expect_same_devices(&self, monitor: &Monitor) -> Result<(), ProtectError> {
        let now = names(monitor.devices()?);
        let mut other = now.symmetric_difference(&self.devices).map(|(id, kind)| format!("{id} ({kind})"));
        match other.next() {
            None => Ok(()),
            Some(device) => Err(ProtectError::Refused(format!(
                "the VM was changed while no checkpoint was made: {device} was added or removed"
            ))),
        }
    }

    /// Returns the record of the checkpoints of the next base, whose disks begin new epochs.
    pub(crate) fn series(&self) -> Manifest {
        let mut manifest = self.manifest.clone();
        manifest.protected_disks = self.disks.plan();
        manifest
    }

    /// How QEMU must be set: what COLO needs is on, and everything that would give the stream another form is off.
    /// With `paced_here` it asks for checkpoints all the time, and is answered when one is due.
    /// `current` are its settings as they were found.
    pub(crate) fn settings(&self, options: &ProtectOptions, paced_here: bool, current: &Settings) -> Settings {
        if options.method == CheckpointMethod::Background {
            return background_settings();
        }
        let every = if paced_here { Duration::ZERO } else { options.every.longest() };
        // 0 would starve the guest's timers.
        let every = u64::try_from(every.as_millis()).unwrap_or(u64::MAX).max(1);
        let mut wish = Settings::new()
            .capability("events", true)
            .capability("x-colo", true)
            .capability("return-path", self.return_path)
            .parameter("x-checkpoint-delay", every)
            .parameter("max-bandwidth", 0)
            .parameter("mode", "normal")
            .parameter("zero-page-detection", "legacy")
            .parameter("tls-creds", "")
            .capability("multifd", options.channels.is_some());
        if let Some(channels) = options.channels {
            wish = wish.parameter("multifd-channels", channels).parameter("multifd-compression", "none");
        }
        for other in [
            "mapped-ram",
            "xbzrle",
            "rdma-pin-all",
            "postcopy-ram",
            "postcopy-preempt",
            "background-snapshot",
            "pause-before-switchover",
            "release-ram",
            "dirty-bitmaps",
            "x-ignore-shared",
            "zero-copy-send",
            "switchover-ack",
        ] {
            wish = wish.capability(other, false);
        }
        if let Some(limit) = current.parameters.get(DOWNTIME_LIMIT) {
            // Not changed yet, but a guest may outrun its base: this has it put back.
            wish = wish.parameter(DOWNTIME_LIMIT, limit.clone());
        }
        wish
    }
}

fn names(devices: Vec<Device>) -> BTreeSet<(String, String)> {
    devices.into_iter().map(|device| (device.id, device.kind)).collect()
}

/// Returns what a fence of the VM has to cover.
fn fence_scope(monitor: &Monitor, devices: &[Device], options: &ProtectOptions) -> Result<FenceScope, ProtectError> {
    let mut scope = FenceScope::default();
    scope.networks = monitor.network_backends()?.into_iter().map(|network| network.id).collect();
    scope.gates.clone_from(&options.gates);
    let external = devices.iter().filter(|device| device.is_external_disk()).map(|device| device.id.clone());
    scope.disks = monitor.disks()?.into_iter().map(|disk| disk.device).chain(external).collect();
    Ok(scope)
}

/// Refuses a VM that has writable disks.
fn refuse_disks(monitor: &Monitor, devices: &[Device]) -> Result<EpochDisks, ProtectError> {
    let disks = monitor.disks()?.into_iter().map(|disk| disk.device);
    let external = devices.iter().filter(|device| device.is_external_disk()).map(|device| device.kind.clone());
    let devices: Vec<String> = disks.chain(external).collect();
    if devices.is_empty() { Ok(EpochDisks::default()) } else { Err(ProtectError::WritableDisks { devices }) }
}

/// Refuses a VM that has a network beside those of the gates: its output would not wait. QEMU does not tell to which
/// gate a network is connected, so they are counted.
fn check_gates(networks: &[NetworkBackend], gates: usize) -> Result<(), ProtectError> {
    if let Some(NetworkBackend { id, kind, .. }) = networks.iter().find(|network| network.kind != "stream") {
        return Err(ProtectError::Refused(format!(
            "the network {id} of the VM ({kind}) has no gate, so its output would not wait for checkpoints"
        )));
    }
    let count = networks.len();
    if count != gates {
        return Err(ProtectError::Refused(format!(
            "the VM has {count} networks, and {gates} gates are given: each network needs one"
        )));
    }
    Ok(())
}

/// Refuses times that background snapshots cannot keep.
fn check_timing(every: CheckpointTiming) -> Result<(), ProtectError> {
    let refused = |why: String| Err(ProtectError::Refused(why));
    if every.is_by_output() {
        return refused("a background snapshot takes too long to be made when something wants to leave".into());
    }
    if every.longest() < SHORTEST_IN_BACKGROUND {
        let shortest = SHORTEST_IN_BACKGROUND.as_secs();
        return refused(format!("background snapshots need a period of at least {shortest} s: each has all of the VM"));
    }
    Ok(())
}

/// Refuses a QEMU whose COLO does not work.
fn check_version(version: Version, kvm: bool) -> Result<(), ProtectError> {
    let works = if kvm {
        (FIRST_OF_10_0..END_OF_10_0).contains(&version) || version >= FIRST_OF_10_2
    } else {
        version >= FIRST_WITH_TCG
    };
    if works {
        return Ok(());
    }
    let accelerator = if kvm { "KVM" } else { "TCG" };
    let needed = if kvm { "10.0.7 and newer of 10.0, or 10.2" } else { "11.1" };
    Err(ProtectError::ColoUnusable(format!(
        "QEMU {version} cannot make checkpoints under {accelerator}: its COLO does not work; {needed} or newer is needed"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_whose_colo_does_not_work_is_refused_by_version_and_accelerator() {
        let works = |version: (u32, u32, u32), kvm| {
            let (major, minor, micro) = version;
            check_version(Version::new(major, minor, micro), kvm).is_ok()
        };
        for (version, tcg, kvm) in [
            ((7, 2, 22), false, false),
            ((10, 0, 2), false, false),
            ((10, 0, 7), false, true),
            ((10, 1, 0), false, false),
            ((10, 2, 0), false, true),
            ((11, 0, 9), false, true),
            ((11, 1, 0), true, true),
            ((12, 0, 0), true, true),
        ] {
            assert_eq!((works(version, false), works(version, true)), (tcg, kvm), "{version:?}");
        }
        let refused = check_version(Version::new(10, 0, 2), false).unwrap_err().to_string();
        assert!(refused.contains("10.0.2") && refused.contains("TCG") && refused.contains("11.1"), "{refused}");
    }

    #[test]
    fn background_snapshots_have_periods_of_seconds() {
        let second = Duration::from_secs(1);
        assert!(check_timing(CheckpointTiming::Period(second)).is_ok());
        for every in [CheckpointTiming::Period(second / 2), CheckpointTiming::Output { at_most: second }] {
            assert!(check_timing(every).is_err(), "{every:?}");
        }
    }

    #[test]
    fn nothing_that_changes_the_streams_form_stays_on() {
        let (disks, overlays) = (EpochDisks::default(), EpochOverlays::default());
        let (manifest, writable, devices) = (Manifest::new(), WritableDisks::default(), BTreeSet::new());
        let found = Preflight { manifest, disks, overlays, writable, return_path: true, devices };
        let every = CheckpointTiming::Period(Duration::from_micros(10));
        let options = ProtectOptions { every, ..ProtectOptions::default() };
        let settings = found.settings(&options, false, &Settings::new());
        assert_eq!(settings.parameters["x-checkpoint-delay"], 1, "0 would starve the guest");
        assert_eq!(
            found.settings(&ProtectOptions::default(), true, &Settings::new()).parameters["x-checkpoint-delay"],
            1
        );
        let on: Vec<_> = settings.capabilities.iter().filter(|(_, on)| **on).map(|(name, _)| name.as_str()).collect();
        assert_eq!(on, ["events", "return-path", "x-colo"]);
    }
}
