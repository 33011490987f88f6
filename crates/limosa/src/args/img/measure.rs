//! The arguments of `limosa img measure`.

use std::ffi::OsString;

use clap::Args;
use limosa_image::qcow2::SnapshotChoice;

use super::convert::parse_snapshot;
use super::image::{ImageArgs, OutputArgs, ShareArg};
use crate::img::options::{MeasureOptions, Measured, Source, Target};
use crate::img::size::parse_size;
use crate::program;

#[derive(Debug, Args)]
#[command(override_usage = format!("{0} measure [OPTIONS] FILE\n       {0} measure [OPTIONS] --size SIZE", program::img()))]
pub(crate) struct ImgMeasureArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// Measure this internal snapshot of FILE: its id or name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", value_parser = parse_snapshot)]
    snapshot: Option<SnapshotChoice>,

    /// The target's format: raw, qcow2 or luks
    #[arg(short = 'O', long, value_name = "FMT", default_value = "raw")]
    target_format: String,

    /// Options of the target's format: NAME=VALUE[,NAME=VALUE...]; -o help lists them. Repeatable
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    options: Vec<String>,

    /// Measure a new image of this virtual size
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, allow_hyphen_values = true)]
    size: Option<u64>,

    /// Measure what convert writes if its target is a pipe: the exact number of bytes
    #[arg(long, conflicts_with = "size")]
    pipe: bool,

    #[command(flatten)]
    share: ShareArg,

    #[command(flatten)]
    output: OutputArgs,

    /// The image that would be converted
    #[arg(value_name = "FILE")]
    file: Option<OsString>,
}

impl ImgMeasureArgs {
    /// Resolves the arguments.
    ///
    /// # Errors
    /// Neither an image nor a size was given, or both.
    pub(crate) fn resolve(self) -> anyhow::Result<MeasureOptions> {
        let target = Target { format: self.target_format, options: self.options.join(","), ..Target::default() };
        let of_file = self.image.is_given() || self.snapshot.is_some();
        let what = match (&self.file, self.size) {
            (Some(_), Some(_)) => anyhow::bail!("--size and FILE cannot be used together"),
            (None, Some(_)) if of_file => anyhow::bail!("--size cannot be used together with -f, -l and --image-opts"),
            (Some(file), None) => {
                Measured::Image(Source { force_share: self.share.force_share, ..self.image.source(file) })
            }
            (None, Some(size)) => Measured::Size(size),
            (None, None) if target.asks_for_help() => Measured::Size(0),
            (None, None) => anyhow::bail!("image not given; use {} measure FILE, or --size SIZE", program::img()),
        };
        Ok(MeasureOptions { what, pipe: self.pipe, snapshot: self.snapshot, target, json: self.output.json() })
    }
}
