//! `limosa img dd`.

use std::ops::ControlFlow;
use std::process::ExitCode;

use limosa_image::chain::OpenOptions;
use limosa_image::convert::{ConvertOptions, ConvertRequest, ConvertTarget, NewTarget};
use limosa_storage::{CacheMode, block_on};

use super::convert::{cause, io, object};
use super::create::new_image;
use super::format_options::FormatOptions;
use super::interrupt::UNFINISHED;
use super::open;
use super::options::DdOptions;
use crate::program::say_named;
use limosa_console::{check_stdout, print_out};

pub(crate) fn run(options: &DdOptions) -> anyhow::Result<ExitCode> {
    let cache = CacheMode::Writeback;
    let mut source = open::resolve(&options.source)?;
    source.options.io = io(options.source.cache);
    let image = new_image(&options.name, cache, &FormatOptions::of(&options.format)?)?;
    let target = NewTarget::new(image, io(cache), OpenOptions::default());
    let mut request = ConvertRequest::new(vec![source], ConvertTarget::New(target));
    request.options = ConvertOptions::default().window(Some(options.blocks.window()));
    let prepared = block_on(request.prepare(&UNFINISHED)).map_err(cause)?;
    if prepared.begins_past_end() {
        say_named!(
            "warning: {}: skip={} begins past the end; the output is empty",
            options.source.name,
            options.blocks.skip
        );
    }
    let length = prepared.length();
    let counters = prepared.run(&|_| ControlFlow::Continue(())).map_err(cause)?;
    if options.json {
        print_out!("{}", object(&counters, length));
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}
