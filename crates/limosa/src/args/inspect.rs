//! The arguments of `limosa inspect`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A snapshot, or a file that a migration stream was recorded into
    #[arg(value_name = "SNAPSHOT|STREAM")]
    pub(crate) file: PathBuf,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}
