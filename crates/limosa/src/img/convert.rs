//! `limosa img convert`.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use limosa_image::chain::{NamedImage, OpenOptions};
use limosa_image::convert::{
    self, ConvertCounters, ConvertRequest, ConvertTarget, InputStream, NewTarget, OutputStream, ResumeOptions, Streams,
};
use limosa_image::reference::Reference;
use limosa_image::{Compress, Format, ImageError, OperationError};
use limosa_storage::{CacheMode, Io, LockPolicy, block_on};
use serde_json::json;

use super::create::{compression, new_image};
use super::format_options::FormatOptions;
use super::interrupt::{self, UNFINISHED};
use super::meter::{self, Meter};
use super::object;
use super::open;
use super::options::{ConvertOptions, Name, Source};
use super::pipe::{self, Output};
use crate::program::say_named;
use crate::remote::{self, ObjectStream, Sent, Staging, Url};
use limosa_console::{anyhow_error_line, check_stdout, print_out, quantity, say};

/// The longest run of zeros that can be asked for, in bytes: qemu-img's.
const SPARSE_MOST: u64 = 16 << 20;

pub(crate) fn run(options: &ConvertOptions) -> anyhow::Result<ExitCode> {
    if options.target.asks_for_help() {
        print_out!("{}", FormatOptions::of(&options.target.format)?.help());
        check_stdout()?;
        return Ok(ExitCode::SUCCESS);
    }
    check(options)?;
    let (counters, length, is_stdout) = match remote::target(&options.name.0)? {
        Some(url) => {
            let (counters, length) = to_object(options, &url)?;
            (counters, length, false)
        }
        None => convert(options, None)?,
    };
    report(&counters, length, options.json, is_stdout);
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// Makes an image that is an object: of the bytes as they come where those are final, else in a file without a name.
pub(super) fn to_object(options: &ConvertOptions, url: &Url) -> anyhow::Result<(ConvertCounters, Option<u64>)> {
    let refused = [(options.no_create, "-n"), (options.resume, "--resume")];
    if let Some((_, option)) = refused.into_iter().find(|(given, _)| *given) {
        anyhow::bail!("{option}: {url} is an object, which is written as a whole and must not exist");
    }
    let format = FormatOptions::parse(&options.target.format, &options.target.options)?;
    if format.path("data_file").is_some() {
        anyhow::bail!("-o data_file: {url} is an object, which has all of its contents");
    }
    let backing = options.backing.as_deref().or_else(|| format.path("backing_file"));
    if let Some(backing) = backing.filter(|backing| is_relative(backing)) {
        let backing = Path::new(backing).display();
        anyhow::bail!(
            "-B {backing}: {url} is an object, in no folder; give the backing file by an absolute path or a URL"
        );
    }
    // Not only after hours of work.
    remote::check(url)?;
    let is_allocated = format.text("preallocation").is_some_and(|how| how != "off");
    let is_piped = options.sources.iter().any(pipe::may_be_input);
    if format.format() == Format::Raw && !is_allocated && !is_piped {
        return streamed(options, url);
    }
    let staging = Staging::new()?;
    let staged = ConvertOptions { name: Name(staging.path().into()), ..options.clone() };
    let named = |error| named_as(remote::of_staging(error), &staging.path(), url);
    let (counters, length, _) = convert(&staged, None).map_err(named)?;
    let most = staging.file().metadata()?.len();
    tell_object(options, url, staging.follow(url, most, true, interrupt::stop())?.finish()?)?;
    Ok((counters, length))
}

/// Makes an object of bytes that come in order.
fn streamed(options: &ConvertOptions, url: &Url) -> anyhow::Result<(ConvertCounters, Option<u64>)> {
    // The store may have forgotten the upload that is continued; that is known once.
    for _ in 0..2 {
        let stream = ObjectStream::new(url);
        let (converted, outcome) = match convert(options, Some(stream.output(interrupt::stop))) {
            Ok((counters, length, _)) => (Some((counters, length)), Ok(())),
            Err(error) => (None, Err(error)),
        };
        match (stream.finish(outcome)?, converted) {
            (Sent::Forgotten, _) => {}
            (sent, Some(converted)) => {
                tell_object(options, url, sent)?;
                return Ok(converted);
            }
            (sent, None) => tell_object(options, url, sent)?,
        }
    }
    anyhow::bail!("{url}: the store has forgotten the upload again; no object was made")
}

/// Tells people of an object that was made. Does not return if a signal has ended that.
fn tell_object(options: &ConvertOptions, url: &Url, sent: Sent) -> anyhow::Result<()> {
    match sent {
        Sent::Whole { length, requests } if !options.quiet => {
            let (length, requests) = (quantity::bytes(length), quantity::count(requests));
            say!("limosa: {url}: {length} written with {requests} requests");
        }
        Sent::Whole { .. } => {}
        Sent::Forgotten => anyhow::bail!("{url}: the store has forgotten the upload; no object was made"),
        Sent::Cancelled { is_kept } => {
            let remedy = if is_kept { "; run the same command to continue the upload" } else { "" };
            interrupt::stopped(format!("{url}: interrupted{remedy}"))
        }
    }
    Ok(())
}

/// Whether the name of a backing file depends on the folder of the image that has it.
fn is_relative(name: &OsStr) -> bool {
    let has_scheme = name.to_str().is_some_and(|name| name.contains(':'));
    !has_scheme && Path::new(name).is_relative()
}

/// An error about the file in which an object is made, as one about the object: nobody else knows that file's name.
fn named_as(error: anyhow::Error, path: &Path, url: &impl std::fmt::Display) -> anyhow::Error {
    let (line, path) = (anyhow_error_line(&error), path.display().to_string());
    if line.contains(&path) { anyhow::anyhow!(line.replace(&path, &url.to_string())) } else { error }
}

/// Converts into a file, a pipe, or the stream of an `object`. Returns counters, the length if it is known, and whether
/// the image is on stdout.
fn convert(
    options: &ConvertOptions,
    object: Option<OutputStream>,
) -> anyhow::Result<(ConvertCounters, Option<u64>, bool)> {
    let mut options = options.clone();
    let (input, output) = match object {
        Some(stream) => (None, Some(Output { stream, is_stdout: false })),
        None => pipes(&mut options)?,
    };
    let options = &options;
    let is_stdout = output.as_ref().is_some_and(|output| output.is_stdout);
    if is_stdout {
        meter::keep_off_stdout();
    }
    let mut request = request(options)?;
    if input.is_some() {
        request.sources.clear();
    }
    let streams = Streams::new(input, output.map(|output| output.stream));
    let was_there = options.no_create || Path::new(&options.name.0).exists();
    let failed = |error| incomplete(broken_bitmap(cause(error)));
    let prepared = block_on(request.prepare_streams(streams, &UNFINISHED)).map_err(failed)?;
    if let Some(image) = prepared.target() {
        open::warn(&target(options), image);
    }
    // A file that was there before is not removed.
    if was_there && !options.resume && !is_stdout && !Path::new(&options.name.0).starts_with("/proc/self/fd") {
        interrupt::keep(format!("{}: interrupted; its contents are not complete", options.name));
    }
    if options.resume {
        interrupt::keep(format!("{}: interrupted; run the same command to continue", options.name));
    }
    if let Some(at) = prepared.resumed_at().filter(|_| !options.quiet) {
        let length = prepared.length().unwrap_or(at);
        say_named!("{}: continuing the interrupted copy at {at} of {length} bytes", options.name);
    }
    for name in prepared.skipped_bitmaps() {
        say_named!("bitmap {name:?} is inconsistent (it was in use and not stored): it is not copied");
    }
    let length = prepared.length();
    let meter = Meter::new("convert", shown(options), options.quiet, options.rate);
    let continued = |error: anyhow::Error| {
        if options.resume { error.context("not complete; the same command continues the copy") } else { error }
    };
    let note = |progress| if interrupt::is_stopping() { ControlFlow::Break(()) } else { meter.note(progress) };
    let counters = prepared.run(&note).map_err(failed).map_err(continued)?;
    drop(meter);
    if !options.quiet {
        warn(&counters);
    }
    Ok((counters, length, is_stdout))
}

/// Prints the counters for programs, on stderr if the image is on stdout. Without a known `length` it is what was read.
pub(super) fn report(counters: &ConvertCounters, length: Option<u64>, json: bool, is_stdout: bool) {
    let object = object(counters, length.unwrap_or(counters.bytes_read));
    match (json, is_stdout) {
        (false, _) => {}
        (true, true) => say!("{object}"),
        (true, false) => print_out!("{object}"),
    }
}

/// Opens the source and the target, where they are pipes.
fn pipes(options: &mut ConvertOptions) -> anyhow::Result<(Option<InputStream>, Option<Output>)> {
    let output = if options.no_create { None } else { pipe::output(&options.name)? };
    let mut input = None;
    let count = options.sources.len();
    for source in &mut options.sources {
        input = match pipe::input(source)? {
            Some(_) if count > 1 => anyhow::bail!("{}: a pipe must be the only source", source.name),
            found => found.or(input),
        };
    }
    if let Some(source) = input.as_ref().and(options.sources.first()) {
        let refused = [
            (options.snapshot.is_some(), "-l"),
            (options.bitmaps.is_some(), "--bitmaps"),
            (options.backing.is_some(), "-B"),
            (options.salvage, "--salvage"),
            (options.copy_range, "-C"),
            (options.resume, "--resume"),
        ];
        if let Some((_, option)) = refused.into_iter().find(|(given, _)| *given) {
            anyhow::bail!(
                "{option}: {} is a pipe, which is read once and in order; store it in a file first",
                source.name
            );
        }
    }
    if output.is_some() {
        let name = &options.name;
        if options.compress {
            let pipe = if name.0 == "-" { "stdout".into() } else { name.to_string() };
            anyhow::bail!(
                "-c: {pipe} gets the tables first, before it is known where compressed clusters go; name a file, or omit \
                 -c"
            );
        }
        let reasons = [
            (options.bitmaps.is_some(), "--bitmaps", "bitmaps are not written to a pipe"),
            (options.out_of_order, "-W", "a pipe is written in order"),
            (options.resume, "--resume", "what was written to a pipe cannot be continued"),
            (options.copy_range, "-C", "a pipe has no places that can be copied to"),
            (options.sparse() == 0, "-S 0", "a pipe has no space that could be allocated"),
        ];
        if let Some((_, option, why)) = reasons.into_iter().find(|(given, _, _)| *given) {
            anyhow::bail!("{option}: {name} is a pipe, and {why}; write to a file, or omit {option}");
        }
    }
    Ok((input, output))
}

/// Whether progress is shown also without a terminal.
const fn shown(options: &ConvertOptions) -> bool {
    options.progress && !options.json
}

/// Keeps an image's own error in the chain, where its remedy is found.
pub(super) fn cause(error: OperationError) -> anyhow::Error {
    match error {
        OperationError::Image(error) => error.into(),
        error => error.into(),
    }
}

/// Adds the option that leaves out a bitmap which cannot be copied.
fn broken_bitmap(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(ImageError::InconsistentBitmap { .. }) => anyhow::anyhow!("{error}, or add --skip-broken-bitmaps"),
        _ => error,
    }
}

/// Describes damage of an image from a pipe: it cannot be checked there.
fn incomplete(error: anyhow::Error) -> anyhow::Error {
    let found = error.chain().find_map(|cause| cause.downcast_ref::<ImageError>());
    match found {
        Some(ImageError::Truncated { image, what, end }) if &**image == "stdin" => {
            anyhow::anyhow!("stdin ended at byte {end}, before the {what}; the stream is incomplete")
        }
        Some(found @ ImageError::Corrupt { image, .. }) if &**image == "stdin" => {
            anyhow::anyhow!("{found}; the stream is incomplete or damaged")
        }
        _ => error,
    }
}

/// Resolves the options into the library's request.
fn request(options: &ConvertOptions) -> anyhow::Result<ConvertRequest> {
    let resolved = |source| {
        let mut named = open::resolve(source)?;
        named.options.io = io(source.cache);
        named.options.snapshot.clone_from(&options.snapshot);
        anyhow::Ok(named)
    };
    let sources = options.sources.iter().map(resolved).collect::<anyhow::Result<Vec<_>>>()?;
    let target = match &options.backing {
        Some(backing) if options.no_create => overlay(options, backing)?,
        None if options.no_create => ConvertTarget::Existing(open::resolve(&target(options))?),
        Some(_) | None => ConvertTarget::New(new_target(options)?),
    };
    let is_cached = !options.target.cache.is_direct() && target.location().path().is_some();
    let mut request = ConvertRequest::new(sources, target);
    request.bitmaps = options.bitmaps;
    request.resume = options.resume.then(|| ResumeOptions::new(description(options)));
    request.options = convert::ConvertOptions::default()
        .max_in_flight(options.in_flight())
        .sparse(options.sparse())
        // Writes into the page cache of one file wait for each other in the kernel: in order, reads continue meanwhile.
        .out_of_order(options.out_of_order && !is_cached)
        .target_is_zero(options.target_is_zero)
        .salvage(options.salvage)
        .copy_range(options.copy_range)
        .compress(options.compress.then(|| Compress::default().level(options.compress_level)));
    Ok(request)
}

/// Describes what determines the contents of a target: a copy that is continued must have been begun with the same.
fn description(options: &ConvertOptions) -> String {
    let mut words = Vec::new();
    let mut add = |option: &str, value: Option<String>| words.extend(value.map(|value| format!("{option} {value}")));
    let text = |name: &std::ffi::OsString| name.to_string_lossy().into_owned();
    add("-O", Some(options.target.format.clone()));
    add("-o", Some(options.target.options.clone()).filter(|options| !options.is_empty()));
    add("-B", options.backing.as_ref().map(text));
    add("-F", options.backing_format.clone());
    add("-l", options.snapshot.as_ref().map(ToString::to_string));
    add("-S", Some(options.sparse().to_string()));
    add("-c", options.compress.then(|| options.compress_level.map_or("default".into(), |level| level.to_string())));
    add("-f", options.sources.first().and_then(|source| source.format.clone()));
    add("of", Some(options.sources.iter().map(|source| source.name.to_string()).collect::<Vec<_>>().join(" ")));
    words.join(" ")
}

/// Refuses options that contradict each other, before anything is opened.
fn check(options: &ConvertOptions) -> anyhow::Result<()> {
    if !options.sparse().is_multiple_of(512) || options.sparse() > SPARSE_MOST {
        anyhow::bail!("-S {}: must be a multiple of 512 up to {SPARSE_MOST}; 0 allocates everything", options.sparse());
    }
    if options.resume && options.target.cache == CacheMode::Unsafe {
        anyhow::bail!("-t unsafe cannot be used with --resume, whose journal must be durable; use writeback");
    }
    if options.no_create && !options.target.options.is_empty() {
        anyhow::bail!("-o and -n exclude each other: -o applies to a new target, -n uses an existing one");
    }
    if options.snapshot.is_some() && options.sources.len() > 1 {
        anyhow::bail!("-l: needs exactly one source");
    }
    if options.bitmaps.is_some() && options.sources.len() > 1 {
        anyhow::bail!("--bitmaps: needs exactly one source");
    }
    if options.bitmaps.is_some() && options.snapshot.is_some() {
        anyhow::bail!("--bitmaps and -l exclude each other: bitmaps are of the disk as it is now, not of a snapshot");
    }
    if options.bitmaps.is_some() && !options.target.image_opts && options.target.format != "qcow2" {
        anyhow::bail!("--bitmaps: format {} has no bitmaps; use -O qcow2", options.target.format);
    }
    if options.backing.is_some() && options.sources.len() > 1 {
        anyhow::bail!("-B: needs exactly one source: the target cannot share the backing file of several");
    }
    if options.backing.is_some() && options.target_is_zero {
        anyhow::bail!("-B and --target-is-zero exclude each other: the target reads as its backing file");
    }
    let format = &options.target.format;
    if options.no_create && options.backing.is_some() && !options.target.image_opts && format != "qcow2" {
        anyhow::bail!("{}: format {format} does not support a backing file; use -O qcow2", options.name);
    }
    if options.no_create && options.backing.is_none() && options.backing_format.is_some() {
        anyhow::bail!("{}: -F needs a backing file; give it with -B", options.name);
    }
    Ok(())
}

/// Cached pages are copied by the thread that requests them, and each request has one.
pub(super) fn io(cache: CacheMode) -> Io {
    if cache.is_direct() { Io::Auto } else { Io::CallerThread }
}

/// The target, as one that exists.
fn target(options: &ConvertOptions) -> Source {
    let target = &options.target;
    Source {
        name: options.name.clone(),
        image_opts: target.image_opts,
        format: (!target.image_opts).then(|| target.format.clone()),
        cache: target.cache,
        io: io(target.cache),
        force_share: false,
        untrusted: options.sources.iter().any(|source| source.untrusted),
    }
}

/// An image that exists, with the backing file that it must have.
fn overlay(options: &ConvertOptions, backing: &OsStr) -> anyhow::Result<ConvertTarget> {
    let image = open::resolve(&target(options))?;
    let format = options.backing_format.as_deref().map(str::parse).transpose()?;
    let reference = Reference::from_image(backing, &image.reference.location)?;
    let backing = Box::new(NamedImage::new(reference, image.options.clone().format(format)));
    Ok(ConvertTarget::Overlay { image, backing })
}

fn new_target(options: &ConvertOptions) -> anyhow::Result<NewTarget> {
    let target = &options.target;
    let mut format = FormatOptions::parse(&target.format, &target.options)?;
    if (options.backing.is_some() || options.backing_format.is_some()) && format.format() != Format::Qcow2 {
        let (name, format) = (&options.name, format.format());
        anyhow::bail!("{name}: format {format} does not support a backing file; use -O qcow2");
    }
    if let Some(backing) = &options.backing {
        format.set("backing_file", backing)?;
    }
    if let Some(backing_format) = &options.backing_format {
        format.set("backing_fmt", backing_format)?;
    }
    if options.compress {
        refuse_uncompressed(&options.name, &format)?;
        check_level(options.compress_level, &format)?;
    }
    match (format.path("backing_file"), format.text("backing_fmt")) {
        (Some(backing), Some(_)) if options.sources.len() > 1 => anyhow::bail!(
            "-o backing_file={}: needs exactly one source: the target cannot share the backing file of several",
            backing.display()
        ),
        (Some(backing), None) => {
            anyhow::bail!("{}: format of the backing file {} not given; use -F", options.name, backing.display())
        }
        (None, Some(_)) => anyhow::bail!("{}: -F needs a backing file; give it with -B", options.name),
        (Some(_), Some(_)) | (None, None) => {}
    }
    let first = options.sources.first();
    let force_share = first.is_some_and(|source| source.force_share);
    let backing = OpenOptions::default()
        .cache(target.cache)
        .lock(if force_share { LockPolicy::None } else { LockPolicy::Auto })
        .policy(open::policy(first.is_some_and(|source| source.untrusted)));
    let image = new_image(&options.name, target.cache, &format)?;
    Ok(NewTarget::new(image, io(target.cache), object::usable(open::no_journal(backing))))
}

/// Refuses a new target that cannot be compressed, before it is created.
fn refuse_uncompressed(name: &Name, format: &FormatOptions) -> anyhow::Result<()> {
    if format.format() != Format::Qcow2 {
        let format = format.format();
        anyhow::bail!("{name}: format {format} does not support compressed contents; use -O qcow2, or omit -c");
    }
    if format.path("data_file").is_some() {
        anyhow::bail!("{name}: an image with a data file does not support compressed contents; omit -c");
    }
    if format.text("encrypt.format").is_some() {
        anyhow::bail!("{name}: an encrypted image does not support compressed contents; omit -c");
    }
    if format.text("preallocation").is_some_and(|preallocation| preallocation != "off") {
        anyhow::bail!("{name}: -c and -o preallocation exclude each other");
    }
    Ok(())
}

/// Refuses a level that the method of compression does not have.
fn check_level(level: Option<u8>, format: &FormatOptions) -> anyhow::Result<()> {
    let method = compression(format)?;
    match level {
        Some(level) if level == 0 || level > method.highest_level() => {
            anyhow::bail!("--compress-level {level}: {} takes 1 to {}", method.name(), method.highest_level())
        }
        _ => Ok(()),
    }
}

fn warn(counters: &ConvertCounters) {
    for place in &counters.unreadable_ranges {
        let bytes = place.end - place.start;
        say_named!("warning: {bytes} bytes at {} could not be read; written as zeros to the target", place.start);
    }
    let named: u64 = counters.unreadable_ranges.iter().map(|place| place.end - place.start).sum();
    if named < counters.bytes_unreadable {
        say_named!("warning: {} further bytes could not be read", counters.bytes_unreadable - named);
    }
}

/// The counters for programs.
pub(super) fn object(counters: &ConvertCounters, length: u64) -> serde_json::Value {
    let mut object = json!({
        "length": length,
        "reads": counters.reads,
        "bytes-read": counters.bytes_read,
        "writes": counters.writes,
        "bytes-written": counters.bytes_written,
        "bytes-stored": counters.bytes_stored,
        "copies": counters.copies,
        "bytes-copied": counters.bytes_copied,
        "zeroes": counters.zeroes,
        "bytes-zeroed": counters.bytes_zeroed,
        "bytes-spared": counters.bytes_already_zero,
        "bytes-below": counters.bytes_in_backing,
        "bytes-lost": counters.bytes_unreadable,
    });
    remote::add_cost(&mut object);
    object
}
