//! The arguments of `limosa import` and `limosa export`.

use std::path::PathBuf;

use clap::Args;

use super::NewSnapshotArgs;

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// A recorded migration stream, packed or not (PATH, or `file:PATH,offset=N` if it begins later), a libvirt save image, or -
    /// for standard input
    #[arg(value_name = "STREAM")]
    pub(crate) stream: PathBuf,

    /// The file to make
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// Write the domain's XML out of a libvirt save image into this file; --force replaces it too
    #[arg(long, value_name = "FILE")]
    pub(crate) xml: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) new: NewSnapshotArgs,

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
