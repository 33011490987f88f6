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
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: ShellArg,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory of the pages: limosa.1 and one for each command. It is created if it does not exist, and so are the
    /// directories above it; pages of the same name are replaced
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}
