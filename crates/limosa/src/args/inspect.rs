//! The arguments of `limosa inspect`.

use std::path::PathBuf;

use clap::Args;
use limosa_image::qcow2::SnapshotChoice;
use limosa_qemu::qmp::MonitorAddress;

use super::KeyArgs;
use super::img::parse_snapshot;

/// A VM that maps a snapshot.
#[derive(Debug, Args)]
#[group(id = "vm", multiple = false)]
pub(crate) struct MappedVmArgs {
    /// The VM's monitor
    #[arg(long, value_name = "SOCK")]
    pub(crate) qmp: Option<MonitorAddress>,

    /// The VM's process, or one that started it
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pid: Option<u32>,
}

impl MappedVmArgs {
    /// Whether the command line names one.
    pub(crate) fn is_given(&self) -> bool {
        self.qmp.is_some() || self.pid.is_some()
    }
}

#[derive(Debug, Args)]
#[command(
    after_help = "With --diff and --against-qmp the exit status is the verdict: 0 no obstacle to loading was found, \
                        1 it would not load, 2 there is no verdict (a file that cannot be read, no monitor, bad usage). \
                        What only loading can tell is listed as \"may\" and does not count."
)]
pub(crate) struct InspectArgs {
    /// A snapshot (a file, or the URL of an object in a store), a file that a migration stream was recorded into, a
    /// libvirt save image, or the directory of a protected VM's checkpoints
    #[arg(value_name = "SNAPSHOT|STREAM|DIR")]
    pub(crate) file: PathBuf,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    /// SNAPSHOT is a qcow2 image: look into the VM that was saved with this internal snapshot (QEMU's savevm). Its id
    /// or name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(long, value_name = "SNAPSHOT", value_parser = parse_snapshot,
        conflicts_with_all = ["diff", "against_qmp", "qemu_args", "changed"])]
    pub(crate) tag: Option<SnapshotChoice>,

    /// With --tag: another disk of the VM, which must have the same snapshot, of the same moment. May be repeated
    #[arg(long, value_name = "IMAGE", requires = "tag")]
    pub(crate) disk: Vec<PathBuf>,

    /// With --tag: read the image although a VM has it open. Do not delete the snapshot meanwhile
    #[arg(short = 'U', long, requires = "tag")]
    pub(crate) force_share: bool,

    /// With --diff: the file, or the object, to compare with
    #[arg(value_name = "OTHER", requires = "diff")]
    pub(crate) other: Option<PathBuf>,

    /// Compare two files: list differences, and whether the first would load where the second was saved
    #[arg(long, requires = "other", conflicts_with = "against_qmp")]
    pub(crate) diff: bool,

    /// With --diff: read the stored pages of two snapshots and count those that differ
    #[arg(long, requires = "diff")]
    pub(crate) memory: bool,

    /// Report whether the file would load in a running QEMU; its state is not changed
    #[arg(long, value_name = "SOCK")]
    pub(crate) against_qmp: Option<MonitorAddress>,

    /// With --against-qmp: the program of this QEMU. It is run without a guest (-dump-vmstate) to learn which device
    /// sections and versions it can read
    #[arg(long, value_name = "BINARY", requires = "against_qmp")]
    pub(crate) qemu: Option<PathBuf>,

    /// Print QEMU's options for a VM whose memory is this snapshot, mapped privately: what the VM writes does not reach
    /// the file. Then restore into it with --memory mapped
    #[arg(long, conflicts_with_all = ["diff", "against_qmp"])]
    pub(crate) qemu_args: bool,

    /// Count and list the pages that a VM which maps this snapshot has made its own
    #[arg(long, requires = "vm", conflicts_with_all = ["diff", "against_qmp", "qemu_args"])]
    pub(crate) changed: bool,

    #[command(flatten)]
    pub(crate) vm: MappedVmArgs,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}
