//! `limosa bench`.

use std::process::ExitCode;
use std::thread;

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::BenchArgs;
use crate::voice::{print_out, say};

pub(crate) fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    if args.name == limosa_bench::stream::END {
        limosa_bench::stream::serve_end()?;
        return Ok(ExitCode::SUCCESS);
    }
    leave_nothing_behind()?;
    let options = limosa_bench::Options {
        size: args.size,
        allocate_ahead: args.allocate_ahead,
        sequential: args.sequential,
        clone: args.clone.unwrap_or_default(),
        rounds: args.rounds,
        dir: args.dir,
        only: args.only,
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

/// Has a signal that ends the bench remove its files first. Its processes end with it in any case.
fn leave_nothing_behind() -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot listen to signals")?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            limosa_bench::scratch::remove_all();
            std::process::exit(128 + signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).context("cannot start a thread for signals")?;
    Ok(())
}
