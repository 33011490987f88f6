//! Device sections: there or not, and of a version that the destination reads.

use super::{Confidence, Finding, Presence, Sections, Severity};
use crate::pci::PciIdentity;
use crate::summary::{DeviceSummary, Summary};

pub(super) fn compare<S: Sections>(saved: &Summary, sections: &S, findings: &mut Vec<Finding>) {
    if saved.devices.is_empty() {
        findings.push(Finding::new(
            Severity::Refuses,
            Confidence::Unknown,
            "device sections",
            "the file does not list them, so they cannot be compared",
        ));
        return;
    }
    findings.extend(saved.devices.iter().filter_map(|section| one(section, sections.look_up(section))));
    for section in &saved.devices {
        if let (Some(saved), Some(here)) = (section.pci, sections.pci(section)) {
            findings.extend(same_device(section, saved, here));
        }
    }
    for vmdesc in &saved.vmdescs {
        for subsection in vmdesc.subsections.iter().map(|subsection| &subsection.name) {
            if sections.knows_subsection(&vmdesc.name, subsection) == Some(false) {
                let what = format!("with the subsection {subsection}, which the destination's QEMU does not know");
                let about = format!("section {}", vmdesc.name);
                findings.push(
                    Finding::new(Severity::Refuses, Confidence::Certain, about, what)
                        .advise("move to a newer QEMU, or save from one that is not newer than the destination"),
                );
            }
        }
    }
    findings.extend(sections.surplus_findings(&saved.devices));
}

/// How findings name a section.
pub(super) fn subject(section: &DeviceSummary) -> String {
    match section.instance {
        0 => format!("section {}", section.name),
        instance => format!("section {} {instance}", section.name),
    }
}

fn one(section: &DeviceSummary, presence: Presence) -> Option<Finding> {
    let refuses = |confidence, what: String| Finding::new(Severity::Refuses, confidence, subject(section), what);
    match presence {
        Presence::Absent { confidence, why } => {
            Some(refuses(confidence, format!("the destination does not have it: {why}")).advise(what_to_add(section)))
        }
        Presence::Unknown { why } => {
            Some(refuses(Confidence::Unknown, format!("whether the destination has it is unknown: {why}")))
        }
        Presence::Present { versions: (_, Some(newest)), .. } if section.version > newest => Some(
            refuses(
                Confidence::Certain,
                format!("of version {}, the destination reads up to {newest}", section.version),
            )
            .advise("move to a newer QEMU, or save from one that is not newer than the destination"),
        ),
        Presence::Present { versions: (Some(oldest), _), .. } if section.version < oldest => Some(
            refuses(
                Confidence::Certain,
                format!("of version {}, the destination reads from {oldest} on", section.version),
            )
            .advise("take an older QEMU that still reads it as the destination"),
        ),
        Presence::Present { .. } => None,
    }
}

/// Checks the bytes of a PCI device's configuration space that QEMU compares before it loads the device.
fn same_device(section: &DeviceSummary, saved: PciIdentity, here: PciIdentity) -> Option<Finding> {
    let refuses = |what: String| Finding::new(Severity::Refuses, Confidence::Certain, subject(section), what);
    if (saved.vendor, saved.device) != (here.vendor, here.device) {
        let what = format!(
            "saved of a PCI device {:04x}:{:04x}, at that address of the destination is {:04x}:{:04x}",
            saved.vendor, saved.device, here.vendor, here.device
        );
        return Some(refuses(what).advise("give the destination the saved VM's device, with the same options"));
    }
    let (Some(saved), Some(here)) = (saved.vectors, here.vectors) else { return None };
    (saved != here).then(|| {
        refuses(format!("saved with {saved} MSI-X vectors, the destination's device has {here}")).advise(
            "give it the saved VM's number of queues; without one, virtio disks have as many as there are vCPUs",
        )
    })
}

fn what_to_add(section: &DeviceSummary) -> String {
    match section.name.split_once('/') {
        Some((place, device)) if place.contains(':') => {
            format!("start the destination with the {device} device at PCI address {place}")
        }
        _ if matches!(section.name.as_str(), "cpu" | "cpu_common" | "apic") => {
            "start the destination with the saved VM's -smp".to_owned()
        }
        _ => "start the destination with the options of the saved VM".to_owned(),
    }
}
