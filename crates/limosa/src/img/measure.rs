//! `limosa img measure`.

use std::process::ExitCode;

use limosa_image::measure::{Measurement, measure_copy, measure_new, measure_stream};
use limosa_storage::{CacheMode, block_on};
use serde::Serialize;

use super::convert::cause;
use super::create::new_image;
use super::format_options::FormatOptions;
use super::open;
use super::options::{MeasureOptions, Measured, Name};
use super::pretty::pretty;
use limosa_console::{check_stdout, print_out};

/// The name of the image that is not created, in errors about its options.
const NEW: &str = "new image";

/// The result for programs, in qemu-img's form.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    #[serde(skip_serializing_if = "Option::is_none")]
    bitmaps: Option<u64>,
    required: u64,
    fully_allocated: u64,
}

pub(crate) fn run(options: &MeasureOptions) -> anyhow::Result<ExitCode> {
    if options.target.asks_for_help() {
        print_out!("{}", FormatOptions::of(&options.target.format)?.help());
        check_stdout()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut format = FormatOptions::parse(&options.target.format, &options.target.options)?;
    if let Measured::Size(size) = options.what {
        format.set("size", size.to_string())?;
    }
    let new = new_image(&Name(NEW.into()), CacheMode::default(), &format)?.format;
    let measured = match &options.what {
        Measured::Size(_) => measure_new(&new, NEW)?,
        Measured::Image(source) => {
            let mut named = open::resolve(source)?;
            named.options = open::one_by_one(&named.options).snapshot(options.snapshot.clone());
            let measured = async {
                if options.pipe {
                    return measure_stream(&named, &new, NEW).await;
                }
                measure_copy(&named, &new, NEW).await
            };
            block_on(measured).map_err(cause)?
        }
    };
    let Measurement { required, fully_allocated, bitmaps, .. } = measured;
    if options.json {
        print_out!("{}", pretty(&Report { bitmaps, required, fully_allocated })?);
    } else {
        print_out!("required size: {required}");
        print_out!("fully allocated size: {fully_allocated}");
        if let Some(bitmaps) = bitmaps {
            print_out!("bitmaps size: {bitmaps}");
        }
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}
