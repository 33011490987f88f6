//! A QEMU's devices, and where each of them sits: `qom-list` from `/machine` down.
//!
//! Facts found with QEMU 10.0.2: an object with a property `parent_bus` is a device, and its value the path of the bus;
//! the bus is a child of the device that provides it. A PCI device's `addr` is its number on the bus, slot * 8 +
//! function. A section of a PCI device is named `0000:00:SLOT.FUNCTION/...`, with `:SLOT.FUNCTION` once more for each
//! bridge on the way; a virtio device is named by the PCI device that carries it; devices on USB and SCSI by their
//! controller and a port. Sections of devices on ISA and on the system bus have no bus in their names.

use std::collections::HashMap;

use serde_json::Value;

use crate::monitor::Monitor;
use crate::qmp::QmpError;

/// More objects than any machine has; the rest is not read.
const MAX_OBJECTS: usize = 65_536;
/// Objects lie a few levels deep, and so do PCI bridges.
const MAX_DEPTH: usize = 32;

/// Where a device sits, according to its sections' names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BusAddress {
    /// On a bus that does not show in a section's name, or on none.
    Unnamed,
    /// At this PCI address, from the root: `0000:00:05.0:00.0`.
    Pci(String),
    /// On a bus of the controller at this PCI address.
    Behind(String),
    /// Where this module cannot say.
    Unknown,
}

/// A device.
#[derive(Debug, Clone)]
pub(super) struct Device {
    /// Its type.
    pub(super) kind: String,
    /// Where it sits.
    pub(super) bus: BusAddress,
    /// MSI-X vectors that it was made with, if it says so (virtio does).
    pub(super) vectors: Option<u32>,
}

/// All devices.
#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) devices: Vec<Device>,
    /// Buses that have a section `PCIBUS` each.
    pub(super) pci_buses: usize,
}

/// An object on the way.
#[derive(Debug, Default)]
struct Object {
    kind: String,
    bus: Option<String>,
    devfn: Option<u64>,
    vectors: Option<u32>,
}

impl Tree {
    /// Walks the tree.
    pub(super) fn of(monitor: &Monitor) -> Result<Self, QmpError> {
        let mut objects: HashMap<String, Object> = HashMap::new();
        let mut order = Vec::new();
        let mut ahead = vec![("/machine".to_owned(), "machine".to_owned(), 0)];
        while let Some((path, kind, depth)) = ahead.pop() {
            if objects.len() >= MAX_OBJECTS {
                break;
            }
            let mut object = Object { kind, ..Object::default() };
            for (name, kind) in monitor.qom_list(&path)? {
                if let Some(kind) = kind.strip_prefix("child<").and_then(|kind| kind.strip_suffix('>')) {
                    // These two are most of a machine, and have no devices below them.
                    if depth < MAX_DEPTH && !matches!(kind, "irq" | "memory-region") {
                        ahead.push((format!("{path}/{name}"), kind.to_owned(), depth + 1));
                    }
                } else if name == "parent_bus" {
                    let bus = monitor.qom_get(&path, "parent_bus")?;
                    object.bus = bus.as_ref().and_then(Value::as_str).map(str::to_owned).filter(|bus| !bus.is_empty());
                } else if name == "addr" {
                    // Other devices have an `addr` too, that means something else or cannot be read.
                    object.devfn = number(monitor, &path, "addr")?;
                } else if name == "vectors" {
                    // The largest number means that it was left to the device, which has not decided.
                    let vectors = number(monitor, &path, "vectors")?.and_then(|vectors| u32::try_from(vectors).ok());
                    object.vectors = vectors.filter(|vectors| *vectors != u32::MAX);
                }
            }
            order.push(path.clone());
            objects.insert(path, object);
        }
        Ok(Self::from_objects(&objects, &order))
    }

    fn from_objects(objects: &HashMap<String, Object>, order: &[String]) -> Self {
        let known = order.iter().filter_map(|path| Some((path, objects.get(path)?)));
        let devices = known
            .clone()
            .map(|(path, object)| Device {
                kind: object.kind.clone(),
                bus: address(objects, path, 0),
                vectors: object.vectors,
            })
            .collect();
        Self { devices, pci_buses: known.filter(|(_, object)| is_pci_bus(&object.kind)).count() }
    }
}

/// A property that is a number; `None` if it is not a number or cannot be read.
fn number(monitor: &Monitor, path: &str, property: &str) -> Result<Option<u64>, QmpError> {
    match monitor.qom_get(path, property) {
        Ok(value) => Ok(value.as_ref().and_then(Value::as_u64)),
        Err(refusal) if refusal.is_refusal() => Ok(None),
        Err(other) => Err(other),
    }
}

fn is_pci_bus(kind: &str) -> bool {
    matches!(kind, "PCI" | "PCIE" | "CXL")
}

fn address(objects: &HashMap<String, Object>, path: &str, depth: usize) -> BusAddress {
    let Some(object) = objects.get(path).filter(|_| depth < MAX_DEPTH) else { return BusAddress::Unknown };
    let Some(bus) = &object.bus else { return BusAddress::Unnamed };
    let kind = objects.get(bus).map_or("", |bus| bus.kind.as_str());
    let Some((owner, _)) = bus.rsplit_once('/') else { return BusAddress::Unknown };
    if is_pci_bus(kind) {
        let Some(devfn) = object.devfn.filter(|devfn| *devfn < 256) else { return BusAddress::Unknown };
        let own = format!(":{:02x}.{}", devfn >> 3, devfn & 7);
        let host = objects.get(owner).map_or("", |owner| owner.kind.as_str());
        return match address(objects, owner, depth + 1) {
            BusAddress::Pci(bridge) => BusAddress::Pci(bridge + &own),
            _ if matches!(host, "q35-pcihost" | "i440FX-pcihost") => BusAddress::Pci(format!("0000:00{own}")),
            _ => BusAddress::Unknown,
        };
    }
    if kind.starts_with("virtio") {
        return address(objects, owner, depth + 1);
    }
    if matches!(kind, "usb-bus" | "SCSI") {
        return match address(objects, owner, depth + 1) {
            BusAddress::Pci(controller) | BusAddress::Behind(controller) => BusAddress::Behind(controller),
            _ => BusAddress::Unknown,
        };
    }
    BusAddress::Unnamed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(objects: &[(&str, &str, Option<&str>, Option<u64>)]) -> Vec<(String, BusAddress)> {
        let order: Vec<String> = objects.iter().map(|(path, ..)| (*path).to_owned()).collect();
        let objects = objects.iter().map(|&(path, kind, bus, devfn)| {
            (path.to_owned(), Object { kind: kind.to_owned(), bus: bus.map(str::to_owned), devfn, vectors: None })
        });
        let tree = Tree::from_objects(&objects.collect(), &order);
        tree.devices.into_iter().map(|device| (device.kind, device.bus)).collect()
    }

    #[test]
    fn a_device_is_placed_through_bridges_and_virtio_by_its_carrier() {
        let placed = tree(&[
            ("/machine/q35", "q35-pcihost", Some("/machine/sysbus"), None),
            ("/machine/sysbus", "System", None, None),
            ("/machine/q35/pcie.0", "PCIE", None, None),
            ("/machine/p/rp", "pcie-root-port", Some("/machine/q35/pcie.0"), Some(40)),
            ("/machine/p/rp/rp", "PCIE", None, None),
            ("/machine/p/d", "virtio-rng-pci", Some("/machine/p/rp/rp"), Some(0)),
            ("/machine/p/d/virtio-bus", "virtio-pci-bus", None, None),
            ("/machine/p/d/virtio-backend", "virtio-rng-device", Some("/machine/p/d/virtio-bus"), None),
            ("/machine/p/x", "qemu-xhci", Some("/machine/q35/pcie.0"), Some(251)),
            ("/machine/p/x/x.0", "usb-bus", None, None),
            ("/machine/p/t", "usb-tablet", Some("/machine/p/x/x.0"), None),
        ]);
        let bus = |kind: &str| placed.iter().find(|(other, _)| other == kind).unwrap().1.clone();
        assert_eq!(bus("q35-pcihost"), BusAddress::Unnamed);
        assert_eq!(bus("pcie-root-port"), BusAddress::Pci("0000:00:05.0".to_owned()));
        assert_eq!(bus("virtio-rng-device"), BusAddress::Pci("0000:00:05.0:00.0".to_owned()));
        assert_eq!(bus("qemu-xhci"), BusAddress::Pci("0000:00:1f.3".to_owned()));
        assert_eq!(bus("usb-tablet"), BusAddress::Behind("0000:00:1f.3".to_owned()));
    }

    #[test]
    fn a_tree_that_goes_round_in_circles_has_an_end() {
        let placed = tree(&[
            ("/a", "bridge", Some("/b/bus"), Some(8)),
            ("/a/bus", "PCI", None, None),
            ("/b", "bridge", Some("/a/bus"), Some(8)),
            ("/b/bus", "PCI", None, None),
        ]);
        assert_eq!(placed.first().unwrap().1, BusAddress::Unknown);
    }
}
