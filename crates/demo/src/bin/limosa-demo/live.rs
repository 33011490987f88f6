//! `limosa-demo live`: runs it, and reports the outcome.

use std::fs::File;
use std::io::Write as _;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context as _;
use clap::CommandFactory as _;
use comfy_table::{CellAlignment, Table, presets};
use limosa_console::{check_stdout, exit_on_signal, print_out, quantity, say};
use limosa_demo::live::{LiveOptions, LiveReport, run as demonstrate};
use limosa_demo::report::Round;
use limosa_demo::state::Role;
use serde_json::json;

use crate::args::{Cli, DemoLiveArgs};

pub(crate) fn run(args: &DemoLiveArgs) -> anyhow::Result<ExitCode> {
    let settings = args.settings();
    if let Some(why) = settings.contradiction() {
        Cli::command().error(clap::error::ErrorKind::ArgumentConflict, why).exit()
    }
    // Each end reads its own; errors in them are reported once, before anything runs.
    settings.client_tls()?;
    settings.server_tls()?;
    let options = LiveOptions {
        program: &|| Command::new("/proc/self/exe"),
        settings: &settings,
        control: args.control.as_deref(),
        notice: &|line| say!("limosa-demo: {line}"),
    };
    exit_on_signal(limosa_demo::remove_folders)?;
    // Before anything runs: if the picture cannot be written, this is reported now.
    let picture = args.write_trace.as_deref().map(|path| {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        anyhow::Ok((path, file))
    });
    let picture = picture.transpose()?;
    let report = demonstrate(&options)?;
    tell(&report);
    if let Some((path, mut file)) = picture {
        let written = file.write_all(report.trace().svg()?.as_bytes());
        written.with_context(|| format!("cannot write {}", path.display()))?;
        say!("  the rounds as a picture: {}", path.display());
    }
    if args.json {
        print_out!("{}", json!(report));
        check_stdout()?;
    }
    Ok(if report.succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn tell(report: &LiveReport) {
    let source = &report.source;
    match (report.runs_at, &source.error) {
        (Role::Destination, _) => say!("limosa-demo: the guest has moved while it ran, in {}", time(source.total_ms)),
        (Role::Source, Some(why)) => say!("limosa-demo: the guest continues at the source: {why}"),
        (Role::Source, None) => say!("limosa-demo: the guest continues at the source"),
    }
    if !source.rounds.is_empty() {
        say!("{}", table(&source.rounds));
    }
    if let Some(stood) = report.stood_ms {
        let expected = source.expected_downtime_ms.map_or(String::new(), |ms| format!("; expected {}", time(ms)));
        say!("  downtime: {}, from its last write there to its first one here{expected}", time(stood));
    }
    let sum = |of: fn(&Round) -> u64| source.rounds.iter().map(of).sum::<u64>();
    say!(
        "  pages: {} with contents, {} zero, {} zero and left out, {} of those never touched",
        quantity::count(sum(|round| round.normal)),
        quantity::count(sum(|round| round.zero)),
        quantity::count(sum(|round| round.left_out)),
        quantity::count(sum(|round| round.holes)),
    );
    if let Some(hints) = &source.hints {
        let list = hints.list_ms.map_or("no list was complete in time".to_owned(), |ms| {
            format!("the first complete list took {}", time(ms))
        });
        let refused = hints.refused.as_ref().map_or(String::new(), |why| format!("; {why}"));
        say!(
            "  {} pages were free, and not sent; {} lists requested: {list}; {} ranges arrived too late{refused}",
            quantity::count(sum(|round| round.hinted)),
            quantity::count(hints.lists.into()),
            quantity::count(hints.late),
        );
    }
    say!(
        "  {} sent with {} system calls, received with {}",
        quantity::bytes(source.channels.bytes_out),
        quantity::count(source.channels.calls_out),
        quantity::count(report.destination.channels.calls_in),
    );
    if source.channels.spliced > 0 {
        say!("  {} of it were spliced: not copied by the sender", quantity::bytes(source.channels.spliced));
    }
    if source.channels.lent > 0 {
        say!(
            "  {} of the calls lent their pages to the kernel, which copied those of {} after all",
            quantity::count(source.channels.lent),
            quantity::count(source.channels.lent_copied)
        );
    }
    say!(
        "  CPU, guest included: {} at the source, {} at the destination",
        time(source.cpu_ms),
        time(report.destination.cpu_ms)
    );
    if let Some(sent) = source.postcopy {
        say!(
            "  {} pages followed while it ran there, for {}; {} of them were requested",
            quantity::count(sent.pages),
            time(sent.took_ms),
            quantity::count(sent.requested)
        );
    }
    if let Some(faults) = report.destination.faults.filter(|faults| faults.requests > 0) {
        say!(
            "  {} faults waited for their pages: {} (median), {} (99%), {} (longest)",
            quantity::count(faults.faults),
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
            free => format!("; {} are free", quantity::count(free)),
        };
        match &found.error {
            None => say!("  memory at the {end}: all {} pages are correct{free}", quantity::count(found.pages)),
            Some(why) => say!("  memory at the {end}: {why}"),
        }
    }
    let (before, after) = report.writes;
    say!("  the guest continues: {} pages written since", quantity::count(after.saturating_sub(before)));
}

/// Where pages that were free are shown, behind those that were zero and left out.
const FREE_COLUMN: usize = 5;

fn table(rounds: &[Round]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    // Only a guest that reports its free pages has any.
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
    // Many rounds are alike; the first and the last ones differ.
    const SHOWN: usize = 20;
    let hidden = rounds.len().saturating_sub(SHOWN);
    for (at, round) in rounds.iter().enumerate() {
        if hidden > 0 && (SHOWN / 2..SHOWN / 2 + hidden).contains(&at) {
            if at == SHOWN / 2 {
                table.add_row([format!("  ({hidden} more)")]);
            }
            continue;
        }
        let rate = round.bandwidth.map_or(String::new(), quantity::bytes);
        let cells = vec![
            if round.last { "  paused".to_owned() } else { format!("  {}", round.number) },
            quantity::count(round.pages),
            quantity::count(round.normal),
            quantity::count(round.zero),
            quantity::count(round.left_out),
            quantity::bytes(round.bytes),
            time(round.took_ms),
            if round.last { String::new() } else { quantity::bytes(round.dirty_rate) },
            rate,
            round.expected_downtime_ms.map_or(String::new(), time),
        ];
        table.add_row(row(cells, quantity::count(round.hinted)));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn time(millis: f64) -> String {
    quantity::time(Duration::from_secs_f64((millis / 1e3).max(0.0)))
}
