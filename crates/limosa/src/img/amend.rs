//! `limosa img amend`.

use std::ffi::OsStr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use limosa_image::amend::{self, amend};
use limosa_image::chain::{ImageFile, NamedImage};
use limosa_image::luks::{DEFAULT_ITER_TIME, KeySlotChange};
use limosa_image::qcow2::DataFileChange;
use limosa_image::{Format, Progress};
use limosa_storage::block_on;

use super::create::version;
use super::format_options::FormatOptions;
use super::meter::Meter;
use super::object;
use super::open;
use super::options::AmendOptions;
use crate::program;
use limosa_console::{check_stdout, print_out};

pub(crate) fn run(options: &AmendOptions) -> anyhow::Result<ExitCode> {
    let source = &options.source;
    if options.options.split(',').any(|option| matches!(option, "help" | "?")) {
        let format = match &source.format {
            Some(format) => format.parse()?,
            None if !source.name.0.is_empty() => open::file(source, true)?.format,
            None => anyhow::bail!("-o help: format not given; use -f"),
        };
        print_out!("{}", FormatOptions::to_amend(format, "")?.help());
        check_stdout()?;
        return Ok(ExitCode::SUCCESS);
    }
    anyhow::ensure!(!source.name.0.is_empty(), "file not given; use {} amend -o OPTIONS FILE", program::img());
    let NamedImage { reference, options: open, .. } = open::resolve(source)?;
    let file = block_on(ImageFile::open(&reference, &open.clone().read_only(true)))?;
    let asked = FormatOptions::to_amend(file.format, &options.options).with_context(|| source.name.to_string())?;
    if let Some(name) = asked.first_of("backing_f") {
        anyhow::bail!("-o {name}: use {} rebase", program::img());
    }
    drop(file);
    let prefix = if asked.format() == Format::Qcow2 { "encrypt." } else { "" };
    let changes = amend::AmendOptions::default()
        .key_slots(key_slots(&asked, prefix)?)
        .version(version(&asked)?)
        .lazy_refcounts(asked.on_off("lazy_refcounts"))
        .refcount_bits(asked.number("refcount_bits").map(u32::try_from).transpose().context("-o refcount_bits")?)
        .size(asked.number("size"))
        .data_file(
            DataFileChange::default()
                .name(asked.path("data_file").map(OsStr::to_owned))
                .is_raw(asked.on_off("data_file_raw")),
        )
        .force(options.force);
    let meter = Meter::new("amend", options.progress, options.quiet, None);
    block_on(amend(&reference, &open, &changes))?;
    let _ = meter.note(Progress::new(1, 1, 0));
    drop(meter);
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// The change of key slots, if one is asked for.
fn key_slots(asked: &FormatOptions, prefix: &str) -> anyhow::Result<Option<KeySlotChange>> {
    let option = |name: &str| format!("{prefix}{name}");
    let secret = |name: &str| asked.text(&option(name)).map(|id| object::named(&option(name), id)).transpose();
    let (new, old) = (secret("new-secret")?, secret("old-secret")?);
    let slot = asked.number(&option("keyslot")).map(usize::try_from).transpose().context("keyslot")?;
    let iter_time = asked.number(&option("iter-time")).map(Duration::from_millis);
    Ok(Some(match (asked.text(&option("state")), new, old) {
        (Some("active"), Some(passphrase), None) => {
            KeySlotChange::Activate { passphrase, slot, iter_time: iter_time.unwrap_or(DEFAULT_ITER_TIME) }
        }
        (Some("active"), None, _) => anyhow::bail!("-o {prefix}state=active needs -o {prefix}new-secret=ID"),
        (Some("active"), _, Some(_)) => anyhow::bail!("-o {prefix}old-secret is for -o {prefix}state=inactive"),
        (Some("inactive"), None, passphrase) if iter_time.is_none() => KeySlotChange::Erase { slot, passphrase },
        (Some("inactive"), ..) => {
            anyhow::bail!("-o {prefix}new-secret and iter-time are for -o {prefix}state=active")
        }
        (Some(other), ..) => anyhow::bail!("-o {prefix}state={other}: must be active or inactive"),
        (None, None, None) if slot.is_none() && iter_time.is_none() => return Ok(None),
        (None, ..) => anyhow::bail!("-o {prefix}state not given: active or inactive"),
    }))
}
