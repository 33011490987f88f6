//! The arguments of `limosa bench`.

use std::path::PathBuf;

use clap::Args;

use super::values::parse_size;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_name = "NAME", value_parser = ["save", "restore", "landing"])]
    pub(crate) name: String,

    /// Memory of the VMs; 2G for save, 4G for restore, 1G for landing by default
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) size: Option<u64>,

    /// How often each contestant runs
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) rounds: u32,

    /// Where files are made; the temporary directory by default
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,

    /// Run only the contestants whose case and variant, as reported, begin with this
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,

    /// Exit with 1 if a target is not met
    #[arg(long)]
    pub(crate) check: bool,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}
