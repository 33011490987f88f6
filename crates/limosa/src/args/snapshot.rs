//! The arguments of `limosa snapshot`, and what every command takes that makes a snapshot.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use limosa_snapshot::{Durability, WriteOptions};

use super::KeyArgs;

#[derive(Debug, Args)]
pub(crate) struct NewSnapshotArgs {
    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) force: bool,

    /// Record a checksum for every 1 MiB of memory; restore verifies them
    #[arg(long)]
    pub(crate) checksum: bool,

    /// Do not wait until the file is durable; a power failure may lose it
    #[arg(long)]
    pub(crate) no_sync: bool,
}

impl NewSnapshotArgs {
    /// Whether to wait until a power cut cannot lose the file.
    pub(crate) fn durability(&self) -> Durability {
        if self.no_sync { Durability::Unsynced } else { Durability::Synced }
    }

    /// Options of a file that limosa writes.
    pub(crate) fn write_options(&self) -> WriteOptions {
        let mut options = WriteOptions::new();
        options.durability = self.durability();
        options.checksum = self.checksum;
        options
    }
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    #[command(subcommand)]
    pub(crate) command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Make the file mappable, in place
    Seal(SealArgs),
    /// List the snapshots of a directory, and which of them stand on which
    List(ListSnapshotsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ListSnapshotsArgs {
    /// The directory
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Places of zero pages that hold old contents become holes, a new trailer is appended, and the file is \
                        made read-only. It stays a snapshot that QEMU loads. Interrupted, it can be repeated."
)]
pub(crate) struct SealArgs {
    /// The snapshot
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}
