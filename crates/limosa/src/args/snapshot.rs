//! What every command takes that makes a snapshot.

use clap::Args;
use limosa_snapshot::Durability;

#[derive(Debug, Args)]
pub(crate) struct NewSnapshotArgs {
    /// Replace the file if it is there
    #[arg(long)]
    pub(crate) force: bool,

    /// Record a checksum of every 1 MiB of memory, verified when it is restored
    #[arg(long)]
    pub(crate) checksum: bool,

    /// Do not wait for the file to be durable: a power cut may lose it
    #[arg(long)]
    pub(crate) no_sync: bool,
}

impl NewSnapshotArgs {
    /// Whether to wait until a power cut cannot lose the file.
    pub(crate) fn durability(&self) -> Durability {
        if self.no_sync { Durability::Unsynced } else { Durability::Synced }
    }
}
