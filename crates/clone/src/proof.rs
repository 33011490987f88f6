//! Proof that a QEMU has the right memory and disks, before it gets its VM.
//!
//! The law: **a clone gets its VM when its memory and its disks are proven**, by its process and its block layer. Its
//! command line proves nothing: a script that starts QEMU may drop options or add some.

use std::path::{Path, PathBuf};

use limosa_migrate::stored::PresentBlock;
use limosa_qemu::monitor::{Disk, Monitor};
use limosa_qemu::{JobError, is_same_file, prove_mapping};
use limosa_snapshot::BackingFile;

use crate::error::CloneError;
use crate::fleet::Fleet;

/// Returns the RAM blocks that this QEMU maps, with the pages that it has written since.
///
/// # Errors
/// Memory that is not mapped as planned; an overlay that is missing or has other images below it; a frozen disk that is
/// attached for writing.
pub(crate) fn prove(fleet: &Fleet<'_>, monitor: &Monitor, folder: &Path) -> Result<Vec<PresentBlock>, CloneError> {
    prove_disks(fleet, monitor, folder)?;
    Ok(prove_mapping(monitor, fleet.snapshot, &fleet.mapped)?)
}

fn prove_disks(fleet: &Fleet<'_>, monitor: &Monitor, folder: &Path) -> Result<(), CloneError> {
    let unproven = |why: String| Err(CloneError::CommandLineMismatch { why });
    let disks = monitor.all_disks().map_err(JobError::from)?;
    for (number, plan) in fleet.overlays.iter().enumerate() {
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
        let recorded = fleet.snapshot.manifest().and_then(|manifest| manifest.disks.get(number));
        prove_lower_files(plan.disk.path(), disk, recorded.map_or(&[][..], |recorded| &recorded.backing))?;
    }
    let frozen = |path: &Path| fleet.overlays.iter().any(|plan| is_same_file(path, plan.disk.path()));
    match disks.iter().find(|disk| disk.writable && disk.path.as_deref().is_some_and(frozen)) {
        Some(disk) => unproven(format!("its disk {} is the frozen disk itself", disk.filename)),
        None => Ok(()),
    }
}

/// Below the frozen disk are the files that the saved VM had there. Its options may have named others than the files
/// themselves do.
fn prove_lower_files(frozen: &Path, disk: &Disk, recorded: &[BackingFile]) -> Result<(), CloneError> {
    let recorded: Vec<_> = recorded.iter().map(|below| below.path.as_path()).collect();
    // Older snapshots have no record; a relative path is one of a directory that limosa could not read.
    if recorded.is_empty() || recorded.iter().any(|path| path.is_relative()) {
        return Ok(());
    }
    let found: Vec<_> = disk.lower_files().skip_while(|path| !is_same_file(path, frozen)).skip(1).collect();
    if found.len() == recorded.len() && found.iter().zip(&recorded).all(|(found, path)| is_same_file(found, path)) {
        return Ok(());
    }
    let list = |paths: &[&Path]| match paths {
        [] => "nothing".to_owned(),
        paths => paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
    };
    Err(CloneError::CommandLineMismatch {
        why: format!(
            "below the frozen disk {} is {}, and when the VM was saved it was {}",
            frozen.display(),
            list(&found),
            list(&recorded)
        ),
    })
}
