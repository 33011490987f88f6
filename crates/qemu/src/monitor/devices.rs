//! Devices that decide what limosa can do with a VM.

use super::Monitor;
use crate::qmp::QmpError;

/// A device that the command line or a hot-plug added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its id, or QEMU's number for one without.
    pub id: String,
    /// Its type, for example `virtio-blk-pci`.
    pub kind: String,
}

impl Device {
    /// Host hardware given to the guest: it writes guest memory behind QEMU's back and needs all of it present, so the memory
    /// cannot be filled lazily.
    #[must_use]
    pub fn is_assigned(&self) -> bool {
        self.kind.starts_with("vfio-") || self.kind.starts_with("vhost-vdpa") || self.kind.starts_with("x-vfio-")
    }

    /// A disk that another process serves: QEMU's list of disks does not show it.
    #[must_use]
    pub fn is_foreign_disk(&self) -> bool {
        ["vhost-user-blk", "vhost-user-scsi", "vhost-scsi", "vhost-user-fs", "vhost-vdpa-device", "virtio-9p"]
            .iter()
            .any(|kind| self.kind.starts_with(kind))
    }
}

impl Monitor {
    /// The devices that were added to the machine (not those that are part of it).
    ///
    /// # Errors
    /// The connection's.
    pub fn devices(&self) -> Result<Vec<Device>, QmpError> {
        let mut devices = Vec::new();
        for place in ["/machine/peripheral", "/machine/peripheral-anon"] {
            for (id, kind) in self.qom_list(place)? {
                if let Some(kind) = kind.strip_prefix("child<").and_then(|kind| kind.strip_suffix('>')) {
                    devices.push(Device { id, kind: kind.to_owned() });
                }
            }
        }
        Ok(devices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assigned_hardware_and_foreign_disks_are_told_from_ordinary_devices() {
        let device = |kind: &str| Device { id: "d".into(), kind: kind.into() };
        assert!(device("vfio-pci").is_assigned() && device("vfio-pci-nohotplug").is_assigned());
        assert!(!device("virtio-blk-pci").is_assigned() && !device("virtio-blk-pci").is_foreign_disk());
        assert!(device("vhost-user-blk-pci").is_foreign_disk());
    }
}
