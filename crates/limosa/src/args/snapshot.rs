//! What every command takes that makes a snapshot.

use clap::Args;
use limosa_snapshot::Durability;

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
}
