//! The arguments of `limosa img dd`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use anyhow::Context as _;
use clap::Args;
use limosa_image::dd::Blocks;

use super::image::{ImageArgs, ShareArg};
use crate::img::options::{DdOptions, Name, Source};
use crate::img::size::{parse_request, parse_size};
use crate::program;

/// Bytes of a block unless `bs` is given, as in dd.
const BLOCK: u64 = 512;

#[derive(Debug, Args)]
#[command(override_usage = format!("{} dd [OPTIONS] if=INPUT of=OUTPUT [bs=SIZE] [count=BLOCKS] [skip=BLOCKS]", program::img()))]
pub(crate) struct ImgDdArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// The output's format: raw or qcow2
    #[arg(short = 'O', long, value_name = "FMT", default_value = "raw")]
    output_format: String,

    #[command(flatten)]
    share: ShareArg,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    json: bool,

    /// if=INPUT, of=OUTPUT (overwritten; - is stdin or stdout), bs=SIZE (a block, default 512), skip=BLOCKS,
    /// count=BLOCKS (up to that block of INPUT, skipped ones included)
    #[arg(value_name = "OPERAND")]
    operands: Vec<OsString>,
}

impl ImgDdArgs {
    /// Resolves the arguments.
    ///
    /// # Errors
    /// An operand is unknown or missing, or has a value that it cannot have.
    pub(crate) fn resolve(self) -> anyhow::Result<DdOptions> {
        let (mut input, mut output, mut blocks) = (None, None, Blocks::new(BLOCK));
        for operand in &self.operands {
            let unknown = || format!("operand {operand:?}: write if=, of=, bs=, count= or skip=");
            let mut parts = operand.as_bytes().splitn(2, |byte| *byte == b'=');
            let (name, value) = parts.next().zip(parts.next()).with_context(unknown)?;
            let value = OsStr::from_bytes(value);
            let number = |parse: fn(&str) -> Result<u64, String>| {
                parse(&value.to_string_lossy())
                    .map_err(|error| anyhow::anyhow!("{}: {error}", String::from_utf8_lossy(name)))
            };
            match name {
                b"if" => input = Some(value),
                b"of" => output = Some(value),
                b"bs" => blocks.size = number(parse_request)?,
                b"count" => blocks.count = Some(number(parse_size)?),
                b"skip" => blocks.skip = number(parse_size)?,
                _ => anyhow::bail!("{}", unknown()),
            }
        }
        let (Some(input), Some(output)) = (input, output) else {
            anyhow::bail!("input or output not given; use {} dd if=INPUT of=OUTPUT", program::img());
        };
        Ok(DdOptions {
            source: Source { force_share: self.share.force_share, ..self.image.source(input) },
            name: Name(output.to_owned()),
            format: self.output_format,
            blocks,
            json: self.json,
        })
    }
}
