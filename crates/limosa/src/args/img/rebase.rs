//! The arguments of `limosa img rebase`.

use std::ffi::OsString;

use clap::Args;
use limosa_image::rebase::BackingName;
use limosa_storage::CacheMode;

use super::image::{ImageArgs, ReportArgs, ShareArg};
use crate::img::options::{RebaseOptions, Source};

#[derive(Debug, Args)]
pub(crate) struct ImgRebaseArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// The new backing file, relative to FILE's folder; "": none, FILE has all contents itself
    #[arg(short, long, value_name = "BACKING", required_unless_present = "backing_unsafe")]
    backing: Option<OsString>,

    /// Format of the new backing file
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,

    /// Change only the name of the backing file; its contents must be the same as before. Without -b, remove the name
    #[arg(short = 'u', long)]
    backing_unsafe: bool,

    /// Compress the clusters that are copied into FILE
    #[arg(short, long)]
    compress: bool,

    /// FILE's cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,

    /// The new backing file's cache mode
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback")]
    backing_cache: CacheMode,

    #[command(flatten)]
    share: ShareArg,

    #[command(flatten)]
    report: ReportArgs,

    /// The overlay
    #[arg(value_name = "FILE")]
    file: OsString,
}

impl ImgRebaseArgs {
    /// Resolves the arguments.
    ///
    /// # Errors
    /// An argument is missing.
    pub(crate) fn resolve(self) -> anyhow::Result<RebaseOptions> {
        let name = self.backing.filter(|name| !name.is_empty());
        let backing = match (name, self.backing_format) {
            (Some(name), Some(format)) => Some(BackingName::new(name, format)),
            (Some(name), None) => anyhow::bail!("format of the backing file {} not given; use -F", name.display()),
            // Without a backing file there is nothing that has a format, and qemu-img takes one.
            (None, _) => None,
        };
        Ok(RebaseOptions {
            source: Source { cache: self.cache, ..self.image.source(&self.file) },
            backing,
            header_only: self.backing_unsafe,
            compress: self.compress,
            backing_cache: self.backing_cache,
            force_share: self.share.force_share,
            progress: self.report.progress,
            quiet: self.report.quiet.quiet,
            json: self.report.json,
        })
    }
}
