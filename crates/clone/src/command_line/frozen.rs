//! The disks that a snapshot froze, and the one that a name on the command line means.
//!
//! The law: **every file of a frozen chain means that disk.** A command line may be older than the snapshot: it names
//! the image with which the VM was started, and overlays were put over it since. The disk is what its uppermost image
//! shows, and the clone's overlay goes over that one.

use std::path::{Path, PathBuf};

use super::Ownership;

/// A writable disk as the snapshot recorded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FrozenDisk {
    /// Its length in bytes.
    pub(crate) length: u64,
    /// The images that it consists of, the uppermost first: at least one.
    pub(crate) layers: Vec<Layer>,
}

/// An image of a frozen disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    /// The file or block device.
    pub(crate) path: PathBuf,
    /// Its format, by QEMU's name.
    pub(crate) format: String,
    /// Whether it is a block device.
    pub(crate) is_device: bool,
    /// Whether path and format are all that is known of it. The image above may have named it with more.
    pub(crate) is_plain: bool,
}

impl FrozenDisk {
    /// The path of its uppermost image, which is the one that the snapshot recorded.
    pub(crate) fn path(&self) -> &Path {
        self.layers.first().map_or(Path::new(""), |layer| &layer.path)
    }
}

/// An overlay to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OverlayPlan {
    /// The frozen disk below it.
    pub(crate) disk: FrozenDisk,
    /// Its file name, in the clone's directory.
    pub(crate) name: String,
}

/// Names for the overlays of these disks: `disk0.qcow2`, ...
pub(crate) fn plan(disks: Vec<FrozenDisk>) -> Vec<OverlayPlan> {
    let planned = disks.into_iter().enumerate();
    planned.map(|(at, disk)| OverlayPlan { disk, name: format!("disk{at}.qcow2") }).collect()
}

/// An image of a frozen disk, by its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// The number of the disk, which is that of its overlay.
    pub(super) disk: usize,
    /// The number of the image in its chain: 0 is the uppermost.
    pub(super) layer: usize,
}

/// The overlays while they are put in the place of their disks.
pub(super) struct Overlays<'a> {
    plans: &'a [OverlayPlan],
    ownership: &'a Ownership<'a>,
    /// Whether a name is that of a file.
    same: &'a dyn Fn(&str, &Path) -> bool,
    used: Vec<bool>,
}

impl<'a> Overlays<'a> {
    pub(super) fn new(
        plans: &'a [OverlayPlan],
        ownership: &'a Ownership<'a>,
        same: &'a dyn Fn(&str, &Path) -> bool,
    ) -> Self {
        Self { plans, ownership, same, used: vec![false; plans.len()] }
    }

    /// The image that a name on the command line means; `None` if it is no image of a frozen disk. Uppermost images
    /// come first: one may be below another disk too.
    ///
    /// # Errors
    /// The image is below several disks and is the uppermost of none.
    pub(super) fn find(&self, name: &str) -> Result<Option<Place>, String> {
        let name = name.strip_prefix("file:").unwrap_or(name);
        let layers = |disk: usize| self.plans.get(disk).map_or(&[][..], |plan| &plan.disk.layers);
        let is = |layer: &Layer| (self.same)(name, &layer.path);
        if let Some(disk) = (0..self.plans.len()).find(|disk| layers(*disk).first().is_some_and(is)) {
            return Ok(Some(Place { disk, layer: 0 }));
        }
        let below = |disk: usize| layers(disk).iter().position(is).map(|layer| Place { disk, layer });
        let mut found = (0..self.plans.len()).filter_map(below);
        match (found.next(), found.next()) {
            (Some(one), Some(other)) => {
                let [one, other] = [one, other].map(|place| self.path(place.disk));
                Err(format!(
                    "{name} is below the frozen disks {one} and {other}: name the one that is meant by another of its \
                     files"
                ))
            }
            (found, _) => Ok(found),
        }
    }

    /// The plan of a disk's overlay.
    pub(super) fn plan(&self, disk: usize) -> Result<&'a OverlayPlan, String> {
        self.plans.get(disk).ok_or_else(|| format!("there is no frozen disk {disk}"))
    }

    fn path(&self, disk: usize) -> String {
        self.plans.get(disk).map_or_else(String::new, |plan| plan.disk.path().display().to_string())
    }

    /// Takes an overlay for the one place of its disk. Returns its path, with a placeholder.
    pub(super) fn take(&mut self, disk: usize) -> Result<String, String> {
        let plan = self.plan(disk)?;
        match self.used.get_mut(disk) {
            Some(used) if !*used => *used = true,
            _ => return Err(format!("the disk {} is named twice", plan.disk.path().display())),
        }
        Ok(format!("{{dir}}/{}", plan.name))
    }

    /// The first disk whose overlay was not taken.
    pub(super) fn unused(&self) -> Option<&'a OverlayPlan> {
        self.used.iter().zip(self.plans).find(|(used, _)| !**used).map(|(_, plan)| plan)
    }

    /// A writable image that is no frozen disk must be the clone's own.
    pub(super) fn own(&self, option: &str, name: &str) -> Result<(), String> {
        if name.is_empty() || self.ownership.is_own(name) {
            return Ok(());
        }
        Err(format!(
            "{option} {name}: all clones would write to it, and the snapshot did not freeze it; make it read-only, or give \
             each clone its own ({{dir}}, {{name}})"
        ))
    }
}
