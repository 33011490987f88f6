//! The backing image converted into another one, by both programs, past the page cache.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::image::Base;
use super::stock::{qemu_img, text};
use crate::measure::{Measured, Stopwatch};
use crate::options::Options;

const WORDS: [&str; 9] = ["convert", "-f", "qcow2", "-O", "qcow2", "-t", "none", "-T", "none"];

/// By limosa.
pub(super) fn limosa(base: &Base, options: &Options) -> Result<Measured> {
    let mut command = Command::new(options.limosa()?);
    command.arg("img").args(WORDS).arg(base.path()).arg(target(base)?).stdin(Stdio::null());
    let watch = Stopwatch::start(&[])?;
    let output = command.output().context("limosa img convert")?;
    let measured = watch.stop()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "limosa img convert: {}: {said}", output.status);
    Ok(measured)
}

/// By stock QEMU.
pub(super) fn stock(base: &Base) -> Result<Measured> {
    let mut words = WORDS.map(str::to_owned).to_vec();
    words.extend([text(&base.path())?.to_owned(), target(base)?]);
    let watch = Stopwatch::start(&[])?;
    qemu_img(&words)?;
    watch.stop()
}

/// A path where nothing is.
fn target(base: &Base) -> Result<String> {
    let path = base.overlay();
    let _ = std::fs::remove_file(&path);
    Ok(text(&path)?.to_owned())
}
