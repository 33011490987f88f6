//! `limosa img commit --to URL`: a new object with the contents of an overlay and of all below it. The overlay stands
//! on it from then on.
//!
//! Law: **the overlay reads as it read before, at every moment.** The object is whole before the overlay's header names
//! it, and what the overlay has itself goes last. It is locked from the beginning to the end.

use std::ffi::OsStr;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use limosa_image::qcow2::{CheckOptions, Header, change_backing, empty};
use limosa_image::reference::Location;
use limosa_storage::{FileOptions, FileStorage, block_on};

use super::convert::{self, report};
use super::open::named;
use super::options::{CommitOptions, ConvertOptions, Name, Source, Target};
use crate::remote;
use crate::serve::on_top::content_line;
use limosa_console::{check_stdout, print_out};

/// Makes the object, and has the overlay stand on it.
pub(super) fn run(options: &CommitOptions, url: &OsStr) -> anyhow::Result<ExitCode> {
    let Some(object) = remote::target(url)? else {
        bail!("--to {}: must be the URL of a new object", url.display());
    };
    let reference = named(&options.source)?.reference;
    let name = &options.source.name;
    let path = reference.path().with_context(|| format!("{name}: --to needs an overlay in a file"))?;
    let overlay = FileStorage::open(path, &FileOptions::default())?;
    let header = block_on(Header::read(&*overlay)).with_context(|| format!("{name}: --to needs a qcow2 overlay"))?;
    if header.features.data_file() || header.snapshots.1 > 0 {
        bail!("{name}: has a data file or internal snapshots, which would read other contents; use img convert");
    }
    let convert = ConvertOptions {
        // This process holds its lock.
        sources: vec![Source { force_share: true, ..options.source.clone() }],
        name: Name(url.to_owned()),
        target: Target { format: "qcow2".to_owned(), ..Target::default() },
        rate: options.rate,
        progress: options.progress,
        quiet: options.quiet,
        json: options.json,
        ..ConvertOptions::default()
    };
    let (counters, length) = convert::to_object(&convert, &object)?;
    // So that it is known which object it is.
    let _opened = remote::stores().open(&object.to_string())?;
    let location = Location::Object(object.to_string());
    let content = remote::content(&object.to_string()).map(|content| content_line(&location, &content));
    let backing = (url.to_owned(), Some("qcow2".to_owned()));
    block_on(change_backing(&*overlay, Some(backing), |header| header.extensions.backing_content = content))?;
    if !options.keep {
        block_on(empty(&*overlay, None, CheckOptions::default()))?;
    }
    report(&counters, length, options.json, false);
    if !options.json && !options.quiet {
        print_out!("Image committed: {name} stands on {object}.");
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}
