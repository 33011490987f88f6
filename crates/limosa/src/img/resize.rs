//! `limosa img resize`.

use std::process::ExitCode;

use anyhow::Context as _;
use limosa_image::chain::NamedImage;
use limosa_image::resize::{ResizeError, SizeFault, resize};
use limosa_storage::block_on;

use super::open;
use super::options::ResizeOptions;
use limosa_console::print_out;

pub(crate) fn run(options: &ResizeOptions) -> anyhow::Result<ExitCode> {
    let mut how = limosa_image::resize::ResizeOptions::new(options.size);
    how.shrink = options.shrink;
    how.preallocation = options.preallocation.parse().context("--preallocation")?;
    let NamedImage { reference, options: open, .. } = open::resolve(&options.source)?;
    block_on(resize(&reference, &open, &how, || open::warn_of_guess(&options.source))).map_err(with_remedy)?;
    if !options.quiet {
        print_out!("Image resized.");
    }
    Ok(ExitCode::SUCCESS)
}

fn with_remedy(error: ResizeError) -> anyhow::Error {
    match error {
        // The image's own error stays in the chain, where its remedy is found.
        ResizeError::Image(error) => error.into(),
        ResizeError::Size { fault: SizeFault::Shrinks { .. }, .. } => {
            anyhow::anyhow!("{error}; use --shrink if they are not needed")
        }
        ResizeError::Size { image, fault: SizeFault::NothingAdded } => {
            anyhow::anyhow!("{image}: --preallocation: applies to added space, but the image does not grow")
        }
        error => error.into(),
    }
}
