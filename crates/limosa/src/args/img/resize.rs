//! The arguments of `limosa img resize`.

use std::ffi::OsString;

use clap::Args;
use limosa_image::resize::NewSize;

use super::image::{ImageArgs, QuietArg};
use crate::img::options::ResizeOptions;
use crate::img::size;

#[derive(Debug, Args)]
pub(crate) struct ImgResizeArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// Allow the disk to become smaller; data beyond the new end is lost
    #[arg(long)]
    shrink: bool,

    /// Preallocation of the added space: off, metadata, falloc, full
    #[arg(long, value_name = "MODE", default_value = "off")]
    preallocation: String,

    #[command(flatten)]
    quiet: QuietArg,

    /// The image
    #[arg(value_name = "FILE")]
    file: OsString,

    /// The new size, or with + or - the change
    #[arg(value_name = "[+-]SIZE", value_parser = parse_new_size, allow_hyphen_values = true)]
    size: NewSize,
}

pub(crate) fn parse_new_size(text: &str) -> Result<NewSize, String> {
    Ok(if let Some(more) = text.strip_prefix('+') {
        NewSize::More(size::parse_size(more)?)
    } else if let Some(less) = text.strip_prefix('-') {
        NewSize::Less(size::parse_size(less)?)
    } else {
        NewSize::Exactly(size::parse_size(text)?)
    })
}

impl ImgResizeArgs {
    /// Resolves the arguments.
    pub(crate) fn resolve(self) -> ResizeOptions {
        ResizeOptions {
            source: self.image.source(&self.file),
            size: self.size,
            shrink: self.shrink,
            preallocation: self.preallocation,
            quiet: self.quiet.quiet,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_relative() {
        assert_eq!(parse_new_size("1k"), Ok(NewSize::Exactly(1024)));
        assert_eq!(parse_new_size("+1k"), Ok(NewSize::More(1024)));
        assert_eq!(parse_new_size("-1.5k"), Ok(NewSize::Less(1536)));
        for wrong in ["", "+", "-", "+-1", "--1", "x"] {
            assert!(parse_new_size(wrong).is_err(), "{wrong}");
        }
    }
}
