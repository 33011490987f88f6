//! `limosa img rebase`.

use std::process::ExitCode;

use limosa_image::chain::OpenOptions;
use limosa_image::rebase::{RebaseMode, RebaseRequest};
use limosa_storage::{LockPolicy, block_on};
use serde_json::json;

use super::convert::{cause, io};
use super::meter::Meter;
use super::open;
use super::options::RebaseOptions;
use crate::program::say_named;
use limosa_console::{check_stdout, print_out};

pub(crate) fn run(options: &RebaseOptions) -> anyhow::Result<ExitCode> {
    let source = &options.source;
    let overlay = open::resolve(source)?;
    let mode = if options.header_only {
        RebaseMode::HeaderOnly
    } else {
        let new = OpenOptions::default()
            .cache(options.backing_cache)
            .io(io(options.backing_cache))
            .lock(if options.force_share { LockPolicy::None } else { LockPolicy::Auto })
            .policy(open::policy(source.untrusted));
        RebaseMode::Copy(Box::new(open::no_journal(new)))
    };
    let mut request = RebaseRequest::new(overlay, options.backing.clone(), mode);
    request.options = limosa_image::rebase::RebaseOptions::default().compress(options.compress);
    let rebase = block_on(request.prepare())?;
    if rebase.snapshots() > 0 {
        say_named!(
            "warning: {}: its {} internal snapshots will read the new backing file where they read the old one",
            source.name,
            rebase.snapshots()
        );
    }
    let meter = Meter::new("rebase", options.progress && !options.json, options.quiet, None);
    let rebased = rebase.run(&|progress| meter.note(progress)).map_err(cause)?;
    drop(meter);
    if let Some(report) = &rebased.repaired {
        open::warn_of_repair(&source.name, report, "flushed");
    }
    if options.json {
        let counters = rebased.counters;
        let report = json!({
            "bytes-read": counters.bytes_read,
            "bytes-written": counters.bytes_written,
            "bytes-zeroed": counters.bytes_zeroed,
        });
        print_out!("{report}");
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}
