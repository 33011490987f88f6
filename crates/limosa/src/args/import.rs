//! The arguments of `limosa import` and `limosa export`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// A recorded migration stream, packed or not (PATH, or `file:PATH,offset=N` if it begins later), a libvirt save image, or -
    /// for standard input
    #[arg(value_name = "STREAM")]
    pub(crate) stream: PathBuf,

    /// The file to make
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// Write the domain's XML out of a libvirt save image into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) xml: Option<PathBuf>,

    /// Replace the files if they are there
    #[arg(long)]
    pub(crate) force: bool,

    /// Record a checksum of every 1 MiB of memory, verified when it is restored
    #[arg(long)]
    pub(crate) checksum: bool,

    /// Do not wait for the file to be durable: a power cut may lose it
    #[arg(long)]
    pub(crate) no_sync: bool,

    /// Listen here for programs that watch and steer the job (as QMP does: `query-migrate`, `migrate_cancel`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The snapshot to read
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// The file to make, or - for standard output
    #[arg(value_name = "STREAM")]
    pub(crate) stream: PathBuf,

    /// Replace the file if it is there
    #[arg(long)]
    pub(crate) force: bool,

    /// Print one JSON object on stdout when done; not together with -
    #[arg(long)]
    pub(crate) json: bool,
}
