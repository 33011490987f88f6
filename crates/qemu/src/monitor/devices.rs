//! Devices that decide what limosa can do with a VM.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Answer, Monitor, QOM_LIST, Question, need_list, property_list};
use crate::qmp::QmpError;

/// A device that the command line or a hot-plug added.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Its id, or QEMU's number for one without.
    pub id: String,
    /// Its type, for example `virtio-blk-pci`.
    pub kind: String,
}

impl Device {
    /// A balloon, of any bus.
    pub(crate) fn is_balloon(&self) -> bool {
        self.kind.starts_with("virtio-balloon")
    }

    /// Host hardware given to the guest: it writes guest memory behind QEMU's back and needs all of it present, so the
    /// memory cannot be filled lazily.
    #[must_use]
    pub fn is_assigned(&self) -> bool {
        self.kind.starts_with("vfio-") || self.kind.starts_with("vhost-vdpa") || self.kind.starts_with("x-vfio-")
    }

    /// A disk that another process serves: QEMU's list of disks does not show it.
    #[must_use]
    pub fn is_external_disk(&self) -> bool {
        ["vhost-user-blk", "vhost-user-scsi", "vhost-scsi", "vhost-user-fs", "vhost-vdpa-device", "virtio-9p"]
            .iter()
            .any(|kind| self.kind.starts_with(kind))
    }
}

/// The QOM parents of devices that were added: those with an id, and those without.
const DEVICE_PLACES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// Bridges lie a few levels deep.
const MAX_BRIDGES: usize = 16;

impl Monitor {
    /// Whether a balloon of the VM hints which pages its guest has free (`free-page-hint=on`).
    pub(crate) fn has_free_page_hints(&self) -> Result<bool, QmpError> {
        for balloon in self.devices()?.iter().filter(|device| device.is_balloon()) {
            for place in DEVICE_PLACES {
                let [hints] = self.qom_get_all(&format!("{place}/{}", balloon.id), ["free-page-hint"])?;
                if hints.and_then(|hints| hints.as_bool()) == Some(true) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// The name of the character device that a vhost-user device of this id uses, as QEMU shows its socket. `None` if
    /// the device has none.
    ///
    /// # Errors
    /// The connection's.
    pub(crate) fn device_socket(&self, id: &str) -> Result<Option<String>, QmpError> {
        const COMMAND: &str = "query-chardev";
        let mut label = None;
        for place in DEVICE_PLACES {
            let [chardev] = self.qom_get_all(&format!("{place}/{id}"), ["chardev"])?;
            label = label.or(chardev);
        }
        let Some(label) = label else { return Ok(None) };
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let named = need_list(COMMAND, &answer)?.iter().find(|entry| entry.get("label") == Some(&label));
        Ok(named.and_then(|entry| Some(entry.get("filename")?.as_str()?.to_owned())))
    }

    /// Vendor and device identifiers of the PCI devices below the first root, by the address that sections' names begin
    /// with: `0000:00:05.0`, and `0000:00:05.0:00.0` behind a bridge.
    ///
    /// # Errors
    /// The connection's.
    pub fn pci_devices(&self) -> Result<BTreeMap<String, (u16, u16)>, QmpError> {
        const COMMAND: &str = "query-pci";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let mut found = BTreeMap::new();
        for root in need_list(COMMAND, &answer)? {
            // Roots of expanders have numbers of their own.
            if root.get("bus").and_then(Value::as_u64) == Some(0) {
                pci_bus(root, "0000:00", 0, &mut found);
            }
        }
        Ok(found)
    }

    /// The devices that were added to the machine (not those that are part of it).
    ///
    /// # Errors
    /// The connection's.
    pub fn devices(&self) -> Result<Vec<Device>, QmpError> {
        answers(self.qmp().execute_all(questions())?)
    }
}

pub(super) fn questions() -> [Question; 2] {
    DEVICE_PLACES.map(|path| (QOM_LIST, json!({ "path": path })))
}

pub(super) fn answers(lists: [Answer; 2]) -> Result<Vec<Device>, QmpError> {
    let mut devices = Vec::new();
    for list in lists {
        for (id, kind) in property_list(list)? {
            if let Some(kind) = kind.strip_prefix("child<").and_then(|kind| kind.strip_suffix('>')) {
                devices.push(Device { id, kind: kind.to_owned() });
            }
        }
    }
    Ok(devices)
}

fn pci_bus(bus: &Value, place: &str, depth: usize, found: &mut BTreeMap<String, (u16, u16)>) {
    for device in bus.get("devices").and_then(Value::as_array).into_iter().flatten() {
        let number = |value: Option<&Value>| value.and_then(Value::as_u64).and_then(|value| u16::try_from(value).ok());
        let (Some(slot), Some(function)) = (number(device.get("slot")), number(device.get("function"))) else {
            continue;
        };
        let place = format!("{place}:{slot:02x}.{function:x}");
        let id = device.get("id");
        let part = |key: &str| number(id.and_then(|id| id.get(key)));
        if let (Some(vendor), Some(device)) = (part("vendor"), part("device")) {
            found.insert(place.clone(), (vendor, device));
        }
        if let Some(bridge) = device.get("pci_bridge").filter(|_| depth < MAX_BRIDGES) {
            pci_bus(bridge, &place, depth + 1, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_grow_by_one_step_for_each_bridge() {
        let bus = serde_json::json!({"bus": 0, "devices": [
            {"slot": 31, "function": 2, "id": {"vendor": 0x8086, "device": 0x2922}},
            {"slot": 5, "function": 0, "id": {"vendor": 0x1b36, "device": 12}, "pci_bridge": {"devices": [
                {"slot": 0, "function": 0, "id": {"vendor": 0x1af4, "device": 0x1005}}]}},
            {"slot": 6}]});
        let mut found = BTreeMap::new();
        pci_bus(&bus, "0000:00", 0, &mut found);
        let addresses: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(addresses, ["0000:00:05.0", "0000:00:05.0:00.0", "0000:00:1f.2"]);
        assert_eq!(found["0000:00:05.0:00.0"], (0x1af4, 0x1005));
    }

    #[test]
    fn assigned_hardware_and_foreign_disks_are_told_from_ordinary_devices() {
        let device = |kind: &str| Device { id: "d".into(), kind: kind.into() };
        assert!(device("vfio-pci").is_assigned() && device("vfio-pci-nohotplug").is_assigned());
        assert!(!device("virtio-blk-pci").is_assigned() && !device("virtio-blk-pci").is_external_disk());
        assert!(device("vhost-user-blk-pci").is_external_disk());
    }
}
