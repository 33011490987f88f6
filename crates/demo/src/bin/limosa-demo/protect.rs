//! `limosa-demo protect`.

use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context as _;
use limosa_console::{check_stdout, exit_on_signal, print_out, quantity, say};
use limosa_demo::guest::LogKind;
use limosa_demo::protect::{ProtectSettings, demonstrate};
use serde_json::json;

use crate::args::{DemoProtectArgs, Every, Output};

/// The longest time of `--every event`.
const LONGEST: Duration = Duration::from_secs(1);
/// The longest time until a kill.
const LIFE_MS: u64 = 1000;

pub(crate) fn run(args: &DemoProtectArgs) -> anyhow::Result<ExitCode> {
    let (every, by_output) = match args.every {
        Every::Time(time) => (time, false),
        Every::Event => (LONGEST, true),
    };
    let settings = ProtectSettings {
        memory: args.memory,
        dirty_rate: args.dirty_rate,
        every,
        by_output,
        held: args.output == Output::Held,
        line_every: Duration::from_millis(3),
        log: LogKind::Best,
    };
    exit_on_signal(limosa_demo::remove_folders)?;
    let program = std::env::current_exe().context("this program")?;
    let mut reports = Vec::new();
    for kill in 1..=args.kills {
        let after = Duration::from_millis(rand(kill) % LIFE_MS);
        let report = demonstrate(|| Command::new(&program), &settings, after)?;
        say!(
            "limosa-demo: killed after {}: {} lines were seen, the survivor knows {} and continues with {} within {:.1} ms",
            quantity::time(after),
            report.seen,
            report.known,
            report.known.saturating_add(1),
            report.failover_ms
        );
        reports.push(report);
    }
    say!("limosa-demo: {} primaries were killed; no line was seen that its survivor does not know", reports.len());
    if args.json {
        print_out!("{}", json!({ "kills": reports }));
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// A number that differs from kill to kill and from run to run.
fn rand(kill: u32) -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(kill)
}
