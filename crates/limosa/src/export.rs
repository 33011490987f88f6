//! `limosa export`.

use limosa_console::quantity;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use limosa_control::JobKind;
use limosa_migrate::stats::PrecopyStats;
use limosa_qemu::is_same_file;
use limosa_snapshot::{Snapshot, UnnamedFile};
use serde_json::json;

use crate::args::ExportArgs;
use crate::job::JobHandles;
use crate::report;
use crate::usage::misused;
use limosa_console::{print_out, say};

pub(crate) fn run(args: &ExportArgs) -> anyhow::Result<ExitCode> {
    let to_stdout = args.stream == Path::new("-");
    let stdout = std::io::stdout();
    if to_stdout && args.json {
        misused("--json prints to standard output, which carries the stream");
    }
    let snapshot = Snapshot::open(&args.snapshot)?;
    if !to_stdout && is_same_file(&args.stream, &args.snapshot) {
        bail!("{}: the snapshot and the stream must be different files", args.stream.display());
    }
    snapshot.lock_serving()?;
    if to_stdout && stdout.is_terminal() {
        bail!("standard output is a terminal: redirect it, or give a file");
    }
    let handles = JobHandles::with_socket(None, JobKind::Save, "exporting", to_stdout)?;
    let stats = if to_stdout {
        let own = stdout.as_fd().try_clone_to_owned().context("standard output")?;
        snapshot.export(own, Path::new("standard output"), &handles.engine)
    } else {
        snapshot.export_file(UnnamedFile::create(&args.stream, args.force)?, &handles.engine)
    };
    drop(handles);
    let stats = stats?;
    tell(args, &snapshot, &stats);
    if args.json {
        print_out!("{}", object(args, &stats));
    }
    Ok(ExitCode::SUCCESS)
}

fn tell(args: &ExportArgs, snapshot: &Snapshot, stats: &PrecopyStats) {
    let to = if args.stream == Path::new("-") { "standard output".into() } else { args.stream.display().to_string() };
    let moved = stats.normal_pages.saturating_mul(limosa_page::PAGE_SIZE);
    say!(
        "exported to {to} ({}) in {}, {:.2} GiB/s",
        quantity::bytes(stats.channel.bytes_out),
        quantity::time(stats.elapsed),
        quantity::rate(moved, stats.elapsed)
    );
    say!("  pages: {} with contents, {} zero", quantity::count(stats.normal_pages), quantity::count(stats.zero_pages));
    let recorded = snapshot.devices().global_state(snapshot.device_tail()).ok().flatten().map(|state| state.run_state);
    if let (Some(recorded), Some(state)) = (recorded, snapshot.run_state())
        && recorded != state
    {
        say!("  QEMU will load it {recorded}, as recorded in the stream; it was {state}: continue it with cont");
    }
}

fn object(args: &ExportArgs, stats: &PrecopyStats) -> serde_json::Value {
    json!({
        "stream": args.stream.to_string_lossy(),
        "elapsed_ms": quantity::millis(stats.elapsed),
        "gib_per_s": quantity::rate(stats.normal_pages.saturating_mul(limosa_page::PAGE_SIZE), stats.elapsed),
        "length": stats.channel.bytes_out,
        "pages": { "normal": stats.normal_pages, "zero": stats.zero_pages },
        "channel": report::counters(&stats.channel),
    })
}
