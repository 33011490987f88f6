//! The arguments of `limosa img create`.

use std::ffi::OsString;

use clap::Args;

use super::image::{OpenArgs, QuietArg};
use crate::img::options::{CreateOptions, Name, Target};
use crate::img::size::parse_size;
use crate::program;

#[derive(Debug, Args)]
pub(crate) struct ImgCreateArgs {
    /// The new image's format: raw, qcow2 or luks
    #[arg(short, long, value_name = "FMT", default_value = "raw")]
    format: String,

    /// Options of the format: NAME=VALUE[,NAME=VALUE...]; -o help lists them. Repeatable
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,

    /// The backing file: provides the contents of clusters not yet written
    #[arg(short, long, value_name = "FILE")]
    backing: Option<OsString>,

    /// Format of the backing file
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,

    /// Do not open the backing file; it need not exist
    #[arg(short = 'u', long)]
    backing_unsafe: bool,

    #[command(flatten)]
    quiet: QuietArg,

    #[command(flatten)]
    pub(super) open: OpenArgs,

    /// The image; an existing file is overwritten
    #[arg(value_name = "FILE", required_unless_present = "options")]
    file: Option<OsString>,

    /// The virtual size; default: that of the backing file
    #[arg(value_name = "SIZE", value_parser = parse_size, allow_hyphen_values = true)]
    size: Option<u64>,
}

impl ImgCreateArgs {
    /// Resolves the arguments.
    ///
    /// # Errors
    /// No file was given.
    pub(crate) fn resolve(self) -> anyhow::Result<CreateOptions> {
        let target = Target { format: self.format, options: self.options.join(","), ..Target::default() };
        if self.file.is_none() && !target.asks_for_help() {
            anyhow::bail!("file not given; use {} create FILE [SIZE]", program::img());
        }
        Ok(CreateOptions {
            target,
            name: Name(self.file.unwrap_or_default()),
            size: self.size,
            backing: self.backing,
            backing_format: self.backing_format,
            backing_unsafe: self.backing_unsafe,
            untrusted: self.open.untrusted,
            quiet: self.quiet.quiet,
        })
    }
}
