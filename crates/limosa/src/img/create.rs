//! `limosa img create`.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::Context as _;
use limosa_image::Policy;
use limosa_image::chain::{self, OpenOptions};
use limosa_image::qcow2::{Compression, create};
use limosa_image::reference::Reference;
use limosa_image::{Preallocation, qcow2, raw};
use limosa_storage::{CacheMode, Create, FileOptions, FileStorage, LockPolicy, Storage, block_on};

use super::format_options::FormatOptions;
use super::interrupt;
use super::options::{CreateOptions, Name};
use limosa_console::{all_printed, print_out};

pub(crate) fn run(options: &CreateOptions) -> anyhow::Result<ExitCode> {
    if options.target.asks_for_help() {
        print_out!("{}", FormatOptions::of(&options.target.format)?.help());
        all_printed()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut format = asked(options)?;
    if let Some(backing) = format.path("backing_file").filter(|_| !options.backing_unsafe) {
        let length = backing_length(options, backing, format.text("backing_fmt"))?;
        if format.number("size").is_none() {
            format.set("size", length.to_string())?;
        }
    }
    if format.number("size").is_none() {
        anyhow::bail!("{}: size not given; use limosa img create FILE SIZE", options.name);
    }
    if !options.quiet {
        print_out!("Formatting '{}', {}", options.name, format.line());
    }
    make(&options.name, options.target.cache, &format)?.keep();
    Ok(ExitCode::SUCCESS)
}

/// The length of the disk below the image, which has to be there.
fn backing_length(options: &CreateOptions, backing: &OsStr, format: Option<&str>) -> anyhow::Result<u64> {
    let format = format.map(str::parse).transpose().with_context(|| options.name.to_string())?;
    let reference = Reference::from_image(backing, &path(&options.name)?)?;
    let policy = if options.untrusted { Policy::Refuse } else { Policy::Follow };
    // Only its length is read, so another process may write it meanwhile; with qemu-img it may, too.
    let open = OpenOptions { format, read_only: true, lock: LockPolicy::None, policy, ..OpenOptions::default() };
    let why = || {
        format!("{}: cannot open its backing file; to create the image anyway, use -u and give a size", options.name)
    };
    Ok(block_on(chain::open(&reference, &open)).with_context(why)?.len())
}

/// Collects the format's options from all places of the command line.
fn asked(options: &CreateOptions) -> anyhow::Result<FormatOptions> {
    let mut format = FormatOptions::parse(&options.target.format, &options.target.options)?;
    if let Some(size) = options.size {
        if format.number("size").is_some() {
            anyhow::bail!("{}: size given twice", options.name);
        }
        format.set("size", size.to_string())?;
    }
    if let Some(value) = options.backing.as_deref().or(options.backing_format.as_deref().map(OsStr::new))
        && format.format() == "raw"
    {
        anyhow::bail!(
            "{}: format raw does not support a backing file ({}); use -f qcow2",
            options.name,
            value.display()
        );
    }
    if let Some(backing) = &options.backing {
        format.set("backing_file", backing)?;
    }
    if let Some(backing_format) = &options.backing_format {
        format.set("backing_fmt", backing_format)?;
    }
    match (format.path("backing_file"), format.text("backing_fmt")) {
        (Some(backing), _) if backing.is_empty() => {
            anyhow::bail!("{}: the name of the backing file is empty", options.name)
        }
        (Some(backing), _) if *backing == options.name.0 => {
            anyhow::bail!("{} cannot be its own backing file", options.name);
        }
        (Some(backing), None) => anyhow::bail!(
            "{}: format of the backing file {} not given; use -F (it is not probed: a guest that writes to a raw \
             image could make it look like another format)",
            options.name,
            backing.display()
        ),
        (None, Some(_)) => anyhow::bail!("{}: -F needs a backing file; give it with -b", options.name),
        _ => Ok(format),
    }
}

/// Makes an image, in place of what is there. Files that were not there before are taken away again, unless they are
/// kept.
///
/// # Errors
/// A value that the format cannot have, or the file cannot be made or written.
pub(crate) fn make(name: &Name, cache: CacheMode, format: &FormatOptions) -> anyhow::Result<NewFiles> {
    let size = format.number("size").with_context(|| format!("{name}: size not given"))?;
    let preallocation = parsed(format, "preallocation")?.unwrap_or_default();
    if format.format() == "raw" {
        let file = NewFile::open(name, cache)?;
        block_on(raw::create(&*file.storage, size, preallocation))?;
        return Ok(NewFiles(vec![file.made]));
    }
    let qcow2 = qcow2_options(format, size, preallocation)?;
    // Before anything is overwritten.
    qcow2.check().map_err(|why| anyhow::anyhow!("{name}: {why}"))?;
    let data_file = match format.path("data_file") {
        // Relative to the working directory, not to the image's: readers of the image resolve the name like this.
        Some(data_file) => Some(NewFile::open(&Name(data_file.to_owned()), cache)?),
        None => None,
    };
    let file = NewFile::open(name, cache)?;
    let contents = data_file.as_ref().map(|data_file| &*data_file.storage as &dyn Storage);
    block_on(create(&*file.storage, contents, &qcow2))?;
    Ok(NewFiles([file].into_iter().chain(data_file).map(|file| file.made).collect()))
}

/// A text with few values, if it was given.
fn parsed<T: FromStr>(format: &FormatOptions, name: &str) -> anyhow::Result<Option<T>>
where
    T::Err: std::fmt::Display,
{
    let parse = |text: &str| text.parse().map_err(|error| anyhow::anyhow!("-o {name}: {error}"));
    format.text(name).map(parse).transpose()
}

fn qcow2_options(
    format: &FormatOptions,
    size: u64,
    preallocation: Preallocation,
) -> anyhow::Result<qcow2::CreateOptions> {
    let usual = qcow2::CreateOptions::default();
    let version = match format.text("compat") {
        None | Some("v3" | "1.1") => 3,
        Some("v2" | "0.10") => 2,
        Some(other) => anyhow::bail!("-o compat: {other:?} must be v2 (0.10) or v3 (1.1)"),
    };
    let compression = match format.text("compression_type") {
        None | Some("zlib") => Compression::Zlib,
        Some("zstd") => Compression::Zstd,
        Some(other) => anyhow::bail!("-o compression_type: {other:?} must be zlib or zstd"),
    };
    Ok(qcow2::CreateOptions {
        size,
        version,
        cluster_size: format.number("cluster_size").unwrap_or(usual.cluster_size),
        refcount_bits: match format.number("refcount_bits") {
            Some(bits) => u32::try_from(bits).context("-o refcount_bits")?,
            None => usual.refcount_bits,
        },
        lazy_refcounts: format.on_off("lazy_refcounts").unwrap_or_default(),
        extended_l2: format.on_off("extended_l2").unwrap_or_default(),
        compression,
        data_file: format.path("data_file").map(Into::into),
        data_file_raw: format.on_off("data_file_raw").unwrap_or_default(),
        backing_file: format.path("backing_file").map(Into::into),
        backing_format: format.text("backing_fmt").map(Into::into),
        preallocation,
    })
}

/// The path of an image that is to be made.
///
/// # Errors
/// It is named as something other than a file.
fn path(name: &Name) -> anyhow::Result<PathBuf> {
    anyhow::ensure!(
        !name.0.as_encoded_bytes().starts_with(b"json:"),
        "{name}: a new image must be given by the path of its file"
    );
    Ok(Reference::named(name)?.path)
}

/// A file that an image is made in.
struct NewFile {
    storage: Arc<FileStorage>,
    made: Made,
}

/// A file that was not there before: it is taken away again.
struct Made(Option<PathBuf>);

/// Files that an image was made in. They are closed.
#[must_use]
pub(crate) struct NewFiles(Vec<Made>);

impl NewFiles {
    /// The image is whole: they stay.
    pub(crate) fn keep(mut self) {
        self.0.iter_mut().filter_map(|made| made.0.take()).for_each(|path| interrupt::made(&path, true));
    }
}

impl NewFile {
    fn open(name: &Name, cache: CacheMode) -> anyhow::Result<Self> {
        let path = &path(name)?;
        let options = |create| FileOptions { cache, create, ..FileOptions::default() };
        match interrupt::making(path, || FileStorage::open(path, &options(Create::New))) {
            Ok(storage) => Ok(Self { storage, made: Made(Some(path.to_owned())) }),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                Ok(Self { storage: FileStorage::open(path, &options(Create::No))?, made: Made(None) })
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            interrupt::made(&path, false);
        }
    }
}
