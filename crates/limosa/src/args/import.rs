//! The arguments of `limosa import` and `limosa export`.

use std::path::PathBuf;

use clap::Args;
use limosa_image::qcow2::SnapshotChoice;

use super::img::parse_snapshot;
use super::{KeyArgs, NewSnapshotArgs};

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// A recorded migration stream, compressed or not (PATH, or `file:PATH,offset=N` if it does not start at 0), a
    /// libvirt save image, - for standard input, or with --tag a qcow2 image
    #[arg(value_name = "STREAM")]
    pub(crate) stream: PathBuf,

    /// The file to create
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// STREAM is a qcow2 image: take the VM that was saved with this internal snapshot (QEMU's savevm). Its id or name,
    /// or snapshot.id=ID,snapshot.name=NAME
    #[arg(long, value_name = "SNAPSHOT", value_parser = parse_snapshot, conflicts_with = "xml")]
    pub(crate) tag: Option<SnapshotChoice>,

    /// With --tag: another disk of the VM, which must have the same snapshot, of the same moment. May be repeated
    #[arg(long, value_name = "IMAGE", requires = "tag")]
    pub(crate) disk: Vec<PathBuf>,

    /// With --tag: read the image although a VM has it open. Do not delete the snapshot meanwhile
    #[arg(short = 'U', long, requires = "tag")]
    pub(crate) force_share: bool,

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
    /// The snapshot to read: a file, or the URL of an object in a store
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    /// The file to create, or - for standard output
    #[arg(value_name = "STREAM", required_unless_present = "into")]
    pub(crate) stream: Option<PathBuf>,

    /// Put the VM into this qcow2 image, in place of a stream: into a new internal snapshot of the disk as it is now,
    /// from which QEMU takes it with -loadvm
    #[arg(long, value_name = "IMAGE", requires = "tag", conflicts_with = "stream")]
    pub(crate) into: Option<PathBuf>,

    /// With --into: name of the new internal snapshot
    #[arg(long, value_name = "NAME", requires = "into")]
    pub(crate) tag: Option<String>,

    /// With --into: another disk of the VM, which gets a snapshot of the same name and time. May be repeated
    #[arg(long, value_name = "IMAGE", requires = "into")]
    pub(crate) disk: Vec<PathBuf>,

    /// Replace the file if it exists
    #[arg(long, conflicts_with = "into")]
    pub(crate) force: bool,

    /// Print one JSON object on stdout when done; not with - as STREAM
    #[arg(long)]
    pub(crate) json: bool,
}
