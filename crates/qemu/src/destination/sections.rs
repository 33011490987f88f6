//! The device sections that a QEMU takes, known from its devices and its program.
//!
//! Law: certain is what follows from an address that is vacant or a type whose section the program declares. What
//! follows from names that are alike is likely. The rest is unknown.

use std::collections::{BTreeMap, BTreeSet};

use limosa_snapshot::{Confidence, DeviceSummary, Finding, PciIdentity, Presence, Sections, Severity};
use serde_json::Value;

use super::tree::{BusAddress, Device, Tree};
use super::vmstate_dump::{Versions, VmstateDump};
use crate::monitor::Monitor;
use crate::qmp::QmpError;

/// Sections that every machine has, with any options.
const EVERYWHERE: [&str; 2] = ["timer", "globalstate"];

/// Common types whose name is not that of their section, for when the program's list is not at hand: type, section.
const COMMON: [(&str, &str); 11] = [
    ("fw_cfg_io", "fw_cfg"),
    ("i8042", "pckbd"),
    ("i8257", "dma"),
    ("i440FX-pcihost", "PCIHost"),
    ("isa-pit", "i8254"),
    ("kvmvapic", "kvm-tpr-opt"),
    ("nec-usb-xhci", "xhci"),
    ("q35-pcihost", "PCIHost"),
    ("qemu-xhci", "xhci"),
    ("usb-mouse", "usb-ptr"),
    ("usb-tablet", "usb-ptr"),
];

/// The device sections of a running QEMU.
#[derive(Debug)]
pub struct QemuSections {
    tree: Tree,
    dump: Option<VmstateDump>,
    /// The program that the monitor's process runs, for advice.
    program: Option<String>,
    /// Numbers of the vCPUs, and of their interrupt controllers where they are known.
    cpus: BTreeSet<u64>,
    apics: BTreeSet<u64>,
    cpu_kind: Option<String>,
    /// Whether the guest gets ACPI tables, whose state is a section.
    acpi: bool,
    /// Identifiers of the PCI devices, by their address.
    pci: BTreeMap<String, (u16, u16)>,
}

impl QemuSections {
    /// Asks for devices and vCPUs.
    pub(super) fn of(monitor: &Monitor, dump: Option<VmstateDump>) -> Result<Self, QmpError> {
        let tree = Tree::of(monitor)?;
        let cpus = monitor.cpus()?;
        let mut apics = BTreeSet::new();
        for cpu in &cpus {
            // Processors without such a property have no such section.
            match monitor.qom_get(&cpu.path, "apic-id") {
                Ok(id) => apics.extend(id.as_ref().and_then(Value::as_u64)),
                Err(refusal) if refusal.is_refusal() => {}
                Err(other) => return Err(other),
            }
        }
        let cpu_kind = match cpus.first() {
            Some(cpu) => monitor.qom_get(&cpu.path, "type")?.as_ref().and_then(Value::as_str).map(str::to_owned),
            None => None,
        };
        let acpi = match monitor.qom_get("/machine", "acpi") {
            Ok(value) => value.as_ref().and_then(Value::as_str).is_some_and(|value| value != "off"),
            Err(refusal) if refusal.is_refusal() => false,
            Err(other) => return Err(other),
        };
        let process = monitor.qmp().process();
        let program = process.and_then(|process| std::fs::read_link(format!("/proc/{process}/exe")).ok());
        Ok(Self {
            tree,
            dump,
            program: program.map(|program| program.display().to_string()),
            cpus: cpus.iter().map(|cpu| cpu.index).collect(),
            apics,
            cpu_kind,
            acpi,
            pci: monitor.pci_devices()?,
        })
    }

    /// The type of the first vCPU.
    pub(super) fn cpu_kind(&self) -> Option<&str> {
        self.cpu_kind.as_deref()
    }

    fn at(&self, place: &BusAddress) -> Vec<&Device> {
        self.tree.devices.iter().filter(|device| device.bus == *place).collect()
    }

    /// The advice where the program's own list of sections would decide.
    fn undumped(&self) -> String {
        let program = self.program.as_deref().unwrap_or("its program");
        if self.dump.is_some() { String::new() } else { format!(" (the sections that {program} lists may tell)") }
    }

    /// A section of a device with a PCI address, or of one behind it.
    fn at_address(&self, place: &str, name: &str) -> Presence {
        let here = self.at(&BusAddress::Pci(place.to_owned()));
        let Some(first) = here.first() else {
            // A device behind an expander bus has an address of another root, which the tree does not show.
            let unplaced = self.tree.devices.iter().any(|device| device.bus == BusAddress::Unknown);
            let confidence = if unplaced { Confidence::Likely } else { Confidence::Certain };
            return Presence::Absent { confidence, why: format!("nothing is at PCI address {place}") };
        };
        if let Some((_, behind)) = name.rsplit_once('/') {
            return self.among(&self.at(&BusAddress::Behind(place.to_owned())), behind, Confidence::Likely);
        }
        let found = self.among(&here, name, Confidence::Certain);
        match found {
            Presence::Absent { confidence, .. } => {
                Presence::Absent { confidence, why: format!("at that address is {}", first.kind) }
            }
            Presence::Unknown { .. } => {
                let why = format!("at that address is {}{}", first.kind, self.undumped());
                Presence::Unknown { why }
            }
            present => present,
        }
    }

    /// A section among those of these devices; `best` is how sure it can be that it is theirs.
    fn among(&self, devices: &[&Device], name: &str, best: Confidence) -> Presence {
        if let Some(dump) = &self.dump {
            let declared = devices.iter().filter_map(|device| dump.section_of(&device.kind));
            if let Some((_, versions)) = declared.into_iter().find(|(declared, _)| *declared == name) {
                return present(best, Some(versions));
            }
            if dump.versions_of(name).is_some() {
                let why = "none of its devices has such a section".to_owned();
                return Presence::Absent { confidence: best, why };
            }
        }
        if devices.iter().any(|device| alike(&device.kind, name)) {
            return present(Confidence::Likely, None);
        }
        // Every virtio device has a section of its own name.
        if name.starts_with("virtio-") {
            let why = "none of its devices has that name".to_owned();
            return Presence::Absent { confidence: Confidence::Likely, why };
        }
        Presence::Unknown { why: format!("none of its devices has that name{}", self.undumped()) }
    }

    /// A section without an address.
    fn by_name(&self, section: &DeviceSummary) -> Presence {
        let instance = u64::from(section.instance);
        let vcpu = |known: &BTreeSet<u64>| {
            if known.contains(&instance) {
                return present(Confidence::Certain, None);
            }
            let why = format!("it has {} vCPUs", self.cpus.len());
            Presence::Absent { confidence: Confidence::Certain, why }
        };
        match section.name.as_str() {
            "cpu" | "cpu_common" => return vcpu(&self.cpus),
            "apic" if !self.apics.is_empty() => return vcpu(&self.apics),
            "PCIBUS" => return counted(self.tree.pci_buses, instance, "PCI buses", Confidence::Likely, None),
            "acpi_build" if self.acpi => return present(Confidence::Likely, None),
            "acpi_build" => {
                let why = "it was started without ACPI".to_owned();
                return Presence::Absent { confidence: Confidence::Likely, why };
            }
            name if EVERYWHERE.contains(&name) => return present(Confidence::Certain, None),
            _ => {}
        }
        let unnamed = self.at(&BusAddress::Unnamed);
        if let Some(dump) = &self.dump
            && let Some(versions) = dump.versions_of(&section.name)
        {
            let mut count = 0;
            let mut of_these: Option<Versions> = None;
            for (name, versions) in unnamed.iter().filter_map(|device| dump.section_of(&device.kind)) {
                if name == section.name {
                    count += 1;
                    of_these = Some(versions);
                }
            }
            // A machine may register a section of a declared name by other ways.
            let confidence = if count == 0 { Confidence::Likely } else { Confidence::Certain };
            let versions = Some(of_these.unwrap_or(versions));
            return counted(count, instance, "devices with such a section", confidence, versions);
        }
        let count = unnamed.iter().filter(|device| alike(&device.kind, &section.name)).count();
        if u64::try_from(count).is_ok_and(|count| count > instance) {
            return present(Confidence::Likely, None);
        }
        Presence::Unknown { why: format!("it belongs to no device known to the monitor{}", self.undumped()) }
    }
}

fn present(confidence: Confidence, versions: Option<Versions>) -> Presence {
    let versions = (versions.map(|versions| versions.oldest), versions.map(|versions| versions.newest));
    Presence::Present { confidence, versions }
}

/// Instances are numbered from 0 in the order in which devices are made.
fn counted(count: usize, instance: u64, of_what: &str, confidence: Confidence, versions: Option<Versions>) -> Presence {
    if u64::try_from(count).is_ok_and(|count| count > instance) {
        return present(confidence, versions);
    }
    Presence::Absent { confidence, why: format!("it has {count} {of_what}") }
}

/// Whether a section of this name commonly belongs to this type: their names are the same but for case, dashes and what
/// virtio types end with, or they are a known pair.
fn alike(kind: &str, name: &str) -> bool {
    if COMMON.contains(&(kind, name)) {
        return true;
    }
    let plain = |text: &str| {
        let letters = text.strip_suffix("-device").unwrap_or(text).chars().filter(char::is_ascii_alphanumeric);
        letters.map(|letter| letter.to_ascii_lowercase()).collect::<String>()
    };
    let (kind, name) = (plain(kind), plain(name));
    !name.is_empty() && (kind == name || kind.strip_prefix("isa") == Some(&name))
}

impl Sections for QemuSections {
    fn look_up(&self, section: &DeviceSummary) -> Presence {
        match section.name.split_once('/') {
            Some((place, name)) if place.contains(':') => self.at_address(place, name),
            _ => self.by_name(section),
        }
    }

    fn pci(&self, section: &DeviceSummary) -> Option<PciIdentity> {
        let (place, _) = section.name.split_once('/')?;
        let &(vendor, device) = self.pci.get(place)?;
        let mut here = self.at(&BusAddress::Pci(place.to_owned())).into_iter();
        Some(PciIdentity { vendor, device, vectors: here.find_map(|device| device.vectors) })
    }

    fn knows_subsection(&self, section: &str, subsection: &str) -> Option<bool> {
        let name = section.rsplit_once('/').map_or(section, |(_, name)| name);
        self.dump.as_ref()?.knows_subsection(name, subsection)
    }

    fn surplus_findings(&self, saved: &[DeviceSummary]) -> Vec<Finding> {
        let mut findings = Vec::new();
        let vcpus = saved.iter().filter(|section| section.name == "cpu").count();
        if vcpus > 0 && self.cpus.len() > vcpus {
            // The state of processor hotplug has a record for each that there can be, and is saved once the guest has
            // used it.
            let what = format!(
                "{vcpus} saved, {} at the destination: QEMU refuses it if the guest has an operating system with ACPI, \
                 otherwise the further ones never start",
                self.cpus.len()
            );
            let finding = Finding::new(Severity::Refuses, Confidence::Unknown, "vCPUs", what);
            findings.push(finding.advise("use the saved VM's -smp"));
        }
        let occupied: BTreeSet<&str> =
            saved.iter().filter_map(|section| Some(section.name.split_once('/')?.0)).collect();
        let mut added = BTreeMap::new();
        for device in &self.tree.devices {
            let BusAddress::Pci(place) = &device.bus else { continue };
            let stateful = self.dump.as_ref().is_none_or(|dump| dump.section_of(&device.kind).is_some());
            if stateful && !occupied.contains(place.as_str()) {
                // The first is the one that has the address itself, before what it carries.
                let kind = self.at(&device.bus).first().map_or(device.kind.as_str(), |first| first.kind.as_str());
                added.insert(place, kind);
            }
        }
        for (place, kind) in added {
            let what = format!("only the destination has a device there ({kind}): the guest does not know of it");
            let about = format!("PCI address {place}");
            findings.push(Finding::new(Severity::Harmless, Confidence::Likely, about, what));
        }
        findings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(kind: &str, place: BusAddress) -> Device {
        Device { kind: kind.to_owned(), bus: place, vectors: None }
    }

    fn sections(devices: Vec<Device>, dump: Option<&[u8]>) -> QemuSections {
        QemuSections {
            tree: Tree { devices, pci_buses: 1 },
            dump: dump.map(|list| VmstateDump::parse(list).unwrap()),
            program: None,
            cpus: [0, 1].into(),
            apics: [0, 1].into(),
            cpu_kind: None,
            acpi: true,
            pci: BTreeMap::new(),
        }
    }

    fn section(name: &str, instance: u32) -> DeviceSummary {
        DeviceSummary { name: name.to_owned(), instance, version: 1, size: 8, pci: None }
    }

    const LIST: &[u8] = br#"{
        "virtio-net-device":{"Description":{"name":"virtio-net","version_id":11,"minimum_version_id":11}},
        "hpet":{"Description":{"name":"hpet","version_id":2,"minimum_version_id":1}},
        "i8257":{"Description":{"name":"dma","version_id":1,"minimum_version_id":1}},
        "usb-tablet":{"Description":{"name":"usb-ptr","version_id":1,"minimum_version_id":1}},
        "qemu-xhci":{"Description":{"name":"xhci","version_id":1,"minimum_version_id":1}}}"#;

    fn machine() -> Vec<Device> {
        let pci = |slot: u8| BusAddress::Pci(format!("0000:00:{slot:02x}.0"));
        vec![
            device("virtio-net-pci", pci(1)),
            device("virtio-net-device", pci(1)),
            device("qemu-xhci", pci(2)),
            device("usb-tablet", BusAddress::Behind("0000:00:02.0".to_owned())),
            device("i8257", BusAddress::Unnamed),
            device("i8257", BusAddress::Unnamed),
        ]
    }

    #[test]
    fn with_the_programs_list_addresses_types_and_counts_are_certain() {
        let here = sections(machine(), Some(LIST));
        let look = |name: &str, instance| here.look_up(&section(name, instance));
        let certain = |versions| Presence::Present { confidence: Confidence::Certain, versions };
        assert_eq!(look("0000:00:01.0/virtio-net", 0), certain((Some(11), Some(11))));
        assert_eq!(look("dma", 1), certain((Some(1), Some(1))));
        assert_eq!(look("cpu", 1), certain((None, None)));
        let absent = |presence, wanted| matches!(presence, Presence::Absent { confidence, .. } if confidence == wanted);
        assert!(absent(look("0000:00:03.0/virtio-net", 0), Confidence::Certain));
        assert!(absent(look("0000:00:02.0/virtio-net", 0), Confidence::Certain));
        assert!(absent(look("dma", 2), Confidence::Certain));
        assert!(absent(look("hpet", 0), Confidence::Likely));
        assert!(absent(look("cpu_common", 2), Confidence::Certain));
        assert!(absent(look("apic", 7), Confidence::Certain));
        assert!(absent(look("PCIBUS", 1), Confidence::Likely));
        let behind = look("0000:00:02.0/1/usb-ptr", 0);
        assert!(matches!(behind, Presence::Present { confidence: Confidence::Likely, .. }), "{behind:?}");
        assert!(matches!(look("slirp", 0), Presence::Unknown { .. }));
    }

    #[test]
    fn without_the_list_only_vacant_addresses_and_vcpus_are_certain() {
        let here = sections(machine(), None);
        let look = |name: &str, instance| here.look_up(&section(name, instance));
        let likely = |presence| matches!(presence, Presence::Present { confidence: Confidence::Likely, .. });
        assert!(likely(look("0000:00:01.0/virtio-net", 0)));
        assert!(matches!(look("0000:00:02.0/virtio-rng", 0), Presence::Absent { confidence: Confidence::Likely, .. }));
        assert!(matches!(look("0000:00:04.0/e1000", 0), Presence::Absent { confidence: Confidence::Certain, .. }));
        assert!(likely(look("0000:00:02.0/xhci", 0)) && likely(look("dma", 1)) && likely(look("acpi_build", 0)));
        assert!(matches!(look("0000:00:02.0/ohci", 0), Presence::Unknown { .. }));
        assert!(matches!(look("hpet", 0), Presence::Unknown { .. }));
        assert!(matches!(look("cpu", 5), Presence::Absent { confidence: Confidence::Certain, .. }));
    }

    #[test]
    fn what_only_the_destination_has_is_told_once_for_each_address() {
        let here = sections(machine(), None);
        let extra = here.surplus_findings(&[section("cpu", 0), section("0000:00:02.0/xhci", 0)]);
        let about: Vec<&str> = extra.iter().map(|finding| finding.subject.as_str()).collect();
        assert_eq!(about, ["vCPUs", "PCI address 0000:00:01.0"]);
    }
}
