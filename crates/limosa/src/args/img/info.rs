//! The arguments of `limosa img info`.

use std::ffi::OsString;

use clap::Args;

use super::image::{ImageArgs, OutputArgs, ShareArg};
use crate::img::options::{InfoOptions, Source};

#[derive(Debug, Args)]
pub(crate) struct ImgInfoArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// Also show its backing files, recursively; without this option no other file is opened
    #[arg(short, long)]
    backing_chain: bool,

    #[command(flatten)]
    share: ShareArg,

    #[command(flatten)]
    output: OutputArgs,

    /// The image
    #[arg(value_name = "FILE")]
    file: OsString,
}

impl ImgInfoArgs {
    /// Resolves the arguments.
    pub(crate) fn resolve(self) -> InfoOptions {
        InfoOptions {
            source: Source { force_share: self.share.force_share, ..self.image.source(&self.file) },
            backing_chain: self.backing_chain,
            json: self.output.json(),
        }
    }
}
