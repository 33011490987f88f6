//! `limosa img commit`.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use limosa_image::chain::{self, Image, NamedImage};
use limosa_image::commit::{self, CommitRequest};
use limosa_image::reference::Reference;
use limosa_qemu::is_same_file;
use limosa_storage::{LockPolicy, block_on};

use super::commit_to;
use super::convert::{cause, io, object};
use super::interrupt;
use super::meter::Meter;
use super::open;
use super::options::CommitOptions;
use crate::program::say_named;
use crate::serve::beside::refuse_incomplete;
use limosa_console::{check_stdout, print_out};

pub(crate) fn run(options: &CommitOptions) -> anyhow::Result<ExitCode> {
    if let Some(url) = &options.to {
        return commit_to::run(options, url);
    }
    let mut overlay = open::resolve(&options.source)?;
    overlay.options.io = io(options.source.cache);
    check_base(&overlay, options.base.as_deref())?;
    let mut request = CommitRequest::new(overlay);
    request.base.clone_from(&options.base);
    request.options = commit::CommitOptions::default().keep_overlay(options.keep);
    interrupt::keep(format!("{}: interrupted; it is complete: commit it again", options.source.name));
    let commit = block_on(request.prepare())?;
    warn(commit.base());
    let length = commit.length();
    let meter = Meter::new("commit", options.progress && !options.json, options.quiet, options.rate);
    let counters = commit.run(&|progress| meter.note(progress)).map_err(cause)?;
    drop(meter);
    if options.json {
        print_out!("{}", object(&counters, length));
    } else if !options.quiet {
        print_out!("Image committed.");
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses a base that does not have all writes of its protected VM: what is committed would be under them. It is asked
/// before the base is opened to be written, which repairs one that was not closed.
fn check_base(overlay: &NamedImage, base: Option<&OsStr>) -> anyhow::Result<()> {
    let options = overlay.options.clone().lock(LockPolicy::None);
    // A chain that cannot be read is an error of the commit itself.
    let Ok(files) = block_on(chain::files(&overlay.reference, &options)) else { return Ok(()) };
    let mut below = files.iter().skip(1).filter_map(|file| file.reference.path());
    let found = match base {
        None => below.next(),
        Some(base) => below.find(|path| is_same_file(path, Path::new(base))),
    };
    found.map_or(Ok(()), |path| refuse_incomplete(&Reference::file(path)))
}

/// Warns before the base is written if it was repaired or its format was guessed.
fn warn(base: &Image) {
    let name = base.as_disk();
    let name = name.name();
    if let Some(report) = base.repair_report() {
        open::warn_of_repair(name, report, "flushed");
    }
    if base.is_guessed() {
        say_named!(
            "{name}: the overlay does not say its format; probed as raw. Writes that would make its first sector \
             look like another format are refused"
        );
    }
}
