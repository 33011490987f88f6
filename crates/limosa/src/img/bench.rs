//! `limosa img bench`.

use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::Context as _;
use limosa_image::bench::{self, FlushEvery};
use limosa_image::qcow2::Qcow2Options;
use limosa_storage::block_on;
use serde_json::json;

use super::open;
use super::options::BenchOptions;
use limosa_console::{check_stdout, print_out, quantity};

pub(crate) fn run(options: &BenchOptions) -> anyhow::Result<ExitCode> {
    if options.count == 0 {
        anyhow::bail!("--count 0: must be at least 1");
    }
    let qcow2 = Qcow2Options::default().reflink_mode(options.clone);
    let disk = if options.write { open::to_write(&options.source, qcow2)? } else { open::to_read(&options.source)? };
    let flush = (options.flush_interval > 0).then(|| FlushEvery::new(options.flush_interval.into(), options.drain));
    let size = usize::try_from(options.buffer_size)?;
    let load = bench::BenchOptions::new(options.count.into(), options.depth.into(), size)
        .offset(options.offset)
        .step(options.step_size)
        .write_pattern(options.write.then_some(options.pattern))
        .flush(flush);
    let for_people = !options.json;
    if for_people {
        let verb = if options.write { "write" } else { "read" };
        print_out!(
            "Sending {} {verb} requests, {} bytes each, {} in parallel (starting at offset {}, step size {})",
            load.count,
            load.size,
            load.depth,
            load.offset,
            load.step
        );
        if let Some(flush) = load.flush {
            let without = if flush.drain { "" } else { ", without waiting for requests in flight" };
            print_out!("Sending flush every {} requests{without}", flush.requests);
        }
    }
    let report = block_on(bench::bench(&*disk, &load, &|_| ControlFlow::Continue(())))?;
    block_on(disk.close()).with_context(|| format!("cannot close {}", options.source.name))?;
    if for_people {
        print_out!("Run completed in {:.3} seconds.", report.elapsed.as_secs_f64());
    }
    if options.json {
        let rate = |count: u64| per_second(count, report.elapsed);
        let report = json!({
            "seconds": report.elapsed.as_secs_f64(),
            "requests": report.requests,
            "flushes": report.flushes,
            "bytes": report.bytes,
            "requests-per-second": rate(report.requests),
            "bytes-per-second": rate(report.bytes),
        });
        print_out!("{report}");
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn per_second(count: u64, time: std::time::Duration) -> f64 {
    quantity::rounded(count as f64 / time.as_secs_f64().max(1e-9))
}
