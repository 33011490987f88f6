//! `limosa img create`.

use std::ffi::OsStr;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use limosa_image::chain::OpenOptions;
use limosa_image::luks::{self, HashAlgorithm, IvGenerator, NewHeader, Passphrase};
use limosa_image::qcow2::{Compression, NewEncryption};
use limosa_image::reference::Reference;
use limosa_image::{Format, NewImage, NewImageFormat, Preallocation, qcow2, raw};
use limosa_storage::{CacheMode, LockPolicy, block_on};

use super::format_options::FormatOptions;
use super::interrupt::UNFINISHED;
use super::object;
use super::open;
use super::options::{CreateOptions, Name};
use crate::program;
use limosa_console::{check_stdout, error_line, print_out};

pub(crate) fn run(options: &CreateOptions) -> anyhow::Result<ExitCode> {
    if options.target.asks_for_help() {
        print_out!("{}", FormatOptions::of(&options.target.format)?.help());
        check_stdout()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut format = asked(options)?;
    let mut image = new_image(&options.name, options.target.cache, &format)?;
    if !options.backing_unsafe
        && let Some(backing) = image.backing()?
    {
        // Only its length is read, so another process may write it meanwhile; with qemu-img it may, too.
        let open = OpenOptions::default().lock(LockPolicy::None).policy(open::policy(options.untrusted));
        let length = block_on(backing.length(&object::usable(open))).map_err(|error| {
            let line = format!(
                "{}: backing file: {}; to create the image without it, use -u and give a size",
                options.name,
                error_line(&error)
            );
            // The library's own remedy is found in the chain.
            anyhow::Error::from(error).context(line)
        })?;
        if format.number("size").is_none() {
            format.set("size", length.to_string())?;
            image.set_size(length);
        }
    }
    if format.number("size").is_none() && format.on_off("detached-header") != Some(true) {
        anyhow::bail!("{}: size not given; use {} create FILE SIZE", options.name, program::img());
    }
    if !options.quiet {
        print_out!("Formatting '{}', {}", options.name, format.line());
    }
    block_on(image.create(&UNFINISHED, &object::tls()))?.keep();
    Ok(ExitCode::SUCCESS)
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
        && format.format() != Format::Qcow2
    {
        anyhow::bail!(
            "{}: format {} does not support a backing file ({}); use -f qcow2",
            options.name,
            format.format(),
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

/// Resolves the options of a new image.
///
/// # Errors
/// A value that the format cannot have, or a name that is no file's.
pub(crate) fn new_image(name: &Name, cache: CacheMode, format: &FormatOptions) -> anyhow::Result<NewImage> {
    let size = format.number("size").unwrap_or_default();
    let preallocation = parsed(format, "preallocation")?.unwrap_or_default();
    let new = match format.format() {
        Format::Raw => NewImageFormat::Raw(raw::CreateOptions::default().size(size).preallocation(preallocation)),
        Format::Qcow2 => {
            let qcow2 = qcow2_options(format, size, preallocation)?;
            NewImageFormat::Qcow2(Box::new(qcow2.encryption(encryption(name, format)?)))
        }
        Format::Luks => NewImageFormat::Luks(Box::new(luks_options(name, format, size, preallocation)?)),
    };
    let hint = format.number("extent_size_hint").map(u32::try_from).transpose();
    let hint = hint.context("-o extent_size_hint: must be less than 4G")?;
    Ok(NewImage::new(Reference::location_from_name(name)?, cache, new).extent_size_hint(hint))
}

/// The options of a new image in the format `luks`.
fn luks_options(
    name: &Name,
    format: &FormatOptions,
    size: u64,
    preallocation: Preallocation,
) -> anyhow::Result<luks::CreateOptions> {
    let (header, passphrase) = luks_header(name, format, "")?;
    let new = luks::CreateOptions::new(passphrase).size(size).header(header).preallocation(preallocation);
    Ok(new.detached(format.on_off("detached-header") == Some(true)))
}

/// The header of a new encrypted image, and the passphrase of its first key slot. `prefix`: begins the options' names.
fn luks_header(name: &Name, format: &FormatOptions, prefix: &str) -> anyhow::Result<(NewHeader, Passphrase)> {
    let option = |name: &str| format!("{prefix}{name}");
    let secret = format.text(&option("key-secret"));
    let secret = secret.with_context(|| format!("{name}: format luks needs -o {prefix}key-secret=ID"))?;
    let passphrase = object::named(&option("key-secret"), secret)?;
    let usual = NewHeader::default();
    let hash = parsed(format, &option("ivgen-hash-alg"))?;
    let generator = match (format.text(&option("ivgen-alg")), hash) {
        (None | Some("plain64"), None) => IvGenerator::Plain64,
        (Some("plain"), None) => IvGenerator::Plain,
        (Some("essiv"), hash) => IvGenerator::Essiv(hash.unwrap_or(HashAlgorithm::Sha256)),
        (None | Some("plain" | "plain64"), Some(_)) => {
            anyhow::bail!("-o {prefix}ivgen-hash-alg needs -o {prefix}ivgen-alg=essiv")
        }
        (Some(other), _) => anyhow::bail!("-o {prefix}ivgen-alg={other}: must be plain, plain64 or essiv"),
    };
    let header = usual
        .cipher(parsed(format, &option("cipher-alg"))?.unwrap_or(usual.cipher))
        .mode(parsed(format, &option("cipher-mode"))?.unwrap_or(usual.mode))
        .generator(generator)
        .hash(parsed(format, &option("hash-alg"))?.unwrap_or(usual.hash))
        .iter_time(format.number(&option("iter-time")).map_or(usual.iter_time, Duration::from_millis));
    Ok((header, passphrase))
}

/// The encryption of a new qcow2 image.
fn encryption(name: &Name, format: &FormatOptions) -> anyhow::Result<Option<NewEncryption>> {
    match format.text("encrypt.format") {
        Some("luks") => {
            let (header, passphrase) = luks_header(name, format, "encrypt.")?;
            Ok(Some(NewEncryption::new(passphrase).header(header)))
        }
        Some(other) => anyhow::bail!("-o encrypt.format={other}: must be luks"),
        None => match format.first_of("encrypt.") {
            Some(option) => anyhow::bail!("-o {option} needs -o encrypt.format=luks"),
            None => Ok(None),
        },
    }
}

/// A text with few values, if it was given.
fn parsed<T: FromStr>(format: &FormatOptions, name: &str) -> anyhow::Result<Option<T>>
where
    T::Err: std::fmt::Display,
{
    let parse = |text: &str| text.parse().map_err(|error| anyhow::anyhow!("-o {name}: {error}"));
    format.text(name).map(parse).transpose()
}

/// The version of a qcow2 image, if it was given.
pub(crate) fn version(format: &FormatOptions) -> anyhow::Result<Option<u32>> {
    Ok(match format.text("compat") {
        None => None,
        Some("v3" | "1.1") => Some(3),
        Some("v2" | "0.10") => Some(2),
        Some(other) => anyhow::bail!("-o compat: {other:?} must be v2 (0.10) or v3 (1.1)"),
    })
}

/// The method of compression of a qcow2 image.
pub(crate) fn compression(format: &FormatOptions) -> anyhow::Result<Compression> {
    Ok(match format.text("compression_type") {
        None | Some("zlib") => Compression::Zlib,
        Some("zstd") => Compression::Zstd,
        Some(other) => anyhow::bail!("-o compression_type: {other:?} must be zlib or zstd"),
    })
}

fn qcow2_options(
    format: &FormatOptions,
    size: u64,
    preallocation: Preallocation,
) -> anyhow::Result<qcow2::CreateOptions> {
    let usual = qcow2::CreateOptions::default();
    let version = version(format)?.unwrap_or(usual.version);
    let compression = compression(format)?;
    let refcount_bits = match format.number("refcount_bits") {
        Some(bits) => u32::try_from(bits).context("-o refcount_bits")?,
        None => usual.refcount_bits,
    };
    let cluster_size = format.number("cluster_size").unwrap_or(usual.cluster_size);
    Ok(usual
        .size(size)
        .version(version)
        .cluster_size(cluster_size)
        .refcount_bits(refcount_bits)
        .lazy_refcounts(format.on_off("lazy_refcounts").unwrap_or_default())
        .extended_l2(format.on_off("extended_l2").unwrap_or_default())
        .compression(compression)
        .data_file(format.path("data_file").map(Into::into))
        .data_file_raw(format.on_off("data_file_raw").unwrap_or_default())
        .backing_file(format.path("backing_file").map(Into::into))
        .backing_format(format.text("backing_fmt").map(Into::into))
        .preallocation(preallocation))
}
