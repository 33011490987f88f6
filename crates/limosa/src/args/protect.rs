//! The arguments of `limosa protect`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use limosa_console::parse;
use limosa_qemu::qmp::MonitorAddress;

use super::{HowArgs, SteerArgs};

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_long_help = "limosa protect --qmp /run/vm.qmp /srv/vm --every 100ms\n  \
limosa protect failover /srv/vm --fence 'ssh host poweroff' -- qemu-system-x86_64 -m 4G ...\n\n\
DIR/checkpoint.limosa is at every moment a whole snapshot. The VM needs QEMU 11.1, or 10.0.7 with KVM. Its network \
output is not held back: after a failover, others may have seen what the VM no longer knows."
)]
pub(crate) struct ProtectArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ProtectCommand>,

    #[command(flatten)]
    pub(crate) keep: Option<KeepArgs>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProtectCommand {
    /// Start a QEMU from the newest checkpoint, once the protected VM cannot run any more
    Failover(Box<FailoverArgs>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DurableArg {
    /// A checkpoint survives the end of any process, and not a power cut
    Process,
    /// A checkpoint survives a power cut: it counts when it is on the disk
    Disk,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProtectDisksArg {
    /// Refuse a VM that has writable disks
    Refuse,
    /// Do not check; disks are kept consistent by other means
    Ignore,
}

#[derive(Debug, Args)]
pub(crate) struct KeepArgs {
    /// QEMU's monitor: a unix socket's path, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "SOCK")]
    pub(crate) qmp: MonitorAddress,

    /// The directory of the checkpoints; it is created if it does not exist
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,

    /// Time between checkpoints, at least 1 ms
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "100ms")]
    pub(crate) every: Duration,

    /// Failures that a checkpoint must survive before it counts
    #[arg(long, value_enum, default_value_t = DurableArg::Process)]
    pub(crate) durable: DurableArg,

    /// How to treat writable disks
    #[arg(long, value_enum, default_value_t = ProtectDisksArg::Refuse)]
    pub(crate) disks: ProtectDisksArg,

    /// How long the VM may stand still for a checkpoint that makes no progress; it then continues without protection
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "2s")]
    pub(crate) stall_timeout: Duration,

    /// Create a QMP-like socket here to monitor and control the job (`query-migrate`, `migrate_cancel`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("fencing").args(["fenced", "fence"]).required(true),
    after_help = "Terminal, signals and exit status are QEMU's. limosa prints nothing unless it fails or -v is given."
)]
pub(crate) struct FailoverArgs {
    /// The directory of the checkpoints
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,

    /// The protected VM is known not to run any more, and not to come back
    #[arg(long)]
    pub(crate) fenced: bool,

    /// A shell command that makes sure of that; it must exit with 0
    #[arg(long, value_name = "COMMAND")]
    pub(crate) fence: Option<OsString>,

    #[command(flatten)]
    pub(crate) how: HowArgs,

    #[command(flatten)]
    pub(crate) steer: SteerArgs,

    /// How long QEMU may take to start
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "60s")]
    pub(crate) start_within: Duration,

    /// The command line that the protected VM was started with; limosa adds -incoming and a private monitor
    #[arg(value_name = "QEMU", last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}
