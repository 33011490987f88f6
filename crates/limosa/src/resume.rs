//! `limosa resume`.

use std::process::ExitCode;

use limosa_qemu::resume::{ResumeOptions, resume};
use serde_json::json;

use crate::args::ResumeArgs;
use crate::job;
use limosa_console::{print_out, say};

pub(crate) fn run(args: &ResumeArgs) -> anyhow::Result<ExitCode> {
    let monitor = job::connect(&args.qmp)?;
    let resumed = resume(&monitor, &ResumeOptions { force: args.force, ..ResumeOptions::default() })?;
    let takeover = &resumed.takeover;
    for remark in &takeover.remarks {
        tracing::info!("{remark}");
    }
    for notice in &takeover.notices {
        say!("limosa: {notice}");
    }
    say!("limosa: {}", resumed.summary(&args.qmp.to_string()));
    if args.json {
        let object = json!({
            "why": resumed.why,
            "remarks": takeover.remarks,
            "notices": takeover.notices,
            "outcome": takeover.outcome.to_string(),
            "vm_state": takeover.run.as_str(),
        });
        print_out!("{object}");
    }
    Ok(if takeover.outcome.ends_job() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
