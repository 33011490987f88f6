//! The arguments about working sets.

use std::time::Duration;

use clap::{Args, ValueEnum};
use limosa_console::parse;

/// Whether a recorded working set is read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReadAheadArg {
    /// If the memory comes lazily and the snapshot has a working set
    Auto,
    /// Also if the memory is mapped; it is an error if there is no working set
    On,
    /// Never
    Off,
}

/// How long a guest is recorded if no time is given.
pub(crate) const RECORDED_BY_DEFAULT: &str = "10s";

/// How working sets are recorded and used.
#[derive(Debug, Args)]
pub(crate) struct WorkingSetArgs {
    /// Record which pages the guest touches within TIME (10s by default) after its start, in SNAPSHOT.working-set.
    /// SIGINT ends the recording (of limosa run: the VM). A lazy restore sends only requested pages meanwhile
    #[arg(
        long,
        value_name = "TIME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = RECORDED_BY_DEFAULT,
        value_parser = parse::time
    )]
    pub(crate) record_working_set: Option<Duration>,

    /// Send the pages of the recorded working set first, or, if the memory is mapped, read them into the page cache
    #[arg(long, value_enum, default_value_t = ReadAheadArg::Auto, value_name = "WHEN")]
    pub(crate) read_ahead: ReadAheadArg,
}
