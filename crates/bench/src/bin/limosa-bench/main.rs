//! limosa-bench: measures limosa, compared with stock QEMU and with its own simpler methods.

mod args;

use std::process::ExitCode;

use clap::Parser as _;
use limosa_console::{exit_on_signal, print_out, say};

use args::BenchArgs;

fn main() -> ExitCode {
    let args = BenchArgs::try_parse().unwrap_or_else(|error| error.exit());
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(std::io::stderr).without_time().init();
    run(args).unwrap_or_else(|error| {
        say!("limosa-bench: {}", limosa_console::anyhow_error_line(&error));
        ExitCode::FAILURE
    })
}

fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    if args.name == limosa_bench::stream::END {
        limosa_bench::stream::serve_end()?;
        return Ok(ExitCode::SUCCESS);
    }
    // The processes of a bench end with it in any case; its files do not.
    exit_on_signal(limosa_bench::scratch::remove_all)?;
    let options = limosa_bench::Options {
        size: args.size,
        allocate_ahead: args.allocate_ahead,
        sequential: args.sequential,
        counts: args.count,
        clone: args.clone.unwrap_or_default(),
        rounds: args.rounds,
        dir: args.dir,
        only: args.only,
        limosa: args.limosa,
        against_qemu: args.against.is_some(),
        progress: |line| say!("{line}"),
        ..Default::default()
    };
    let report = limosa_bench::run(&args.name, &options)?;
    if args.json {
        print_out!("{}", report.to_json()?);
    } else {
        print_out!("{report}");
    }
    Ok(if args.check && !report.targets_met() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
