//! The arguments of `limosa completions` and `limosa man`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShellArg {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell that is to complete limosa's commands and options
    #[arg(value_enum)]
    pub(crate) shell: ShellArg,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Where the pages are written, limosa.1 and one for each command; made if it is not there
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}
