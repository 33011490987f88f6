//! The arguments of `limosa inspect`.

use std::path::PathBuf;

use clap::Args;
use limosa_qemu::qmp::MonitorAddress;

#[derive(Debug, Args)]
#[command(
    after_help = "With --diff and --against-qmp the exit status is the verdict: 0 nothing was found that ends a load, \
                        1 it would not load, 2 there is no verdict (a file that cannot be read, no monitor, bad usage). \
                        What only loading can tell is listed as \"may\" and does not count."
)]
pub(crate) struct InspectArgs {
    /// A snapshot, a file that a migration stream was recorded into, or a libvirt save image
    #[arg(value_name = "SNAPSHOT|STREAM")]
    pub(crate) file: PathBuf,

    /// With --diff: another one
    #[arg(value_name = "OTHER", requires = "diff")]
    pub(crate) other: Option<PathBuf>,

    /// Compare two files: what differs, and would the first load where the second was saved
    #[arg(long, requires = "other", conflicts_with = "against_qmp")]
    pub(crate) diff: bool,

    /// With --diff: read the stored pages of two snapshots and count those that differ
    #[arg(long, requires = "diff")]
    pub(crate) memory: bool,

    /// Compare with a QEMU: would the file load there. Its state is not changed
    #[arg(long, value_name = "SOCK")]
    pub(crate) against_qmp: Option<MonitorAddress>,

    /// With --against-qmp: the program that this QEMU runs. It is run once more, without a guest, to learn which device
    /// sections and versions it reads (-dump-vmstate)
    #[arg(long, value_name = "BINARY", requires = "against_qmp")]
    pub(crate) qemu: Option<PathBuf>,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}
