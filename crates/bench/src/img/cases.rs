//! The commands that are compared.

use std::path::PathBuf;

use anyhow::Result;

use super::images::{Images, LUKS};
use super::program::words;

/// A command line, with what a run of it needs made.
pub(super) struct Work {
    pub(super) words: Vec<String>,
    /// The files that it is given, and more that it reads: they are in the page cache when the clock starts.
    pub(super) sources: Vec<PathBuf>,
    /// The image that it writes, whose length is reported; it is removed after the run.
    pub(super) result: Option<PathBuf>,
}

/// The least that is asked of a case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Goal {
    /// Not slower than stock.
    Even,
    /// Compression: faster, and the image is as small.
    Compression,
}

/// Something that both programs do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) goal: Goal,
    pub(super) one_core: bool,
    /// Makes what a run needs.
    pub(super) prepare: fn(&Images) -> Result<Work>,
}

/// Commands that only read.
fn reads(line: &str, paths: &[PathBuf]) -> Result<Work> {
    let names: Vec<_> = paths.iter().map(PathBuf::as_path).collect();
    Ok(Work { words: words(line, &names)?, sources: paths.to_vec(), result: None })
}

/// Commands whose last path is what they write.
fn writes(line: &str, paths: &[PathBuf]) -> Result<Work> {
    Ok(Work { result: paths.last().cloned(), ..reads(line, paths)? })
}

/// From one image to a new one.
fn converts(images: &Images, line: &str, source: PathBuf) -> Result<Work> {
    writes(line, &[source, images.output("output")])
}

const fn case(name: &'static str, prepare: fn(&Images) -> Result<Work>) -> Case {
    Case { name, goal: Goal::Even, one_core: false, prepare }
}

fn zlib(images: &Images) -> Result<Work> {
    converts(images, "convert -c -f raw -O qcow2 {} {}", images.small_raw()?)
}

fn zstd(images: &Images) -> Result<Work> {
    converts(images, "convert -c -f raw -O qcow2 -o compression_type=zstd {} {}", images.small_raw()?)
}

/// The cases, those that compress first.
pub(super) fn all() -> Vec<Case> {
    let compress = |name, prepare| Case { goal: Goal::Compression, ..case(name, prepare) };
    let mut cases = vec![
        compress("compress zlib", zlib),
        compress("compress zstd", zstd),
        Case { one_core: true, ..case("compress zlib on one core", zlib) },
        Case { one_core: true, ..case("compress zstd on one core", zstd) },
        case("decompress zlib", |images| converts(images, "convert -f qcow2 -O raw {} {}", images.compressed("zlib")?)),
        case("decompress zstd", |images| converts(images, "convert -f qcow2 -O raw {} {}", images.compressed("zstd")?)),
    ];
    cases.extend(plain());
    cases.extend(encrypted());
    cases.extend(chains_and_snapshots());
    cases.extend(reports());
    cases
}

/// Copies.
fn plain() -> Vec<Case> {
    vec![
        case("convert raw to qcow2", |images| converts(images, "convert -f raw -O qcow2 {} {}", images.raw()?)),
        case("convert qcow2 to raw", |images| converts(images, "convert -f qcow2 -O raw {} {}", images.qcow2()?)),
        case("convert raw to qcow2, direct", |images| {
            converts(images, "convert -t none -T none -f raw -O qcow2 {} {}", images.raw()?)
        }),
        case("convert qcow2 to raw, direct", |images| {
            converts(images, "convert -t none -T none -f qcow2 -O raw {} {}", images.qcow2()?)
        }),
        case("convert -W raw to qcow2", |images| converts(images, "convert -W -f raw -O qcow2 {} {}", images.raw()?)),
        case("convert -W raw to qcow2, direct", |images| {
            converts(images, "convert -W -t none -T none -f raw -O qcow2 {} {}", images.raw()?)
        }),
        case("convert sparse raw to qcow2", |images| {
            converts(images, "convert -f raw -O qcow2 {} {}", images.sparse()?)
        }),
        case("convert sparse raw to raw", |images| converts(images, "convert -f raw -O raw {} {}", images.sparse()?)),
        case("dd raw to raw", |images| converts(images, "dd -f raw -O raw bs=1M if={} of={}", images.raw()?)),
        case("dd qcow2 to raw", |images| converts(images, "dd -f qcow2 -O raw bs=1M if={} of={}", images.qcow2()?)),
    ]
}

/// Whole encrypted disks.
fn encrypted() -> Vec<Case> {
    vec![
        case("convert raw to luks", |images| {
            let line = format!("convert --object secret,id=s,file={{}} -n -f raw --target-image-opts {{}} {LUKS}");
            writes(&line, &[images.key()?, images.raw()?, images.empty_luks()?])
        }),
        case("convert luks to raw", |images| {
            let line = format!("convert --object secret,id=s,file={{}} --image-opts -O raw {LUKS} {{}}");
            writes(&line, &[images.key()?, images.luks()?, images.output("output")])
        }),
        case("convert raw to luks, direct", |images| {
            let line = format!(
                "convert --object secret,id=s,file={{}} -n -t none -T none -f raw --target-image-opts {{}} {LUKS}"
            );
            writes(&line, &[images.key()?, images.raw()?, images.empty_luks()?])
        }),
    ]
}

/// Commands that change an image in place.
fn chains_and_snapshots() -> Vec<Case> {
    vec![
        case("commit", |images| writes("commit -q -f qcow2 {}", &[images.overlay_to_commit()?])),
        case("rebase", |images| {
            let paths = [images.new_base()?, images.overlay_to_rebase()?];
            let mut work = writes("rebase -q -f qcow2 -F qcow2 -b {} {}", &paths)?;
            work.sources.push(images.base()?);
            Ok(work)
        }),
        case("snapshot -c", |images| writes("snapshot -c second {}", &[images.with_snapshot()?])),
        case("snapshot -a", |images| writes("snapshot -a first {}", &[images.with_snapshot()?])),
        case("snapshot -d", |images| writes("snapshot -d first {}", &[images.with_snapshot()?])),
    ]
}

/// Commands that change nothing.
fn reports() -> Vec<Case> {
    vec![
        case("compare raw with qcow2", |images| {
            reads("compare -q -f raw -F qcow2 {} {}", &[images.raw()?, images.qcow2()?])
        }),
        case("compare qcow2 with qcow2", |images| {
            reads("compare -q -f qcow2 -F qcow2 {} {}", &[images.qcow2()?, images.other_qcow2()?])
        }),
        case("measure raw", |images| reads("measure -f raw -O qcow2 {}", &[images.sparse()?])),
        case("measure qcow2", |images| reads("measure -f qcow2 -O qcow2 {}", &[images.full()?])),
        case("check", |images| reads("check -f qcow2 {}", &[images.full()?])),
        case("check with a snapshot", |images| reads("check -f qcow2 {}", &[images.snapshots()?])),
        case("info", |images| reads("info -f qcow2 {}", &[images.snapshots()?])),
        case("map of a chain", |images| reads("map -f qcow2 --output json {}", &[images.overlay_in_chain()?])),
        case("map of a large disk", |images| reads("map -f qcow2 --output json {}", &[images.full()?])),
    ]
}
