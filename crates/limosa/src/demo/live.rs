//! `limosa demo live`: runs it, and puts what it came to into words.

use std::fs::File;
use std::io::Write as _;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use limosa_demo::live::{LiveOptions, LiveReport, run as demonstrate};
use limosa_demo::report::Round;
use limosa_demo::state::Role;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::DemoLiveArgs;
use crate::endpoint;
use crate::job::THIS_PROGRAM;
use crate::voice::{all_printed, print_out, say};
use crate::words;

pub(crate) fn run(args: &DemoLiveArgs) -> anyhow::Result<ExitCode> {
    let settings = args.settings();
    if let Some(why) = settings.contradiction() {
        endpoint::misused(why);
    }
    // Each end reads its own; what is wrong with them is told once, and before anything runs.
    settings.client_tls()?;
    settings.server_tls()?;
    let options = LiveOptions {
        limosa: &|| Command::new(THIS_PROGRAM),
        settings: &settings,
        control: args.control.as_deref(),
        notice: &|line| say!("limosa: {line}"),
    };
    leave_nothing_behind()?;
    // Before anything runs: whoever cannot have the picture is to know it now.
    let picture = args.write_trace.as_deref().map(|path| {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        anyhow::Ok((path, file))
    });
    let picture = picture.transpose()?;
    let report = demonstrate(&options)?;
    tell(&report);
    if let Some((path, mut file)) = picture {
        let written = file.write_all(report.trace().svg().as_bytes());
        written.with_context(|| format!("cannot write {}", path.display()))?;
        say!("  the rounds as a picture: {}", path.display());
    }
    if args.json {
        print_out!("{}", json!(report));
        all_printed()?;
    }
    Ok(if report.succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Has a signal that ends the demonstration remove its sockets first. Its processes end with it in any case.
fn leave_nothing_behind() -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot listen to signals")?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            limosa_demo::live::remove_folders();
            std::process::exit(128 + signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).context("cannot start a thread for signals")?;
    Ok(())
}

fn tell(report: &LiveReport) {
    let source = &report.source;
    match (report.runs_at, &source.error) {
        (Role::Destination, _) => say!("limosa: the guest has moved while it ran, in {}", time(source.total_ms)),
        (Role::Source, Some(why)) => say!("limosa: the guest goes on at the source: {why}"),
        (Role::Source, None) => say!("limosa: the guest goes on at the source"),
    }
    if !source.rounds.is_empty() {
        say!("{}", table(&source.rounds));
    }
    if let Some(stood) = report.stood_ms {
        let expected = source.expected_downtime_ms.map_or(String::new(), |ms| format!("; expected {}", time(ms)));
        say!("  it stood still for {}, from its last write there to its first one here{expected}", time(stood));
    }
    let sum = |of: fn(&Round) -> u64| source.rounds.iter().map(of).sum::<u64>();
    say!(
        "  pages: {} with contents, {} zero, {} zero and left out, {} of those never touched",
        words::count(sum(|round| round.normal)),
        words::count(sum(|round| round.zero)),
        words::count(sum(|round| round.left_out)),
        words::count(sum(|round| round.holes)),
    );
    if let Some(hints) = &source.hints {
        let list = hints.list_ms.map_or("no list was complete in time".to_owned(), |ms| {
            format!("the first complete list took {}", time(ms))
        });
        let refused = hints.refused.as_ref().map_or(String::new(), |why| format!("; {why}"));
        say!(
            "  {} pages were free, and not sent; the guest was asked {} times: {list}; {} ranges came too late{refused}",
            words::count(sum(|round| round.hinted)),
            words::count(hints.lists.into()),
            words::count(hints.late),
        );
    }
    say!(
        "  {} went out with {} system calls, and came in with {}",
        words::bytes(source.channels.bytes_out),
        words::count(source.channels.calls_out),
        words::count(report.destination.channels.calls_in),
    );
    if source.channels.spliced > 0 {
        say!("  {} of it were spliced: not copied on the way out", words::bytes(source.channels.spliced));
    }
    if source.channels.lent > 0 {
        say!(
            "  {} of the calls lent their pages to the kernel, which copied those of {} after all",
            words::count(source.channels.lent),
            words::count(source.channels.lent_copied)
        );
    }
    say!(
        "  CPU, guest included: {} at the source, {} at the destination",
        time(source.cpu_ms),
        time(report.destination.cpu_ms)
    );
    if let Some(sent) = source.postcopy {
        say!(
            "  {} pages followed while it ran there, for {}; {} of them were asked for",
            words::count(sent.pages),
            time(sent.took_ms),
            words::count(sent.requested)
        );
    }
    if let Some(faults) = report.destination.faults.filter(|faults| faults.requests > 0) {
        say!(
            "  {} faults waited for their pages: {} (median), {} (99%), {} (longest)",
            words::count(faults.faults),
            time(faults.median_us / 1e3),
            time(faults.p99_us / 1e3),
            time(faults.longest_us / 1e3)
        );
    }
    let there = (report.runs_at == Role::Destination).then_some(&report.memory);
    for (end, found) in [("source", report.memory_at_source.as_ref()), ("destination", there)] {
        let Some(found) = found else { continue };
        let free = match found.free_pages + found.held_pages {
            0 => String::new(),
            free => format!("; {} are free", words::count(free)),
        };
        match &found.error {
            None => say!("  memory at the {end}: all {} pages hold what they must{free}", words::count(found.pages)),
            Some(why) => say!("  memory at the {end}: {why}"),
        }
    }
    let (before, after) = report.writes;
    say!("  the guest goes on: {} pages written since", words::count(after.saturating_sub(before)));
}

/// Where pages that were free stand, behind those that were zero and left out.
const FREE_COLUMN: usize = 5;

fn table(rounds: &[Round]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    // Only a guest that tells its free pages has any.
    let hinted = rounds.iter().any(|round| round.hinted > 0);
    let row = |mut cells: Vec<String>, free: String| {
        if hinted {
            cells.insert(FREE_COLUMN, free);
        }
        cells
    };
    let header =
        ["  round", "pages", "contents", "zero", "left out", "sent", "took", "dirtied/s", "sent/s", "downtime then"];
    table.set_header(row(header.map(str::to_owned).to_vec(), "free".to_owned()));
    // Many rounds are alike; the first and the last ones tell.
    const SHOWN: usize = 20;
    let hidden = rounds.len().saturating_sub(SHOWN);
    for (at, round) in rounds.iter().enumerate() {
        if hidden > 0 && (SHOWN / 2..SHOWN / 2 + hidden).contains(&at) {
            if at == SHOWN / 2 {
                table.add_row([format!("  ({hidden} more)")]);
            }
            continue;
        }
        let rate = round.bandwidth.map_or(String::new(), words::bytes);
        let cells = vec![
            if round.last { "  paused".to_owned() } else { format!("  {}", round.number) },
            words::count(round.pages),
            words::count(round.normal),
            words::count(round.zero),
            words::count(round.left_out),
            words::bytes(round.bytes),
            time(round.took_ms),
            if round.last { String::new() } else { words::bytes(round.dirty_rate) },
            rate,
            round.expected_downtime_ms.map_or(String::new(), time),
        ];
        table.add_row(row(cells, words::count(round.hinted)));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn time(millis: f64) -> String {
    words::time(Duration::from_secs_f64((millis / 1e3).max(0.0)))
}
