//! The load, put on by stock `qemu-img bench`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use super::image::{Base, Shape};
use super::load::{Load, rated};
use crate::measure::{Measured, Stopwatch, millis};

/// Puts it on a fresh image.
pub(super) fn bench(base: &Base, shape: &Shape, load: &Load) -> Result<Measured> {
    let path = base.fresh(shape)?;
    let step = load.step.context("qemu-img bench has steps only")?;
    let mut words = ["bench", "-f", "qcow2", "-w", "-t", "none", "-i", "io_uring"].map(str::to_owned).to_vec();
    for (option, value) in
        [("-c", load.count), ("-d", load.depth), ("-s", load.size), ("-S", step), ("-o", load.offset)]
    {
        words.extend([option.to_owned(), value.to_string()]);
    }
    words.push(text(&path)?.to_owned());
    let watch = Stopwatch::start(&[])?;
    let printed = qemu_img(&words)?;
    let mut measured = watch.stop()?;
    let seconds = printed.rsplit("Run completed in ").next().and_then(|rest| rest.split(' ').next());
    let seconds = seconds.and_then(|seconds| seconds.parse().ok());
    let asked = Duration::from_secs_f64(seconds.with_context(|| format!("qemu-img bench printed {printed:?}"))?);
    let rest = measured.wall.saturating_sub(asked);
    measured.wall = asked;
    // With its exec and its opening.
    Ok(rated(measured.with("close_ms", millis(rest)), load.count))
}

/// Runs `qemu-img`; what it prints.
pub(super) fn qemu_img(words: &[String]) -> Result<String> {
    let output = Command::new("qemu-img").args(words).output().context("qemu-img")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "qemu-img {}: {}: {said}", words.join(" "), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The path as stock tools want it.
pub(super) fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| anyhow!("{}: not UTF-8", path.display()))
}
