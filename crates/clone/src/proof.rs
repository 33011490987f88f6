//! Proof that a QEMU has the right memory and disks, before it gets its VM.
//!
//! The law: **a clone gets its VM when its memory and its disks are proven**, by its process and its block layer. Its
//! command line proves nothing: a script that starts QEMU may drop options or add some.

use std::path::{Path, PathBuf};

use limosa_migrate::stored::InPlace;
use limosa_qemu::monitor::Monitor;
use limosa_qemu::{JobError, is_same_file, prove_mapping, refuse_shared_snapshot};

use crate::error::CloneError;
use crate::fleet::Fleet;

/// Returns the RAM blocks that this QEMU maps, with the pages that it has written since.
///
/// # Errors
/// Memory that is not mapped as planned; an overlay that is missing or has another image below it; a frozen disk that
/// is attached for writing.
pub(crate) fn prove(fleet: &Fleet<'_>, monitor: &Monitor, folder: &Path) -> Result<Vec<InPlace>, CloneError> {
    refuse_shared_snapshot(monitor, fleet.snapshot)?;
    prove_disks(fleet, monitor, folder)?;
    match fleet.mapped.as_slice() {
        [] => Ok(Vec::new()),
        planned => Ok(prove_mapping(monitor, fleet.snapshot, planned)?),
    }
}

fn prove_disks(fleet: &Fleet<'_>, monitor: &Monitor, folder: &Path) -> Result<(), CloneError> {
    let unproven = |why: String| Err(CloneError::Unproven { why });
    let disks = monitor.all_disks().map_err(JobError::from)?;
    for plan in &fleet.overlays {
        let path = folder.join(&plan.name);
        let Some(disk) = disks.iter().find(|disk| disk.path.as_deref().is_some_and(|found| is_same_file(found, &path)))
        else {
            return unproven(format!("no disk of it is the overlay {}", path.display()));
        };
        // A filter above the overlay stands in the chain with the overlay's own file.
        let is_overlay = |below: &Option<PathBuf>| below.as_deref().is_some_and(|below| is_same_file(below, &path));
        let below = disk.backing.iter().find(|below| !is_overlay(below)).and_then(Option::as_deref);
        if !below.is_some_and(|below| is_same_file(below, plan.disk.path())) {
            let found = below.map_or_else(|| "nothing".to_owned(), |below| below.display().to_string());
            return unproven(format!(
                "below the overlay {} is {found}, and not the frozen disk {}",
                path.display(),
                plan.disk.path().display()
            ));
        }
    }
    let frozen = |path: &Path| fleet.overlays.iter().any(|plan| is_same_file(path, plan.disk.path()));
    match disks.iter().find(|disk| disk.writable && disk.path.as_deref().is_some_and(frozen)) {
        Some(disk) => unproven(format!("its disk {} is the frozen disk itself", disk.filename)),
        None => Ok(()),
    }
}
