//! `limosa inspect DIR`: the directory of a protected VM's checkpoints.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use limosa_console::{check_stdout, print_out, quantity};
use limosa_snapshot::{CHECKPOINT_NAME, CheckpointDirectory, Manifest, Snapshot, SnapshotError, Summary};
use serde_json::json;

use crate::report;

/// How often a checkpoint is opened that is replaced meanwhile.
const ATTEMPTS: u32 = 100;
/// Time between two attempts.
const AGAIN_AFTER: Duration = Duration::from_millis(3);

/// The newest checkpoint.
struct Newest {
    summary: Summary,
    /// Its number; none if the file is another program's.
    number: Option<u64>,
    counted: SystemTime,
}

/// Shows which checkpoint is the newest, and whether more follow.
pub(crate) fn inspect(directory: &Path, as_json: bool) -> anyhow::Result<ExitCode> {
    let is_kept = CheckpointDirectory::is_kept(directory)?;
    let Some(newest) = newest(&directory.join(CHECKPOINT_NAME))? else {
        let more = if is_kept { "; a limosa protect receives the first one" } else { "" };
        bail!("{}: no checkpoint is in this directory{more}", directory.display());
    };
    let age = newest.counted.elapsed().unwrap_or_default();
    if as_json {
        let object = json!({
            "directory": directory.to_string_lossy(),
            "checkpoint": newest.number,
            "kept": is_kept,
            "age_ms": quantity::millis(age),
            "snapshot": newest.summary,
        });
        print_out!("{object}");
    } else {
        show(directory, &newest, is_kept, age);
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the newest checkpoint, if there is one. It may become the spare while it is read. A lock would prevent that,
/// and have its keeper copy all of the VM.
fn newest(path: &Path) -> anyhow::Result<Option<Newest>> {
    let mut attempt = 1;
    loop {
        match open(path) {
            Ok(newest) => return Ok(Some(newest)),
            Err(error) if is_missing(&error) => return Ok(None),
            Err(_) if attempt < ATTEMPTS => thread::sleep(AGAIN_AFTER),
            Err(error) => return Err(error),
        }
        attempt += 1;
    }
}

fn open(path: &Path) -> anyhow::Result<Newest> {
    let snapshot = Snapshot::open(path)?;
    let number = snapshot.manifest().and_then(|manifest| manifest.checkpoint);
    let counted =
        std::fs::metadata(path).and_then(|file| file.modified()).with_context(|| path.display().to_string())?;
    Ok(Newest { summary: snapshot.summary(), number, counted })
}

/// The names of the disks that belong to a checkpoint.
fn disks(manifest: &Manifest) -> impl Iterator<Item = &str> {
    let recorded = manifest.disks.iter().map(|disk| disk.device.as_deref().unwrap_or(&disk.node));
    let served = manifest.protected_disks.iter().map(|disk| disk.device.as_str());
    recorded.chain(served).chain(manifest.overlaid_disks.iter().map(|disk| disk.device.as_str()))
}

fn is_missing(error: &anyhow::Error) -> bool {
    let is_missing = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref() {
        Some(SnapshotError::Io { source, .. }) => source.kind() == io::ErrorKind::NotFound,
        _ => false,
    };
    error.chain().any(is_missing)
}

fn show(directory: &Path, newest: &Newest, is_kept: bool, age: Duration) {
    let Newest { summary, number, counted } = newest;
    let number =
        number.map_or_else(|| "a snapshot that is no checkpoint".into(), |number| format!("checkpoint {number}"));
    print_out!("{}: {number}, {} old", directory.display(), quantity::time(age));
    let since = counted.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    print_out!("counted       {}", report::date(since.as_secs()));
    print_out!(
        "keeper        {}",
        if is_kept { "alive: more follow" } else { "none: the VM is not protected into this directory now" }
    );
    let (length, allocated) = (quantity::bytes(summary.length), quantity::bytes(summary.allocated));
    print_out!("file          {} ({length}, {allocated} on disk)", summary.path);
    if let Some(manifest) = &summary.manifest {
        if let Some(name) = &manifest.vm_name {
            print_out!("VM            {name}");
        }
        if let Some(uuid) = &manifest.vm_uuid {
            print_out!("VM uuid       {uuid}");
        }
        print_out!("QEMU          {}", manifest.qemu_version.as_deref().unwrap_or("unknown"));
    }
    print_out!("machine       {}", summary.machine);
    print_out!("run state     {}", summary.run_state.as_deref().unwrap_or("not recorded"));
    let used = summary.blocks.iter().map(|block| block.used).sum();
    let stored: u64 = summary.blocks.iter().map(|block| block.stored).sum();
    let stored = quantity::bytes(stored.saturating_mul(limosa_page::PAGE_SIZE));
    print_out!("memory        {}, {stored} of it not zero", quantity::bytes(used));
    let names: Vec<&str> = summary.manifest.iter().flat_map(disks).collect();
    print_out!("disks         {}", if names.is_empty() { "none in it".to_owned() } else { names.join(", ") });
}
