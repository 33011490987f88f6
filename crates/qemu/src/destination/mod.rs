//! Whether a stored VM would load on a QEMU that runs: asked over its monitor, without changing anything in it.
//!
//! Machine type, RAM blocks, uuid and vCPUs are what QEMU says of itself. It does not say which device sections it
//! takes: they are derived from its tree of objects (`tree`) and, if the program may be run, from what it says about
//! the versions that it reads ([`VmstateDump`]). What cannot be derived is said to be unknown.

mod sections;
mod tree;
mod vmstate_dump;

use limosa_snapshot::{
    Comparison, Confidence, Finding, LoadTarget, LoadTargetBlock, Severity, Summary, check_disks, compare,
};

use crate::monitor::{Monitor, RunState};
use crate::qmp::QmpError;
pub use sections::QemuSections;
pub use vmstate_dump::{VmstateDump, VmstateDumpError};

/// Compares a stored VM with the QEMU behind a monitor. `dump` is what that QEMU's program reads, if it is known.
///
/// # Errors
/// The monitor's.
pub fn examine(monitor: &Monitor, saved: &Summary, dump: Option<VmstateDump>) -> Result<Comparison, QmpError> {
    let destination = look_at(monitor, saved, dump)?;
    let mut findings = compare(saved, &destination).findings;
    findings.extend(readiness(monitor)?);
    findings.extend(processor(&destination.sections));
    disks(monitor, saved, &mut findings)?;
    Ok(Comparison::new(findings))
}

fn look_at(
    monitor: &Monitor,
    saved: &Summary,
    dump: Option<VmstateDump>,
) -> Result<LoadTarget<QemuSections>, QmpError> {
    let machine = monitor.machine()?;
    let machine_advice = if machine == saved.machine { None } else { Some(machine_advice(monitor, &saved.machine)?) };
    let blocks = monitor.ram_blocks()?.into_iter().map(|block| LoadTargetBlock {
        name: block.name,
        used: block.used_length,
        limit: Some(block.total_length),
        page_size: Some(block.page_size),
    });
    Ok(LoadTarget {
        machine,
        machine_advice,
        qemu: Some(monitor.version().to_string()),
        uuid: monitor.uuid()?,
        blocks: blocks.collect(),
        sections: QemuSections::of(monitor, dump)?,
    })
}

/// Finds out whether this QEMU has a machine type that it was not started with.
fn machine_advice(monitor: &Monitor, wanted: &str) -> Result<String, QmpError> {
    let machines = monitor.machines()?;
    Ok(match machines.iter().find(|machine| machine.name == wanted) {
        Some(machine) if machine.deprecated => {
            format!("start it with -machine {wanted}, which this QEMU still has but is about to drop")
        }
        Some(_) => format!("start it with -machine {wanted}, which this QEMU has"),
        None => format!("this QEMU does not have {wanted}: take one that has, or boot the guest afresh"),
    })
}

fn readiness(monitor: &Monitor) -> Result<Option<Finding>, QmpError> {
    let status = monitor.status()?;
    let migration = monitor.migration()?;
    if status.state == RunState::Inmigrate && migration.status.as_str() == "none" {
        return Ok(None);
    }
    let what = format!(
        "this QEMU does not wait for a VM (its state is {}, its migration {}): only its options were compared",
        status.state, migration.status
    );
    let finding = Finding::new(Severity::Harmless, Confidence::Certain, "run state", what);
    Ok(Some(finding.advise("load into one that was started with the same options and -incoming defer")))
}

fn processor(sections: &QemuSections) -> Option<Finding> {
    let what = format!(
        "this QEMU has {}; which one the saved VM had is not recorded, and QEMU does not compare them",
        sections.cpu_kind()?
    );
    let finding = Finding::new(Severity::ChangesVm, Confidence::Unknown, "CPU model", what);
    Some(
        finding.advise(
            "start QEMU with the -cpu of the saved VM: its guest crashes on an instruction that this CPU lacks",
        ),
    )
}

fn disks(monitor: &Monitor, saved: &Summary, findings: &mut Vec<Finding>) -> Result<(), QmpError> {
    let Some(manifest) = &saved.manifest else { return Ok(()) };
    // Paths mean something on the host where QEMU runs.
    if manifest.disks.is_empty() || !monitor.qmp().passes_descriptors() {
        return Ok(());
    }
    for change in check_disks(manifest) {
        let about = format!("disk {}", change.disk.device.as_deref().unwrap_or(&change.disk.node));
        let finding = Finding::new(Severity::Refuses, Confidence::Certain, about, change.to_string());
        findings.push(finding.advise("put the disk back; a restore is refused, QEMU itself would not notice"));
    }
    let here = monitor.disks()?;
    for disk in &manifest.disks {
        if disk.overlay.is_some() {
            let what = format!(
                "{} was frozen; that the destination has an overlay on it is not looked at",
                disk.path.display()
            );
            let about = format!("disk {}", disk.device.as_deref().unwrap_or(&disk.node));
            let finding = Finding::new(Severity::Refuses, Confidence::Unknown, about, what);
            findings.push(finding.advise("a restore checks it"));
        } else if !here.iter().any(|here| here.path.as_ref() == Some(&disk.path)) {
            let about = format!("disk {}", disk.device.as_deref().unwrap_or(&disk.node));
            let what = format!("the destination has no writable disk on {}", disk.path.display());
            let finding = Finding::new(Severity::ChangesVm, Confidence::Likely, about, what);
            findings.push(finding.advise("attach the disk that belongs to this memory"));
        }
    }
    Ok(())
}
