//! `limosa protect merge`: all that a VM wrote is brought to its images, and its checkpoint is given up.

use std::process::ExitCode;

use anyhow::bail;
use limosa_console::say;
use limosa_qemu::merge_overlays;
use limosa_snapshot::{CHECKPOINT_NAME, CheckpointDirectory, Snapshot};

use crate::args::MergeArgs;

pub(super) fn run(MergeArgs { directory }: &MergeArgs) -> anyhow::Result<ExitCode> {
    let path = directory.join(CHECKPOINT_NAME);
    if !path.is_file() {
        bail!("{}: no checkpoint is in this directory", directory.display());
    }
    // A keeper that lives, or a failover, has the disks.
    let _held = CheckpointDirectory::open(directory)?;
    let snapshot = Snapshot::open(&path)?;
    let disks = snapshot.manifest().map(|manifest| manifest.overlaid_disks.clone()).unwrap_or_default();
    if disks.is_empty() {
        bail!("{}: no disk of this checkpoint has overlays", path.display());
    }
    merge_overlays(&disks)?;
    let images: Vec<String> = disks.iter().map(|disk| disk.path.display().to_string()).collect();
    if let [disk, ..] = snapshot.manifest().map(|manifest| manifest.protected_disks.as_slice()).unwrap_or_default() {
        say!(
            "limosa: the disk {} is not one of them: its server at {} brings all that the VM wrote to it with limosa serve \
             ctl unprotect",
            disk.device,
            disk.control.display()
        );
    }
    say!("limosa: {} has all that the VM wrote; {} cannot be continued from", images.join(", "), path.display());
    Ok(ExitCode::SUCCESS)
}
