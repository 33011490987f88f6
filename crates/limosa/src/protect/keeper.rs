//! `limosa keep`: checkpoints of VMs on other hosts.

use std::process::ExitCode;

use limosa_channel::{Listener, Options};
use limosa_console::{error_line, print_out, quantity, say};
use limosa_control::JobKind;
use limosa_protect::{Farewell, KeepEvent, KeepOptions, KeepReport, KeepRequest, keep};
use serde_json::{Value, json};

use super::durability;
use crate::args::KeeperArgs;
use crate::job::JobHandles;
use crate::usage::misused;

pub(crate) fn run(args: &KeeperArgs) -> anyhow::Result<ExitCode> {
    if let Some(why) = args.contradiction() {
        misused(why);
    }
    let mut options = KeepOptions::default();
    options.lost_after = args.lost_after;
    options.stall_timeout = args.stall_timeout;
    options.store.durability = durability(args.durable);
    let listener = Listener::bind(&args.uri, &Options { tls: args.tls.read()?, ..Options::default() })?;
    let handles = JobHandles::with_socket(None, JobKind::Save, "keeping", true)?;
    say!("limosa: listening on {}", listener.local_uri());
    let report = keep(KeepRequest {
        listener: &listener,
        directory: &args.directory,
        options: &options,
        watch: handles.watch(),
        event: &tell_event,
    })?;
    tell(&report);
    if args.json {
        print_out!("{}", object(&report));
    }
    Ok(ExitCode::SUCCESS)
}

fn tell_event(event: &KeepEvent<'_>) {
    match event {
        KeepEvent::Connected { peer } => say!("limosa: {peer} sends its VM"),
        KeepEvent::Ended { newest: None, error, .. } => {
            say!(
                "limosa: nothing was kept of it{}",
                error.map(|error| format!(": {}", error_line(error))).unwrap_or_default()
            );
        }
        KeepEvent::Ended { newest: Some(newest), farewell, error } => {
            let why = match (farewell, error) {
                (Some(Farewell::Unprotected), _) => "its protection has ended; the VM continues there".to_owned(),
                (Some(Farewell::VmEnded), _) => "the VM has ended by itself".to_owned(),
                (Some(Farewell::VmLost), _) => "the VM is lost: its QEMU has ended without a word".to_owned(),
                (_, Some(error)) => format!("the VM may be lost: {}", error_line(*error)),
                (_, None) => "the VM may be lost: its host closed the connection without a word".to_owned(),
            };
            say!("limosa: checkpoint {newest} is the last one: {why}");
        }
        _ => {}
    }
}

fn tell(report: &KeepReport) {
    say!(
        "kept {} checkpoints of {} protections in {}",
        quantity::count(report.checkpoints),
        report.series,
        quantity::time(report.elapsed)
    );
    if report.checkpoints > 0 {
        say!(
            "  pages: {} with contents, {} of them unchanged; {} zero; {} received",
            quantity::count(report.pages),
            quantity::count(report.equal_pages),
            quantity::count(report.zero_pages),
            quantity::bytes(report.bytes),
        );
    }
}

fn object(report: &KeepReport) -> Value {
    json!({
        "newest": report.newest.as_ref().map(|path| path.to_string_lossy()),
        "series": report.series,
        "checkpoints": report.checkpoints,
        "elapsed_ms": quantity::millis(report.elapsed),
        "pages": { "contents": report.pages, "unchanged": report.equal_pages, "zero": report.zero_pages },
        "received_bytes": report.bytes,
    })
}
