//! `limosa bench`.

use std::process::ExitCode;

use crate::args::BenchArgs;

pub(crate) fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    let options = limosa_bench::Options {
        size: args.size,
        rounds: args.rounds,
        dir: args.dir,
        progress: |line| eprintln!("{line}"),
        ..Default::default()
    };
    let report = limosa_bench::run(&args.name, &options)?;
    if args.json {
        println!("{}", report.to_json()?);
    } else {
        println!("{report}");
    }
    Ok(if args.check && !report.targets_met() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
