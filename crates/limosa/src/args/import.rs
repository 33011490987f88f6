//! The arguments of `limosa import` and `limosa export`.

use std::path::PathBuf;

use clap::Args;

use super::NewSnapshotArgs;

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// A recorded migration stream, compressed or not (PATH, or `file:PATH,offset=N` if it does not start at 0), a
    /// libvirt save image, or - for standard input
    #[arg(value_name = "STREAM")]
    pub(crate) stream: PathBuf,

    /// The file to create
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// Write the domain XML of a libvirt save image to this file; --force replaces it too
    #[arg(long, value_name = "FILE")]
    pub(crate) xml: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) new: NewSnapshotArgs,

    /// Create a QMP-like socket here to monitor and control the job (`query-migrate`, `migrate_cancel`, ...)
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

    /// The file to create, or - for standard output
    #[arg(value_name = "STREAM")]
    pub(crate) stream: PathBuf,

    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) force: bool,

    /// Print one JSON object on stdout when done; not with - as STREAM
    #[arg(long)]
    pub(crate) json: bool,
}
