//! `limosa protect failover`: the VM continues from its newest checkpoint.
//!
//! Laws: **at most one side runs the VM.** A checkpoint says nothing about whether the protected VM still runs, so that
//! is [fenced](Fence) first, and a VM that continues already is found by the record of its directory. **Memory and
//! disks are of one instant**: disks that belong to the checkpoint are brought to it first.

use std::cell::Cell;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use limosa_console::{anyhow_error_line, say};
use limosa_protect::{give_back, has_survivor, take_over};
use limosa_snapshot::{CHECKPOINT_NAME, CheckpointDirectory, Manifest, Snapshot, SnapshotError};

use super::fence::{Fence, run_command};
use crate::args::{DisksArg, FailoverArgs, KeyArgs, RunArgs};
use crate::run::{self, Caller};

/// How long a keeper whose VM has ended may take to end.
const KEEPER_WITHIN: Duration = Duration::from_secs(10);
/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long a keeper is watched whose VM a command would end.
const WATCHED_FOR: Duration = Duration::from_secs(3);

pub(super) fn run(args: FailoverArgs, verbose: u8) -> anyhow::Result<ExitCode> {
    let snapshot = args.directory.join(CHECKPOINT_NAME);
    if !snapshot.is_file() {
        bail!("{}: no checkpoint is in this directory", args.directory.display());
    }
    // Before anything is fenced: it would be the survivor. A keeper may be replacing the checkpoint at this moment.
    if let Ok(manifest) = read_manifest(&snapshot) {
        refuse_survivor(&args.directory, has_survivor(&args.directory, &manifest)?)?;
    }
    let FailoverArgs { directory: place, fenced, fence: command, gate, how, steer, start_within, command: line } = args;
    let key = KeyArgs::default();
    let vm = RunArgs { snapshot: snapshot.clone(), key, how, steer, start_within, command: line };
    // A VM that could not be continued is better left alone, too.
    again(|| run::check(&vm))?;
    let fence = Fence {
        gates: &gate,
        disk_servers: (vm.how.disks == DisksArg::Check).then_some(vm.how.disk_server.as_slice()),
        is_off: fenced || command.is_some(),
    };
    if let Some(command) = &command {
        refuse_progress(&place)?;
        // A keeper that still has the directory may change it at this moment.
        fence.look(&again(|| Ok(read_manifest(&snapshot)?))?)?;
        run_command(command)?;
    }
    let directory = newest(&place)?;
    let manifest = read_manifest(&snapshot)?;
    // Another failover may have been faster.
    refuse_survivor(&place, has_survivor(&place, &manifest)?)?;
    let fenced_by = fence.close(&manifest)?;
    if verbose > 0 && !fenced_by.is_empty() {
        say!("limosa: the protected VM is refused by {}", fenced_by.join(", "));
    }
    let held = Cell::new(Some(directory));
    let (is_taken, had_guest) = (Cell::new(false), Cell::new(false));
    // QEMU may be started a second time, if it does not know an option.
    let take = || {
        if !is_taken.get() {
            // Its primary is turned away from now on, should it come back.
            refuse_survivor(&place, !take_over(&place, &manifest)?)?;
            is_taken.set(true);
            drop(held.take());
        }
        Ok(())
    };
    let caller = Caller { started: &take, had_guest: &had_guest };
    let ended = run::run_for(&caller, &vm, verbose);
    if is_taken.get() && !had_guest.get() {
        // Held, so that no other failover writes the record meanwhile.
        let given_back = newest(&place).and_then(|_held| Ok(give_back(&place, &manifest)?));
        if let Err(error) = given_back {
            say!("limosa: {}", anyhow_error_line(&error));
        }
    }
    ended
}

/// Tries once more what may have failed because a keeper that has the directory changed it at this moment.
fn again<T>(done: impl Fn() -> anyhow::Result<T>) -> anyhow::Result<T> {
    done().or_else(|_| {
        thread::sleep(LOOK_EVERY);
        done()
    })
}

/// Returns what a checkpoint says of its VM: nothing if no limosa of today has made it.
fn read_manifest(snapshot: &Path) -> Result<Manifest, SnapshotError> {
    Ok(Snapshot::open(snapshot)?.manifest().cloned().unwrap_or_else(Manifest::new))
}

fn refuse_survivor(directory: &Path, has_survivor: bool) -> anyhow::Result<()> {
    if has_survivor {
        bail!(
            "{}: the VM has continued from this checkpoint already; if that VM is gone, start it from there again with \
             limosa run {}/{CHECKPOINT_NAME}",
            directory.display(),
            directory.display()
        );
    }
    Ok(())
}

/// Refuses a directory in which checkpoints are still kept: its VM runs, and a fence would end it. A keeper that hangs,
/// or waits for a VM that does, keeps none.
fn refuse_progress(directory: &Path) -> anyhow::Result<()> {
    let newest = || {
        // It is replaced now and then.
        let snapshot = Snapshot::open(&directory.join(CHECKPOINT_NAME)).ok()?;
        snapshot.manifest().map(|manifest| (manifest.protection, manifest.checkpoint))
    };
    let (begun, mut first) = (Instant::now(), newest());
    while begun.elapsed() < WATCHED_FOR && CheckpointDirectory::is_kept(directory)? {
        thread::sleep(LOOK_EVERY);
        let now = newest();
        first = first.or(now);
        if now.is_some() && now != first {
            return Err(still_kept(directory));
        }
    }
    Ok(())
}

fn still_kept(directory: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "{}: a limosa still keeps checkpoints here, so the protected VM runs: end its protection first",
        directory.display()
    )
}

/// Returns the directory once no keeper can replace its checkpoint.
fn newest(directory: &Path) -> anyhow::Result<CheckpointDirectory> {
    let begun = Instant::now();
    loop {
        match CheckpointDirectory::open(directory) {
            Ok(directory) => return Ok(directory),
            Err(SnapshotError::Locked { .. }) if begun.elapsed() < KEEPER_WITHIN => thread::sleep(LOOK_EVERY),
            Err(SnapshotError::Locked { .. }) => return Err(still_kept(directory)),
            Err(error) => return Err(error.into()),
        }
    }
}
