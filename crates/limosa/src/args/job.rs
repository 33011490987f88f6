//! Arguments of every job on a QEMU.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use limosa_qemu::qmp::MonitorAddress;

use limosa_console::parse;

/// Who writes or reads the pages of a snapshot. Its values are described where the option is: a save writes and a
/// restore reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransportArg {
    /// `File` where it is possible, else `Socket`.
    Auto,
    /// QEMU itself, through a file descriptor that limosa passes.
    File,
    /// limosa, at the other end of a migration stream.
    Socket,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DisksArg {
    /// Refuse if memory and disks could be from different points in time
    Check,
    /// Do not check; disks are kept consistent by other means
    Ignore,
}

/// How a QEMU is reached, and how the job is watched.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// QEMU's monitor: a unix socket's path, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "SOCK")]
    pub(crate) qmp: MonitorAddress,

    #[command(flatten)]
    pub(crate) steer: SteerArgs,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

/// How a job is watched and reached into.
#[derive(Debug, Args)]
pub(crate) struct SteerArgs {
    /// Maximum bandwidth in bytes per second, unlimited by default; QEMU is imprecise below a few MiB
    #[arg(long, value_name = "RATE", value_parser = parse::rate)]
    pub(crate) max_bandwidth: Option<NonZeroU64>,

    /// Create a QMP-like socket here to monitor and control the job (`query-migrate`, `migrate_cancel`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,
}
