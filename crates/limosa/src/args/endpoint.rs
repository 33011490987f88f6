//! What both ends of a migration without a monitor take.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::values::{parse_rate, parse_time};

#[derive(Debug, Args)]
pub(crate) struct EndpointArgs {
    /// Nothing comes back from the other end: a recorded stream, a pipeline, a command that only takes or only gives
    #[arg(long)]
    pub(crate) one_way: bool,

    /// Longest wait for the other end: to come or be reached, to go on, to finish
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) timeout: Option<Duration>,

    /// Most bytes a second, no limit by default
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) max_bandwidth: Option<NonZeroU64>,

    /// Listen here for programs that watch and steer the job (as QMP does: `query-migrate`, `migrate_cancel`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}
