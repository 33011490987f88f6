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
use limosa_protect::{bring_disks, take_over};
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
        expect_servers(&snapshot, &args.how.disk_server)?;
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

/// Refuses a checkpoint with disks if no server was named. Only those that the user named are asked: the file may name
/// others.
fn expect_servers(snapshot: &Path, servers: &[PathBuf]) -> anyhow::Result<()> {
    let snapshot = Snapshot::open(snapshot)?;
    let disks = snapshot.manifest().map(|manifest| manifest.protected_disks.as_slice()).unwrap_or_default();
    if let Some(disk) = disks.first().filter(|_| servers.is_empty()) {
        bail!(
            "the checkpoint has the disk {} ({}), which the server at {} served: give --disk-server, or --disks ignore",
            disk.device,
            disk.path.display(),
            disk.control.display()
        );
    }
    Ok(())
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
