//! What every job on a QEMU takes.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use limosa_qemu::qmp::MonitorAddress;

use super::values::parse_rate;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ViaArg {
    /// By file where QEMU can (9.0 or newer, on this host), else through a socket
    Auto,
    /// QEMU writes or reads the file itself, through a descriptor that limosa passes
    File,
    /// limosa receives or sends the migration stream
    Socket,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DisksArg {
    /// Refuse where memory and disks could be of different instants
    Check,
    /// Somebody else keeps the disks consistent
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
    /// Most bytes a second, no limit by default; below a few MiB QEMU keeps it only roughly
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) max_bandwidth: Option<NonZeroU64>,

    /// Listen here for programs that watch and steer the job (as QMP does: `query-migrate`, `migrate_cancel`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,
}
