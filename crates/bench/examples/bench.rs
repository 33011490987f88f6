//! Runs a bench without the command line: `bench NAME [ROUNDS [MIB [ONLY [DIRECTORY]]]]`.

use anyhow::{Context, Result};
use limosa_bench::{Options, run};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().context("usage: bench NAME [ROUNDS [MIB [ONLY [DIRECTORY]]]]")?;
    let mut options = Options { progress: |line| eprintln!("{line}"), ..Options::default() };
    if let Some(rounds) = arguments.next() {
        options.rounds = rounds.parse()?;
    }
    if let Some(mib) = arguments.next() {
        options.size = Some(mib.parse::<u64>()? << 20);
    }
    options.only = arguments.next().filter(|only| !only.is_empty());
    options.dir = arguments.next().map(Into::into);
    let report = run(&name, &options)?;
    eprint!("{report}");
    println!("{}", report.to_json()?);
    Ok(())
}
