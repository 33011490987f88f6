//! `limosa img dd`.

use std::ops::ControlFlow;
use std::process::ExitCode;

use limosa_image::chain::OpenOptions;
use limosa_image::convert::{ConvertOptions, ConvertRequest, ConvertTarget, NewTarget, Streams};
use limosa_storage::{CacheMode, block_on};

use super::convert::{cause, io, report};
use super::create::new_image;
use super::format_options::FormatOptions;
use super::interrupt::UNFINISHED;
use super::open;
use super::options::DdOptions;
use super::pipe;
use crate::program::say_named;
use limosa_console::check_stdout;

pub(crate) fn run(options: &DdOptions) -> anyhow::Result<ExitCode> {
    let cache = CacheMode::Writeback;
    let mut source = options.source.clone();
    let (input, output) = (pipe::input(&mut source)?, pipe::output(&options.name)?);
    let is_stdout = output.as_ref().is_some_and(|output| output.is_stdout);
    let mut source = open::resolve(&source)?;
    source.options.io = io(options.source.cache);
    let image = new_image(&options.name, cache, &FormatOptions::of(&options.format)?)?;
    let target = NewTarget::new(image, io(cache), OpenOptions::default());
    let sources = if input.is_some() { Vec::new() } else { vec![source] };
    let mut request = ConvertRequest::new(sources, ConvertTarget::New(target));
    request.options = ConvertOptions::default().window(Some(options.blocks.window()));
    let streams = Streams::new(input, output.map(|output| output.stream));
    let prepared = block_on(request.prepare_streams(streams, &UNFINISHED)).map_err(cause)?;
    if prepared.begins_past_end() {
        say_named!(
            "warning: {}: skip={} begins past the end; the output is empty",
            options.source.name,
            options.blocks.skip
        );
    }
    let length = prepared.length();
    let counters = prepared.run(&|_| ControlFlow::Continue(())).map_err(cause)?;
    report(&counters, length, options.json, is_stdout);
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}
