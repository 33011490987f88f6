//! The arguments of `limosa snapshot`, and what every command takes that makes a snapshot.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use limosa_pack::DEFAULT_LEVEL;
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
    /// Remove snapshots that no other file of their directory stands on
    Rm(RemoveSnapshotsArgs),
    /// Have a packed snapshot stand on another base, or on none, without changing what it holds
    Rebase(RebaseSnapshotArgs),
    /// Remove a packed snapshot that others stand on; these take over what they need of it
    Merge(MergeSnapshotArgs),
    /// Remove old packed snapshots; those that stay take over what they need of them, in a store they keep their bases
    Prune(PruneSnapshotsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ListSnapshotsArgs {
    /// The directory, or the URL of a folder of an object store
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveSnapshotsArgs {
    /// The snapshots. One that another one of them stands on may come before it
    #[arg(value_name = "SNAPSHOT", required = true)]
    pub(crate) snapshots: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) ignore: IgnoreArgs,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

/// Files of a directory that are not looked into.
#[derive(Debug, Args)]
pub(crate) struct IgnoreArgs {
    /// A file of the directory that stands on none of its snapshots, for one that limosa cannot look into. May be given
    /// several times
    #[arg(long, value_name = "NAME")]
    pub(crate) ignore: Vec<OsString>,
}

/// How snapshots are packed again.
#[derive(Debug, Args)]
pub(crate) struct RepackArgs {
    /// Level of zstd for what is packed again
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LEVEL, value_parser = clap::value_parser!(u8).range(1..=22))]
    pub(crate) level: u8,

    #[command(flatten)]
    pub(crate) ignore: IgnoreArgs,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("onto").required(true).args(["base", "whole"])))]
pub(crate) struct RebaseSnapshotArgs {
    /// The snapshot
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// The new base: a packed snapshot in the same directory
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) base: Option<PathBuf>,

    /// Have it stand on nothing
    #[arg(long)]
    pub(crate) whole: bool,

    #[command(flatten)]
    pub(crate) repack: RepackArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MergeSnapshotArgs {
    /// The snapshot, which is removed
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    #[command(flatten)]
    pub(crate) repack: RepackArgs,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("rules").required(true).multiple(true).args(["keep_last", "keep_daily"])))]
pub(crate) struct PruneSnapshotsArgs {
    /// The directory, or the URL of a folder of an object store
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,

    /// Keep the newest N snapshots of each VM
    #[arg(long, value_name = "N")]
    pub(crate) keep_last: Option<NonZeroUsize>,

    /// Keep the newest snapshot of each day (UTC), of the newest N days with snapshots of the VM
    #[arg(long, value_name = "N")]
    pub(crate) keep_daily: Option<NonZeroUsize>,

    /// Only say what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,

    #[command(flatten)]
    pub(crate) repack: RepackArgs,
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
