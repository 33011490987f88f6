//! `limosa resume`.

use std::process::ExitCode;

use limosa_qemu::takeover::Outcome;
use limosa_qemu::{ResumeOptions, Resumed, resume};
use serde_json::json;

use crate::args::ResumeArgs;
use crate::{job, remedy};
use limosa_console::{print_out, say};

pub(crate) fn run(args: &ResumeArgs) -> anyhow::Result<ExitCode> {
    let monitor = job::connect(&args.qmp)?;
    let mut options = ResumeOptions::default();
    options.force = args.force;
    options.disk_servers.clone_from(&args.disk_server);
    let resumed = resume(&monitor, &options)?;
    let takeover = &resumed.takeover;
    for remark in &takeover.remarks {
        tracing::info!("{remark}");
    }
    for notice in &takeover.notices {
        say!("limosa: {notice}");
    }
    say!("limosa: {}", summary(&resumed, &args.qmp.to_string()));
    if args.json {
        let object = json!({
            "why": resumed.why,
            "remarks": takeover.remarks,
            "notices": takeover.notices,
            "outcome": remedy::of_outcome(takeover.outcome),
            "vm_state": takeover.run.as_str(),
        });
        print_out!("{object}");
    }
    Ok(if takeover.outcome.ends_job() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Describes in one line what was found, what was done, and what remains to do.
fn summary(resumed: &Resumed, monitor: &str) -> String {
    let Resumed { why, record, takeover, .. } = resumed;
    match (takeover.outcome, record) {
        (Outcome::NeedsRecovery, Some(record)) => format!(
            "{why}: {}; go on with 'limosa restore --recover {} --qmp {monitor}'",
            takeover.outcome, record.path
        ),
        (Outcome::Running, None) if takeover.remarks.is_empty() => format!("{why}; nothing to do"),
        (outcome, _) => format!("{why}; now {}", remedy::of_outcome(outcome)),
    }
}
