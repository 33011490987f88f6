//! `limosa img snapshot`.

use std::process::ExitCode;

use limosa_image::Format;
use limosa_image::info::ImageInfo;
use limosa_image::qcow2::{CheckOptions, change_snapshots};
use limosa_storage::block_on;

use super::info::snapshots;
use super::open;
use super::options::SnapshotOptions;
use super::pretty::pretty;
use limosa_console::{check_stdout, print_out};

pub(crate) fn run(options: &SnapshotOptions) -> anyhow::Result<ExitCode> {
    let source = &options.source;
    let file = open::file(source, options.change.is_none())?;
    match &options.change {
        None => {
            let info = block_on(ImageInfo::of(&file))?;
            if options.json {
                print_out!("{}", pretty(&info.snapshots)?);
            } else if !info.snapshots.is_empty() {
                print_out!("{}", snapshots(&info.snapshots).join("\n"));
            }
        }
        Some(_) if file.format != Format::Qcow2 => {
            anyhow::bail!("{}: format raw has no internal snapshots", source.name);
        }
        Some(change) => block_on(change_snapshots(&*file.storage, change, CheckOptions::default()))?,
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}
