//! `limosa img bitmap`.

use std::process::ExitCode;

use limosa_image::Format;
use limosa_image::chain::ImageFile;
use limosa_image::qcow2::{CheckOptions, change_bitmap};
use limosa_storage::{Storage, block_on};

use super::open;
use super::options::{BitmapOptions, Source};

pub(crate) fn run(options: &BitmapOptions) -> anyhow::Result<ExitCode> {
    let file = qcow2(&options.source, false)?;
    let merged = options.merged.as_ref().map(|source| qcow2(source, true)).transpose()?;
    let merged = merged.as_ref().map(|file| &*file.storage as &dyn Storage);
    block_on(change_bitmap(&*file.storage, &options.bitmap, &options.actions, merged, CheckOptions::default()))?;
    Ok(ExitCode::SUCCESS)
}

/// Opens an image that has bitmaps.
fn qcow2(source: &Source, read_only: bool) -> anyhow::Result<ImageFile> {
    let file = open::file(source, read_only)?;
    if file.format != Format::Qcow2 {
        anyhow::bail!("{}: format raw has no bitmaps", source.name);
    }
    Ok(file)
}
