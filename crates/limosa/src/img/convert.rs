//! `limosa img convert`.
//!
//! Law: a target that was just made reads as zeros, and an existing one is not assumed to; an existing file is not
//! touched before all sources are open; a file that was made for a copy that failed is removed again, since it looks
//! like the copy.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use limosa_image::Disk;
use limosa_image::chain::{self, OpenOptions};
use limosa_image::convert::{self, ConvertCounters};
use limosa_image::qcow2::Qcow2Options;
use limosa_storage::{CacheMode, Io, block_on};
use serde_json::json;

use super::create::NewFiles;
use super::format_options::FormatOptions;
use super::meter::Meter;
use super::options::{ConvertOptions, Name, Source};
use super::{create, open};
use limosa_console::{all_printed, print_out, say};

/// The longest run of zeros that can be asked for, in bytes: qemu-img's.
const SPARSE_MOST: u64 = 16 << 20;

pub(crate) fn run(options: &ConvertOptions) -> anyhow::Result<ExitCode> {
    if options.target.asks_for_help() {
        print_out!("{}", FormatOptions::of(&options.target.format)?.help());
        all_printed()?;
        return Ok(ExitCode::SUCCESS);
    }
    check(options)?;
    let sources =
        options.sources.iter().map(|source| open_source(source, options)).collect::<anyhow::Result<Vec<_>>>()?;
    let length = convert::length(&sources)?;
    let made = if options.no_create { Made::default() } else { make(options, length)? };
    let target = open::to_write(&target(options), Qcow2Options::default())?;
    let how = convert::ConvertOptions {
        requests: options.parallel.into(),
        sparse: options.sparse_size,
        // Writes into the page cache of one file wait for each other in the kernel: in order, reads continue meanwhile.
        out_of_order: options.out_of_order && options.target.cache.is_direct(),
        target_is_zero: options.target_is_zero || made.is_zero,
        below: made.below,
        salvage: options.salvage,
        copy_range: options.copy_range,
        ..convert::ConvertOptions::default()
    };
    let meter = Meter::new("convert", options.progress && !options.json, options.quiet, options.rate);
    let counters = convert::convert_on_threads(&sources, &*target, &how, &|progress| meter.note(progress))?;
    block_on(target.close()).with_context(|| format!("cannot finish {}", options.name))?;
    made.files.into_iter().for_each(NewFiles::keep);
    drop(meter);
    warn(&counters);
    if options.json {
        print_out!("{}", object(&counters, length));
    }
    all_printed()?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses options that contradict each other, before anything is opened.
fn check(options: &ConvertOptions) -> anyhow::Result<()> {
    if !options.sparse_size.is_multiple_of(512) || options.sparse_size > SPARSE_MOST {
        anyhow::bail!(
            "-S {}: must be a multiple of 512 up to {SPARSE_MOST}; 0 allocates everything",
            options.sparse_size
        );
    }
    if options.no_create && !options.target.options.is_empty() {
        anyhow::bail!("-o and -n exclude each other: -o applies to a new target, -n uses an existing one");
    }
    if options.snapshot.is_some() && options.sources.len() > 1 {
        anyhow::bail!("-l: needs exactly one source");
    }
    if options.backing.is_some() && options.sources.len() > 1 {
        anyhow::bail!("-B: needs exactly one source: the target cannot share the backing file of several");
    }
    Ok(())
}

/// Cached pages are copied by the thread that requests them, and each request has one.
fn io(cache: CacheMode) -> Io {
    if cache.is_direct() { Io::Auto } else { Io::Caller }
}

fn open_source(source: &Source, options: &ConvertOptions) -> anyhow::Result<Arc<dyn Disk>> {
    let source = Source { io: io(source.cache), ..source.clone() };
    let how = OpenOptions { snapshot: options.snapshot.clone(), ..open::how(&source)? };
    Ok(block_on(chain::open(&open::reference(&source)?, &how))?)
}

fn target(options: &ConvertOptions) -> Source {
    let target = &options.target;
    Source {
        name: options.name.clone(),
        image_opts: target.image_opts,
        format: (!target.image_opts).then(|| target.format.clone()),
        cache: target.cache,
        io: io(target.cache),
        force_share: false,
        // One that was just made refers to what was named here, and what that refers to has been looked at.
        untrusted: options.no_create && options.sources.iter().any(|source| source.untrusted),
    }
}

/// Properties of a target that was just made.
#[derive(Default)]
struct Made {
    is_zero: bool,
    /// The files that it was made in.
    files: Option<NewFiles>,
    /// Bytes of the disk that it lies on.
    below: Option<u64>,
}

fn make(options: &ConvertOptions, length: u64) -> anyhow::Result<Made> {
    let target = &options.target;
    let mut format = FormatOptions::parse(&target.format, &target.options)?;
    format.set("size", length.to_string())?;
    if (options.backing.is_some() || options.backing_format.is_some()) && format.format() == "raw" {
        anyhow::bail!("{}: format raw does not support a backing file; use -O qcow2", options.name);
    }
    if let Some(backing) = &options.backing {
        format.set("backing_file", backing)?;
    }
    if let Some(backing_format) = &options.backing_format {
        format.set("backing_fmt", backing_format)?;
    }
    let below = match (format.path("backing_file"), format.text("backing_fmt")) {
        (Some(backing), Some(_)) if options.sources.len() > 1 => anyhow::bail!(
            "-o backing_file={}: needs exactly one source: the target cannot share the backing file of several",
            backing.display()
        ),
        (Some(backing), Some(format)) => Some(below(options, backing, format)?),
        (Some(backing), None) => {
            anyhow::bail!("{}: format of the backing file {} not given; use -F", options.name, backing.display())
        }
        (None, Some(_)) => anyhow::bail!("{}: -F needs a backing file; give it with -B", options.name),
        (None, None) => None,
    };
    let files = Some(create::make(&options.name, target.cache, &format)?);
    // A device keeps what was on it, except in an image that says what of it counts.
    let device = fs::metadata(&options.name.0).is_ok_and(|metadata| metadata.file_type().is_block_device());
    Ok(Made { is_zero: below.is_none() && (format.format() != "raw" || !device), files, below })
}

/// The length of the disk that the target is to lie on.
fn below(options: &ConvertOptions, backing: &OsStr, format: &str) -> anyhow::Result<u64> {
    // As the target will name it: from its own folder.
    let bytes = backing.as_bytes();
    let path: PathBuf = if bytes.starts_with(b"json:") {
        backing.into()
    } else {
        let plain = OsStr::from_bytes(bytes.strip_prefix(b"file:").unwrap_or(bytes));
        Path::new(&options.name.0).parent().unwrap_or(Path::new("")).join(plain)
    };
    let name = Name(path.into());
    let first = options.sources.first();
    let source = Source {
        name,
        image_opts: false,
        format: Some(format.to_owned()),
        cache: options.target.cache,
        io: Io::Auto,
        force_share: first.is_some_and(|source| source.force_share),
        untrusted: first.is_some_and(|source| source.untrusted),
    };
    let disk = open::to_read(&source).with_context(|| format!("cannot open the backing file {}", backing.display()))?;
    Ok(disk.len())
}

fn warn(counters: &ConvertCounters) {
    for place in &counters.lost {
        let bytes = place.end - place.start;
        say!("limosa: warning: {bytes} bytes at {} could not be read; written as zeros to the target", place.start);
    }
    let named: u64 = counters.lost.iter().map(|place| place.end - place.start).sum();
    if named < counters.bytes_lost {
        say!("limosa: warning: {} further bytes could not be read", counters.bytes_lost - named);
    }
}

fn object(counters: &ConvertCounters, length: u64) -> serde_json::Value {
    json!({
        "length": length,
        "reads": counters.reads,
        "bytes-read": counters.bytes_read,
        "writes": counters.writes,
        "bytes-written": counters.bytes_written,
        "copies": counters.copies,
        "bytes-copied": counters.bytes_copied,
        "zeroes": counters.zeroes,
        "bytes-zeroed": counters.bytes_zeroed,
        "bytes-spared": counters.bytes_spared,
        "bytes-below": counters.bytes_below,
        "bytes-lost": counters.bytes_lost,
    })
}
