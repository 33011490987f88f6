//! `limosa protect failover`: the VM continues from its newest checkpoint.
//!
//! Laws: **at most one side runs the VM.** A checkpoint says nothing about whether the protected VM still runs, so the
//! caller says that it does not, or gives a command that makes sure of it. **Memory and disks are of one instant**:
//! disks that belong to the checkpoint are brought to it first.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use limosa_protect::take_over;
use limosa_qemu::drop_disks_after;
use limosa_snapshot::{CHECKPOINT_NAME, CheckpointDirectory, Snapshot, SnapshotError};

use crate::args::{DisksArg, FailoverArgs, RunArgs};
use crate::run;

/// How long a keeper whose VM has ended may take to end.
const KEEPER_WITHIN: Duration = Duration::from_secs(10);
/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

pub(super) fn run(args: FailoverArgs, verbose: u8) -> anyhow::Result<ExitCode> {
    let snapshot = args.directory.join(CHECKPOINT_NAME);
    if !snapshot.is_file() {
        bail!("{}: no checkpoint is in this directory", args.directory.display());
    }
    if let Some(command) = &args.fence {
        fence(command)?;
    }
    let directory = newest(&args.directory)?;
    let snapshot = directory.checkpoint();
    if args.how.disks == DisksArg::Check {
        bring_disks(&snapshot, &args.how.disk_server)?;
    }
    drop(directory);
    let FailoverArgs { how, steer, start_within, command, .. } = args;
    run::run(&RunArgs { snapshot, how, steer, start_within, command }, verbose)
}

/// Has a command make sure that the protected VM is off.
pub(super) fn fence(command: &OsStr) -> anyhow::Result<()> {
    let ended = Command::new("sh").arg("-c").arg(command).status().context("cannot run the fence command")?;
    if !ended.success() {
        let command = command.to_string_lossy();
        bail!("`{command}`, the fence command, failed ({ended}): the protected VM may still run");
    }
    Ok(())
}

/// Has the disks of a checkpoint as of it. Only servers that the user named are asked: the file may name others.
fn bring_disks(snapshot: &Path, servers: &[PathBuf]) -> anyhow::Result<()> {
    let snapshot = Snapshot::open(snapshot)?;
    let Some(manifest) = snapshot.manifest() else { return Ok(()) };
    let disks = &manifest.protected_disks;
    if let Some(disk) = disks.first().filter(|_| servers.is_empty()) {
        bail!(
            "the checkpoint has the disk {} ({}), which the server at {} served: give --disk-server, or --disks ignore",
            disk.device,
            disk.path.display(),
            disk.control.display()
        );
    }
    Ok(drop_disks_after(disks, manifest.checkpoint.unwrap_or(0), servers)?)
}

/// Returns the directory once no keeper can replace its checkpoint.
fn newest(directory: &Path) -> anyhow::Result<CheckpointDirectory> {
    let begun = Instant::now();
    loop {
        match CheckpointDirectory::open(directory) {
            Ok(directory) => {
                // Its primary is turned away from now on, should it come back.
                take_over(directory.path())?;
                return Ok(directory);
            }
            Err(SnapshotError::Locked { .. }) if begun.elapsed() < KEEPER_WITHIN => thread::sleep(LOOK_EVERY),
            Err(SnapshotError::Locked { .. }) => bail!(
                "{}: a limosa still keeps checkpoints here, so the protected VM runs: end its protection first",
                directory.display()
            ),
            Err(error) => return Err(error.into()),
        }
    }
}
