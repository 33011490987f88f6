//! `limosa img snapshot`.

use std::process::ExitCode;

use limosa_image::Format;
use limosa_image::chain::ImageFile;
use limosa_image::info::ImageInfo;
use limosa_image::qcow2::{CheckOptions, change_snapshots};
use limosa_storage::block_on;

use super::info::snapshots;
use super::looking::look;
use super::open;
use super::options::SnapshotOptions;
use super::pretty::pretty;
use limosa_console::{check_stdout, print_out};

pub(crate) fn run(options: &SnapshotOptions) -> anyhow::Result<ExitCode> {
    let source = &options.source;
    match &options.change {
        None => {
            let info = look(source, |image| {
                let info = async { ImageInfo::of(&ImageFile::open(&image.reference, &image.options).await?).await };
                Ok(block_on(info)?)
            })?;
            let taken = info.found.snapshots;
            if options.json {
                print_out!("{}", pretty(&taken)?);
            } else if !taken.is_empty() {
                print_out!("{}", snapshots(&taken).join("\n"));
            }
        }
        Some(change) => {
            let file = open::file(source, false)?;
            if file.format != Format::Qcow2 {
                anyhow::bail!("{}: format raw has no internal snapshots", source.name);
            }
            block_on(change_snapshots(&*file.storage, change, CheckOptions::default()))?;
        }
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}
