//! The arguments of `limosa img check`.

use std::ffi::OsString;

use clap::{Args, ValueEnum};
use limosa_image::qcow2::Repair;
use limosa_storage::CacheMode;

use super::image::{ImageArgs, OutputArgs, QuietArg, ShareArg};
use crate::img::options::{CheckOptions, Source};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RepairArg {
    /// Free leaked clusters
    Leaks,
    /// All errors that can be repaired
    All,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 no errors, or all were repaired; 1 the check could not be completed, or bad usage; \
                        2 the image is corrupt; 3 space is lost, but the image is not corrupt; 63 images of this format have \
                        nothing to check."
)]
pub(crate) struct ImgCheckArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// Repair errors
    #[arg(short, long, value_enum, value_name = "WHAT", conflicts_with = "force_share")]
    repair: Option<RepairArg>,

    /// Cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,

    #[command(flatten)]
    share: ShareArg,

    #[command(flatten)]
    quiet: QuietArg,

    #[command(flatten)]
    output: OutputArgs,

    /// The image
    #[arg(value_name = "FILE")]
    file: OsString,
}

impl ImgCheckArgs {
    /// Resolves the arguments.
    pub(crate) fn resolve(self) -> CheckOptions {
        CheckOptions {
            source: Source { force_share: self.share.force_share, cache: self.cache, ..self.image.source(&self.file) },
            repair: self.repair.map(|repair| match repair {
                RepairArg::Leaks => Repair::Leaks,
                RepairArg::All => Repair::All,
            }),
            quiet: self.quiet.quiet,
            json: self.output.json(),
        }
    }
}
