//! The arguments of `limosa img commit`.

use std::ffi::OsString;

use clap::Args;
use limosa_storage::CacheMode;

use super::image::{ImageArgs, ReportArgs};
use crate::img::options::{CommitOptions, Source};
use crate::img::size::parse_rate;

#[derive(Debug, Args)]
pub(crate) struct ImgCommitArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// The image of FILE's backing chain that takes its contents; default: its backing file. Implies -d; images between
    /// the two read as something else afterwards
    #[arg(short, long, value_name = "BASE")]
    base: Option<OsString>,

    /// Make a new object of FILE and all below it, and have FILE stand on that one
    #[arg(long, value_name = "URL", conflicts_with = "base")]
    to: Option<OsString>,

    /// Do not empty FILE
    #[arg(short, long)]
    drop: bool,

    /// Cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,

    /// Maximum bandwidth in bytes per second
    #[arg(short, long, value_name = "RATE", value_parser = parse_rate)]
    rate: Option<u64>,

    #[command(flatten)]
    report: ReportArgs,

    /// The overlay
    #[arg(value_name = "FILE")]
    file: OsString,
}

impl ImgCommitArgs {
    /// Resolves the arguments.
    pub(crate) fn resolve(self) -> CommitOptions {
        CommitOptions {
            source: Source { cache: self.cache, ..self.image.source(&self.file) },
            base: self.base,
            to: self.to,
            keep: self.drop,
            rate: self.rate,
            progress: self.report.progress,
            quiet: self.report.quiet.quiet,
            json: self.report.json,
        }
    }
}
