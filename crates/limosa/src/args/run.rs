//! The arguments of `limosa run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{HowArgs, KeyArgs, SteerArgs};
use limosa_console::parse;

#[derive(Debug, Args)]
#[command(
    after_help = "Terminal, signals and exit status are QEMU's. limosa prints nothing unless it fails or -v is given.\n\
                        To be able to recover a restore after limosa was killed, give QEMU a separate -qmp socket."
)]
pub(crate) struct RunArgs {
    /// The snapshot to restore from: a file, or the URL of an object in a store
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    #[command(flatten)]
    pub(crate) how: HowArgs,

    #[command(flatten)]
    pub(crate) steer: SteerArgs,

    /// How long QEMU may take to start
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "60s")]
    pub(crate) start_within: Duration,

    /// The command line that the saved VM was started with; limosa adds -incoming and a private monitor
    #[arg(value_name = "QEMU", last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}
