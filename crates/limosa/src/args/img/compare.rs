//! The arguments of `limosa img compare`.

use std::ffi::{OsStr, OsString};

use clap::Args;
use limosa_storage::CacheMode;

use super::image::{OpenArgs, ReportArgs, ShareArg};
use crate::img::options::{CompareOptions, Source};

#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 the images are identical, 1 they differ, 2 an image cannot be opened, or bad usage, 3 \
        allocation cannot be determined, 4 contents cannot be read."
)]
pub(crate) struct ImgCompareArgs {
    /// The first image's format; probed by default
    #[arg(short = 'f', long, value_name = "FMT", conflicts_with = "image_opts")]
    a_format: Option<String>,

    /// The second image's format
    #[arg(short = 'F', long, value_name = "FMT", conflicts_with = "image_opts")]
    b_format: Option<String>,

    /// FILE1 and FILE2 are lists of options: driver=qcow2,file.driver=file,file.filename=NAME,...
    #[arg(long)]
    image_opts: bool,

    /// Strict mode: different virtual sizes or allocation also count as differences
    #[arg(short, long)]
    strict: bool,

    /// Cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,

    #[command(flatten)]
    share: ShareArg,

    #[command(flatten)]
    report: ReportArgs,

    #[command(flatten)]
    pub(super) open: OpenArgs,

    /// The first image
    #[arg(value_name = "FILE1")]
    first: OsString,

    /// The second image
    #[arg(value_name = "FILE2")]
    second: OsString,
}

impl ImgCompareArgs {
    /// Resolves the arguments.
    pub(crate) fn resolve(self) -> CompareOptions {
        let source = |name: &OsStr, format: Option<&String>| Source {
            force_share: self.share.force_share,
            cache: self.cache,
            ..self.open.source(name, format, self.image_opts)
        };
        CompareOptions {
            first: source(&self.first, self.a_format.as_ref()),
            second: source(&self.second, self.b_format.as_ref()),
            strict: self.strict,
            progress: self.report.progress,
            quiet: self.report.quiet.quiet,
            json: self.report.json,
        }
    }
}
