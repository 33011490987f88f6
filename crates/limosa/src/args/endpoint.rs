//! Arguments of both ends of a migration without a monitor.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use limosa_console::parse;

#[derive(Debug, Args)]
pub(crate) struct EndpointArgs {
    /// The other end sends no answers: a recorded stream, a pipeline, a command used in one direction
    #[arg(long)]
    pub(crate) one_way: bool,

    /// Longest wait for the other end: to connect, to make progress, to finish
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    pub(crate) timeout: Option<Duration>,

    /// Maximum bandwidth in bytes per second; unlimited by default
    #[arg(long, value_name = "RATE", value_parser = parse::rate)]
    pub(crate) max_bandwidth: Option<NonZeroU64>,

    /// Create a QMP-like socket here to monitor and control the job (`query-migrate`, `migrate_cancel`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}
