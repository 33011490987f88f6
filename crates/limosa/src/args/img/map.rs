//! The arguments of `limosa img map`.

use std::ffi::OsString;

use clap::Args;

use super::image::{ImageArgs, OutputArgs, ShareArg};
use crate::img::options::{MapOptions, Source};
use crate::img::size::parse_size;

#[derive(Debug, Args)]
pub(crate) struct ImgMapArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// Start offset in bytes
    #[arg(short, long, value_name = "SIZE", default_value = "0", value_parser = parse_size, allow_hyphen_values = true)]
    start_offset: u64,

    /// Number of bytes to map; default: to the end
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = parse_size, allow_hyphen_values = true)]
    max_length: Option<u64>,

    #[command(flatten)]
    share: ShareArg,

    #[command(flatten)]
    output: OutputArgs,

    /// The image
    #[arg(value_name = "FILE")]
    file: OsString,
}

impl ImgMapArgs {
    /// Resolves the arguments.
    pub(crate) fn resolve(self) -> MapOptions {
        MapOptions {
            source: Source { force_share: self.share.force_share, ..self.image.source(&self.file) },
            start: self.start_offset,
            length: self.max_length,
            json: self.output.json(),
        }
    }
}
