//! The arguments of `limosa img amend`.

use std::ffi::OsString;

use clap::Args;
use limosa_storage::CacheMode;

use super::image::{ImageArgs, QuietArg};
use crate::img::options::{AmendOptions, Source};
use crate::program;

#[derive(Debug, Args)]
pub(crate) struct ImgAmendArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// Options of the format to change: NAME=VALUE[,NAME=VALUE...]; -o help lists them. Repeatable
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    options: Vec<String>,

    /// Cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,

    /// Overwrite active key slots, and erase the last one: all data may be lost
    #[arg(long)]
    force: bool,

    /// Show progress, even without a terminal
    // The help of qemu-img 10.0 spells it like the alias, which its parser takes as an abbreviation.
    #[arg(short, long, alias = "progres")]
    progress: bool,

    #[command(flatten)]
    quiet: QuietArg,

    /// The image
    #[arg(value_name = "FILE", required_unless_present = "options")]
    file: Option<OsString>,
}

impl ImgAmendArgs {
    /// Resolves the arguments.
    ///
    /// # Errors
    /// No options or no file were given.
    pub(crate) fn resolve(self) -> anyhow::Result<AmendOptions> {
        let options = self.options.join(",");
        if options.is_empty() {
            anyhow::bail!("nothing to change; use {} amend -o OPTIONS FILE (-o help lists them)", program::img());
        }
        let name = self.file.unwrap_or_default();
        Ok(AmendOptions {
            source: Source { cache: self.cache, ..self.image.source(&name) },
            options,
            force: self.force,
            progress: self.progress,
            quiet: self.quiet.quiet,
        })
    }
}
