//! The VM's writable disks, as they were when its protection began.
//!
//! Law: **a VM whose disks change is not protected any more.** A disk that comes later belongs to no checkpoint, and
//! one of another size has overlays or a log of the size before. QEMU plugs no device while COLO lasts, but it puts
//! media into drives and resizes disks, and between background snapshots it does everything.

use limosa_qemu::monitor::Monitor;

use crate::error::ProtectError;
use crate::options::{ProtectDisks, ProtectOptions};

/// Devices of writable disks, and their bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WritableDisks {
    /// `None`: somebody else keeps them consistent.
    found: Option<Vec<(String, u64)>>,
}

impl WritableDisks {
    /// Asks QEMU for them.
    pub(crate) fn find(monitor: &Monitor, options: &ProtectOptions) -> Result<Self, ProtectError> {
        let found = match options.disks {
            ProtectDisks::Ignore => None,
            _ => Some(ask(monitor)?),
        };
        Ok(Self { found })
    }

    /// Refuses to continue if they have changed.
    pub(crate) fn check(&self, monitor: &Monitor) -> Result<(), ProtectError> {
        let Some(found) = &self.found else { return Ok(()) };
        difference(found, &ask(monitor)?).map_or(Ok(()), |what| Err(ProtectError::DisksChanged { what }))
    }
}

fn ask(monitor: &Monitor) -> Result<Vec<(String, u64)>, ProtectError> {
    Ok(monitor.disks()?.into_iter().map(|disk| (disk.device, disk.virtual_size)).collect())
}

/// Says what is different.
fn difference(before: &[(String, u64)], now: &[(String, u64)]) -> Option<String> {
    fn size_of(disks: &[(String, u64)], device: &str) -> Option<u64> {
        disks.iter().find(|(other, _)| other == device).map(|(_, size)| *size)
    }
    let gone = before.iter().find_map(|(device, size)| match size_of(now, device) {
        None => Some(format!("{device} is not there any more")),
        Some(other) if other != *size => Some(format!("{device} has {other} bytes, and had {size}")),
        Some(_) => None,
    });
    let come = || now.iter().find(|(device, _)| size_of(before, device).is_none());
    gone.or_else(|| come().map(|(device, _)| format!("{device} is new")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_comes_or_goes_or_has_another_size_is_a_difference() {
        let disks = |disks: &[(&str, u64)]| -> Vec<(String, u64)> {
            disks.iter().map(|(device, size)| ((*device).to_owned(), *size)).collect()
        };
        let before = disks(&[("a", 1), ("b", 2)]);
        let what = |now: &[(&str, u64)]| difference(&before, &disks(now));
        assert_eq!(what(&[("b", 2), ("a", 1)]), None);
        assert_eq!(what(&[("a", 1), ("b", 3)]).as_deref(), Some("b has 3 bytes, and had 2"));
        assert_eq!(what(&[("a", 1)]).as_deref(), Some("b is not there any more"));
        assert_eq!(what(&[("a", 1), ("b", 2), ("c", 2)]).as_deref(), Some("c is new"));
    }
}
