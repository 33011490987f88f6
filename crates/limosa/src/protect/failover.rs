//! `limosa protect failover`: the VM continues from its newest checkpoint.
//!
//! Law: **at most one side runs the VM.** A checkpoint says nothing about whether the protected VM still runs, so the
//! caller says that it does not, or gives a command that makes sure of it.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use limosa_snapshot::{CHECKPOINT_NAME, CheckpointDirectory, SnapshotError};

use crate::args::{FailoverArgs, RunArgs};
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
        let ended = Command::new("sh").arg("-c").arg(command).status().context("cannot run the fence command")?;
        if !ended.success() {
            let command = command.to_string_lossy();
            bail!("the fence command failed ({ended}), so the protected VM may still run: {command}");
        }
    }
    let snapshot = newest(&args.directory)?;
    let FailoverArgs { how, steer, start_within, command, .. } = args;
    run::run(&RunArgs { snapshot, how, steer, start_within, command }, verbose)
}

/// Returns the newest checkpoint once no keeper can replace it.
fn newest(directory: &Path) -> anyhow::Result<PathBuf> {
    let begun = Instant::now();
    loop {
        match CheckpointDirectory::open(directory) {
            Ok(directory) => return Ok(directory.checkpoint()),
            Err(SnapshotError::Locked { .. }) if begun.elapsed() < KEEPER_WITHIN => thread::sleep(LOOK_EVERY),
            Err(SnapshotError::Locked { .. }) => bail!(
                "{}: a limosa protect still keeps checkpoints here, so the protected VM runs: end it first",
                directory.display()
            ),
            Err(error) => return Err(error.into()),
        }
    }
}
